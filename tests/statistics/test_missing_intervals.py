"""A correlation or interval that is not there says why."""

import numpy as np

import pyflatness as pf

RATES = [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
TABLE = {"kappa": [1.0, 2, 3, 4, 5, 6], "gap": [2.0, 1, 4, 3, 6, 5], "loss": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}


def test_too_few_for_an_interval():
    few = {name: column[:4] for name, column in TABLE.items()}
    assert "[–]: 4 networks are too few for an interval" in str(pf.statistics.correlations(few, "kappa"))
    table = {**TABLE, "rate": RATES}
    said = str(pf.statistics.correlations(table, "kappa", settings=["rate"], interval="fisher"))
    assert "[–]: 3 clusters are too few for an interval" in said
    assert "too few" not in str(pf.statistics.correlations(TABLE, "kappa"))


def test_not_defined():
    held = pf.statistics.correlations(TABLE, "kappa", given="loss")
    assert np.isnan(held["kappa", "Spearman"].value)
    assert "nan: not defined where a column is constant, or in the order of what is held fixed" in str(held)
    constant = pf.statistics.correlations({**TABLE, "kappa": [1.0] * 6}, "kappa")
    assert "nan: not defined where a column is constant\n" in f"{constant}\n"
    assert "nan" not in str(pf.statistics.correlations(TABLE, "kappa"))

"""A checkpoint that could not be measured is left out by its name, in a file of several layers too."""

import csv

import pytest
from scipy import stats

import pyflatness as pf


def test_a_broken_checkpoint_makes_no_column(tmp_path):
    path, rows = tmp_path / "scores.csv", []
    for number, loss in enumerate([1.0, 3.0, 2.0, 5.0, 4.0, 6.0]):
        facts = {"checkpoint": f"n{number}", "measure": "kappa", "loss": loss, "error": ""}
        rows += [facts | {"layer": layer, "value": number * sign} for layer, sign in (("fc1", 1), ("fc2", -1))]
    rows.append({"checkpoint": "broken", "layer": "", "measure": "kappa", "value": "", "loss": "", "error": "no file"})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    found = pf.statistics.correlations(path, y="loss", exclude=["broken"])
    assert {row.measure for row in found.rows} == {"kappa fc1", "kappa fc2"}
    expected = stats.kendalltau(range(6), [1, 3, 2, 5, 4, 6]).statistic
    assert found["kappa fc1", "Kendall"].value == pytest.approx(expected)
    with pytest.raises(pf.errors.InputError, match="broken"):
        pf.statistics.correlations(path, y="loss")

"""Figures of correlations: clusters in colours, intervals in the title, and matrices of measures."""

import math

import numpy as np
import pytest
from scipy import stats

import pyflatness as pf

pytest.importorskip("matplotlib")
RNG = np.random.default_rng(0)
KAPPA, TRACE, NOISE = RNG.lognormal(size=(3, 28))
TABLE = {
    "kappa": KAPPA.tolist(),
    "trace": (TRACE + KAPPA).tolist(),
    "gap": (NOISE - KAPPA).tolist(),
    "recipe": [f"recipe {k % 7}" for k in range(28)],
    "number": [k % 14 for k in range(28)],
}


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_clusters_have_colours_and_their_intervals_are_shown():
    _, axes = pf.statistics.plot_correlation(TABLE, "kappa", settings="recipe")
    lines = axes.get_lines()
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 7
    for number, line in enumerate(lines):
        here = np.arange(28) % 7 == number
        assert np.array_equal(line.get_xydata(), np.stack([KAPPA, NOISE - KAPPA], 1)[here])
    assert legend(axes) == [f"recipe {k}" for k in range(7)]
    assert axes.get_title().splitlines() == [
        str(row) for row in pf.statistics.correlations(TABLE, "kappa", settings="recipe").rows
    ]
    _, axes = pf.statistics.plot_correlation(TABLE, "kappa", settings="recipe", interval="fisher")
    assert "[" in axes.get_title()
    assert axes.get_title().splitlines() == [
        str(row) for row in pf.statistics.correlations(TABLE, "kappa", settings="recipe", interval="fisher").rows
    ]


def test_many_clusters_are_counted_in_the_legend():
    _, axes = pf.statistics.plot_correlation(TABLE, "kappa", settings="number", exclude=["0"])
    *clusters, counted, hollow = axes.get_lines()
    assert len({(line.get_color(), line.get_marker()) for line in clusters}) == 14
    assert len(counted.get_xdata()) == 0
    assert hollow.get_fillstyle() == "none"
    assert hollow.get_xydata().tolist() == [[KAPPA[0], NOISE[0] - KAPPA[0]]]
    assert legend(axes) == ["27 networks in 14 clusters", "1 left out of the correlations"]


@pytest.mark.parametrize("statistic", ["Pearson", "Spearman", "Kendall"])
def test_the_matrix_holds_the_correlations(statistic, tmp_path):
    figure, axes = pf.statistics.plot_correlation_matrix(TABLE, statistic=statistic, path=tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").stat().st_size > 0
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == [label.get_text() for label in axes.get_yticklabels()] == ["gap", "kappa", "trace", "number"]
    function = {"Pearson": stats.pearsonr, "Spearman": stats.spearmanr, "Kendall": stats.kendalltau}[statistic]
    expected = [[function(TABLE[a], TABLE[b]).statistic for b in names] for a in names]
    assert np.asarray(axes.images[0].get_array()) == pytest.approx(np.array(expected))
    assert axes.images[0].get_clim() == (-1, 1)
    assert [text.get_text() for text in axes.texts] == [f"{value:.2f}" for row in expected for value in row]
    bar = figure.axes[-1]
    assert bar.get_ylabel() == f"{statistic}, 28 networks"


def test_the_matrix_of_chosen_columns_and_networks():
    figure, axes = pf.statistics.plot_correlation_matrix(TABLE, ["trace", "kappa"], exclude=["1"])
    assert axes.images[0].get_array().shape == (2, 2)
    assert figure.axes[-1].get_ylabel() == "Kendall, 27 networks"
    panel = figure.add_subplot()
    assert pf.statistics.plot_correlation_matrix(TABLE, ["trace", "kappa"], axes=panel) == (figure, panel)
    wide = {f"m{k}": RNG.normal(size=9) for k in range(20)}
    assert not pf.statistics.plot_correlation_matrix(wide)[1].texts  # no room
    flat = pf.statistics.plot_correlation_matrix({"kappa": [1, 1, 1], "gap": [1, 2, 3]})[1].images[0].get_array()
    assert math.isnan(flat.filled(math.nan)[0, 1])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((TABLE, ["kapa"]), {}, "no column of numbers 'kapa'"),
        (
            (TABLE,),
            {"statistic": "kendall"},
            "statistic='kendall' does not exist; choose one of 'Pearson', 'Spearman', 'Kendall'",
        ),
        (({**TABLE, "kappa": [math.nan, *TABLE["kappa"][1:]]},), {}, "'kappa' is empty, NaN or infinite for 0;"),
    ],
)
def test_refusals(arguments, options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.statistics.plot_correlation_matrix(*arguments, **options)

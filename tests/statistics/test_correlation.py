"""Correlations over tables of networks: every form of table, no point left out but by name, figures."""

import csv
import math
import sys

import numpy as np
import pytest
import torch
from scipy import stats

import pyflatness as pf

RNG = np.random.default_rng(0)
KAPPA = RNG.lognormal(size=20)
GAP = KAPPA**0.3 + 0.5 * RNG.normal(size=20)
NAMES = [f"runs/net{k}.safetensors" for k in range(20)]
TABLE = {"checkpoint": NAMES, "kappa": KAPPA.tolist(), "trace": (-KAPPA).tolist(), "gap": GAP.tolist()}


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return path


def scored(path, losses, layers=("fc",), skip=()):
    """As `pyflatness score` writes it."""
    rows = []
    for k, name in enumerate(NAMES):
        for layer in layers:
            facts = {"checkpoint": name, "layer": layer, "measure": "relative_flatness", "value": KAPPA[k]}
            facts |= {"method": "head", "exact": True, "samples": 9, "loss": losses[k], "accuracy": 0.5, "error": ""}
            if k in skip:
                facts |= {"value": "", "loss": "", "accuracy": "", "error": "broken"}
            rows.append(facts)
        rows.append({**rows[-1], "layer": "", "measure": "weight_norm", "value": "" if k in skip else k})
    return write(path, rows)


def test_against_scipy():
    found = pf.statistics.correlations(TABLE)
    assert (found.points, found.excluded, found.y) == (20, (), "gap")
    assert found["kappa", "Pearson"].value == pytest.approx(stats.pearsonr(KAPPA, GAP).statistic)
    assert found["kappa", "Spearman"].value == pytest.approx(stats.spearmanr(KAPPA, GAP).statistic)
    assert found["kappa", "Kendall"].value == pytest.approx(stats.kendalltau(KAPPA, GAP).statistic)
    for row in found.rows:
        assert row.low < row.value < row.high
    assert found["trace", "Spearman"].value == pytest.approx(-found["kappa", "Spearman"].value)
    assert pf.statistics.correlations(TABLE) == found
    other = pf.statistics.correlations(TABLE, seed=1)
    assert other["kappa", "Pearson"].value == found["kappa", "Pearson"].value
    assert other["kappa", "Pearson"].low != found["kappa", "Pearson"].low


def test_a_broken_checkpoint_makes_no_column(tmp_path):
    """It is left out by its name, in a file of several layers too."""
    rows = []
    for number, loss in enumerate([1.0, 3.0, 2.0, 5.0, 4.0, 6.0]):
        facts = {"checkpoint": f"n{number}", "measure": "kappa", "loss": loss, "error": ""}
        rows += [facts | {"layer": layer, "value": number * sign} for layer, sign in (("fc1", 1), ("fc2", -1))]
    rows.append({"checkpoint": "broken", "layer": "", "measure": "kappa", "value": "", "loss": "", "error": "no file"})
    path = write(tmp_path / "scores.csv", rows)
    found = pf.statistics.correlations(path, y="loss", exclude=["broken"])
    assert {row.measure for row in found.rows} == {"kappa fc1", "kappa fc2"}
    expected = stats.kendalltau(range(6), [1, 3, 2, 5, 4, 6]).statistic
    assert found["kappa fc1", "Kendall"].value == pytest.approx(expected)
    with pytest.raises(pf.errors.InputError, match="broken"):
        pf.statistics.correlations(path, y="loss")


def test_no_interval_from_fewer_than_five_networks():
    for count in (3, 4):
        found = pf.statistics.correlations({"kappa": list(range(count)), "gap": list(range(count))})
        assert [row.value for row in found.rows] == pytest.approx([1, 1, 1])
        assert all(math.isnan(row.low) and math.isnan(row.high) for row in found.rows)
        assert str(found["kappa", "Pearson"]) == "Pearson 1.00 [–]"
    assert not math.isnan(
        pf.statistics.correlations({"kappa": [1, 2, 3, 4, 5], "gap": [1, 3, 2, 5, 4]})["kappa", "Kendall"].low
    )


def test_every_form_of_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    found = pf.statistics.correlations(TABLE, "kappa")
    rows = [dict(zip(TABLE, row, strict=True)) for row in zip(*TABLE.values(), strict=True)]
    wide = write(tmp_path / "wide.csv", rows)
    frame = pandas.DataFrame(TABLE)
    indexed = frame.set_index("checkpoint")
    for table in (wide, str(wide), frame, indexed):
        assert pf.statistics.correlations(table, "kappa") == found
        assert pf.statistics.correlations(table, "kappa", exclude=["net3"]).excluded == (NAMES[3],)
    assert list(found.to_frame().columns) == ["measure", "statistic", "value", "low", "high", "y", "points"]


def test_scores_are_a_table():
    torch.manual_seed(0)
    networks = {f"net{number}": torch.nn.Linear(3, 2) for number in range(6)}
    train, test = (
        pf.score(networks, "cross_entropy", (torch.randn(8, 3), torch.randint(2, (8,))), measures=["trace"])
        for _ in range(2)
    )
    found = pf.statistics.correlations(train, "trace", test=test, max_loss=math.inf)  # nobody has trained these
    assert found == pf.statistics.correlations(train.columns(), "trace", test=test.columns(), max_loss=math.inf)
    gaps = [test[name, "trace"].loss - train[name, "trace"].loss for name in networks]
    traces = [train[name, "trace"].value for name in networks]
    assert found["trace", "Pearson"].value == pytest.approx(stats.pearsonr(traces, gaps).statistic)


def test_files_of_score(tmp_path):
    train, test = np.linspace(0, 1, 20), np.linspace(0, 1, 20) + GAP
    paths = [scored(tmp_path / f"{name}.csv", losses) for name, losses in (("train", train), ("test", test))]
    found = pf.statistics.correlations(paths[0], test=paths[1])
    assert found["relative_flatness", "Pearson"].value == pytest.approx(stats.pearsonr(KAPPA, GAP).statistic)
    assert {row.measure for row in found.rows} == {"relative_flatness", "weight_norm"}
    with pytest.raises(pf.errors.InputError, match=r"no column of numbers 'gap'.*pass test="):
        pf.statistics.correlations(paths[0])
    assert pf.statistics.correlations(paths[0], y="loss").points == 20
    several = scored(tmp_path / "several.csv", train, ("conv", "fc"))
    measures = {row.measure for row in pf.statistics.correlations(several, test=paths[1]).rows}
    assert measures == {"relative_flatness conv", "relative_flatness fc", "weight_norm"}
    broken = scored(tmp_path / "broken.csv", train, skip=(3, 5))
    with pytest.raises(
        pf.errors.InputError, match=r"'gap' is empty, NaN or infinite for runs/net3.safetensors, runs/net5"
    ):
        pf.statistics.correlations(broken, test=paths[1])
    assert pf.statistics.correlations(broken, test=paths[1], exclude=["net3", "net5"]).points == 18


def test_figures(tmp_path):
    pytest.importorskip("matplotlib")
    figure, axes = pf.statistics.plot_correlation(TABLE, "kappa", path=tmp_path / "scatter.png")
    assert (tmp_path / "scatter.png").stat().st_size > 0
    assert figure.axes == [axes]
    (points,) = axes.get_lines()
    assert np.array_equal(points.get_xydata(), np.stack([KAPPA, GAP], 1))
    assert axes.get_title().splitlines() == [str(row) for row in pf.statistics.correlations(TABLE, "kappa").rows]
    _, axes = pf.statistics.plot_correlation(TABLE, "kappa", exclude=NAMES[:2])
    full, hollow = axes.get_lines()
    assert len(full.get_xdata()) == 18
    assert hollow.get_fillstyle() == "none"
    assert np.array_equal(hollow.get_xydata(), np.stack([KAPPA, GAP], 1)[:2])
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["18 networks", "2 left out of the correlations"]
    wide = {"kappa": [1, 10, 1000], "gap": [1, 2, 3]}
    assert pf.statistics.plot_correlation(wide, "kappa")[1].get_xscale() == "log"
    panel = figure.add_subplot()
    assert pf.statistics.plot_correlation(wide, "kappa", axes=panel) == (figure, panel)
    _, axes = pf.statistics.plot_correlation({"kappa": [1, 2, math.nan], "gap": [1, 2, 3]}, "kappa", exclude=["2"])
    assert axes.get_xscale() == "linear"


def test_what_is_undefined_and_what_is_shown():
    found = pf.statistics.correlations({"kappa": [1, 1, 1], "gap": [1, 2, 3]})
    assert all(math.isnan(row.value) for row in found.rows)
    text = str(pf.statistics.correlations(TABLE, "kappa", exclude=[NAMES[0]]))
    assert text.startswith(f"with gap, 19 networks, 1 excluded: {NAMES[0]}")
    assert "Kendall" in text


def test_the_name_of_a_measure_alone_is_answered_with_its_columns_the_network_s_first():
    columns = [f"kappa {layer}" for layer in range(12)]
    table = {name: [1, 2, 3] for name in [*columns, "kappa network", "kappas", "gap"]}
    with pytest.raises(pf.errors.InputError, match="'kappa'; there are kappa network, kappa 0, kappa 1") as caught:
        pf.statistics.plot_correlation(table, "kappa")
    assert "kappas" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3,), {}, "got int"),
        (("nowhere.csv",), {}, "there is no such file"),
        (({},), {}, "columns of one length"),
        (({"a": [1, 2], "gap": [1]},), {}, r"'a': 2, 'gap': 1"),
        (({"a": ["x", "y"], "gap": [1, 2]},), {}, "no column of numbers but 'gap'"),
        ((TABLE, "kapa"), {}, "no column of numbers 'kapa'; did you mean kappa"),
        ((TABLE,), {"exclude": ["net33"]}, "'net33' is not in the table"),
        ((TABLE,), {"exclude": NAMES}, "every row is excluded"),
        (({"a": [1, math.inf], "gap": [1, 2]},), {}, "'a' is empty, NaN or infinite for 1;"),
        ((TABLE,), {"test": {"checkpoint": ["other"], "loss": [1]}}, "20 of the 20 networks are not in it"),
    ],
)
def test_refusals(arguments, options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.statistics.correlations(*arguments, **options)
    with pytest.raises(pf.errors.InputError, match="no \\('kappa', 'Spear'\\)"):
        pf.statistics.correlations(TABLE)["kappa", "Spear"]


def test_without_the_extras(monkeypatch):
    found = pf.statistics.correlations(TABLE)
    for extra, call in (
        ("pandas", found.to_frame),
        ("matplotlib", lambda: pf.statistics.plot_correlation(TABLE, "kappa")),
    ):
        name = "matplotlib.figure" if extra == "matplotlib" else extra
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(pf.errors.MissingExtraError, match=f"needs {extra}: pip install 'pyflatness"):
            call()


@pytest.mark.parametrize("option", ["given", "settings"])
def test_names_of_columns_that_can_be_read_once(option):
    table = {"a": KAPPA, "b": [1, 2, 3, 4] * 5, "y": GAP}
    listed = pf.statistics.correlations(table, ["a"], "y", **{option: ["b"]})
    once = pf.statistics.correlations(table, (name for name in ["a"]), "y", **{option: (name for name in ["b"])})
    assert str(once) == str(listed)
    assert str(once) != str(pf.statistics.correlations(table, ["a"], "y"))

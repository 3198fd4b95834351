"""What is made of two tables of scores: columns of test data, and which networks are not trained as the others are."""

import csv
import math
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats

import pyflatness as pf
from pyflatness.statistics import tables
from support.score_runs import status

LOSSES = [0.05, 0.04, 0.06, 0.05, 0.07, 2.3]
SHARPNESS = [3.0, 4.0, 1.0, 5.0, 2.0, 0.0]


def rows(losses: list[float], accuracies: list[float], chance: float = 0.1) -> list[dict[str, object]]:
    found = []
    for number, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True)):
        for layer, part in (("a", 0.5), ("b", 0.5), ("", 1.0)):
            found.append({"checkpoint": f"net {number}", "layer": layer, "measure": "sharpness"})
            found[-1] |= {"value": part * SHARPNESS[number], "loss": loss, "accuracy": accuracy, "chance": chance}
    return found


def written(path: Path, held: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*held[0]])
        writer.writeheader()
        writer.writerows(held)
    return path


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return written(tmp_path / "train.csv", rows(LOSSES, [1.0, 1.0, 0.99, 1.0, 0.98, 0.1]))


@pytest.fixture
def test(tmp_path: Path) -> Path:
    return written(tmp_path / "test.csv", rows([0.5, 0.4, 0.3, 0.6, 0.2, 2.3], [0.8, 0.85, 0.9, 0.75, 0.95, 0.1]))


def test_test_data_give_their_loss_accuracy_and_error(train: Path, test: Path) -> None:
    networks = tables.read(train, test)
    assert networks.column("test_loss").tolist() == [0.5, 0.4, 0.3, 0.6, 0.2, 2.3]
    assert networks.column("test_accuracy").tolist() == [0.8, 0.85, 0.9, 0.75, 0.95, 0.1]
    np.testing.assert_allclose(networks.column("test_error"), [0.2, 0.15, 0.1, 0.25, 0.05, 0.9])
    np.testing.assert_allclose(networks.column("gap"), np.subtract([0.5, 0.4, 0.3, 0.6, 0.2, 2.3], LOSSES))
    assert networks.measures == ("sharpness a", "sharpness b", "sharpness network")
    with pytest.raises(pf.errors.InputError, match=r"no column of numbers 'test_error'.*; pass test="):
        pf.statistics.correlations(train, "sharpness network", "test_error")


def test_a_file_of_ours_that_pandas_has_read_has_the_same_columns(train: Path) -> None:
    assert tables.read(pandas.read_csv(train)).measures == tables.read(train).measures


def test_the_table_without_losses_is_named(train: Path, tmp_path: Path) -> None:
    without = [{**row, "loss": ""} for row in rows(LOSSES, LOSSES)]
    empty = written(tmp_path / "empty.csv", without)
    for given, what in (((train, empty), "test"), ((empty, train), "table")):
        with pytest.raises(pf.errors.InputError, match=rf"^{what}: it has no loss of any of its 6 networks"):
            pf.statistics.correlations(given[0], "sharpness network", test=given[1])


def test_test_data_that_are_the_training_data_are_an_error(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [loss * (1 + 1e-7) for loss in LOSSES]  # in another order of addition
    table = {"name": [f"net {place}" for place in range(6)], "m": SHARPNESS, "loss": losses}
    with pytest.raises(pf.errors.InputError, match=r"^test: all networks have the losses .* the same data"):
        pf.statistics.correlations(train, "sharpness network", test=table)
    assert "the same data" in str(status("correlate", str(train), "--test", str(train)))


def test_a_table_that_is_not_there_is_named(train: Path) -> None:
    for arguments in (["nothere.csv"], [str(train), "--test", "nothere.csv"]):
        assert status("correlate", *arguments) == "Error: 'nothere.csv': there is no such file"
    assert "cannot be read" in str(status("correlate", str(train.parent)))
    with pytest.raises(pf.errors.InputError, match=r"'nothere\.csv': there is no such file"):
        pf.statistics.correlations("nothere.csv")


def test_columns_that_are_not_named_are_counted() -> None:
    table = {f"measure_{number:02}": [1.0, 2.0] for number in range(40)}
    with pytest.raises(pf.errors.InputError, match=r"there are measure_00, .*, measure_07 and 32 more"):
        pf.statistics.correlations(table, y="zzz")


def test_who_is_not_trained_is_named() -> None:
    def untrained(losses: list[float], accuracies: list[float], most: float | None = None) -> dict[str, str]:
        held = rows(losses, accuracies)
        networks = tables.read({name: [row[name] for row in held] for name in held[0]})
        return {name: why for name, why in zip(networks.names, networks.left_out((), most), strict=True) if why}

    assert untrained(LOSSES, [math.nan] * 6) == {"net 5": "its loss is 2.3"}  # no classes
    assert untrained(LOSSES, [1.0] * 5 + [0.3]) == {"net 5": "its loss is 2.3"}
    assert untrained([*LOSSES[:5], 0.28], [1.0] * 5 + [0.92]) == {}  # another learning rate, and a healthy network
    assert untrained([0.1] * 6, [0.9] * 5 + [0.11]) == {"net 5": "its accuracy of 0.11 is that of chance"}
    assert untrained([0.1] * 6, [0.1] * 6) == {}  # then chance is what is studied
    assert untrained(LOSSES, [1.0] * 5 + [0.1], float("inf")) == {}
    assert untrained([-0.1, *LOSSES[1:]], [math.nan] * 6) == {}  # of a density: five times the median says nothing
    assert untrained(LOSSES, [1.0] * 6, 0.065) == {"net 4": "its loss is 0.07", "net 5": "its loss is 2.3"}


def test_a_dead_network_does_not_turn_a_correlation(
    train: Path, test: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "correlate", str(train), "--test", str(test), "--against", "test_error"
    assert status(*arguments) == 0
    out = capsys.readouterr().out
    assert "5 networks, 1 excluded: net 5" in out
    assert "left out: net 5, its loss is 2.3; --max-loss inf keeps it" in out
    assert [line.split()[0] for line in out.splitlines() if line.strip().startswith("sharpness")] == ["sharpness"]
    assert "0.80 [" in out  # Kendall's, of the five
    assert status(*arguments, "--max-loss", "inf", "--layers", "--plot", str(tmp_path / "a.png")) == 2
    assert status(*arguments, "--max-loss", "inf", "--layers") == 0
    out = capsys.readouterr().out
    assert "6 networks;" in out
    assert [line.split()[0] for line in out.splitlines() if line.strip().startswith("sharpness")] == ["sharpness"] * 3
    assert status(*arguments, "--measures", "sharpness network", "--plot", str(tmp_path / "a.svg")) == 0
    assert status(*arguments, "--measures", "sharpness", "--plot", str(tmp_path / "b.svg"), "--title", "of five") == 0
    assert status(*arguments, "--plot", str(tmp_path / "c.svg")) == 0  # the table has one measure
    for figure in ("a.svg", "b.svg", "c.svg"):
        assert (tmp_path / figure).stat().st_size > 1000
    capsys.readouterr()
    assert str(status("correlate", str(train), "--against", "gap")).endswith(
        "no column of numbers 'gap'; pass --test, the same networks scored on test data"
    )
    assert "; did you mean sharpness network" in str(status(*arguments, "--given", "sharpnes network"))


def test_python_leaves_out_whom_the_command_line_does(train: Path, test: Path) -> None:
    arguments = train, "sharpness network", "test_error"
    found = pf.statistics.correlations(*arguments, test=test)
    assert (found.points, found.untrained) == (5, {"net 5": "its loss is 2.3"})
    assert "left out: net 5, its loss is 2.3; max_loss=math.inf keeps it" in str(found)
    expected = stats.kendalltau(SHARPNESS[:5], [0.2, 0.15, 0.1, 0.25, 0.05]).statistic
    assert found["sharpness network", "Kendall"].value == pytest.approx(expected)
    every = pf.statistics.correlations(*arguments, test=test, max_loss=math.inf)
    assert (every.points, every.untrained, every.excluded) == (6, {}, ())
    assert every["sharpness network", "Pearson"].value < 0
    _, axes = pf.statistics.plot_correlation(*arguments, test=test)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "5 networks",
        "1 left out of the correlations",
    ]
    _, axes = pf.statistics.plot_correlation(*arguments, test=test, max_loss=math.inf)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["6 networks"]


def test_networks_of_one_name_are_left_out_one_by_one() -> None:
    found = pf.statistics.correlations({"name": ["a"] * 6, "m": SHARPNESS, "gap": SHARPNESS, "loss": LOSSES}, "m")
    assert (found.points, found.excluded) == (5, ("a",))


def test_a_figure_for_a_paper(train: Path, test: Path) -> None:
    options = {"title": "digits", "xlabel": "κ", "ylabel": "error", "log": True, "exclude": ["net 5"]}
    _, axes = pf.statistics.plot_correlation(train, "sharpness network", "test_error", test=test, **options)
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("digits", "κ", "error")
    assert axes.get_xscale() == "log"
    assert axes.get_ylim()[1] < 0.3  # the excluded network's error is 0.9


def test_one_name_is_excluded_as_several_are(train: Path, test: Path) -> None:
    found = pf.statistics.correlations(train, "sharpness network", test=test, exclude="net 4")
    assert found.excluded == ("net 4", "net 5")

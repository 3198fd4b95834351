"""Networks of other settings are not taken for those that are asked for; values that are none; too few networks."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import pyflatness as pf
from benchmarks.papers import (
    c24,
    c24_pairs,
    c24_transformers,
    c24_trends,
    correlating,
    grid,
    grid_networks,
    image_data,
    p21_fig6,
    p21_minima,
    zoo,
)
from benchmarks.papers.experiment import Bench, Finding
from benchmarks.papers.grid import Grid
from benchmarks.papers.networks import fully_connected
from benchmarks.papers.training import Descent, Until
from benchmarks.papers.zoo import BY_LAYERS
from support.grid import normal

GRID = {
    **{"widths": [4], "depths": [1], "batch_sizes": [16], "learning_rates": [2.0], "optimizers": ["adam"]},
    **{"seeds": 1, "samples": 60, "loss": 1.0, "steps": 2000},
}


def test_a_grid_of_another_loss_and_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(grid_networks, "_NAMES", ("relative_flatness", "weight_norm"))

    def made(changes):
        bench = Bench("small", grid.EXPERIMENT.settings("small", GRID | changes), tmp_path, shown=False)
        return grid_networks.made(bench)[0]

    first = made({})
    assert made({"loss": 0.8})["train_loss"] == pytest.approx([0.8], rel=2e-4)
    assert len(made({"seeds": 2})["name"]) == 2
    assert made({}) == first


def test_a_table_of_other_classes_and_descents(tmp_path):
    settings = {"classes": [3, 8], "samples": 30, "measured": 10, "width": 4}

    def losses(changes, *descents):
        bench = Bench("small", settings | changes, tmp_path, shown=False)
        return c24.table(bench, "perceptron", descents, [5], lambda network, data: {})[0]["loss"]

    first = losses({}, Descent(0.1, 20, 0))
    alone = Bench("small", settings | {"classes": [0, 1]}, tmp_path / "alone", shown=False)
    other = c24.table(alone, "perceptron", [Descent(0.1, 20, 0)], [5], lambda network, data: {})[0]["loss"]
    assert losses({"classes": [0, 1]}, Descent(0.1, 20, 0)) == other != first
    assert losses({}, Descent(0.2, 10, 0), Descent(0.1, 20, 0)) != losses({}, Descent(0.1, 10, 0), Descent(0.2, 20, 0))
    assert losses({}, Descent(0.1, 20, 0)) == first


def test_minima_by_the_papers_own_rates(tmp_path, monkeypatch):
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4)
    monkeypatch.setattr(image_data, "read", lambda folder, name: (images, images))

    def recipes(changes):
        settings = p21_fig6.EXPERIMENT.settings("paper", changes)
        return [*p21_minima.zoo(Bench("paper", settings, tmp_path, tmp_path)).recipes.values()]

    ours, paper = recipes({}), recipes({"rates": "paper", "seeds": 2})
    assert (len(ours), len(paper)) == (110, 2 * 3 * 5 * 3)
    assert {recipe.learning_rate for recipe in paper} == {0.0001, 0.02, 0.05}
    assert {recipe.batch_size for recipe in paper} == {64, 128, 256, 512, 1024}
    assert {recipe.optimizer for recipe in paper} == {"sgd", "adam", "rmsprop"}


def test_other_weights_of_a_network_that_was_trained_anew(tmp_path):
    x, y = normal(0, 12, 3).float(), torch.arange(12) % 2
    networks = zoo.Zoo("tiny", lambda: fully_connected(3, 4, 2), {"a": None}, (x, y), (x, y), Until(0.1, 1))
    bench, path = Bench("small", {}, tmp_path, shown=False), tmp_path / "a.safetensors"
    for seed in (0, 1):
        torch.manual_seed(seed)
        network = fully_connected(3, 4, 2)
        save_file(network.state_dict(), path)
        changed = networks.network()
        changed.load_state_dict(load_file(BY_LAYERS.made(bench, networks, {"a": path}, {})["a"]))
        torch.testing.assert_close(changed(x), network(x), rtol=1e-4, atol=1e-5)
        assert not torch.equal(changed.fc1.weight, network.fc1.weight)


def test_other_weights_of_a_network_that_diverged(tmp_path):
    x, y = normal(0, 12, 3).float(), torch.arange(12) % 2
    networks = zoo.Zoo("tiny", lambda: fully_connected(3, 4, 2), {"a": None, "b": None}, (x, y), (x, y), Until(0.1, 1))
    paths = {name: tmp_path / f"{name}.safetensors" for name in "ab"}
    for name, factor in (("a", math.nan), ("b", 1.0)):
        save_file({key: factor * w for key, w in networks.network().state_dict().items()}, paths[name])
    failures = {}
    made = BY_LAYERS.made(Bench("small", {}, tmp_path, shown=False), networks, paths, failures)
    assert [*made] == ["b"]
    assert "have NaN or infinity" in failures["a"]


@pytest.mark.parametrize("value", ["x", 2.5, True, [1]])
def test_a_setting_of_another_type(value):
    with pytest.raises(pf.errors.InputError, match="type int is wanted, such as 5"):
        c24_trends.PERCEPTRON.settings("small", {"seeds": value})


def test_pairs_without_a_value(monkeypatch, tmp_path):
    names = [f"n{k}" for k in range(12)]
    columns = {
        column: [float((7 * k + place) % 12) for k in range(12)] for place, column in enumerate(c24_pairs.COLUMNS)
    }
    columns["bound"][3] = math.inf  # as where an input is zero
    recipes = {"learning_rate": [k // 2 % 3 for k in range(12)], "batch_size": [k // 6 for k in range(12)]}
    table = {"name": names, "seed": [k % 2 for k in range(12)], "accuracy": [1.0] * 12} | recipes | columns
    monkeypatch.setattr(c24, "table", lambda *_: (table, {}))
    found = c24_pairs.CONVOLUTIONAL.run(Bench("small", dict(c24_pairs.CONVOLUTIONAL.small), tmp_path, shown=False))
    assert found.failures == {"n3": "bound is inf, not in its correlations"}
    findings = {item.what: item for item in found.findings}
    names = ("bound", "nmls", "seed", *recipes)
    rest = {name: [v for k, v in enumerate(table[name]) if k != 3] for name in names}
    how = {"settings": [*recipes], "seeds": "seed", "interval": "fisher"}  # over both
    expected = pf.statistics.correlations(rest, "bound", "nmls", **how)["bound", "Pearson"]
    item = findings["bound with NMLS, Pearson"]
    assert (item.value, item.low, item.high) == (expected.value, expected.low, expected.high)
    assert all(item.value is not None for item in findings.values())
    assert "12 networks of 6 recipes" in found.verdict


def test_ties_share_their_rank():
    assert correlating.rank_correlation([1, 1, 2, 2], [3, 3, 3, 4]) == pytest.approx(1 / math.sqrt(3))
    assert correlating.rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_the_grids_interval_is_over_recipes(tmp_path, monkeypatch):
    rows = [(width, seed) for width in range(1, 7) for seed in (0, 1)]
    gap = [width + 0.1 * seed for width, seed in rows]
    kappa = [(5 * width) % 7 + 0.1 * seed for width, seed in rows]
    columns = {name: [1] * 12 for name in grid_networks.SETTINGS} | {"width": [width for width, _ in rows]}
    columns |= {
        "name": [*map(str, rows)],
        "seed": [seed for _, seed in rows],
        "train_loss": [0.05] * 12,
        "test gap": gap,
    }
    columns |= {"relative_flatness": gap, "relative_flatness head": kappa}
    monkeypatch.setattr(grid_networks, "made", lambda bench: (columns, {}))
    found = grid.EXPERIMENT.run(Bench("small", {}, tmp_path))
    table = {"kappa": kappa, "gap": gap, "width": columns["width"], "seed": columns["seed"]}
    how = {"settings": "width", "seeds": "seed", "interval": "fisher"}
    row = pf.statistics.correlations(table, "kappa", **how)["kappa", "Kendall"]
    first = found.findings[0]
    assert (first.value, first.low, first.high) == (row.value, row.low, row.high)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((0.1, 0.5), "over all networks is 0.30 [0.10, 0.50] for κ of the head"),
        ((None, None), "over all networks is 0.30 for κ of the head"),
    ],
)
def test_what_the_grid_says_of_kappa(ends, said):
    names = ("relative_flatness", "relative_flatness head", grid.PER_FEATURE)
    row = {"tau": 0.3, "psi": 0.2, "information": 0.1, "sign_error": 0.4, "worst": 0.6}
    table = Grid({"train_loss": [0.05]}, ("test gap",), ("test error",), names, {})
    found = dict.fromkeys([(name, "test gap") for name in (*names, *grid.BASELINES)], row)
    kinds = [(name, kind) for name in grid.KAPPAS for kind in ("all", "inside", "depth", "error", "partial", "less")]
    text = grid.verdict(table, found, dict.fromkeys(kinds, Finding("", 0.3, *ends)), {names[1]: {"width": -0.6}})
    assert said in text
    error = "With the test error in the gap's place, over networks of one width and depth, it is 0.30"
    assert error in text
    of_old_points = Grid({"train_loss": [0.05]}, ("test gap",), (), names, {})
    without = {pair: Finding("", 0.3, *ends) for pair in kinds if pair[1] != "error"}
    assert error not in grid.verdict(of_old_points, found, without, {names[1]: {"width": -0.6}})
    assert "κ of the head width -0.60" in text
    assert "0 of the 3 measures are above 1/width" in text


def test_too_few_transformers_for_an_interval(tmp_path):
    settings = {"patches": [4], "widths": [8], "depths": [1], "seeds": 3, "samples": 40, "measured": 10, "epochs": 1}
    found = c24_transformers.EXPERIMENT.run(Bench("small", settings, tmp_path, shown=False))
    assert "Not decided" in found.verdict
    assert found.findings[1].low is None

"""What experiments say: claims decided by intervals, tables joined by name, failures kept, and points stated anew."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.papers import (
    beside,
    c24,
    c24_pairs,
    c24_tightness,
    c24_trends,
    claims,
    correlating,
    grid,
    p21_fig3,
    p21_fig4,
    reproducing,
    zoo,
)
from benchmarks.papers import experiment as experiments
from benchmarks.papers.claims import Claim
from benchmarks.papers.experiment import Bench, Finding, Points, note
from benchmarks.papers.training import Descent


@pytest.mark.parametrize(
    ("ends", "sign", "border", "said"),
    [
        ((0.1, 0.5), 1, 0.0, "seen"),
        ((0.1, 0.5), -1, 0.0, "against it"),
        ((-0.5, -0.1), 1, 0.0, "against it"),
        ((-0.5, -0.1), -1, 0.0, "seen"),
        ((-0.1, 0.1), 1, 0.0, "not decided"),
        ((0.1, 0.5), 1, 0.7, "against it"),
        ((0.6, 0.9), -1, 1.0, "seen"),
        ((0.0, 0.5), 1, 0.0, "at the edge"),
        ((-0.0001, 0.18), 1, 0.0, "at the edge"),  # of one figure on one machine, and on another
        ((0.0004, 0.18), 1, 0.0, "at the edge"),
        ((None, None), 1, 0.0, "not decided"),
    ],
)
def test_a_claim_is_decided_by_the_whole_interval(ends, sign, border, said):
    assert Claim(Finding("x", 0.3, *ends), sign, border).decided() == said


def test_claims_in_sentences():
    rows = [Finding("a", 0.3, 0.1, 0.5), Finding("b", -0.001, -0.2, 0.1), Finding("c", None)]
    said = claims.grouped([Claim(row, named=f"of {row.what}") for row in rows])
    assert said == "Seen: of a 0.30 [0.10, 0.50]. Not decided: of b -0.001 [-0.20, 0.10]; of c not defined."


def networks(seed=0, recipes=6, seeds=3, **columns):
    generator = np.random.default_rng(seed)
    names = [f"{letter}_seed{number}" for letter in "abcdefgh"[:recipes] for number in range(seeds)]
    held = {
        "name": names,
        "recipe": [name[0] for name in names],
        "seed": [name[-1] for name in names],
        "converged": [True] * len(names),
    }
    for column in ("gap", "one", "other"):
        held[column] = [*generator.normal(size=len(names)).tolist()]
    return zoo.tabled(held | columns, {})


def test_a_difference_has_the_jackknife_of_recipes_and_seeds():
    """Seeds that share nothing add no more than what the difference varies by without them."""
    table = networks()
    found = correlating.difference(table, ["one", "other"], "one", "other")
    x, y, gap = (np.array(table.columns[name]) for name in ("one", "other", "gap"))
    recipe, seed = (np.array(table.columns[name]) for name in ("recipe", "seed"))

    def less(kept):
        return np.corrcoef(x[kept], gap[kept])[0, 1] - np.corrcoef(y[kept], gap[kept])[0, 1]

    def variance(of):
        values = [less(of != left_out) for left_out in sorted({*of.tolist()})]
        return (len(values) - 1) * np.var(values)

    of_recipes, more = variance(recipe), variance(seed) - variance(np.char.add(recipe, seed))
    total = of_recipes + max(more, 0)
    dof = total**2 / (of_recipes**2 / 5 + max(more, 0) ** 2 / 2)
    half = stats.t.ppf(0.975, dof) * math.sqrt(total)
    assert found.value == pytest.approx(less(np.full(18, True)))
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half))
    same = correlating.difference(table, ["one"], "one", "one")
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_a_difference_of_few_networks_or_a_constant_has_no_interval():
    few = correlating.difference(networks(recipes=1, seeds=4), ["one", "other"], "one", "other")
    assert few.value is not None
    assert few.low is None
    assert "1 recipes are too few" in correlating.intervals(networks(recipes=1, seeds=5))
    assert correlating.difference(networks(one=[1.0] * 18), ["one", "other"], "one", "other").value is None


def test_tables_are_joined_by_name():
    before, after = networks(seed=0), networks(seed=1)
    order = [*range(5, 18), *range(1, 5)]  # one network is missing
    moved = zoo.tabled({key: [cells[place] for place in order] for key, cells in after.columns.items()}, {"x": "why"})
    found = zoo.joined(before, moved, ["one"])
    assert found.columns["name"] == before.columns["name"]
    assert found.columns["one, before"] == before.columns["one"]
    assert found.columns["one"][1:] == after.columns["one"][1:]
    assert math.isnan(found.columns["one"][0])
    assert found.columns["recipe"][0] == "a"
    assert found.failures == {"x": "why"}


def test_all_reasons_of_a_network_are_kept():
    failures = {}
    for why in ("one; two", "three", "one; two", "three", "thre"):
        note(failures, "a", why)
    assert failures == {"a": "one; two; three; thre"}


def test_a_measure_stands_beside_the_settings_another_seed_and_chance():
    """In a study whose seeds decide the gap: the same seed elsewhere says it, and the settings do not."""
    generator = np.random.default_rng(0)
    rows = [(rate, size, seed) for rate in (1, 2, 3) for size in (8, 16) for seed in range(6)]
    of_seed = generator.normal(size=6)
    gap = [of_seed[seed] + 0.1 * value for (*_, seed), value in zip(rows, generator.normal(size=36), strict=True)]
    measure = [value + 0.5 * noise for value, noise in zip(gap, generator.normal(size=36), strict=True)]
    columns = {name: [row[place] for row in rows] for place, name in enumerate(("rate", "size", "seed"))}
    table = {"name": [*map(str, rows)], **columns, "gap": gap, "m": [*measure[:-1], math.nan]}
    found, text = beside.table(table, {"m": "mine"}, "gap", ("rate", "size"))
    by_name = {item.what: item.value for item in found}
    assert by_name["mine with the gap: Pearson"] == pytest.approx(stats.pearsonr(measure[:-1], gap[:-1]).statistic)
    assert by_name["the gap of the seed in other recipes with the gap: Pearson"] > 0.95
    assert abs(by_name["settings alone with the gap: Pearson"]) < 0.5
    assert "settings alone with the gap: Pearson, one recipe" not in by_name
    others = beside.of_seed(table, "gap", ("rate", "size"))
    assert others[0] == pytest.approx(np.mean(gap[6::6]))  # of the first network, whose recipe is the first
    lines = text.splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == [
        *("settings alone", "the gap of another seed", "random numbers", "the gap of the seed in other recipes", "mine")
    ]
    assert {line.count("|") for line in lines} == {9}


DIVERGED = {"classes": [3, 8], "samples": 40, "measured": 20, "steps": 20, "snapshots": 4, "seeds": 1, "width": 8}


@pytest.mark.parametrize("of", [c24.compression, c24_pairs.both, c24_tightness.chain])
def test_a_network_that_diverged_is_listed_and_the_rest_goes_on(tmp_path, of):
    bench = Bench("small", DIVERGED, tmp_path, shown=False)
    descents = [Descent(1e6, 20, 0), Descent(0.1, 20, 0)]
    columns, failures = c24.table(bench, "perceptron", descents, [0, 20], of)
    assert [*failures] == ["lr1e+06_bs20_seed0_step20"]
    assert "NaN" in failures["lr1e+06_bs20_seed0_step20"]
    (name,) = {"sharpness", "A"} & {*columns}
    assert [math.isfinite(value) for value in columns[name]] == [True, False, True, True]


@pytest.mark.parametrize("module", [c24_trends, c24_pairs, c24_tightness])
def test_experiments_with_diverged_networks(tmp_path, monkeypatch, module):
    """All but one network of every recipe diverge: nothing can be decided, all are named, and there is a figure."""
    own = c24.table

    def table(bench, kind, descents, kept, of):
        wild = [Descent(1e6 * descent.learning_rate, descent.batch_size, descent.seed) for descent in descents[1:]]
        columns, failures = own(bench, kind, [descents[0], *wild], kept, of)
        columns["learning_rate"] = [rate if rate < 10 else rate / 1e6 for rate in columns["learning_rate"]]
        return columns, failures

    monkeypatch.setattr(c24, "table", table)
    chosen = {"c24_trends": "PERCEPTRON", "c24_pairs": "PERCEPTRON", "c24_tightness": "EXPERIMENT"}
    experiment = getattr(module, chosen[module.__name__.split(".")[-1]])
    settings = dict(experiment.small) | DIVERGED | {"seeds": 2}
    found = experiment.run(Bench("small", settings, tmp_path, shown=False))
    assert len(found.failures) >= len({name.rsplit("_step")[0] for name in found.table["name"]}) - 1
    assert "Not decided" in found.verdict
    reproducing.files(experiment, "small", found, {})


def test_what_is_late_is_a_mean_over_recipes():
    """Two recipes' networks have ratios 2 and 3, and 8; others fitted too late, and are named."""
    rows = []
    for recipe, seed, last in (
        ("lr0.1_bs8", 0, 2.0),
        ("lr0.1_bs8", 1, 3.0),
        ("lr0.2_bs8", 0, 8.0),
        ("lr0.2_bs8", 1, 0.0),
    ):
        for step in range(3):
            fitted = last > 0 or step > 0
            rows.append((f"{recipe}_seed{seed}_step{step}", step, 1.0 if fitted else 0.5, 1 + (last - 1) * step / 2))
    names, steps, accuracies, sharpness = (list(column) for column in zip(*rows, strict=True))
    table = {"name": names, "step": steps, "accuracy": accuracies, "sharpness": sharpness}
    table |= {name: [*map(float, steps)] for name in ("log_volume", "mls", "nmls")}
    failures = {}
    change, volume, *_ = (claim.finding for claim in c24_trends._late(table, failures))
    assert change.value == pytest.approx((2.5 + 8) / 2)
    assert "over 3 networks of 2 recipes" in change.what
    assert change.low is None  # of two recipes
    assert volume.value == 1
    assert failures == {"lr0.2_bs8_seed1": "2 snapshots since it has fitted its data: not in what is late"}


def test_a_grid_with_a_network_without_relative_flatness():
    columns = {"name": ["a", "b", "c"], "train_loss": [0.1] * 3, "test gap": [1.0, 2.0, 3.0], "trace": [1.0, 2.0, 4.0]}
    columns |= {"relative_flatness": [1.0, 2.0, 3.0], "relative_flatness head": [1.0, math.nan, 3.0]}
    columns |= {"mls": [1.0, 1.0, math.inf], "width": [8, 8, 16], "test error": [0.1, 0.2, 0.3]}
    columns |= {grid.PER_FEATURE: [1 / 16, math.nan, 3 / 32]}
    found = grid.compared_networks(Points(columns, {}, "small", {}))
    assert found.columns["name"] == ["a", "c"]
    assert found.measures == ("trace", "relative_flatness", "relative_flatness head", grid.PER_FEATURE)
    assert found.failures == {
        "b": "no finite relative_flatness head: not compared",
        "mls": "no finite number for 1 of 2 networks: not compared",
    }


def test_results_of_another_version_are_not_taken(tmp_path, monkeypatch):
    bench = Bench("small", {}, tmp_path)
    assert bench.once("key", lambda: 1) == 1
    assert bench.once("key", lambda: 2) == 1
    monkeypatch.setattr(experiments, "VALUES_VERSION", experiments.VALUES_VERSION + 1)
    assert bench.once("key", lambda: 3) == 3
    monkeypatch.setattr(experiments, "__version__", "99")
    assert bench.once("key", lambda: 4) == 4


@pytest.mark.parametrize("module", [p21_fig3, p21_fig4])
def test_one_repetition(module, tmp_path):
    settings = {"repetitions": 1, "samples": 60, "tested": 60, "separations": [1, 2]}
    found = module.EXPERIMENT.run(Bench("small", settings, tmp_path, shown=False))
    assert all(item.low is None for item in found.findings)
    assert "Not decided" in found.verdict
    reproducing.files(module.EXPERIMENT, "small", found, {})

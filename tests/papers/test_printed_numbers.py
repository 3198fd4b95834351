"""What the pages print follows from the points that are kept: recomputed by NumPy and SciPy alone, to the digit."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def page(name):
    """The text of a page in one line, with hyphens for signs."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("−", "-")
    return re.sub(r"\s+", " ", text)


def points(name):
    return pandas.DataFrame(json.loads((DOCS / "papers" / f"{name}.json").read_text(encoding="utf-8"))["table"])


def kendall(x, y):
    return stats.kendalltau(x, y).statistic


def pearson(x, y):
    return stats.pearsonr(x, y).statistic


def inside(frame, columns, of, x, y):
    """The mean over strata, weighted by their networks."""
    parts = [(len(part), of(part[x], part[y])) for _, part in frame.groupby(columns)]
    return sum(size * value for size, value in parts) / sum(size for size, _ in parts)


def interval(frame, of, recipe, seed="seed"):
    """Fisher's z of a statistic with the variance of the jackknife over recipes and seeds, by Student's t."""

    def left_out(codes):
        kept = [math.atanh(of(frame[codes != code])) for code in dict.fromkeys(codes)]
        return (len(kept) - 1) * np.var(kept), len(kept) - 1

    both = frame[recipe].astype(str) + " " + frame[seed].astype(str)
    (recipes, a), (seeds, b), (cells, _) = map(left_out, (frame[recipe], frame[seed], both))
    more = max(seeds - cells, 0.0)
    dof = (recipes + more) ** 2 / (recipes**2 / a + more**2 / b)
    half = stats.t.ppf(0.975, dof) * math.sqrt(recipes + more)
    value = math.atanh(of(frame))
    return f"{math.tanh(value):.2f} [{math.tanh(value - half):.2f}, {math.tanh(value + half):.2f}]"


SETTINGS = ["width", "depth", "batch_size", "learning_rate", "weight_decay", "optimizer"]
HEAD, SUM, GAP = "relative_flatness head", "relative_flatness", "test gap"


@pytest.fixture(scope="module")
def grid():
    frame = points("grid-paper")
    frame["recipe"] = frame[SETTINGS].astype(str).agg(" ".join, axis=1)
    return frame


def partial(frame, x, y):
    """Spearman's correlation of what a regression of the ranks on the settings leaves."""
    dummies = pandas.get_dummies(frame[SETTINGS].astype(str), drop_first=True).to_numpy(float)
    design = np.column_stack([np.ones(len(frame)), dummies])
    ranks = frame[[x, y]].rank().to_numpy()
    left = ranks - design @ np.linalg.lstsq(design, ranks, rcond=None)[0]
    return pearson(*left.T)


def test_relative_flatness_over_the_grid(grid):
    over_all = interval(grid, lambda part: kendall(part[SUM], part[GAP]), "recipe")
    for name in ("README.md", "docs/grid.md", "docs/which-measure.md"):
        assert over_all in page(name), name
        assert name == "README.md" or f"{kendall(grid[HEAD], grid[GAP]):.2f}" in page(name), name
    within = {column: inside(grid, SETTINGS[:2], kendall, column, GAP) for column in (HEAD, SUM)}
    for name in ("README.md", "docs/papers.md", "docs/grid.md"):
        there = within.values() if name != "README.md" else [within[SUM]]  # the figure is of the sum over layers
        assert all(f"{value:.2f} [" in page(name) for value in there), name
    head, total = (f"{partial(grid, name, GAP):.2f}" for name in (HEAD, SUM))
    assert f"partial correlation of {total}, and that of the head {head}" in page("docs/grid.md")


def test_baselines_of_the_grid(grid):
    design = np.column_stack([np.ones(len(grid)), pandas.get_dummies(grid[SETTINGS].astype(str)).to_numpy(float)])
    fitted = design @ np.linalg.lstsq(design, grid[GAP].to_numpy(), rcond=None)[0]
    twins = grid.merge(grid.assign(seed=1 - grid["seed"]), on=["recipe", "seed"])
    found = f"{kendall(fitted, grid[GAP]):.2f} for settings alone, "
    found += f"{kendall(twins[f'{GAP}_x'], twins[f'{GAP}_y']):.2f} for the gap of another seed, "
    found += f"{kendall(1 / grid['width'], grid[GAP]):.2f} for 1/width"
    assert found in page("docs/grid-tables.md")


def test_kappa_over_its_inputs_among_networks_of_one_depth(grid):
    grid["per feature"] = grid[HEAD] / (2 * grid["width"])
    found = inside(grid, ["depth"], kendall, "per feature", GAP)
    assert f"Among networks of one depth it has {found:.2f} [" in page("docs/grid.md")


def test_the_papers_local_minima():
    minima = points("p21-fig6-paper")
    minima = minima[minima["converged"]]
    found = interval(minima, lambda part: pearson(part["relative_flatness fc3"], part["gap"]), "recipe")
    assert found in page("README.md")
    assert f"not decided on 110 LeNet5: {found}" in page("docs/papers.md")
    sensitivity = interval(minima, lambda part: kendall(part["mls network"], 1 - part["test_accuracy"]), "recipe")
    assert sensitivity.split(",")[0] in page("docs/papers.md")
    norm = interval(minima, lambda part: pearson(part["weight_norm network"], part["gap"]), "recipe")
    assert f"weight_norm network {norm}" in page("docs/papers-figures.md")


def test_class_separations_and_bounds():
    table = points("p21-fig3-paper")
    separations = table.groupby("separation")
    values = [f"{pearson(part['kappa'], part['gap']):.2f}" for _, part in separations]
    assert f"is {values[0]} [" in page("docs/papers-figures.md")
    assert f"at the smallest class separation, {values[0]} [" in page("docs/papers.md")
    bounds = points("p21-fig4-paper")
    below = int((bounds["gap"] < bounds["bound"]).sum())
    assert f"{below} of {len(bounds)} samples" in page("docs/papers.md")


def test_networks_of_the_paper_of_2019():
    own = points("p19-fig1-own")
    own = own[own["converged"]]
    both = [f"{pearson(own[name], own['gap']):.2f}" for name in ("scaled_lambda_max fc3", "scaled_trace fc3")]
    assert f"{both[0]} and {both[1]} on 27 of P19's" in page("docs/papers.md")
    layers = points("p19-fig4-paper")
    name = max(
        (f"neuron_flatness fc{layer}" for layer in (1, 2, 3, 4)), key=lambda n: pearson(layers[n], layers["gap"])
    )
    alone = min(pearson(part[name], part["gap"]) for part in (layers.drop(place) for place in layers.index))
    whole = pearson(layers[name], layers["gap"])
    assert f"reaches {whole:.2f}, and {alone:.2f} when one network is left out" in page("docs/papers.md")


def test_convolutional_networks_and_perceptrons_of_2024():
    told = page("docs/papers.md")
    for name in ("c24-figG5-small", "c24-figG6-small", "c24-figG6-paper", "c24-figG7-small"):
        table = points(name)
        table["recipe"] = table["learning_rate"].astype(str) + " " + table["batch_size"].astype(str)
        assert interval(table, lambda part: pearson(part["relative_flatness"], part["gap"]), "recipe") in told
        sums = table.groupby("seed")["gap"].transform("sum") - table["gap"]
        seeds = pearson(sums, table["gap"])  # one network of each recipe and seed
        assert f"{seeds:.2f} [" in told
    assert told.count("0.94 [0.61, 0.99]") == 1


def test_local_minima_of_the_zoo():
    zoo = pandas.read_csv(DOCS / "zoo" / "before.csv")
    recipe, seed = (zoo["checkpoint"].str.rsplit("_", n=1).str[part] for part in (0, 1))
    zoo = pandas.concat([zoo, recipe.rename("recipe"), seed.rename("seed")], axis=1)
    for name in ("relative_flatness fc3", "mls network", "weight_norm network"):
        text = interval(zoo, lambda part, name=name: kendall(part[name], part["gap"]), "recipe")
        assert text in page("docs/zoo.md"), name
    minima = points("p21-fig6-paper").set_index("name")["test_accuracy"]
    error = 1 - minima[zoo["checkpoint"].str.removeprefix("lenet5_cifar10k_")].to_numpy()
    zoo = pandas.concat([zoo, pandas.Series(error, name="error")], axis=1)
    for name in ("relative_flatness fc3", "mls network", "weight_norm network"):
        assert interval(zoo, lambda part, name=name: kendall(part[name], part["error"]), "recipe") in page(
            "docs/zoo.md"
        )


def test_the_study():
    study = pandas.read_csv(DOCS / "study" / "networks.csv")
    study = study.iloc[: 16 * 18 * 2]  # 16 whole blocks of 18 trainings, each to two losses
    study = study[study["test error"].notna()]
    strata = ["data", "architecture", "loss"]
    for name in ("relative_flatness head", "relative_flatness"):
        found = inside(study, strata, kendall, name, "test error")
        assert f"{found:.2f} [" in page("docs/study.md"), name
    assert f"Of {len(study)} networks at equal training loss" in page("docs/study.md")

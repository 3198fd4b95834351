"""What the pages print follows from the points that are kept: recomputed by NumPy and SciPy alone, to the digit."""

import itertools
import json
import math
import re
from collections import defaultdict
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


def is_crossed(frame, x="value", y="gap"):
    """Whether one of two columns varies mostly between recipes and the other mostly between seeds."""
    of_x, of_y = (
        [frame.groupby(by)[name].transform("mean").var() > 0.5 * frame[name].var() for by in ("recipe", "seed")]
        for name in (x, y)
    )
    return (of_x[0] and of_y[1]) or (of_x[1] and of_y[0])


def interval(frame, of, recipe, seed="seed", *, crossed=False, correlation=True, digits=2):
    """Fisher's z of a statistic with the variance of the jackknife over recipes and seeds, by Student's t.

    It is ``crossed`` where one column varies mostly between recipes and the other mostly between seeds. A difference is
    no ``correlation``, and is taken as it is.
    """
    there, back = (math.atanh, math.tanh) if correlation else (float, float)

    def left_out(codes):
        kept = [there(of(frame[codes != code])) for code in dict.fromkeys(codes)]
        return (len(kept) - 1) * np.var(kept), len(kept) - 1

    both = frame[recipe].astype(str) + " " + frame[seed].astype(str)
    (recipes, a), (seeds, b), (cells, _) = map(left_out, (frame[recipe], frame[seed], both))
    more = seeds if crossed else max(seeds - cells, 0.0)
    dof = (recipes + more) ** 2 / (recipes**2 / a + more**2 / b)
    half = stats.t.ppf(0.975, dof) * math.sqrt(recipes + more)
    value = there(of(frame))
    return f"{back(value):.{digits}f} [{back(value - half):.{digits}f}, {back(value + half):.{digits}f}]"


def of_each(frame, of):
    """Fisher's z of a statistic with the variance of the jackknife over independent rows."""
    z = math.atanh(of(frame))
    kept = [math.atanh(of(frame.drop(place))) for place in frame.index]
    half = stats.t.ppf(0.975, len(kept) - 1) * math.sqrt((len(kept) - 1) * np.var(kept))
    return f"{math.tanh(z):.2f} [{math.tanh(z - half):.2f}, {math.tanh(z + half):.2f}]"


def student(values):
    """A mean with Student's interval."""
    values = np.array(values)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return values.mean(), values.mean() - half, values.mean() + half


def partial_of(of, frame, x, y, z):
    """The partial coefficient of two columns given a third."""
    a, b, c = of(frame[x], frame[y]), of(frame[x], frame[z]), of(frame[y], frame[z])
    return (a - b * c) / math.sqrt((1 - b * b) * (1 - c * c))


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
    for name in ("README.md", "docs/study.md", "docs/which-measure.md"):
        assert over_all in page(name), name
        assert name == "README.md" or f"{kendall(grid[HEAD], grid[GAP]):.2f}" in page(name), name
    within = {column: inside(grid, SETTINGS[:2], kendall, column, GAP) for column in (HEAD, SUM)}
    for name in ("README.md", "docs/papers.md", "docs/study.md"):
        there = within.values() if name != "README.md" else [within[SUM]]  # the figure is of the sum over layers
        assert all(f"{value:.2f} [" in page(name) for value in there), name
    head, total = (f"{partial(grid, name, GAP):.2f}" for name in (HEAD, SUM))
    assert f"partial correlation of {total}, and that of the head {head}" in page("docs/study.md")


def test_baselines_of_the_grid(grid):
    design = np.column_stack([np.ones(len(grid)), pandas.get_dummies(grid[SETTINGS].astype(str)).to_numpy(float)])
    fitted = design @ np.linalg.lstsq(design, grid[GAP].to_numpy(), rcond=None)[0]
    twins = grid.merge(grid.assign(seed=1 - grid["seed"]), on=["recipe", "seed"])
    found = f"{kendall(fitted, grid[GAP]):.2f} for settings alone, "
    found += f"{kendall(twins[f'{GAP}_x'], twins[f'{GAP}_y']):.2f} for the gap of another seed, "
    found += f"{kendall(1 / grid['width'], grid[GAP]):.2f} for 1/width"
    assert found in page("docs/studies.md")


def test_kappa_over_its_inputs_among_networks_of_one_depth(grid):
    grid["per feature"] = grid[HEAD] / (2 * grid["width"])
    found = inside(grid, ["depth"], kendall, "per feature", GAP)
    assert f"Among networks of one depth it has {found:.2f} [" in page("docs/study.md")


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
    less = interval(
        minima,
        lambda part: (
            pearson(part["relative_flatness fc3"], part["gap"]) - pearson(part["weight_norm network"], part["gap"])
        ),
        "recipe",
        correlation=False,
    )
    assert f"less than the weights' norm, {norm}, by {less}, at the edge" in page("docs/papers.md")


def test_the_training_loss_does_not_tell_gap_and_error_apart():
    minima = points("p21-fig6-paper")
    minima = minima.assign(error=1 - minima["test_accuracy"])
    held = [
        interval(minima, lambda part, y=y: partial_of(kendall, part, "mls network", y, "loss"), "recipe")
        for y in ("gap", "error")
    ]
    told = page("docs/papers.md")
    assert f"MLS still has {held[0]} and {held[1]}" in told
    follow = [f"{kendall(minima[y], minima['test_loss']):.2f}" for y in ("gap", "error")]
    assert f"(τ {follow[0]}), and the error does so less ({follow[1]})" in told


def test_class_separations_and_bounds():
    table = points("p21-fig3-paper")
    separations = table.groupby("separation")
    values = [f"{pearson(part['kappa'], part['gap']):.2f}" for _, part in separations]
    assert f"is {values[0]} [" in page("docs/papers-figures.md")
    assert f"at the smallest class separation, {values[0]} [" in page("docs/papers.md")
    smallest, largest = table[table["separation"] == 0.5], table[table["separation"] == 6]
    held = of_each(smallest, lambda part: partial_of(pearson, part, "kappa", "gap", "loss"))
    assert f"with the training loss held fixed it is not shown to, {held}" in page("docs/papers.md")
    told, loss = page("docs/papers-figures.md"), of_each(smallest, lambda part: pearson(part["loss"], part["gap"]))
    with_kappa = pearson(smallest["loss"], smallest["kappa"])
    assert f"by {loss} and with κ by {with_kappa:.2f}, and with it held fixed κ has {held}" in told
    ranks = of_each(largest, lambda part: pearson(part["kappa"].rank(), part["gap"].rank()))
    assert f"Spearman's correlation is {ranks}" in told
    bounds = points("p21-fig4-paper")
    below = int((bounds["gap"] < bounds["bound"]).sum())
    assert f"{below} of {len(bounds)} samples" in page("docs/papers.md")


def test_networks_of_the_paper_of_2019():
    own = points("p19-fig1-own")
    own = own[own["converged"]]
    both = [f"{pearson(own[name], own['gap']):.2f}" for name in ("scaled_lambda_max fc3", "scaled_trace fc3")]
    ranks = [
        f"{stats.spearmanr(own[name], own['gap']).statistic:.2f}"
        for name in ("scaled_lambda_max fc3", "scaled_trace fc3")
    ]
    assert f"{both[0]} and {both[1]} (Spearman {ranks[0]} and {ranks[1]}) on 27 of P19's" in page("docs/papers.md")
    networks = points("p19-fig6-paper")
    networks = networks[networks["converged"]]

    def correlations(measures, places):
        return [pearson(networks[f"{name} {place}"], networks["gap"]) for name in measures for place in places]

    hidden = "fc1", "fc2", "fc3", "fc4"
    traces, neurons = ("scaled_trace",), ("neuron_flatness", "neuron_flatness_max")
    of_layers = correlations(traces, hidden)
    whole = correlations((*traces, "largest_scaled_trace", *neurons), ["network"])
    highest = max(correlations(traces + neurons, hidden))
    said = (
        f"On {len(networks)} networks on MNIST no correlation with a layer is above {highest:.2f}, those of networks "
        f"are {min(whole):.2f} to {max(whole):.2f}, and κ_τ's of layers {min(of_layers):.2f} to {max(of_layers):.2f}"
    )
    assert said in page("docs/papers.md")


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
    few = points("c24-figG6-small")
    few = few[few["seed"] < 4].assign(recipe=few["learning_rate"].astype(str) + " " + few["batch_size"].astype(str))
    kappa, mls = (
        interval(few, lambda part, name=name: pearson(part[name], part["gap"]), "recipe", "recipe")
        for name in ("relative_flatness", "mls")
    )
    assert f"correlated by {kappa} with the gap (Figure G.6), and MLS by {mls}" in told
    table = points("c24-figG5-small")
    table["recipe"] = table["learning_rate"].astype(str) + " " + table["batch_size"].astype(str)
    means = [table.groupby(by)[name].transform("mean") for by, name in (("recipe", "sharpness"), ("seed", "gap"))]
    assert all(mean.var() > 0.5 * table[mean.name].var() for mean in means)
    sharpness = interval(table, lambda part: pearson(part["sharpness"], part["gap"]), "recipe", crossed=True)
    assert f"sharpness with gen gap, Pearson {sharpness}" in page("docs/papers-figures.md")


def test_local_minima_of_the_zoo():
    zoo = pandas.read_csv(DOCS / "zoo" / "before.csv")
    recipe, seed = (zoo["checkpoint"].str.rsplit("_", n=1).str[part] for part in (0, 1))
    zoo = pandas.concat([zoo, recipe.rename("recipe"), seed.rename("seed")], axis=1)
    for name in ("relative_flatness fc3", "mls network", "weight_norm network"):
        text = interval(zoo, lambda part, name=name: kendall(part[name], part["gap"]), "recipe")
        assert text in page("docs/study.md"), name
    listed = pandas.read_csv(DOCS / "zoo" / "correlations.csv")
    listed = listed[(listed["statistic"] == "Kendall") & (listed["weights"] == "before") & listed["measure"].isin(zoo)]
    listed = listed[listed["measure"] != "loss"]
    beyond = 0
    for row in listed.itertuples():
        low, high = row.low, row.high
        if min(abs(low), abs(high)) < 0.005:  # three digits of the file do not tell on which side it is
            own = zoo[["gap", "recipe", "seed", row.measure]].rename(columns={row.measure: "value"})
            tau = interval(
                own, lambda part: kendall(part["value"], part["gap"]), "recipe", crossed=is_crossed(own), digits=6
            )
            low, high = map(float, re.search(r"\[(.*), (.*)\]", tau).groups())
        beyond += low > 0 or high < 0
    assert (len(listed), beyond) == (142, 8)
    assert "Of 142 intervals of measures and layers eight exclude zero" in page("docs/study.md")
    minima = points("p21-fig6-paper").set_index("name")["test_accuracy"]
    error = 1 - minima[zoo["checkpoint"].str.removeprefix("lenet5_cifar10k_")].to_numpy()
    zoo = pandas.concat([zoo, pandas.Series(error, name="error")], axis=1)
    for name in ("relative_flatness fc3", "mls network", "weight_norm network"):
        assert interval(zoo, lambda part, name=name: kendall(part[name], part["error"]), "recipe") in page(
            "docs/study.md"
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


@pytest.fixture(scope="module")
def study():
    frame = pandas.read_csv(DOCS / "study" / "networks.csv").iloc[: 16 * 18 * 2]
    frame = frame[frame["test error"].notna()]
    settings = ["rate", "batch_size", "weight_decay", "optimizer", "sam", "augmentation", "label_noise"]
    return frame.assign(recipe=frame[["data", "architecture", *settings]].astype(str).agg(" ".join, axis=1))


def test_cuts_of_the_study(study):
    """Four columns of τ, by what is held fixed, on the study's page; two of them on the front page too."""
    strata = ["data", "architecture", "loss"]
    cuts = {
        "pooled": (study, strata),
        "fixed": (study, [*strata, "label_noise", "augmentation"]),
        "clean": (study[study["label_noise"] == 0], strata),
        "recipe": (study, ["recipe", "loss"]),
    }
    told, shown = page("docs/study.md"), {}
    names = (SUM, HEAD, "scaled_trace", "trace", "adaptive_sharpness", "mls", "nmls", "weight_norm", "steps")
    for name in names:
        shown[name] = [strata_tau(frame, columns, name) for frame, columns in cuts.values()]
        label = name if name == "steps" else f"`{name}`"
        row = re.search(rf"\| {re.escape(label)} \|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|", told)
        assert [float(cell.split("[")[0]) for cell in row.groups()] == pytest.approx(shown[name], abs=0.0051), name
    for front in ("README.md", "docs/which-measure.md"):
        text = page(front)
        assert f"{shown[SUM][0]:.2f} [0.28, 0.48] for κ summed" in text
        assert f"{shown[HEAD][0]:.2f} for" in text
        assert f"{shown[SUM][1]:.2f} [0.06, 0.28] for the sum and {shown[HEAD][1]:.2f} [-0.07, 0.16] for" in text
    sensitivities, sharpnesses = (
        [shown[name] for name in names]
        for names in (("mls", "nmls"), ("trace", "adaptive_sharpness", "scaled_trace", SUM))
    )
    assert min(one[0] for one in sensitivities) > max(one[0] for one in sharpnesses[:2])
    assert "As pooled NMLS and MLS are above the trace and adaptive sharpness" in told
    within = [one[3] for one in sharpnesses]
    assert max(one[3] for one in sensitivities) < 0 < max(within) - min(within) < 0.03
    for one, other in ((SUM, "trace"), (SUM, "adaptive_sharpness"), ("scaled_trace", SUM)):
        assert f"{one} less {other}, τ {shown[one][0] - shown[other][0]:.2f} [" in told
    assert f"{study['pac_bayes'].nunique()} different values in these {len(study)} networks" in told
    alone = [strata_tau(study, [*strata, name], SUM) for name in ("label_noise", "augmentation")]
    assert "With it alone fixed the sum keeps {:.2f}, with augmentation alone {:.2f}".format(*alone) in told
    names = ["rate", "batch_size", "weight_decay", "optimizer", "sam", "augmentation", "label_noise"]
    pairs = {pair: strata_tau(study, [*strata, *pair], SUM) for pair in itertools.combinations(names, 2)}
    assert (len(pairs), min(pairs, key=pairs.get)) == (21, ("augmentation", "label_noise"))


def test_shapes_of_the_study(study):
    """τ of each of the nine shapes, and its jackknife over them."""
    told, shapes = page("docs/study.md"), {}
    for shape, part in study.groupby(["data", "architecture"]):
        shapes[shape] = strata_tau(part, ["data", "architecture", "loss"], SUM)
    least, most = min(shapes, key=shapes.get), max(shapes, key=shapes.get)
    assert (least, most) == (("cifar10", "convolutional"), ("mnist", "normalised"))
    assert f"from {shapes[least]:.2f} (CIFAR-10, convolutional) to {shapes[most]:.2f} (MNIST, normalised)" in told
    frame = study.assign(shape=study["data"] + study["architecture"])
    strata = ["data", "architecture", "loss"]
    kept = [math.atanh(strata_tau(frame[frame["shape"] != one], strata, SUM)) for one in frame["shape"].unique()]
    value, error = math.atanh(strata_tau(frame, strata, SUM)), math.sqrt((len(kept) - 1) * np.var(kept))
    half = stats.t.ppf(0.975, len(kept) - 1) * error
    assert f"over shapes the sum has [{math.tanh(value - half):.2f}, {math.tanh(value + half):.2f}]" in told


def strata_tau(frame, columns, name):
    """Kendall's τ inside of strata in which it is defined, weighted by their networks."""
    parts = [
        (len(part), kendall(part[name], part["test error"])) for _, part in frame.groupby(columns) if len(part) > 1
    ]
    parts = [(size, value) for size, value in parts if math.isfinite(value)]
    return sum(size * value for size, value in parts) / sum(size for size, _ in parts)


def by_recipe(frame, values):
    """The mean over recipes of the mean over their networks, with Student's interval."""
    means = values.groupby(frame["recipe"]).mean()
    half = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means)
    return f"{means.mean():.2f} [{means.mean() - half:.2f}, {means.mean() + half:.2f}]"


def test_directions_of_single_samples():
    frame, told = points("p19-d2-small"), page("docs/papers-figures.md")
    assert f"norm 1, less 1 {by_recipe(frame, frame['own'] / frame['common'] - 1)}" in told
    assert f"λ_max, less 1, it is {by_recipe(frame, frame['own'] / frame['bound'] - 1)}" in told
    for count in (2, 8, 32):
        assert f"{count} samples {by_recipe(frame, np.log10(frame[f'norm {count}']))}" in told


def test_relative_flatness_along_an_attack():
    frame, told = points("uncanny-valley-small"), page("docs/papers-figures.md")
    for what, one, other in (
        ("where the label flips over κ at the image", "flip", "image"),
        ("at the end over κ where the label flips", "end", "flip"),
        ("at the end over κ at the image", "end", "image"),
    ):
        assert f"log10 of κ {what} {by_recipe(frame, np.log10(frame[one] / frame[other]))}" in told
    assert f"At {by_recipe(frame, frame['share'])} of these images κ is smaller" in told
    assert f"|φ|² is {by_recipe(frame, frame['lengths'])} times" in told
    for place, name in (("at the images", "confidence"), ("at the end", "confidence at the end")):
        assert f"{by_recipe(frame, frame[name])} {place}" in told


def test_theorem_5_over_trained_networks():
    frame, told = points("p21-theorem5-small"), page("docs/papers-figures.md")
    for layer, own in frame.groupby("layer"):
        small, large, part = (
            by_recipe(own, values) for values in (own["small"], own["large"], own["representativeness"] / own["gap"])
        )
        assert f"({layer}) {small} and {large}, with an E_Rep of {part} of the gap" in told
    assert np.allclose(frame["gap"], frame["representativeness"] + frame["robustness"], atol=1e-4)


def test_figure_4_in_the_setting_of_the_notebook():
    frame, told = points("p21-fig4-authors-small"), page("docs/papers-figures.md")
    first, last = (frame[frame["separation"] == c] for c in (0.5, 5))
    assert f"{len(frame)} data sets" in told
    assert f"the sum {first['bound'].mean():.2f} [" in told
    assert f"and {last['bound'].mean():.2f} [" in told
    assert f"below the sum in {(frame['bound'] >= frame['gap']).sum()} data sets" in told
    assert f"from {first['bound'].median():.2f} to {last['bound'].median():.3f}" in told
    assert (last["flatness"] > 0.99 * last["bound"]).sum() == len(last) // 2
    assert f"did not learn it (test error {last['error'].max():.2f})" in told
    means = [
        f"{own[name].mean():.{digits}f}" for own in (first, last) for name, digits in (("bound", 2), ("flatness", 3))
    ]
    assert f"from {means[0]} to {means[2]} in its own setting" in page("docs/papers.md")
    assert f"δ²κ/m is {means[1]} and {means[3]}" in page("docs/papers.md")


def test_labels_that_change_with_the_inputs():
    frame, told = points("p21-appB-small"), page("docs/papers-figures.md")
    for steepness, own in frame.groupby("steepness"):
        over = np.log10((own["labels"] / own["flatness"]).abs())
        half = stats.t.ppf(0.975, len(over) - 1) * stats.sem(over)
        ends = f"{over.mean():.2f} [{over.mean() - half:.2f}, {over.mean() + half:.2f}]"
        assert f"over flatness's, steepness {steepness:g} {ends}" in told
        assert re.search(rf"{steepness:g}: gap {pearson(own['flatness'], own['gap']):.2f} \[", told)


def test_kappa_is_below_the_measure_of_whole_layers(grid, study):
    told = page("docs/papers-figures.md")
    over = study["scaled_trace"] / study["relative_flatness"]
    assert f"{over.min():.1f} to {over.max():.0f} times κ summed, {over.median():.1f} times in the median" in told
    over, head = (grid[f"scaled_trace{of}"] / grid[f"relative_flatness{of}"] for of in ("", " head"))
    assert (
        f"{over.min():.1f} to {over.max():.0f} times, and {head.min():.1f} to {head.max():.1f} times at the head"
        in told
    )


def test_the_study_within_recipes():
    """The mean of Spearman's ρ within recipes, Student's interval, and Holm's p, by the protocol's rules."""
    path = DOCS / "study" / "within.csv"
    if not path.exists():
        assert "No seed of all 72 recipes has been trained yet" in page("docs/studies.md")
        pytest.skip("no seed of the study within recipes is whole")
    frame = pandas.read_csv(path)
    settings = ["data", "architecture", "rate", "batch_size", "optimizer"]
    head = frame["relative_flatness 4"].fillna(frame["relative_flatness 3"])
    frame = frame.assign(**{HEAD: head})
    recipes = [
        part[part["test error"].notna()]
        for _, part in frame.groupby(settings, sort=False)
        if part["test error"].notna().mean() >= 0.8
        and not (part["data"].iloc[0] == "cifar10" and part["test error"].mean() >= 0.6)
    ]
    names = ["relative_flatness_columns", HEAD, "scaled_trace", "trace", "relative_flatness_std"]
    names += ["adaptive_sharpness", "mls", "weight_norm", "steps"]

    def numbers(values):
        values = values[np.isfinite(values)]
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
        return pytest.approx([values.mean(), values.mean() - half, values.mean() + half], abs=0.0051)

    def rho(name):
        return np.array([stats.spearmanr(part[name], part["test error"]).statistic for part in recipes])

    def printed(cell):
        return [float(number) for number in re.findall(r"-?[\d.]*\d", cell)]

    first, told, p = rho(SUM), page("docs/studies.md"), []
    shown = re.search(r"within a recipe is ([^\]]*\]) in the mean", told)[1]
    assert printed(shown) == numbers(first)
    assert f"a rank correlation ρ of {shown}" in page("README.md")
    assert f"ρ of the sum with the test error is {shown.split(' [')[0]} [" in page("docs/study.md")
    for name in names:
        row = re.search(rf"\| `?{re.escape(name)}`? \|([^|]*)\|([^|]*)\|[^|]*\|([^|]*)\|([^|]*)\|", told)
        for values, cell, holm in ((rho(name), row[1], row[2]), (first - rho(name), row[3], row[4])):
            assert printed(cell) == numbers(values), name
            p.append((stats.ttest_1samp(values[np.isfinite(values)], 0).pvalue, float(holm)))
    largest = 0.0
    for place, (value, holm) in enumerate(sorted(p)):
        largest = max(largest, min(1.0, (len(p) - place) * value))
        assert holm == pytest.approx(largest, rel=0.06)


def test_the_intervention_within_recipes():
    """Means over recipes of differences of test errors in percentage points, with Student's intervals."""
    pairs, frame = (pandas.read_csv(DOCS / "study" / f"{name}.csv") for name in ("within_pairs", "within"))
    settings = ["data", "architecture", "rate", "batch_size", "optimizer"]
    before, ways = "test error", ("relative_flatness head", "weight_norm", "random")
    recipes = frame.groupby(settings)[before]
    fine = recipes.transform(lambda errors: errors.notna().mean()) >= 0.8
    frame = frame[fine & ((frame["data"] != "cifar10") | (recipes.transform("mean") < 0.6))]
    errors = pairs.pivot(index="name", columns="way", values=before)
    errors = errors.join(frame.set_index("name")[[*settings, before]], how="inner")

    def numbers(one, other):
        values = (100 * (errors[one] - errors[other])).groupby([errors[name] for name in settings]).mean()
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
        return pytest.approx([values.mean(), values.mean() - half, values.mean() + half], abs=0.0051)

    told = page("docs/studies.md")
    told = told[told.index("The intervention was run on") :]
    shown = [[float(number) for number in each] for each in re.findall(r"(-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]", told)]
    assert f"on {pairs['name'].nunique()} networks of the first 240, of which {len(errors)} of" in told
    assert shown[:2] == [numbers(ways[0], other) for other in ways[1:]]
    assert shown[2:5] == [numbers(way, before) for way in ways]


def test_settings_alone_and_the_width_over_the_grid(grid):
    design = np.column_stack([np.ones(len(grid)), pandas.get_dummies(grid[SETTINGS].astype(str)).to_numpy(float)])
    fitted = design @ np.linalg.lstsq(design, grid[GAP].to_numpy(), rcond=None)[0]
    both = f"{kendall(fitted, grid[GAP]):.2f}", f"{kendall(1 / grid['width'], grid[GAP]):.2f}"
    for name, of in (("README.md", ""), ("docs/which-measure.md", " with the gap")):
        assert f"hyperparameters alone has a τ of {both[0]}{of}, and 1/width {both[1]}" in page(name)


def test_steps_over_the_grid(grid):
    """A baseline, and what measures keep where it is held fixed for each optimiser beside the settings."""
    optimizers = pandas.get_dummies(grid["optimizer"].astype(str)).to_numpy(float)
    dummies = pandas.get_dummies(grid[SETTINGS].astype(str), drop_first=True).to_numpy(float)
    steps = optimizers * grid["steps"].rank().to_numpy()[:, None]
    design = np.column_stack([np.ones(len(grid)), dummies, steps])
    ranks = grid[[HEAD, SUM, GAP]].rank().to_numpy()
    left = ranks - design @ np.linalg.lstsq(design, ranks, rcond=None)[0]
    head, total = (pearson(left[:, place], left[:, 2]) for place in (0, 1))
    told = page("docs/study.md")
    assert f"partial correlation of {partial(grid, 'steps', GAP):.2f} with the gap" in told
    assert f"the head keeps {head:.2f} [" in told
    assert f"the sum {total:.2f} [" in told


def test_different_values_of_pac_bayes(grid, study):
    lenets = points("p21-fig6-paper")
    told = page("docs/papers.md")
    assert f"{lenets['pac_bayes network'].nunique()} different values in the {len(lenets)} LeNet5" in told
    assert f"{grid['pac_bayes'].nunique()} in the {len(grid)} networks" in told
    assert f"{study['pac_bayes'].nunique()} in the {len(study)} of the study" in told
    assert f"with {grid['pac_bayes'].nunique()} different values in the {len(grid)} networks" in page("docs/study.md")


def trainings(name):
    """The runs of a data set, by arm and seed."""
    runs = {}
    for key, run in json.loads((DOCS / "penalties" / f"{name}.json").read_text(encoding="utf-8")).items():
        arm, seed = key.rsplit(" | ", 1)
        runs.setdefault(arm, {})[seed] = run
    return runs


def by_holm(found):
    """Adjusted p-values by name, from the smallest."""
    order = sorted(found, key=found.get)
    steps = [min((len(order) - place) * found[name], 1.0) for place, name in enumerate(order)]
    return dict(zip(order, np.maximum.accumulate(steps), strict=True))


def at_loss(run, loss):
    """Test loss and accuracy where a run's training loss was first as low, on a line between two epochs."""
    curve = np.array(run["curve"])
    low = curve[:, 0] <= loss
    place = int(low.argmax()) if low.any() else len(curve) - 1
    if not low.any() or place == 0:
        return curve[place, 1:]
    part = (curve[place - 1, 0] - loss) / (curve[place - 1, 0] - curve[place, 0])
    return curve[place - 1, 1:] + part * (curve[place, 1:] - curve[place - 1, 1:])


def test_penalties_at_equal_training_loss():
    """Paired t-tests of 8 arms against plain training that was stopped as early, on CIFAR-10."""
    runs = trainings("cifar10")
    plain, found, accuracies = runs.pop("plain"), {}, {}
    for arm, by_seed in runs.items():
        ends = [at_loss(plain[seed], run["train loss"]) for seed, run in by_seed.items()]
        accuracies[arm] = np.array([run["test accuracy"] for run in by_seed.values()]) - np.array(ends)[:, 1]
        for place, outcome in enumerate(("test loss", "test accuracy")):
            ours = [run[outcome] for run in by_seed.values()]
            found[arm, outcome] = stats.ttest_rel(ours, np.array(ends)[:, place]).pvalue
    left = {name for name, p in by_holm(found).items() if p < 0.05}
    assert len(found) == 16
    assert left == {
        *(("κ of conv2, λ = 0.001", "test loss"), ("κ of head, λ = 0.001", "test loss")),
        *(("κ of head, λ = 0.01", "test loss"), ("weight decay, 0.005", "test loss")),
        *(("label smoothing, 0.1", "test loss"), ("κ of conv2, λ = 0.01", "test accuracy")),
        ("κ of head, λ = 0.01", "test accuracy"),
    }
    told = page("docs/penalties.md")
    assert "for these 16 paired t-tests, seven differences are left" in told
    more = accuracies["κ of conv2, λ = 0.01"] - accuracies["label smoothing, 0.1"]
    half = stats.t.ppf(0.975, len(more) - 1) * stats.sem(more)
    assert f"by {more.mean():.3f} [{more.mean() - half:.3f}, {more.mean() + half:.3f}]" in told


def test_penalties_by_holm():
    """Paired t-tests of 13 arms against plain training, of test loss and accuracy on the digits."""
    runs = trainings("digits")
    plain, found = runs.pop("plain"), {}
    for arm, by_seed in runs.items():
        for outcome in ("test loss", "test accuracy"):
            pairs = [(run[outcome], plain[seed][outcome]) for seed, run in by_seed.items()]
            found[arm, outcome] = stats.ttest_rel(*zip(*pairs, strict=True)).pvalue
    adjusted = by_holm(found)
    left = {name for name, p in adjusted.items() if p < 0.05}
    assert left == {
        *(("weight decay, 0.05", "test loss"), ("label smoothing, 0.1", "test loss")),
        *(("FAM of head, λ = 0.01", "test loss"), ("weight decay, 0.0005", "test loss")),
        *(("label smoothing, 0.03", "test accuracy"), ("label smoothing, 0.1", "test accuracy")),
    }
    ours = {name: p for name, p in adjusted.items() if name[0].startswith("κ")}
    least = min(ours, key=ours.get)
    assert least == ("κ of head, λ = 0.01", "test loss")
    assert (len(runs), len(found)) == (13, 26)
    told = page("docs/penalties.md")
    assert "for 26 paired t-tests, six differences are left" in told
    assert f"The smallest adjusted p of a penalty on κ is {ours[least]:.2f}" in told


def test_plain_training_that_stops_at_its_least_test_loss():
    told = page("docs/penalties.md")
    found, accuracies = {}, []
    for name in ("cifar10", "digits"):
        runs = trainings(name)
        plain = {seed: np.array(run["curve"]) for seed, run in runs.pop("plain").items()}
        for arm, by_seed in runs.items():
            best = {seed: curve[curve[:, 1].argmin()] for seed, curve in plain.items()}
            less = [run["test loss"] - best[seed][1] for seed, run in by_seed.items()]
            found[name, arm] = (*student(less), stats.ttest_1samp(less, 0).pvalue * len(runs))
            if (name, arm) not in (("cifar10", "SAM, ρ = 0.1"),) and name == "cifar10":
                accuracies.append(np.mean([run["test accuracy"] - best[seed][2] for seed, run in by_seed.items()]))
    lower = [arm for (name, arm), (_, _, high, _) in found.items() if name == "cifar10" and high < 0]
    assert lower == ["κ of conv2, λ = 0.01"]
    value, low, high, p = found["cifar10", lower[0]]
    assert f"ends at a lower loss, by {-value:.3f} [{-high:.3f}, {-low:.3f}] (p {p:.2f} by Holm)" in told
    value, low, high, _ = found["cifar10", "κ of head, λ = 0.001"]
    assert f"the loss is higher by {value:.2f} [{low:.2f}, {high:.2f}]" in told
    assert f"by {min(accuracies):.3f} to {max(accuracies):.3f}" in told
    value, low, high, p = found["digits", "κ of head, λ = 0.01"]
    assert f"least of plain training by {-value:.3f} [{-high:.3f}, {-low:.3f}], with a p of {p:.2f} by Holm" in told
    runs = [run for by_seed in trainings("cifar10").values() for run in by_seed.values()]
    with_gap, with_accuracy, loss = (
        stats.spearmanr([run[x] for run in runs], [run[y] for run in runs]).statistic
        for x, y in (("κ of conv2", "gap"), ("κ of conv2", "test accuracy"), ("train loss", "gap"))
    )
    assert f"(Spearman {with_gap:.2f}), but the training loss does better ({loss:.2f})" in told
    assert f"does not order the accuracies ({with_accuracy:.2f})" in told


def test_trends_of_2024_at_equal_training_loss():
    """Quantities where the loss was first as low as the highest final one, on a line of log loss."""
    told = page("docs/papers-figures.md")
    names = {
        "c24-fig1-2-small": "convolutional, small scale",
        "c24-figH8-H9-small": "perceptron, small scale",
        "c24-figH8-H9-paper": "perceptron, FashionMNIST",
        "c24-figH8-H9-mnist": "perceptron, MNIST",
    }
    for name, label in names.items():
        table = points(name)
        owners = [
            part.sort_values("step") for _, part in table.groupby(table["name"].str.replace(r"_step.*", "", regex=True))
        ]
        target = max(part["loss"].min() for part in owners)
        rows = []
        for part in owners:
            place = int((part["loss"] <= target).to_numpy().argmax())
            before, after = part.iloc[place - 1], part.iloc[place]
            along = math.log(before["loss"] / target) / math.log(before["loss"] / after["loss"])
            row = {name: after[name] for name in ("learning_rate", "batch_size", "seed")}
            rows.append(
                row | {c: before[c] + along * (after[c] - before[c]) for c in ("sharpness", "mls", "log_volume")}
            )
        frame = pandas.DataFrame(rows)
        frame = frame[frame["batch_size"] == 20]
        cells = [
            interval(frame, lambda part, c=c: pearson(part["learning_rate"], part[c]), "seed", "seed")
            for c in ("sharpness", "mls", "log_volume")
        ]
        assert len(frame) == 15
        assert f"| {label} | {' | '.join(cells)} |" in told


def test_the_widest_step_of_the_bounds_of_2024():
    frame, told = points("c24-figG4-small"), page("docs/papers-figures.md")
    wider = np.log10(frame["D"] / frame["C"]) - np.log10(frame["B"] / frame["A"])
    means, ends = wider.groupby(frame["seed"]).mean(), wider[frame["step"] == frame["step"].max()]
    for values, where in (
        (means, "by {:.2f} [{:.2f}, {:.2f}] decades over"),
        (ends, "not shown: {:.2f} [{:.2f}, {:.2f}]"),
    ):
        assert where.format(*student(values)) in told


def test_further_claims_of_2024():
    told, fell, trainings = page("docs/papers-figures.md"), 0, 0
    for name in ("c24-fig1-2-small", "c24-figH8-H9-small", "c24-figH8-H9-paper", "c24-figH8-H9-mnist"):
        table = points(name)
        for _, part in table.groupby(table["name"].str.replace(r"_step.*", "", regex=True)):
            dimension = part.sort_values("step")["local_dimension"].dropna()
            fell, trainings = fell + (dimension.iloc[-1] < dimension.iloc[0]), trainings + 1
    assert f"in {fell} of {trainings} trainings" in told
    columns = ["sharpness", "mls", "log_volume", "nmls", "relative_flatness", "local_dimension", "test_loss"]
    found = {}
    for name in ("G5-small", "G6-small", "G7-small", "G6-paper"):
        table = points(f"c24-fig{name}")[columns].astype(float)
        found[name] = table[np.isfinite(table).all(axis=1)].corr()
    dimension, mls, volume = (
        [found[name].loc["sharpness", column] for name in found] for column in ("local_dimension", "mls", "log_volume")
    )
    assert f"(G.6) {dimension[3]:.2f} with dimension, {mls[3]:.2f} with MLS, {volume[3]:.2f} with log volume" in told
    ranges = [f"{min(cells[:3]):.2f} to {max(cells[:3]):.2f}" for cells in (dimension, mls, volume)]
    assert f"at small scale from {ranges[0]}, beside {ranges[1]} and {ranges[2]}" in told
    for one, other in (("mls", "nmls"), ("relative_flatness", "sharpness")):
        a, b, c, d = (f"{held.loc[one, other]:.2f}" for held in found.values())
        assert f"{a} (G.5), {b} (G.6), {c} (G.7), {d} (G.6 on FashionMNIST)" in told, one
    paper = [f"{found['G6-paper'].loc['test_loss', name]:.2f}" for name in ("mls", "log_volume")]
    assert f"not seen: {paper[0]} and {paper[1]} on FashionMNIST" in told
    small = points("c24-fig3-small")
    design = np.column_stack([np.ones(len(small)), np.log(small["adaptive_sharpness"])])
    hat = design @ np.linalg.pinv(design)
    left = np.log(small["normalized_mls"]).to_numpy() @ (np.eye(len(small)) - hat)
    rest = 1 - np.diag(hat)
    residuals = left / np.sqrt(rest * (left @ left - left**2 / rest) / (len(small) - 3))
    ends = small.iloc[[residuals.argmin(), residuals.argmax()]]
    assert f"are from {residuals.min():.1f} to {residuals.max():.1f}, and both" in told
    assert ends[["patch", "width", "depth"]].nunique().max() == 1


def test_choices_of_bits():
    """The means of the page on allocation, and how many intervals hold, by the table of every draw."""
    told, every = page("docs/allocation.md"), page("docs/quantisation.md")
    draws, second, held = defaultdict(list), defaultdict(list), []
    for name, row in re.findall(r"\| ([\w-]+, [\d.]+) \| \d \| ((?:[^|]+\| ){7}[^|]+) \|", every):
        same, ours, predicted, _, _, *others = row.split(" | ")
        low, high = (float(end.replace("−", "-")) for end in re.search(r"\[(.*), (.*)\]", predicted).groups())
        held.append(low <= float(ours) <= high)
        draws[name].append([None if cell == "–" else float(cell) for cell in (same, ours, *others[:2])])
        second[name].append(float(row.split(" | ")[4]))
    assert len(draws) == 7
    for name, rows in draws.items():
        means = ["–" if None in column else f"{sum(column) / len(column):.3f}" for column in zip(*rows, strict=True)]
        (cells,) = re.findall(rf"\| {re.escape(name)} \| ((?:[^|]+\| ){{3}}[^|]+) \|", told)
        for printed, mean in zip(cells.split(" | "), means, strict=True):
            assert printed == mean or abs(float(printed) - float(mean)) <= 0.00101
        assert float(means[1]) == min(float(mean) for mean in means if mean != "–")
    assert f"{sum(held)} of {len(held)} intervals of 95 %" in told
    alone = {name: np.mean(values) for name, values in second.items()}
    less = [name for name, rows in draws.items() if alone[name] <= np.mean([row[1] for row in rows])]
    assert less == ["ResNet-20, 4.0", "ResNet-20, 4.5"]
    said = "(`measured=False`) does as well at 4 and 4.5 bits of ResNet-20 ({:.3f}, {:.3f})"
    assert said.format(*map(alone.get, less)) in told

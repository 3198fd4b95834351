"""The study within recipes: its list, networks at exactly the loss, and its evaluation against SciPy."""

import csv

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch.nn import functional as F

from benchmarks.papers import within, within_pairs, within_report
from support.grid import normal


def test_every_recipe_comes_once_before_any_comes_twice():
    trainings = within.plan()
    assert len({planned.seed for planned in trainings}) == len({planned.name for planned in trainings}) == 2880
    for start in range(0, len(trainings), within.BLOCK):
        block = trainings[start : start + within.BLOCK]
        assert len({(one.data, one.architecture, *one.settings.values()) for one in block}) == within.BLOCK == 72


def synthetic(name):
    images = (normal(1, 160, 1, 28, 28).float() * 40 + 100).clamp(0, 255)
    labels = torch.arange(160) % 10
    images += 100 * F.interpolate((labels[:, None] == torch.arange(16)).float().view(-1, 1, 4, 4), size=28)
    return within.prepared((images[:80], labels[:80]), (images[80:], labels[80:]))


@pytest.mark.parametrize(("architecture", "optimizer"), [("perceptron", "adam"), ("patches", "momentum")])
def test_from_images_to_rows(tmp_path, monkeypatch, architecture, optimizer):
    monkeypatch.setattr(within, "LOSS", 1.0)
    settings = {"rate": 1.0, "batch_size": 20, "optimizer": optimizer}
    trainings = [within.Planned("mnist", architecture, settings, seed) for seed in (3, 4)]
    text = within.run(trainings, synthetic, tmp_path, 1).read_text()
    path = within.run(trainings, synthetic, tmp_path, 2)
    assert path.read_text().startswith(text)  # goes on, and trains none again
    rows = [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())]
    assert [row["name"] for row in rows] == [planned.name for planned in trainings]
    layers = {"perceptron": 3, "patches": 4}[architecture]
    missing = {f"{name} {place + 1}" for name in within.MEASURES for place in range(layers, within.LAYERS)}
    assert {name for name in within.COLUMNS if not rows[0][name]} == missing
    row, (train, test) = rows[1], synthetic("mnist")
    network = within.ARCHITECTURES[architecture](1)
    network.load_state_dict(load_file(tmp_path / "weights" / f"{row['name']}.safetensors"))
    with torch.no_grad():
        loss = float(F.cross_entropy(network(train[0]), train[1]))
        wrong = (network(test[0]).argmax(dim=1) != test[1]).float()
    assert loss == pytest.approx(float(row["train_loss"]), rel=1e-5) == pytest.approx(1.0, rel=1e-4)
    halves = [float(row[f"test error, {half} images"]) for half in ("even", "odd")]
    assert halves == pytest.approx([float(wrong[0::2].mean()), float(wrong[1::2].mean())])
    assert float(row["test error"]) == pytest.approx(float(wrong.mean()))
    parts = [float(row[f"relative_flatness {place + 1}"]) for place in range(layers)]
    assert float(row["relative_flatness"]) == pytest.approx(sum(parts), rel=1e-5)


def test_a_new_folder_begins_with_the_rows_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(within, "LOSS", 1.0)
    settings = {"rate": 1.0, "batch_size": 20, "optimizer": "adam"}
    trainings = [within.Planned("mnist", "perceptron", settings, seed) for seed in (3, 4)]
    begun = within.run(trainings, synthetic, tmp_path / "here", 1, begun=tmp_path / "none")
    path = within.run(trainings, synthetic, tmp_path / "there", 2, begun=begun)
    assert path.read_text(encoding="utf-8").startswith(begun.read_text(encoding="utf-8"))
    assert [file.name for file in (tmp_path / "there" / "weights").iterdir()] == [f"{trainings[1].name}.safetensors"]


def test_a_recipe_that_does_not_reach_the_loss_is_given_up_after_two_networks(tmp_path, monkeypatch):
    monkeypatch.setattr(within, "LOSS", 1e-9)
    monkeypatch.setattr(within.trained, "__defaults__", (1,))
    settings = {"rate": 1.0, "batch_size": 20, "optimizer": "adam"}
    trainings = [within.Planned("mnist", "perceptron", settings, seed) for seed in (3, 4, 5, 6)]
    within.run(trainings, synthetic, tmp_path, 3)
    path = within.run(trainings, synthetic, tmp_path, 4)  # which knows it of the table
    rows = [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())]
    assert [row["name"] for row in rows] == [planned.name for planned in trainings]
    assert [bool(row["training_seconds"]) for row in rows] == [True, True, False, False]
    assert not any(row["train_loss"] for row in rows)


@pytest.mark.parametrize("architecture", list(within.ARCHITECTURES))
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_steps_are_those_of_torch(architecture, name):
    (x, y), _ = synthetic("mnist")
    planned = within.Planned("mnist", architecture, {"rate": 1.0, "batch_size": 20, "optimizer": name}, 5)
    own, other = (within.initialized(lambda: within.ARCHITECTURES[architecture](1), 5) for _ in range(2))
    assert within.trained(own, planned, (x, y), epochs=3) is None
    parameters = other.parameters()
    optimizer = torch.optim.SGD(parameters, 0.05, 0.9) if name == "momentum" else torch.optim.Adam(parameters, 0.002)
    for epoch in range(3):
        for places in within.order(5, epoch, len(y)).split(20):
            optimizer.zero_grad()
            F.cross_entropy(other(x[places]), y[places]).backward()
            optimizer.step()
    torch.testing.assert_close([*own.parameters()], [*other.parameters()], rtol=1e-4, atol=1e-5)


def test_moves_along_a_level_of_the_loss(monkeypatch):
    (x, y), _ = synthetic("mnist")
    network = within.initialized(lambda: within.perceptron(1), 5)
    with torch.no_grad():
        monkeypatch.setattr(within, "LOSS", float(F.cross_entropy(network(x), y)))
    start, before = network.state_dict(), {}
    start = {name: value.clone() for name, value in start.items()}
    for way in within_pairs.WAYS:
        network.load_state_dict(start)
        loss = within_pairs.continued(network, way, (x, y), 0, steps=20)
        assert loss == pytest.approx(within.LOSS, rel=1e-4)
        before[way] = float(within_pairs.kappa(network, (x, y)).detach())
    network.load_state_dict(start)
    kappa = float(within_pairs.kappa(network, (x, y)).detach())
    assert before["relative_flatness head"] < min(kappa, before["weight_norm"], before["random"])


@pytest.fixture(scope="module")
def rows():
    """Three whole seeds and a network; κ is the order of the error in a half of the recipes."""
    generator, made = np.random.default_rng(0), []
    for number, planned in enumerate(within.plan()[: 3 * within.BLOCK + 1]):
        error = {"cifar10": 0.5, "mnist": 0.1, "fashion_mnist": 0.2}[planned.data] + 0.05 * generator.random()
        facts = {"name": planned.name, "data": planned.data, "architecture": planned.architecture, **planned.settings}
        cells = dict(zip(within.COLUMNS[5:], generator.random(len(within.COLUMNS) - 5), strict=True)) | facts
        cells |= {"seed": planned.seed, "test error": error}
        if number % 2:
            cells["relative_flatness"] = error
        made.append(cells)
    made[8 * 8]["test error"] = np.nan  # CIFAR-10, convolutional: a third of the recipe's networks
    for start in (0, 72, 144):
        made[start + 48]["test error"] += 0.2
    return pandas.DataFrame(made)


def test_the_evaluation_is_that_of_scipy(rows, tmp_path):
    path = tmp_path / "networks.csv"
    rows.to_csv(path, index=False)
    frame = within_report.whole(path)
    assert len(frame) == 3 * within.BLOCK
    found = within_report.study(frame)
    assert (found.seeds, found.unreached, len(found.recipes), len(found.frame)) == (3, 1, 70, 210)
    assert sorted(why.split(" 0.")[0] for why in found.excluded.values()) == [
        "1 of 3 networks did not reach the loss",
        "mean test error",
    ]
    values = [stats.spearmanr(part["relative_flatness"], part["test error"]).statistic for part in found.recipes]
    half = stats.t.ppf(0.975, 69) * np.std(values, ddof=1) / np.sqrt(70)
    told = within_report.paragraph(frame)
    assert f"{np.mean(values):.2f} [{np.mean(values) - half:.2f}, {np.mean(values) + half:.2f}] in the mean" in told
    assert "3 of 40 seeds" in told
    heads = [part["relative_flatness 4"].fillna(part["relative_flatness 3"]) for part in found.recipes]
    assert all((part["relative_flatness head"] == head).all() for part, head in zip(found.recipes, heads, strict=True))


def test_the_page_is_written_from_the_points(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(within_report, "POINTS", tmp_path / "within.csv")
    monkeypatch.setattr(within_report, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(within_report, "CHANCE", 2)
    marks = "".join(f"<!-- within: {name} -->\n\nold\n\n<!-- end -->\n" for name in ("verdict", "table"))
    (tmp_path / "page.md").write_text(marks, encoding="utf-8")
    rows.to_csv(tmp_path / "networks.csv", index=False)
    within_report.restate(tmp_path)
    told = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert within_report.restate(tmp_path / "elsewhere").split()[:4] == ["This", "is", "an", "interim"]
    assert told == (tmp_path / "page.md").read_text(encoding="utf-8")  # from the points alone
    assert told.count("\n| ") == 12
    assert "old" not in told


def test_the_intervention_is_judged_by_recipes(rows):
    found, generator, made = within_report.study(rows[: 3 * within.BLOCK]), np.random.default_rng(0), []
    for name in rows["name"][: within.BLOCK + 9]:
        for way in within_pairs.WAYS:
            shift = -0.01 if way == within_report.HEAD else 0.0
            numbers = {"test error": shift + 0.001 * generator.random(), within_report.HEAD: 1 + generator.random()}
            numbers["test loss"] = generator.random()
            made.append({"name": name, "way": way, **numbers})
    pairs = pandas.DataFrame(made)
    counted = found.frame[found.frame["name"].isin(pairs["name"])]
    errors = pairs.pivot(index="name", columns="way", values="test error")
    less = (errors["relative_flatness head"] - errors["weight_norm"])[counted["name"]].to_numpy()
    values = 100 * pandas.Series(less).groupby(counted["recipe"].to_numpy()).mean()
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    told = within_report.intervention(found, pairs)
    assert f"is {values.mean():.2f} [{values.mean() - half:.2f}, {values.mean() + half:.2f}] percentage points" in told
    assert f"on {within.BLOCK + 9} networks of the first 240, of which {len(counted)} of {len(values)} recipes" in told
    assert "**a difference is shown**" in told
    assert within_report.intervention(found, pairs[:0]) == "The intervention has not been run."


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.02, 0.2, "seen"),
        (0.02, 0.09, "seen, and smaller than 0.1"),
        (-0.02, 0.09, "refuted"),
        (-0.2, -0.1, "refuted, the order is reversed"),
        (-0.1, 0.2, "not decided"),
    ],
)
def test_verdicts_are_those_of_the_protocol(low, high, said):
    assert within_report.verdict(low, high) == said

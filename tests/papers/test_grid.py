"""The grid: training to one loss, by torch's own optimisers; shifts; a tiny grid from its networks to its verdict."""

import json
import math

import pytest
import torch
from torch import nn

from benchmarks.papers import grid, grid_networks, same_loss
from benchmarks.papers.experiment import Bench
from benchmarks.papers.same_loss import BASE, Recipe
from support.grid import normal

X, Y = normal(3, 60, 5).float(), (normal(4, 60) > 0).long()
SHAPE = 5, 6, 2, 2


def of_torch(recipe, net):
    rate, decay = BASE[recipe.optimizer]
    rate *= recipe.learning_rate
    decay *= recipe.weight_decay
    if recipe.optimizer == "adam":
        return torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=decay), 0.0
    momentum = 0.9 if recipe.optimizer == "momentum" else 0.0
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum), rate * decay


def losses(recipe, epochs, batch_size):
    """The loss on all data after each step of one network trained alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = same_loss.perceptron(*SHAPE)
    optimizer, shrink = of_torch(recipe, net)
    generator, loss, found = torch.Generator().manual_seed(recipe.seed), nn.CrossEntropyLoss(), []
    for _ in range(epochs):
        order = torch.randperm(len(X), generator=generator)
        for index in order.split(batch_size)[: len(X) // batch_size]:
            optimizer.zero_grad()
            loss(net(X[index]), Y[index]).backward()
            with torch.no_grad():
                before = [shrink * p for p in net.parameters()]
            optimizer.step()
            with torch.no_grad():
                for p, less in zip(net.parameters(), before, strict=True):
                    p -= less
                found.append(float(loss(net(X), Y)))
    return found


@pytest.mark.parametrize("optimizer", [*BASE])
def test_the_step_that_reaches_the_loss(optimizer):
    recipes = [Recipe(optimizer, rate, decay, seed) for rate, decay, seed in ((1.0, 0.0, 0), (2.0, 1.0, 1))]
    target, size = 0.5, 16
    found = same_loss.train(SHAPE, recipes, (X, Y), batch_size=size, target=target, most_steps=3000)
    for recipe, trained in zip(recipes, found, strict=True):
        alone = losses(recipe, -(-trained.steps // (len(X) // size)), size)
        assert alone[trained.steps - 1] <= target * (1 + 1e-3)  # with the whole step
        assert alone[trained.steps - 2] > target * (1 - 1e-3)
        net = same_loss.perceptron(*SHAPE)
        net.load_state_dict(trained.weights)
        reached = float(nn.CrossEntropyLoss()(net(X), Y).detach())
        assert reached == pytest.approx(target, rel=2e-4)
        assert trained.loss == pytest.approx(reached, rel=1e-5)


def test_mixed_optimisers_are_as_alone():
    recipes = [Recipe(optimizer, 1.0, 1.0, 0) for optimizer in BASE]
    together = same_loss.train(SHAPE, recipes, (X, Y), batch_size=16, target=0.5, most_steps=3000)
    for recipe, one in zip(recipes, together, strict=True):
        (alone,) = same_loss.train(SHAPE, [recipe], (X, Y), batch_size=16, target=0.5, most_steps=3000)
        assert alone.steps == one.steps
        for name, weight in alone.weights.items():
            torch.testing.assert_close(one.weights[name], weight, rtol=1e-3, atol=1e-4)


def test_a_loss_that_is_not_reached():
    slow, lost = Recipe("sgd", 1e-4, 0.0, 0), Recipe("sgd", 1e9, 0.0, 0)
    found = same_loss.train(SHAPE, [slow, lost], (X, Y), batch_size=16, target=0.01, most_steps=10)
    assert [trained.weights for trained in found] == [None, None]
    assert found[0].steps >= 10
    assert not found[1].loss < 1e3


def test_shifts():
    images = torch.zeros(200, 1, 9, 9)
    images[:, 0, 4, 4], images[:, 0, 4, 7] = 1.0, 1.0
    labels = torch.arange(200) % 10
    found = grid_networks.shifts(images, labels)
    assert torch.equal(found["test"][0], images)
    turned = found["rotated"][0]
    torch.testing.assert_close(turned[:, 0, 4, 4], torch.ones(200))  # the centre stays
    row, column = divmod(int(turned[0, 0, :, 6:].argmax()), 3)
    angle = math.degrees(math.atan2(abs(row - 4), column + 6 - 4))
    assert 5 < angle < 35
    assert float((found["noisy"][0] - images).std()) == pytest.approx(0.2, rel=0.05)
    assert float((found["wrong labels"][1] != labels).float().mean()) == pytest.approx(0.1, abs=0.07)


TINY = {
    **{"widths": [4, 8], "depths": [1], "batch_sizes": [16], "learning_rates": [1.0, 2.0], "optimizers": ["adam"]},
    **{"seeds": 2, "samples": 60, "loss": 1.0, "steps": 2000},
}


def test_a_tiny_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(grid_networks, "_NAMES", ("relative_flatness", "trace", "mls", "weight_norm"))
    bench = Bench("small", grid.EXPERIMENT.settings("small", TINY), tmp_path, shown=False)
    found = grid.EXPERIMENT.run(bench)
    table = found.table
    assert len(table["name"]) == len(set(table["name"])) == 8
    assert all(loss == pytest.approx(1.0, rel=2e-4) for loss in table["train_loss"])
    for target in ("test", "rotated", "noisy", "wrong labels"):
        pairs = zip(table[f"{target} loss"], table["train_loss"], strict=True)
        assert table[f"{target} gap"] == [test - train for test, train in pairs]
    assert {"relative_flatness", "relative_flatness head", "mls", "trace head", "weight_norm head"} <= {*table}
    by_name = {item.what: item.value for item in found.findings}
    assert by_name["networks"] == 8
    agreed = grid.compared(table, "mls", "test gap", ["width", "learning_rate"])
    assert by_name["mls: Ψ"] == agreed["psi"]
    (train, tests), name = grid_networks.data(bench), table["name"][0]
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    net = grid_networks._network({"name": name, "width": 4, "depth": 1}, train, folder)
    with torch.no_grad():
        expected = float(nn.CrossEntropyLoss()(net(tests["noisy"][0]), tests["noisy"][1]))
    assert table["noisy loss"][0] == pytest.approx(expected, rel=1e-5)
    assert grid.EXPERIMENT.run(bench).verdict == found.verdict  # nothing is trained again
    json.dumps(found.verdict)


def test_psi_of_a_measure_that_is_the_gap():
    rows = [(width, rate, seed) for width in (1, 2) for rate in (1, 2) for seed in (0, 1)]
    gap = [0.1, 0.2, 0.35, 0.3, 0.6, 0.5, 0.9, 0.8]
    table = {"name": [*map(str, rows)], "width": [r[0] for r in rows], "rate": [r[1] for r in rows], "gap": gap}
    table |= {"same": gap, "other": [-value for value in gap]}
    same, other = (grid.compared(table, name, "gap", ["width", "rate"]) for name in ("same", "other"))
    keys = "tau", "psi", "sign_error", "worst"
    assert [same[key] for key in keys] == pytest.approx([1, 1, 0, 0])
    assert [other[key] for key in keys] == pytest.approx([-1, -1, 1, 1])
    assert same["information"] == pytest.approx(1) == pytest.approx(other["information"])

"""The grid: training to one loss, by torch's own optimisers; shifts; a tiny grid from its networks to its verdict."""

import functools
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.papers import grid, grid_networks, networks, training
from benchmarks.papers.experiment import Bench
from benchmarks.papers.training import Recipe, Until
from support.grid import normal

X, Y = normal(3, 60, 5).float(), (normal(4, 60) > 0).long()
NETWORK = functools.partial(networks.fully_connected, 5, 6, 6, 2)
SIZE = 16


def of_torch(recipe, net):
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "adam":
        return torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=decay), 0.0
    momentum = 0.9 if recipe.optimizer == "momentum" else 0.0
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum), rate * decay


def losses(recipe, epochs):
    """The loss on all data after each step of one network trained alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = NETWORK()
    optimizer, shrink = of_torch(recipe, net)
    loss, found = nn.CrossEntropyLoss(), []
    for epoch in range(epochs):
        for index in training.order(recipe.seed, epoch, len(X)).split(SIZE):
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


def of(optimizer, rate, decay, seed):
    own_rate, own_decay = grid_networks.BASE[optimizer]
    return Recipe(optimizer, SIZE, own_rate * rate, seed, "", own_decay * decay)


@pytest.mark.parametrize("optimizer", [*grid_networks.BASE])
def test_the_step_that_reaches_the_loss(tmp_path, optimizer):
    recipes = {f"{seed}": of(optimizer, rate, decay, seed) for rate, decay, seed in ((1.0, 0.0, 0), (2.0, 1.0, 1))}
    target = 0.5
    paths = training.train(NETWORK, recipes, (X, Y), Until(target, 800, exact=True), tmp_path, shown=False)
    for name, recipe in recipes.items():
        told = training.metadata(paths[name])
        steps = int(told["steps"])
        alone = losses(recipe, -(-steps // 4))
        assert alone[steps - 1] <= target * (1 + 1e-3)  # with the whole step
        assert alone[steps - 2] > target * (1 - 1e-3)
        net = NETWORK()
        net.load_state_dict(load_file(paths[name]))
        reached = float(nn.CrossEntropyLoss()(net(X), Y).detach())
        assert reached == pytest.approx(target, rel=2e-4)
        assert float(told["loss"]) == pytest.approx(reached, rel=1e-5)
        assert told["converged"] == "true"


def test_a_loss_that_is_not_reached(tmp_path):
    recipes = {"slow": of("sgd", 1e-4, 0.0, 0), "lost": of("sgd", 1e30, 0.0, 0)}
    paths = training.train(NETWORK, recipes, (X, Y), Until(0.01, 3, exact=True), tmp_path, shown=False)
    slow, lost = (training.metadata(paths[name]) for name in recipes)
    assert (slow["converged"], lost["converged"]) == ("false", "false")
    assert (slow["steps"], lost["steps"]) == ("12", "4")


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
    names = ("relative_flatness", "relative_flatness_per_feature", "trace", "mls", "weight_norm")
    monkeypatch.setattr(grid_networks, "_NAMES", names)
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
    net = grid_networks._read({"name": name, "width": 4, "depth": 1}, train, folder)
    with torch.no_grad():
        expected = float(nn.CrossEntropyLoss()(net(tests["noisy"][0]), tests["noisy"][1]))
    assert table["noisy loss"][0] == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        wrong = float((net(tests["test"][0]).argmax(dim=1) != tests["test"][1]).double().mean())
    assert table["test error"][0] == pytest.approx(wrong, abs=1e-12)
    with_error = grid.compared(table, "mls", "test error", ["width", "learning_rate"])
    assert by_name["mls: τ, test error"] == with_error["tau"]
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

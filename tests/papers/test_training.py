"""Training many networks at once: each is trained as torch would train it alone, and an interrupted run goes on."""

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from benchmarks.papers import networks, training
from benchmarks.papers.training import Recipe, Until


def network():
    return networks.fully_connected(6, 5, 3).double()


def data():
    inputs = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).double()
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0)


def alone(recipe, epochs):
    """The same by torch's own optimiser, with the recipe's learning rate, one network at a time."""
    net, (inputs, labels) = training.initialized(network, recipe.seed, recipe.initialization), data()
    optimizer = training.OPTIMIZERS[recipe.optimizer](net.parameters(), lr=recipe.learning_rate)
    for epoch in range(epochs):
        losses = []
        for places in training.order(recipe.seed, epoch, 50).split(recipe.batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs[places]), labels[places])
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * len(places))
    return net.state_dict(), sum(losses) / 50


@pytest.mark.parametrize("optimizer", sorted(training.OPTIMIZERS))
def test_each_network_is_trained_as_if_alone(tmp_path, optimizer):
    recipes = {f"{rate}_{seed}": Recipe(optimizer, 16, rate, seed) for rate in (0.01, 0.03) for seed in (0, 1)}
    paths = training.train(network, recipes, data(), Until(0.0, 3), tmp_path, shown=False)
    for name, recipe in recipes.items():
        expected, loss = alone(recipe, 3)
        found = load_file(paths[name])
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9)
        told = training.metadata(paths[name])
        assert (told["epochs"], told["converged"], told["optimizer"]) == ("3", "false", optimizer)
        assert float(told["loss"]) == pytest.approx(loss, rel=1e-6)


def test_networks_leave_when_they_are_done(tmp_path):
    recipes = {"fast": Recipe("sgd", 10, 0.3, 0), "slow": Recipe("sgd", 10, 0.03, 1)}
    paths = training.train(network, recipes, data(), Until(0.6, 200), tmp_path, shown=False)
    epochs = {}
    for name, path in paths.items():
        told = training.metadata(path)
        epochs[name] = int(told["epochs"])
        expected, loss = alone(recipes[name], epochs[name])
        assert (told["converged"], loss < 0.6) == ("true", True)
        assert alone(recipes[name], epochs[name] - 1)[1] >= 0.6
        torch.testing.assert_close(load_file(path)["fc1.weight"], expected["fc1.weight"], rtol=1e-9, atol=1e-9)
    assert epochs["fast"] < epochs["slow"] < 200


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_interrupted_run_goes_on(tmp_path, optimizer, monkeypatch):
    recipes = {f"{seed}": Recipe(optimizer, 16, rate, seed) for seed, rate in enumerate((0.1, 0.02, 0.001))}
    monkeypatch.setattr(training, "_SAVED_EVERY", 0.0)
    until = Until(0.9, 9)
    whole = training.train(network, recipes, data(), until, tmp_path / "whole", shown=False)
    step, calls = training._Group._train_epoch, []

    def interrupted(self, *given, **options):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(0)
        return step(self, *given, **options)

    monkeypatch.setattr(training._Group, "_train_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.train(network, recipes, data(), until, tmp_path / "cut", shown=False)
    calls[:] = [0] * 5  # lets all that follow through
    parts = training.train(network, recipes, data(), until, tmp_path / "cut", shown=False)
    assert len(calls) > 5
    for name, path in parts.items():
        assert training.metadata(path) == training.metadata(whole[name])
        for key, value in load_file(path).items():
            assert torch.equal(value, load_file(whole[name])[key])
    assert not [*tmp_path.rglob(".group*")]


def test_what_diverges_ends(tmp_path):
    recipes = {"bad": Recipe("sgd", 16, 1e20, 0), "good": Recipe("sgd", 16, 0.01, 0)}
    paths = training.train(network, recipes, data(), Until(0.0, 4), tmp_path, shown=False)
    bad, good = (training.metadata(paths[name]) for name in recipes)
    assert (bad["converged"], good["converged"], good["epochs"]) == ("false", "false", "4")
    assert int(bad["epochs"]) < 4


def test_random_state_is_left_alone(tmp_path):
    before = torch.get_rng_state()
    training.train(network, {"a": Recipe("sgd", 16, 0.1, 0)}, data(), Until(0.0, 1), tmp_path, shown=False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", sorted(training.INITIALIZATIONS))
def test_initial_weights(name):
    made = training.initialized(functools.partial(networks.fully_connected, 400, 300, 2), 0, name)
    spread = {"xavier_normal": (2 / 700) ** 0.5, "kaiming_uniform": (2 / 400) ** 0.5, "uniform": 0.1 / 3**0.5}
    assert made.fc1.weight.std().item() == pytest.approx(spread.get(name, 0.1**0.5), rel=0.01)
    assert not made.fc1.bias.any()
    assert isinstance(made.fc2, nn.Linear)


def test_networks_of_other_recipes_are_trained_anew(tmp_path):
    """Under one name: another learning rate, target, number of samples or of epochs; not what has nothing to say."""

    def trained(rate, until, count=50):
        inputs, labels = data()
        paths = training.train(
            network, {"a": Recipe("sgd", 16, rate, 0)}, (inputs[:count], labels[:count]), until, tmp_path
        )
        return load_file(paths["a"])["fc1.weight"]

    known = [trained(0.1, Until(0.0, 2))]
    for rate, until, count in (
        *((0.2, Until(0.0, 2), 50), (0.2, Until(0.01, 2), 50)),
        *((0.2, Until(0.01, 3), 50), (0.2, Until(0.01, 3), 40)),
    ):
        known.append(trained(rate, until, count))
        assert not torch.equal(known[-1], known[-2]) or (until.loss > 0 and until.epochs == 2)
        assert torch.equal(trained(rate, until, count), known[-1])
    assert torch.equal(trained(0.2, Until(0.01, 0), 40), known[-1])
    assert not training.train(network, {"a": Recipe("sgd", 16, 0.3, 0)}, data(), Until(0.0, 0), tmp_path)
    save_file({"fc1.weight": known[0]}, tmp_path / "a.safetensors")
    assert torch.equal(trained(0.3, Until(0.0, 2)), known[0])

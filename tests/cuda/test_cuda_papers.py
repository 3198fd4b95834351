"""Experiments on a GPU: the same first weights, orders and recipes, and values of one trained network as on the CPU."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import papers
from benchmarks.papers import networks, p21_fig6, training, zoo
from benchmarks.papers.experiment import Bench
from benchmarks.papers.training import Recipe, Until
from benchmarks.papers.zoo import Zoo

TINY = {
    **{"images": 60, "samples": 60, "measured": 30, "tested": 60, "repetitions": 5, "seeds": 2, "epochs": 3},
    **{"steps": 60, "snapshots": 4, "separations": [0.5, 6]},
    **{"widths": [8], "depths": [1], "batch_sizes": [16], "learning_rates": [1.0, 2.0]},
}


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(80, 3, 32, 32, generator=generator)
    return inputs, torch.randint(10, (80,), generator=generator)


@pytest.fixture
def gpu():
    """A GPU, with the compiled kernels or without them."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda")


@pytest.fixture
def full_precision():
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
def test_training(gpu, tmp_path, optimizer, full_precision):
    """To rounding, which the steps of Adam and RMSprop, about as large for small gradients, enlarge."""
    recipes = {f"{seed}": Recipe(optimizer, 16, 1e-3, seed) for seed in range(3)}
    found = {}
    for device in (torch.device("cpu"), gpu):
        inputs, labels = data()
        given = inputs.to(device), labels.to(device)
        paths = training.train(networks.lenet5, recipes, given, Until(0.0, 2), tmp_path / device.type, shown=False)
        found[device.type] = {name: (load_file(path), training.metadata(path)) for name, path in paths.items()}
    for name, (state, facts) in found["cuda"].items():
        expected, told = found["cpu"][name]
        assert facts["trained_on"] == f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        assert float(facts["loss"]) == pytest.approx(float(told["loss"]), rel=1e-4)
        start = training.initialized(networks.lenet5, recipes[name].seed, recipes[name].initialization).state_dict()
        for key, value in state.items():
            moved = (expected[key] - start[key]).norm()
            assert (value - expected[key]).norm() <= 0.02 * moved, key


def test_an_interrupted_run_goes_on(gpu, tmp_path, monkeypatch):
    recipes = {f"{seed}": Recipe("adam", 16, 1e-3, seed) for seed in range(2)}
    monkeypatch.setattr(training, "_SAVED_EVERY", 0.0)
    step, calls = training._Group._train_epoch, []

    def interrupted(self, *given, **how):
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self, *given, **how)

    monkeypatch.setattr(training._Group, "_train_epoch", interrupted)
    given = tuple(part.to(gpu) for part in data())
    with pytest.raises(KeyboardInterrupt):
        training.train(networks.lenet5, recipes, given, Until(0.0, 4), tmp_path, shown=False)
    paths = training.train(networks.lenet5, recipes, given, Until(0.0, 4), tmp_path, shown=False)
    assert len(calls) == 5  # of the fourth epoch, too
    assert {training.metadata(path)["epochs"] for path in paths.values()} == {"4"}


def test_values(gpu, tmp_path, full_precision):
    """Of networks that were trained on the CPU; those with random draws are from the device's generator."""
    recipes = {f"{seed}_seed{seed}": Recipe("adam", 16, 1e-3, seed) for seed in range(2)}
    of = Zoo("lenet5", networks.lenet5, recipes, data(), data(), Until(0.0, 1))
    here = Bench("paper", {"measured": 40}, tmp_path, shown=False)
    there = dataclasses.replace(here, device=gpu)
    expected, found = (zoo.networks(bench, of, p21_fig6.asked(bench, of)) for bench in (here, there))
    assert expected.columns.keys() == found.columns.keys()
    for column, values in found.columns.items():
        if column != "pac_bayes network":
            assert values == pytest.approx(expected.columns[column], rel=2e-3, abs=1e-6), column


@pytest.mark.parametrize("experiment", papers.EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_experiments(gpu, experiment, tmp_path):
    pytest.importorskip("sklearn")
    changes = {name: value for name, value in TINY.items() if name in experiment.small}
    if "loss" in experiment.small:
        changes["loss"] = 2.0 if experiment.name == "grid" else 2.2
    bench = Bench("small", experiment.settings("small", changes), tmp_path, shown=False, device=gpu)
    columns, _ = experiment.measure(bench)
    assert len({len(column) for column in columns.values()}) == 1

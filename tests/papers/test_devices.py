"""``--device``: what depends on it is kept apart, and what does not is the same."""

import json

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.papers import networks, reproducing, training, zoo
from benchmarks.papers.experiment import Bench, Experiment, Found
from benchmarks.papers.networks import placed
from benchmarks.papers.training import Recipe, Until
from benchmarks.papers.zoo import Asked, Zoo
from pyflatness.scoring import keys


@pytest.mark.parametrize("name", ["meta", "nonsense", "cpu:x", "cuda:99"])
def test_a_device_that_cannot_be_used(tmp_path, status, name):
    said = str(status("p21-fig3", "--device", name, "--out", str(tmp_path)))
    assert said.startswith(f"Error: device: {name!r} cannot be used here (")
    assert said.endswith("; pass one of this machine, or cpu")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("kind", "name"), [("cpu", "work"), ("meta", "work-meta")])
def test_each_device_has_a_folder(tmp_path, monkeypatch, kind, name):
    seen = []

    def measure(bench):
        seen.append((bench.folder, bench.device, torch.backends.cudnn.conv.fp32_precision))
        return {}, {}

    experiment = Experiment(
        *("a", "b", "c", "d", measure, lambda points: Found({}, (), "e", lambda figure: None), 0, {}, {})
    )
    monkeypatch.setattr(reproducing, "usable", torch.device)
    before = torch.backends.cudnn.conv.fp32_precision
    _, files = reproducing.reproduce(experiment, tmp_path / "work", device=kind)
    assert seen == [(tmp_path / name, torch.device(kind), "ieee")]
    assert torch.backends.cudnn.conv.fp32_precision == before
    assert json.loads(files["a-small.json"])["versions"]["device"] == kind


def test_a_placed_network():
    meta = torch.device("meta")
    assert placed(networks.lenet5, torch.device("cpu")) is networks.lenet5
    made = placed(networks.lenet5, meta)
    assert {parameter.device for parameter in made().parameters()} == {meta}
    facts = [keys.described(of) for of in (networks.lenet5, made, placed(networks.mnist_network, meta))]
    assert all(one != other for one in facts for other in facts if one is not other)
    assert keys.described(placed(networks.lenet5, meta)) == facts[1]


def small_zoo(recipes):
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, 0] > 0).long()
    data = (inputs[:20], labels[:20]), (inputs[20:], labels[20:])
    return Zoo("small", small_network, recipes, *data, Until(0.0, 2))


def small_network():
    return networks.fully_connected(6, 5, 2)


def test_networks_say_what_they_were_trained_on(tmp_path):
    """One from another device is taken as it is."""
    of = small_zoo({f"sgd_seed{seed}": Recipe("sgd", 8, 0.1, seed) for seed in range(2)})
    bench = Bench("small", {}, tmp_path, shown=False)
    paths = zoo.trained(bench, of)
    here = f"cpu, torch {torch.__version__}"
    first, second = paths.values()
    assert training.metadata(first)["trained_on"] == here
    training.save(load_file(second), training.metadata(second) | {"trained_on": "another"}, second)
    written = second.read_bytes()
    found = zoo.networks(bench, of, [Asked(["trace"], None, of.train)])
    assert found.columns["trained_on"] == [here, "another"]
    assert second.read_bytes() == written

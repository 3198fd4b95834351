"""Training many networks at once, by one network alone; and the experiments of C24 in a minute's part of a size."""

import json
import math

import pytest
import torch
from torch import nn

from benchmarks.papers import (
    c24,
    c24_pairs,
    c24_tightness,
    c24_transformers,
    c24_trends,
    correlating,
    training,
)
from benchmarks.papers.experiment import Bench
from benchmarks.papers.networks import SigmoidOutputs, vgg11
from support.grid import normal
from support.jacobian_truth import places

X, Y = normal(3, 30, 4).float(), torch.arange(30) % 2


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def alone(descent, steps):
    """The same training of one network, by torch's own optimiser."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(descent.seed)
        net = network()
    generator = torch.Generator().manual_seed(descent.seed)
    optimizer, targets = torch.optim.SGD(net.parameters(), lr=descent.learning_rate), torch.eye(2)[Y]
    for _ in range(steps):
        index = torch.randint(len(X), (descent.batch_size,), generator=generator)
        optimizer.zero_grad()
        (nn.MSELoss()(net(X[index]), targets[index])).backward()  # half of two outputs' sum is their mean
        optimizer.step()
    return net.state_dict()


def test_each_network_is_as_if_trained_alone(tmp_path):
    rows = [(0.05, 4, 0), (0.2, 4, 0), (0.2, 4, 1), (0.2, 8, 1)]
    descents = [training.Descent(*row) for row in rows]
    found = training.followed(network, descents, (X, Y), [0, 3, 7], tmp_path)
    for descent, states in found.items():
        for steps, state in zip((0, 3, 7), states, strict=True):
            for name, weight in alone(descent, steps).items():
                torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-6)
    again = training.followed(network, descents, (X + 1, Y), [0, 3, 7], tmp_path)  # what is kept is not trained
    torch.testing.assert_close([*again[descents[0]]][2], alone(descents[0], 7), rtol=1e-4, atol=1e-6)


def test_a_group_that_was_interrupted_goes_on_where_it_was_saved(tmp_path, monkeypatch):
    descents = [training.Descent(0.2, 4, seed) for seed in (0, 1)]
    whole = training.followed(network, descents, (X, Y), [0, 3, 7], tmp_path / "whole")
    monkeypatch.setattr(training, "_FOLLOWED_SAVED_EVERY", -1.0)
    save, steps = training.save, []

    def saved(tensors, facts, path):
        save(tensors, facts, path)
        steps.extend(facts.values())
        if steps == [1, 2, 3, 4]:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "save", saved)
    with pytest.raises(KeyboardInterrupt):
        training.followed(network, descents, (X, Y), [0, 3, 7], tmp_path / "in two")
    in_two = training.followed(network, descents, (X, Y), [0, 3, 7], tmp_path / "in two")
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    for descent in descents:
        for one, other in zip(whole[descent], in_two[descent], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    assert sorted(path.name for path in (tmp_path / "in two").iterdir()) == [
        f"bs4_step{step}.safetensors" for step in (0, 3, 7)
    ]


def test_steps_kept():
    assert training.steps_kept(100, 5) == [0, 6, 25, 56, 100]


def test_columns_of_a_network():
    """Sharpness is the root of Eq. 3, and the chain A to D is that of Eq. 48, by autograd of single samples."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    x = X.double()
    S, jacobians, own = 0.0, [], []
    for sample in x:
        rows = [torch.autograd.grad(f, [*net.parameters()], retain_graph=True) for f in net(sample[None])[0]]
        S += sum(float(g.square().sum()) for row in rows for g in row) / len(x)
        own.append(sum(float(row[0].square().sum()) for row in rows))
        jacobians.append(places(net, sample[None], ["1"])["1"][1])
    found = c24.compression(net, (x, Y))
    assert found["sharpness"] == pytest.approx(math.sqrt(S), rel=1e-6)
    s = torch.linalg.svdvals(torch.stack(jacobians))
    assert found["mls"] == pytest.approx(float(s[:, 0].mean()), rel=1e-6)
    assert found["log_volume"] == pytest.approx(float(s.log().sum(dim=1).mean()), rel=1e-5)
    chain = c24_tightness.chain(net, (x, Y))
    norm, sizes = float(torch.linalg.matrix_norm(net[1].weight.detach(), 2)), x.norm(dim=1)
    roots = torch.tensor(own, dtype=torch.float64).sqrt()
    assert chain["A"] == pytest.approx(float(s[:, 0].mean()), rel=1e-6)
    assert chain["B"] == pytest.approx(norm * float((roots / sizes).mean()), rel=1e-6)
    spread = math.sqrt(float(sizes.pow(-2).mean()))
    assert chain["C"] == pytest.approx(norm * spread * math.sqrt(float(roots.square().mean())), rel=1e-6)
    assert chain["D"] == pytest.approx(norm * spread * math.sqrt(S), rel=1e-6)
    pairs = c24_pairs.both(net, (x, Y))
    assert pairs["D"] == pytest.approx(chain["D"], rel=1e-9)
    assert {*c24_pairs.COLUMNS} - {"gap"} <= {*pairs}


def test_chosen_classes():
    inputs, labels = torch.arange(6.0)[:, None], torch.tensor([5, 3, 3, 0, 5, 3])
    some = c24.chosen((inputs, labels), [3, 5], 3)
    assert some[0].flatten().tolist() == [0, 1, 2]
    assert some[1].tolist() == [1, 0, 0]


def test_sigmoid_outputs_and_vgg():
    net = network()
    assert torch.equal(SigmoidOutputs(net)(X), net(X).sigmoid())
    assert vgg11(2)(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    assert sum(isinstance(part, (nn.Conv2d, nn.Linear)) for part in vgg11(2)) == 9


def test_a_rank_correlation():
    assert correlating.rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert correlating.rank_correlation([1, 2], [1, math.inf]) is None


TINY = {"samples": 40, "measured": 20, "steps": 30, "snapshots": 4, "seeds": 1, "width": 8}


@pytest.mark.parametrize("experiment", [c24_trends.PERCEPTRON, c24_tightness.EXPERIMENT], ids=lambda e: e.name)
def test_a_tiny_experiment(experiment, tmp_path):
    found = experiment.run(Bench("small", experiment.settings("small", TINY), tmp_path, shown=False))
    points = 4 * (5 if experiment is c24_trends.PERCEPTRON else 1)
    assert {len(column) for column in found.table.values()} == {points}
    if experiment is c24_tightness.EXPERIMENT:
        for left, right in (("A", "B"), ("B", "C"), ("C", "D")):
            assert all(a <= b for a, b in zip(found.table[left], found.table[right], strict=True))
        assert "0 break an inequality" in found.verdict
    else:
        assert {*found.failures} == {name.rsplit("_step", 1)[0] for name in found.table["name"]}  # after 30 steps
        assert all("not in what is late" in why for why in found.failures.values())


def test_tiny_transformers(tmp_path, capsys, status):
    options = [("patches", [4]), ("widths", [8]), ("depths", [1]), ("seeds", 5), ("samples", 40), ("measured", 10)]
    settings = [f"--set={name}={json.dumps(value)}" for name, value in [*options, ("epochs", 1)]]
    assert status("c24-fig3", "--out", str(tmp_path), *settings) == 0
    assert "c24-fig3-small.md has all numbers and sentences" in capsys.readouterr().out
    page = (tmp_path / "c24-fig3-small.md").read_text()
    assert "transformers of 1 shapes, with 95 % intervals over shapes and seeds" in page
    table = json.loads((tmp_path / "c24-fig3-small.json").read_text())["table"]
    assert all(value > 0 for value in table["normalized_mls"])
    assert len(set(table["normalized_mls"])) == 5
    assert c24_transformers.EXPERIMENT.name == "c24-fig3"

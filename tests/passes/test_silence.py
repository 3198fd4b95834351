"""Where nothing arrives at a layer: zero only if the model's outputs do not depend on it, else an error."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.combinations import every
from support.grid import Net

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 0, 1, 1, 2, 0])
LOSS = nn.CrossEntropyLoss()


def network(between):
    torch.manual_seed(0)
    parts = {"front": nn.Linear(5, 6), "side": nn.Linear(5, 6), "head": nn.Linear(6, 3)}
    return Net(lambda net, x: net.head(between(torch.relu(net.front(x)), net.side(x))), **parts)


def written_under_no_grad(h, z):
    h = h.clone()
    with torch.no_grad():
        h += z
    return h


HIDDEN = {
    "detach": lambda h, z: h + z.detach(),
    "data": lambda h, z: h * z.data.sigmoid(),
    "numpy": lambda h, z: h + torch.from_numpy(z.detach().numpy().copy()),
    "a small part": lambda h, z: h + 1e-3 * z.detach().tanh(),
    "under no_grad": written_under_no_grad,
}
WITHOUT_PART = {
    "unused": lambda h, z: h,
    "times zero": lambda h, z: h + 0 * z.detach(),
    "compared": lambda h, z: torch.where(z > 0, h, 2 * h),
    "an index": lambda h, z: h.gather(1, z.argsort(1)),
}


@every(together=1, way=[*HIDDEN], dtype=[torch.float32, torch.float64])
def test_outputs_that_depend_on_a_layer_without_a_path_to_it_are_refused(way, dtype):
    net = network(HIDDEN[way]).to(dtype)
    said = r"layer 'side': the model's outputs change with what it gives, but autograd has no path"
    for measure in ("trace", "lambda_max", "mls"):
        with pytest.raises(pf.errors.InputError, match=said):
            pf.measure(net, LOSS, (X.to(dtype), Y), measures=measure, layers=["side", "front"])
    with pytest.raises(pf.errors.InputError, match=said):
        pf.relative_flatness(net, LOSS, (X.to(dtype), Y), "side", probes=2)
    assert pf.measure(net, LOSS, (X.to(dtype), Y), layers="front")["front", "trace"].value > 0


@pytest.mark.parametrize("way", WITHOUT_PART)
def test_layers_that_outputs_do_not_depend_on_are_zero(way):
    net = network(WITHOUT_PART[way])
    report = pf.measure(net, LOSS, (X, Y), measures=["relative_flatness", "lambda_max"])
    assert report["side", "relative_flatness"].value == 0
    assert report["side", "relative_flatness"].exact == (way != "times zero")  # what is detached does reach the outputs
    assert report["side", "lambda_max"].value == 0
    assert report["front", "relative_flatness"].value > 0


def test_one_call_of_several_without_a_part_is_looked_at_alone():
    def forward(net, x):
        kept = net.shared(x)
        aside = net.shared(-x)
        return net.head(torch.relu(kept) + (aside.detach() if net.used else 0))

    torch.manual_seed(0)
    net = Net(forward, shared=nn.Linear(5, 6), head=nn.Linear(6, 3))
    net.used = False
    before = pf.relative_flatness(net, LOSS, (X, Y), "shared")
    assert before.exact
    net.run = lambda net, x: net.head(torch.relu(net.shared(x)))
    assert pf.relative_flatness(net, LOSS, (X, Y), "shared").value == pytest.approx(before.value, rel=1e-6)
    net.run, net.used = forward, True
    with pytest.raises(pf.errors.InputError, match="layer 'shared': the model's outputs change"):
        pf.relative_flatness(net, LOSS, (X, Y), "shared")


def test_a_layer_that_loses_its_path_at_a_later_batch_is_refused():
    net = network(lambda h, z: h + (z if float(z.detach().abs().max()) < 50 else z.detach()))
    batches = [(X, Y), (X, Y), (100 * X, Y)]
    with pytest.raises(pf.errors.InputError, match="layer 'side': the model's outputs change"):
        pf.measure(net, LOSS, batches, measures="trace")


def test_outputs_without_any_graph_are_refused():
    net = network(lambda h, z: h + z)
    data, head = (X, Y), net.head
    net.head = nn.Identity()
    net.run = lambda net, x: (net.front(x) @ head.weight.t()).detach()
    with pytest.raises(pf.errors.InputError, match="layer 'front': the model's outputs change"):
        pf.relative_flatness(net, LOSS, data, "front")

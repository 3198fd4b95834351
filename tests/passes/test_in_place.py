"""Operations in place on what a layer gives or takes: values are those of the same network written without them."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth
from support.combinations import every
from support.grid import Net

transformers = pytest.importorskip("transformers", reason="its Conv1D is one of the layers")

X = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 2, 1, 0])
LOSS = nn.CrossEntropyLoss()
OF_A_SWEEP = ["relative_flatness", "trace", "neuron_flatness", "adaptive_sharpness"]
EXACT_ALONE = ["neuron_flatness"]
MEASURES = [
    *OF_A_SWEEP,
    *("relative_flatness_max", "lambda_max", "sharpness", "interpolation_sharpness", "fisher_rao", "mls", "log_volume"),
]


def added(q, net):
    q += net.side(net.h)
    return q


def multiplied(q, net):
    q *= 0.5
    return q


def a_part(q, net):
    q[..., :2] *= 0.5
    return q


def reshaped(q, net):
    q.flatten(0, 1).mul_(3)
    return q


def transposed(q, net):
    return q.transpose(0, 1).relu_().transpose(0, 1)


def unflattened(q, net):
    return q.unflatten(-1, (2, 3)).tanh_().flatten(-2)


def used_before(q, net):
    r = q.mean(1, keepdim=True)
    q.mul_(0.5)
    return q + r


def of_another_part(q, net):
    a, b = q[..., :3], q[..., 3:]
    a.add_(b.clone().square())
    return q


def overwritten(q, net):
    q[..., 0].copy_(2 * q[..., 1])
    return q


def copied(q, net):
    whole = torch.zeros_like(q)
    whole.copy_(q)  # not into a part of it
    return q.copy_(whole.mul(0.5))


BEHIND = {
    "relu_": lambda q, net: q.relu_(),
    "masked_fill_": lambda q, net: q.masked_fill_(torch.eye(3, 6).bool(), -1.0),
    "tanh_": lambda q, net: q.tanh_(),
    **{f.__name__: f for f in (added, multiplied, a_part, reshaped, transposed, unflattened, used_before)},
    **{f.__name__: f for f in (overwritten, of_another_part, copied)},
}


class Network(nn.Module):
    """front, relu, a, an operation in place, head; ``apart``: the same on copies of what a takes and gives."""

    def __init__(self, behind, layer, *, apart=False):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.side, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.a, self._behind, self._apart = layer(), behind, apart
        self.double().eval()

    def forward(self, x):
        self.h = torch.relu(self.front(x))
        q = self.a(self.h)
        if self._apart:
            q, self.h = q.clone(), self.h.clone()
        return self.head(torch.relu(self._behind(q, self)).mean(1))


def transposed_weight():
    layer = transformers.pytorch_utils.Conv1D(6, 6)
    layer.weight.data.normal_(0, 0.4)
    layer.bias.data.normal_()
    return layer


LAYERS = {"bias": lambda: nn.Linear(6, 6), "no bias": lambda: nn.Linear(6, 6, bias=False), "Conv1D": transposed_weight}


@every(together=1, behind=[*BEHIND], layer=[*LAYERS])
def test_relative_flatness_is_that_of_the_hessian(behind, layer):
    net = Network(BEHIND[behind], LAYERS[layer])
    for name in ("front", "a"):
        expected = _truth(net, name)
        assert abs(expected) > 1e-4
        for options in ({}, {"curvature": "hessian"}, {"memory": 1}):
            estimate = pf.relative_flatness(net, LOSS, (X, Y), name, **options)
            assert estimate.exact
            assert estimate.value == pytest.approx(expected, rel=1e-9)


def _truth(net, name):
    """κ of a layer by nested autograd."""
    layer = net.get_submodule(name)
    is_transposed = not isinstance(layer, nn.Linear)

    def risk(weight):
        changed = {f"{name}.weight": weight.t() if is_transposed else weight}
        return LOSS(torch.func.functional_call(net, changed, (X,)), Y)

    return truth.relative_flatness(risk, layer.weight.detach().t() if is_transposed else layer.weight.detach())


@every(together=1, behind=[*BEHIND], options=[{}, {"curvature": "ggn"}, {"probes": 3}, {"normalize": "std"}])
def test_every_measure_is_that_of_copies(behind, options):
    measures = [name for name in MEASURES if not (options.get("probes") and name in EXACT_ALONE)]
    if options:
        measures = [name for name in measures if name in OF_A_SWEEP]
    here, there = (
        pf.measure(
            Network(BEHIND[behind], LAYERS["bias"], apart=apart),
            *(LOSS, (X, Y)),
            layers=["front", "a"],
            measures=measures,
            **options,
        )
        for apart in (False, True)
    )
    assert here.to_dict() == there.to_dict()


@pytest.mark.parametrize("behind", BEHIND)
def test_block_traces_are_those_of_copies(behind):
    here, there = (
        pf.block_traces(Network(BEHIND[behind], LAYERS["bias"], apart=apart), LOSS, (X, Y), "a")
        for apart in (False, True)
    )
    assert bool(here.any())
    torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-15)


def mixed_in_place(view):
    """Tokens to which a layer's output is added in place; ``view``: these are a view of something else."""

    def forward(net, x):
        h = nn.functional.silu(net.front(x))
        h = h.transpose(0, 1) if view else h
        h += net.a(h)
        return net.head((h.transpose(0, 1) if view else h).mean(1))

    torch.manual_seed(0)
    net = Net(forward, front=nn.Linear(5, 6), a=nn.Linear(6, 6), head=nn.Linear(6, 3)).double()
    net.a.requires_grad_(False)  # training it would need the input that is modified
    return net


def of_copies(net):
    net.run = lambda net, x: net.head((lambda h: h + net.a(h))(nn.functional.silu(net.front(x))).mean(1))
    return net


def test_inputs_that_are_modified_in_place_are_taken_as_they_went_in():
    found = [
        pf.measure(net, LOSS, (X, Y), layers="a", measures=["relative_flatness", "mls"])
        for net in (mixed_in_place(view=False), of_copies(mixed_in_place(view=False)))
    ]
    assert found[0].to_dict() == found[1].to_dict()
    views = [
        pf.relative_flatness(net, LOSS, (X, Y), "a")
        for net in (mixed_in_place(view=True), of_copies(mixed_in_place(view=False)))
    ]
    assert views[0].value == pytest.approx(views[1].value, rel=1e-12)


def test_a_jacobian_in_a_view_that_is_modified_in_place_is_refused():
    with pytest.raises(
        pf.errors.InputError, match=r"layer 'a': its input is a view .* write x = x \+ y in the place of x \+= y"
    ):
        pf.measure(mixed_in_place(view=True), LOSS, (X, Y), layers="a", measures="mls")


def added_forward():
    """Its layer's input is modified in place when the layer's gradient in the weight still needs it."""

    def forward(net, x):
        h = net.first(x)
        h += net.added(h)
        return net.last(torch.tanh(h))

    return Net(forward, first=nn.Linear(4, 5), added=nn.Linear(5, 5), last=nn.Linear(5, 3))


def test_what_torch_cannot_differentiate_in_a_weight_is_said():
    torch.manual_seed(0)
    model, loss = added_forward().double(), nn.CrossEntropyLoss()
    data = torch.randn(6, 4).double(), torch.arange(6) % 3
    for measure in ("lambda_max", "sharpness", "interpolation_sharpness"):
        with pytest.raises(pf.errors.InputError, match=r"modified in place later.*write h = h \+ layer\(h\)"):
            pf.measure(model, loss, data, measures=measure)
    report = pf.measure(model, loss, data, measures="all")
    assert "modified in place later" in report.skipped["lambda_max"]
    assert report["added", "relative_flatness"].exact

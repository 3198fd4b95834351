"""What a model takes out of autograd's graph on the way to its outputs is constant to every derivative, and said so."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth
from support.combinations import every, in_turn
from support.grid import Net

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 2, 1, 0, 1, 1, 2, 0, 2])
LOSS = nn.CrossEntropyLoss()


class Doubled(torch.autograd.Function):
    """A function with its own, right derivative; what it does inside has no graph."""

    @staticmethod
    def forward(ctx, x):
        return x.detach() * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def under_no_grad(z):
    with torch.no_grad():
        return z * torch.sigmoid(z)


def under_inference(z):
    with torch.inference_mode():
        gate = torch.sigmoid(z)
    return z * gate.clone()


def written(z):
    gate = torch.zeros_like(z)
    with torch.no_grad():
        gate[:, :2] = torch.sigmoid(z[:, :2])
    return z * gate


def data_set(z):
    gate = torch.zeros_like(z)
    gate.data = torch.sigmoid(z.data)
    return z * gate


def detached_in_place(z):
    gate = torch.sigmoid(z)
    gate.detach_()
    return z * gate


def inside_no_grad(row):
    with torch.no_grad():
        gate = torch.sigmoid(row)
    return row * gate


@functools.cache
def scripted(way):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "trace":
            return torch.jit.trace(lambda z: z * torch.sigmoid(z).detach(), torch.ones(9, 6).double())
        if way == "module":
            return torch.jit.script(nn.Sequential(nn.Sigmoid()))
        return torch.jit.script(gated)


def gated(z):
    return z * torch.sigmoid(z).detach()


def written_to_a_buffer(write):
    def way(z):
        buffer = torch.ones(z.shape, dtype=z.dtype)
        getattr(buffer.data, write)(torch.sigmoid(z.data))
        return z * buffer

    return way


def added(z):
    h = z.clone()
    with torch.no_grad():
        h += torch.sigmoid(z)
    return h


def written_to_a_view(z):
    gate = torch.ones_like(z)
    with torch.no_grad():
        gate[:, 1:].copy_(torch.sigmoid(z[:, 1:]))
    return z + gate


CUT = {
    "detach": lambda z: z * torch.sigmoid(z).detach(),
    "data": lambda z: z + torch.sigmoid(z.data),
    "no_grad": lambda z: z + under_no_grad(z),
    "inference mode": under_inference,
    "written": written,
    "written to a view": written_to_a_view,
    "straight-through": lambda z: z + (torch.tanh(z) - z).detach(),
    "numpy": lambda z: z + torch.from_numpy(np.tanh(z.detach().numpy())),
    "a list": lambda z: z * torch.tensor(z.detach().sigmoid().tolist(), dtype=z.dtype),
    "a number": lambda z: torch.stack([row * math.tanh(row.sum().detach().item()) for row in z]),
    "through a layer": lambda z: z * nn.functional.linear(z.detach(), torch.eye(6).double()).sigmoid(),
    "added in place": added,
    "shared with another library": lambda z: z * torch.from_dlpack(z.detach()).sigmoid(),
    "data of another tensor": data_set,
    "detached in place": detached_in_place,
    "through complex numbers": lambda z: z * torch.fft.irfft(torch.fft.rfft(z.detach()), n=6).sigmoid(),
    "in vmap": torch.func.vmap(lambda row: row * torch.sigmoid(row).detach()),
    "by columns in vmap": torch.func.vmap(lambda row: row * torch.sigmoid(row).detach(), in_dims=1, out_dims=1),
    "no_grad in vmap": torch.func.vmap(inside_no_grad),
    "script": lambda z: scripted("script")(z),
    "trace": lambda z: scripted("trace")(z),
    "a scripted module": lambda z: z * scripted("module")(z.detach()),
    "copied to a buffer": written_to_a_buffer("copy_"),
    "added to a buffer": written_to_a_buffer("add_"),
    "a parameter": lambda z: z * nn.Parameter(torch.sigmoid(z).detach()),
    "a parameter of the same memory": lambda z: z * nn.Parameter(z.detach()),
    "written after a log": lambda z: (z.detach().cpu().view(-1).tolist(), added(z))[1],
    "written to its own memory": lambda z: (h := z.clone(), h.detach().view(-1).mul_(2), h)[-1].sigmoid(),
    "clamped by itself": lambda z: torch.maximum(z, z.detach().mean(1, keepdim=True)),
}
KEPT = {
    "nothing": torch.relu,
    "stored": lambda z: (setattr(under_no_grad, "last", z.detach()), torch.relu(z))[1],
    "stored by itself": lambda z: (setattr(under_no_grad, "last", nn.Parameter(z.detach())), torch.relu(z))[1],
    "nothing in vmap": torch.func.vmap(torch.relu),
    "logged": lambda z: (z.detach().cpu().float().view(-1).numpy().mean(), torch.relu(z))[1],
    "compared": lambda z: torch.where(z.detach() > 0.1, z, 0.5 * z),
    "as an index": lambda z: z.gather(1, z.detach().argsort(1)),
    "a shape": lambda z: z + torch.zeros_like(z.detach()) + torch.ones_like(z),
    "converted": lambda z: torch.relu(z) * (z > 0).to(z.dtype),
    "as another tensor is": lambda z: torch.relu(z) * torch.arange(1, 7).to(z).type_as(z).expand_as(z),
    "checked": lambda z: torch.relu(z) if bool(z.detach().isfinite().all()) else z,
}


def network(between):
    torch.manual_seed(0)
    parts = {"front": nn.Linear(4, 6), "head": nn.Linear(6, 3)}
    return Net(lambda net, x: net.head(between(net.front(x))), **parts).double()


def by_differences(net, weight, step=1e-3):
    """κ from values of the loss alone."""
    before, gram, total = weight.detach().clone(), weight.detach() @ weight.detach().t(), 0.0
    with torch.no_grad():
        for j in range(weight.shape[1]):
            for s in range(len(weight)):
                for t in range(len(weight)):
                    for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                        weight[s, j] += a * step
                        weight[t, j] += b * step
                        total += a * b * float(gram[s, t] * LOSS(net(X), Y)) / (4 * step**2)
                        weight.copy_(before)
    return total


@pytest.mark.parametrize("way", CUT)
def test_values_behind_a_detached_way_are_not_called_exact(way):
    net = network(CUT[way])
    estimate = pf.relative_flatness(net, LOSS, (X, Y), "front", curvature="hessian")
    assert not estimate.exact
    assert "out of autograd's graph" in estimate.notes[-1]
    assert abs(estimate.value / by_differences(net, net.front.weight) - 1) > 1e-3
    report = pf.measure(net, LOSS, (X, Y), measures=["relative_flatness", "lambda_max", "fisher_rao"])
    assert not any(report["front", measure].exact for measure in ("relative_flatness", "lambda_max"))
    assert not report["fisher_rao"].exact
    assert not pf.representation(net, LOSS, (X, Y))["front", "mls"].exact
    with pytest.raises(pf.errors.InputError, match="no block traces, since the model's outputs may depend on tensors"):
        pf.block_traces(net, LOSS, (X, Y), "front")


@in_turn(3, "way", CUT)
def test_the_head_behind_it_is_exact(way):
    estimate = pf.relative_flatness(network(CUT[way]), LOSS, (X, Y))
    assert (estimate.method, estimate.exact, estimate.notes) == ("head", True, ())


@pytest.mark.parametrize("way", KEPT)
def test_what_does_not_reach_the_outputs_or_has_no_derivative_does_no_harm(way):
    net = network(KEPT[way])
    estimate = pf.relative_flatness(net, LOSS, (X, Y), "front", curvature="hessian")
    assert estimate.exact
    assert not estimate.notes
    assert estimate.value == pytest.approx(truth.of_model(net, LOSS, X, Y, "front"), rel=1e-9)
    assert estimate.value == pytest.approx(by_differences(net, net.front.weight), rel=1e-4)


def test_inside_a_function_with_a_derivative_of_its_own_nothing_is_detached():
    estimate = pf.relative_flatness(network(Doubled.apply), LOSS, (X, Y), "front", curvature="hessian")
    assert estimate.notes == ("second derivatives of functions that torch did not write taken as they are",)
    straight = network(lambda z: Doubled.apply(z).detach() * z)
    assert "out of autograd's graph" in pf.relative_flatness(straight, LOSS, (X, Y), "front", curvature="ggn").notes[-1]


def test_a_detached_way_in_front_of_the_measured_layer_does_no_harm():
    net = network(torch.relu)
    model = nn.Sequential(nn.Linear(4, 4).double(), Net(lambda net, x: x * x.detach()), net)
    assert pf.relative_flatness(model, LOSS, (X, Y), "2.front").exact
    assert not pf.relative_flatness(model, LOSS, (X, Y), "0", curvature="hessian").exact


def test_a_weight_that_is_stored_does_no_harm():
    """A parameter shares memory with what is detached from it, and others may, where they are parts of one tensor."""

    def forward(net, x):
        net.kept = net.front.weight.detach(), net.front.weight.data.abs().sum()
        return net.head(torch.relu(net.front(x)))

    torch.manual_seed(0)
    net = Net(forward, front=nn.Linear(4, 6), head=nn.Linear(6, 3)).double()
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    for parameter, part in zip(net.parameters(), flat.split([p.numel() for p in net.parameters()]), strict=True):
        parameter.data = part.view_as(parameter)
    report = pf.measure(net, LOSS, (X, Y), measures=["sharpness", "fisher_rao", "relative_flatness"])
    assert all(report[measure].exact for measure in report.measures)


def test_a_layer_that_is_detached_alone_is_left_out_of_all_layers():
    torch.manual_seed(0)
    parts = {"front": nn.Linear(4, 6), "side": nn.Linear(4, 6), "head": nn.Linear(6, 3)}
    net = Net(lambda net, x: net.head(torch.relu(net.front(x)) * net.side(x).detach().sigmoid()), **parts).double()
    for cut in (5, 9):
        report = pf.measure(net, LOSS, [(X[:cut], Y[:cut]), (X[cut:], Y[cut:])][: 2 - cut // 9], measures="sweep")
        assert report.layers == ("front", "head")
        assert [*report.uncovered] == ["side.weight"]
        assert not report["trace"].exact
    alone = pf.relative_flatness(net, LOSS, (X, Y), "front")
    assert alone.exact
    assert alone.value == pytest.approx(report["front", "relative_flatness"].value, rel=1e-12)


class LogCumSum(nn.Module):
    def forward(self, z):
        return z.logcumsumexp(dim=1).relu()


def test_behind_logcumsumexp_no_hessian_value_is_called_exact():
    """Torch leaves a part of its second derivative out where the gradient that reaches it is 0, as behind a ReLU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), LogCumSum(), nn.Linear(5, 3)).double().eval()
    report = pf.measure(model, LOSS, (X, Y), measures="relative_flatness")
    assert not report["0", "relative_flatness"].exact
    assert any("logcumsumexp" in note for note in report["0", "relative_flatness"].notes)
    assert pf.relative_flatness(model, LOSS, (X, Y)).exact  # the head's takes no derivative
    with pytest.raises(pf.errors.InputError, match="logcumsumexp"):
        pf.block_traces(model, LOSS, (X, Y), "0")


@pytest.mark.parametrize("cut", [lambda weight: weight.detach(), lambda weight: weight.data.clone()])
def test_a_weight_of_a_layer_that_is_detached_elsewhere_is_not_exact(cut):
    def forward(net, x):
        return net.b(torch.relu(net.a(x)) + nn.functional.linear(x, cut(net.a.weight)))

    model = Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)).double()
    report = pf.measure(model, LOSS, (X, Y), measures="trace")
    assert not report["a", "trace"].exact
    assert any("detach" in note for note in report["a", "trace"].notes)
    assert not pf.verify(model, LOSS, (X, Y), "a")


@pytest.mark.parametrize(
    "taken",
    [
        lambda weight: float(weight.norm()),
        lambda weight: weight.abs().max().item(),
        lambda weight: weight.detach().sum(1).tolist()[0],
        lambda weight: float(weight.detach().numpy().sum()),
        lambda weight: torch.tensor(float(weight.norm())),  # in float32
        lambda weight: torch.tensor(float(weight.norm()), dtype=torch.bfloat16),
    ],
)
@pytest.mark.parametrize("for_a_log", [True, False])
def test_numbers_that_are_taken_out_of_a_weight_are_told_where_outputs_depend_on_them(taken, for_a_log):
    def forward(net, x):
        net.number = taken(net.a.weight)
        h = net.a(x) / (1.0 if for_a_log else net.number)
        return net.b(torch.relu(h))

    torch.manual_seed(0)
    model = Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)).double()
    report = pf.measure(model, LOSS, (X, Y), measures="trace")
    assert report["a", "trace"].exact == for_a_log
    assert any("detach" in note for note in report["a", "trace"].notes) != for_a_log


LOGGED = {
    "a number": lambda h: float(h.norm()),
    "an item": lambda h: h.detach().abs().max().item(),
    "a list": lambda h: sum(h.tolist()),
    "an array": lambda h: float(np.abs(h.detach().numpy()).sum()),
    "complex": lambda h: abs(torch.fft.rfft(h).sum().item()),
    "shared": lambda h: float(torch.from_dlpack(h.detach()).sum()),
}


@every(together=1, when=["never", "always", "later"], taken=[*LOGGED])
def test_numbers_that_are_taken_out_of_activations_are_told_where_outputs_depend_on_them(taken, when):
    """Of one sample each, since numbers of a batch mix its samples."""

    def forward(net, x):
        h = net.front(x)
        net.log = [LOGGED[taken](row) for row in h]
        depends = when == "always" or (when == "later" and bool((x[0] == X[-1]).all()))
        return net.head(torch.relu(h) * (torch.tensor(net.log)[:, None].to(h) if depends else 1))

    torch.manual_seed(0)
    net = Net(forward, front=nn.Linear(4, 6), head=nn.Linear(6, 3)).double()
    data = [(X[i : i + 1], Y[i : i + 1]) for i in range(9)] if when == "later" else (X, Y)
    report = pf.measure(net, LOSS, data, measures=["trace", "fisher_rao"])
    assert report["front", "trace"].exact == (when == "never")
    assert any("detach" in note for note in report["front", "trace"].notes) == (when != "never")
    assert pf.importance(net, LOSS, data, kind="hessian").exact == (when == "never")
    if when != "later":
        assert report["fisher_rao"].exact == (when == "never")


@pytest.mark.parametrize("between", [torch.relu, torch.tanh])
@pytest.mark.parametrize(
    "hook", [lambda g: g / 2, lambda g: g.clone(), lambda g: None, lambda g: g.div_(2), torch.tensor(0.5).double().mul]
)
def test_a_hook_that_changes_gradients_is_told(between, hook):
    def forward(net, x):
        h = net.a(x)
        if h.requires_grad:
            h.register_hook(hook)
        return net.b(between(h))

    model = Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)).double()
    report = pf.measure(model, LOSS, (X, Y), measures="trace")
    changes = hook(torch.ones(1, dtype=torch.float64)) == 0.5
    assert report["a", "trace"].exact == (not changes)
    assert any("register_hook" in note for note in report["a", "trace"].notes) == bool(changes)


@pytest.mark.parametrize("max_norm", [1.0, 9.0, None])
def test_an_embedding_that_changes_its_weight_is_told_where_values_are_of_it(max_norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 5, max_norm=max_norm), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    data = torch.arange(9) % 4, Y
    model(data[0])
    for kind in ("hessian", "ggn"):
        found = pf.importance(model, LOSS, data, kind=kind)
        assert found.exact == (max_norm != 1)
        assert any("max_norm" in note for note in found.notes) == (max_norm == 1)
    assert any("max_norm" in note for note in pf.spectrum(model, LOSS, data, k=1).notes) == (max_norm == 1)
    assert pf.relative_flatness(model, LOSS, data, "2", curvature="hessian").exact


class Capsules(nn.Module):
    """Multiply by a weight of several matrices, which is no layer, and cut a part of what comes of it."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.cut, self.weight, self.head = cut, nn.Parameter(torch.randn(2, 3, 2, 3)), nn.Linear(6, 3)

    def forward(self, x):
        u = torch.einsum("nij,ijko->niko", x.unflatten(1, (2, -1)), self.weight)
        weights = (u.detach() if self.cut else u).sum(-1, keepdim=True).softmax(2)
        return self.head((weights * u).sum(1).flatten(1))


@pytest.mark.parametrize("cut", [True, False])
def test_values_of_parameters_that_are_no_layer_tell_what_is_cut(cut):
    torch.manual_seed(0)
    model, x = Capsules(cut=cut).double().eval(), torch.randn(9, 6, dtype=torch.float64)
    found = pf.importance(model, LOSS, (x, Y), kind="hessian")
    assert "weight" in [*found]
    assert found.exact == (not cut)
    assert any("detach" in note for note in found.notes) == cut
    assert any("detach" in note for note in pf.spectrum(model, LOSS, (x, Y), k=1).notes) == cut
    by_forward_mode = pf.measure(model, LOSS, (x, Y), measures="fisher_rao")["fisher_rao"]
    assert by_forward_mode.exact == (not cut)

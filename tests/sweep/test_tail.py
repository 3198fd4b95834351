"""Several cotangents that go through a model's last operations at once: values are the Hessian's, whatever is there."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes import tail
from support import truth
from support.grid import Net, checked, normal

QUANTITIES = ["relative_flatness", "trace"]


@pytest.fixture
def sent(monkeypatch):
    """How many cotangents were sent at once, and the layers that they reached, for every time."""
    found = []
    send = tail.Tail.send

    def seen(self, cotangents):
        found.append((len(cotangents), [*self.names]))
        return send(self, cotangents)

    monkeypatch.setattr(tail.Tail, "send", seen)
    return found


def check(model, x, y, loss=F.cross_entropy, **options):
    return checked(model, loss, [(x[:5], y[:5]), (x[5:], y[5:])], progress=False, **options)


def mlp(*widths):
    parts = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1]).double().eval()


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(8) % 3


@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_all_of_a_small_network(backend, sent):
    check(mlp(4, 6, 5, 3), X, Y, backend=backend)
    assert sent == [(2, ["0", "2", "4"])] * 2 or sent == [(2, ["0", "2"])] * 2


def test_more_cotangents_than_go_at_once(sent):
    """And a last group that is smaller, in stacks that are held back or not."""
    model = mlp(4, 3, 40)
    check(model, X, torch.arange(8) * 4)
    assert [count for count, _ in sent] == [13, 13, 13] * 2
    sent.clear()
    x, y = torch.randn(8, 3, 4).double(), torch.arange(24).view(8, 3)
    check(model, x.flatten(0, 1), y.flatten())
    assert sent


class Front(nn.Module):
    """Convolutions, through which gradients go one by one, in front of linear layers, and a path around these."""

    def __init__(self, around):
        super().__init__()
        self.early, self.conv = nn.Conv2d(1, 1, 2), nn.Conv2d(1, 2, 2)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.around = around

    def forward(self, x):
        h = self.conv(self.early(x).relu()).flatten(1)
        behind = F.relu(self.first(F.relu(h)))
        return self.last(behind + h if self.around else behind)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(("size", "names"), [(0, {"last", "first"}), (2**20, {"last", "first", "conv", "early"})])
def test_what_is_in_front_goes_one_by_one(around, size, names, sent, monkeypatch):
    monkeypatch.setattr(tail, "_SMALL_IMAGES", size)
    check(Front(around).double().eval(), torch.randn(8, 1, 4, 4).double(), Y)
    assert sent
    assert all({*at_once} == names for _, at_once in sent)


@pytest.mark.parametrize("pooling", [nn.Identity(), nn.MaxPool2d(2)], ids=["whole", "pooled"])
def test_convolutions_of_half_precision_in_front_of_it(pooling, sent):
    """Held against the same weights and inputs in float32."""
    torch.manual_seed(0)
    width = 8 if isinstance(pooling, nn.MaxPool2d) else 32
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), pooling, nn.Flatten(), nn.Linear(width, 6)).bfloat16().eval()
    x, y = torch.randn(8, 1, 5, 5).bfloat16(), torch.arange(8) % 6
    found, expected = (
        pf.measure(model.to(dtype), F.cross_entropy, (x.to(dtype), y), measures=QUANTITIES, progress=False)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert [names for _, names in sent] == [["0", "4"]] * 2 or [names for _, names in sent] == [["0"]] * 2
    for measure in QUANTITIES:
        assert found["0", measure].value == pytest.approx(expected["0", measure].value, rel=0.05)


@pytest.mark.parametrize("size", [2**20, 71])
def test_large_gradients_go_one_by_one(size, sent, monkeypatch):
    monkeypatch.setattr(tail, "_SMALL", size)
    check(mlp(4, 6, 5, 3), X, Y)
    assert bool(sent) is (size == 2**20)


def test_positions_signs_and_layers_that_run_twice(sent):
    def twice(net, x):
        return net.last(F.relu(net.first(x)) + F.relu(net.first(-x)))

    check(Net(twice, first=nn.Linear(4, 4), last=nn.Linear(4, 3)).double().eval(), X, Y)
    assert sent == []
    positions = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 3)).double().eval()
    check(positions, torch.randn(8, 3, 4).double(), Y)
    assert sent
    sent.clear()

    def loss(outputs, targets):
        return (outputs.sin() * (targets.unsqueeze(1) + 1)).sum(dim=1).mean()

    check(mlp(4, 6, 3), X, Y, loss)
    assert sent


def test_a_layer_that_the_outputs_do_not_depend_on(sent):
    def idle(net, x):
        net.idle(x)
        return net.last(F.relu(net.first(x)))

    report = check(Net(idle, idle=nn.Linear(4, 4), first=nn.Linear(4, 5), last=nn.Linear(5, 3)).double().eval(), X, Y)
    assert report["idle", "trace"].value == 0
    assert sent == []


def test_a_hook_that_takes_one_gradient_at_a_time(sent):
    """A number of a gradient, which several at once do not have."""
    seen = []

    def hooked(net, x):
        h = net.first(x).relu()
        if h.requires_grad:
            h.register_hook(lambda gradient: seen.append(float(gradient.detach().sum())))
        return net.last(h)

    check(Net(hooked, first=nn.Linear(4, 5), last=nn.Linear(5, 3)).double().eval(), X, Y)
    assert sent
    assert seen


def test_samples_alone_and_those_that_are_not_finite(sent):
    model, x = mlp(4, 6, 5, 3), X.clone()
    options = {"nan_policy": "propagate", "per_sample": True, "progress": False}
    clean = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, Y), "0", **options).per_sample
    x[3, 0] = torch.inf
    spoiled = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, Y), "0", **options).per_sample
    keep = torch.arange(8) != 3
    torch.testing.assert_close(spoiled[keep], clean[keep], rtol=1e-12, atol=0)
    assert spoiled[3].isnan()
    assert len(sent) == 2


def test_the_model_is_left_as_it_was(sent):
    model = mlp(4, 6, 5, 3)
    check(model, X, Y)
    assert sent
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    model(X).sum().backward()


class Residual(nn.Module):
    """Two blocks with a shortcut each, of which the first one is a convolution, and a head."""

    def __init__(self, before, width):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.shortcut = (
            nn.Conv2d(2, before, 3, 2),
            nn.Conv2d(before, 4, 1),
            nn.Conv2d(2, 4, 3, 2),
        )
        self.third, self.fourth, self.norm = (
            nn.Conv2d(4, width, 3, padding=1),
            nn.Conv2d(width, 4, 1),
            nn.BatchNorm2d(4),
        )
        self.head = nn.Linear(4, 3)
        self.double().eval()

    def forward(self, x):
        h = F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))
        h = F.relu(self.norm(self.fourth(F.relu(self.third(h)))) + h)
        return self.head(h.mean((2, 3)))


LAST = {"head", "third", "fourth"}


@pytest.mark.parametrize(
    ("size", "before", "width", "names"),
    [
        (0, 4, 4, {"head"}),
        (2000, 4, 4, LAST | {"first", "second", "shortcut"}),
        (2000, 40, 4, LAST | {"second", "shortcut"}),
        (2000, 4, 40, {"head"}),  # a part of the second block is small, but has two results in front of it
    ],
)
def test_blocks_with_shortcuts(size, before, width, names, sent, monkeypatch):
    monkeypatch.setattr(tail, "_SMALL_IMAGES", size)
    check(Residual(before, width), torch.randn(8, 2, 7, 7).double(), Y)
    assert all({*at_once} == names for _, at_once in sent)
    assert bool(sent)


# --- paths in front of what cotangents are sent through together -----------------------------------------------------


class Around(nn.Module):
    """A skip connection made by ``torch.addmm``, in front of a linear layer."""

    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last, self.activation = (
            nn.Linear(4, 3),
            nn.Linear(3, 6),
            nn.Linear(3, 4),
            activation,
        )
        self.register_buffer("mixing", torch.randn(6, 3))
        self.double().eval()

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.addmm(h, self.activation(self.inner(h)), self.mixing))


@pytest.mark.parametrize("activation", [F.relu, F.leaky_relu])
def test_a_skip_connection_counts_once(activation):
    """Both summands are in front of the last operations, and one is in front of the other too."""
    model, x, y = Around(activation), torch.randn(8, 4).double(), torch.arange(8) % 4
    check(model, x, y)


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("size", [tail._SMALL, 0])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_function_that_hands_no_gradient_on(pooled, size, monkeypatch):
    """It counts as a constant, as in torch: also where cotangents are taken from behind pooling."""

    def cut():
        def forward(net, x):
            h = net.conv(x).relu()
            return net.last(Stop.apply(F.max_pool2d(h, 2) if pooled else h).flatten(1))

        return Net(forward, conv=nn.Conv2d(2, 3, 2), last=nn.Linear(18 if pooled else 90, 6))

    monkeypatch.setattr(tail, "_SMALL", size)
    model, x, y = cut().double().eval(), torch.randn(8, 2, 7, 6).double(), torch.arange(8) % 6
    report = check(model, x, y, curvature="ggn")
    assert report["conv", "trace"].value == 0


# --- the last cotangents, and none at all -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("classes", [3, 17, 18, 40])
def test_per_neuron_sums_of_all_cotangents(classes, backend):
    names = ["neuron_flatness", "neuron_flatness_rows", "adaptive_sharpness"]
    check(mlp(5, 6, classes), normal(1, 7, 5), torch.randint(classes, (7,)), measures=names, backend=backend)


@pytest.mark.parametrize("options", [{}, {"probes": 3}, {"probes": "adaptive", "rtol": 1e-9}])
def test_a_batch_in_which_every_target_is_ignored(options):
    model, x, y = mlp(5, 6, 4), normal(1, 16, 5), torch.arange(16) % 4
    y[:6] = -100
    data = [(x[:6], y[:6]), (x[6:], y[6:])]
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures="trace", progress=False, **options)
    for name in report.layers:
        found, expected = report[name, "trace"], truth.trace_of(truth.layer_hessian(model, F.cross_entropy, x, y, name))
        assert found.value == pytest.approx(expected, rel=1e-9 if found.stderr is None else 1), name


@pytest.mark.parametrize("options", [{}, {"probes": 3}, {"probes": "adaptive"}])
def test_one_class(options):
    data = normal(1, 16, 5), torch.zeros(16, dtype=torch.int64)
    report = pf.measure(mlp(5, 6, 1), nn.CrossEntropyLoss(), data, measures="trace", progress=False, **options)
    assert [report[name, "trace"].value for name in report.layers] == [0.0, 0.0]

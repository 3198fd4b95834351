"""The head's formula inside the sweep: where it is taken, what it spares, and that values are the definition's."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.contractions import SoftmaxVariance
from pyflatness.sweep import adaptive_sweep, layer_sweep
from pyflatness.sweep.contracted import Contracted
from support import truth

LOSS = nn.CrossEntropyLoss()
X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(16) % 4
BATCHES = [(X[:6], Y[:6]), (X[6:], Y[6:])]
KAPPA = "relative_flatness"


class Net(nn.Module):
    """Two layers, and something behind the second for the samples that ``marked`` finds."""

    def __init__(self, behind=None):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.last, self.behind = nn.Linear(5, 6), nn.Linear(6, 4), behind
        self.double().eval()

    def forward(self, x):
        z = self.last(torch.relu(self.front(x)))
        return z if self.behind is None or not bool(marked(x).all()) else self.behind(z)


def marked(x):
    return x[:, 0].abs() > 9


def twice(z):
    return 2 * z


def measure(model, data=BATCHES, loss=LOSS, **options):
    return pf.measure(model, loss, data, progress=False, **options)


def expected(model, x=X, y=Y, layer="last"):
    return truth.of_model(model, LOSS, x, y, layer)


def no_cotangents(monkeypatch):
    class Refusing(Contracted):
        def of(self, *args):
            raise AssertionError("a cotangent is sent")

    for module in (layer_sweep, adaptive_sweep):
        monkeypatch.setattr(module, "Contracted", Refusing)


@pytest.mark.parametrize("options", [{}, {"probes": 3}, {"probes": "adaptive"}])
def test_the_head_alone_takes_no_backward_pass(options, monkeypatch):
    no_cotangents(monkeypatch)
    report = measure(Net(), layers="last", measures=KAPPA, per_sample=True, **options)
    for estimate in (report["last", KAPPA], report[KAPPA]):
        assert (estimate.method, estimate.exact, estimate.stderr, estimate.dof) == ("head", True, None, None)
        assert estimate.value == pytest.approx(expected(Net()), rel=1e-10)
        assert float(estimate.per_sample.mean()) == pytest.approx(estimate.value, rel=1e-12)
    with pytest.raises(AssertionError, match="a cotangent is sent"):
        measure(Net(), layers="last", measures=[KAPPA, "trace"], **options)


@pytest.mark.parametrize("options", [{}, {"probes": 3}, {"probes": "adaptive", "rtol": 0.3}])
def test_beside_others_it_is_exact(options):
    names = [KAPPA, "trace"]
    report, exact = measure(Net(), measures=names, **options), measure(Net(), measures=names, curvature="ggn")
    head, front, both = report["last", KAPPA], report["front", KAPPA], report[KAPPA]
    assert (head.method, head.exact, head.stderr) == ("head", True, None)
    assert head.value == pytest.approx(expected(Net()), rel=1e-10)
    for measure_ in names:
        assert report[measure_].value == pytest.approx(sum(report[one, measure_].value for one in report.layers))
    if not options:
        assert (front.method, both.method, report["last", "trace"].method) == ("ggn", "ggn", "ggn")
        for layer in report.layers:
            for measure_ in names:
                assert report[layer, measure_].value == pytest.approx(exact[layer, measure_].value, rel=1e-10)
    else:
        assert (front.method, both.method) == ("ggn-sampled", "ggn-sampled")
        trace = report["last", "trace"]  # its probes have one length, and cannot differ
        assert (trace.method, trace.exact) == ("ggn", True)
        assert trace.value == pytest.approx(exact["last", "trace"].value, rel=1e-10)
        assert both.stderr == pytest.approx(front.stderr, rel=1e-6)  # the head adds no error to the network's
        assert front.stderr > 0


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("behind", "method"), [(twice, "ggn"), (torch.tanh, "hessian")])
def test_a_layer_that_is_the_head_of_some_batches_alone(behind, method, first):
    x = X.clone()
    x[slice(0, 6) if first else slice(6, 16), 0] = 10.0
    net, data = Net(behind), [(x[:6], Y[:6]), (x[6:], Y[6:])]
    report = measure(net, data, layers="last", measures=[KAPPA, "trace"])
    value = sum(len(part[0]) / 16 * expected(net, *part) for part in data)
    assert report["last", KAPPA].value == pytest.approx(value, rel=1e-9)
    assert (report["last", KAPPA].method, report["last", KAPPA].exact) == (method, True)
    assert measure(net, data, layers="last", measures=KAPPA)["last", KAPPA].value == pytest.approx(value, rel=1e-9)


def test_outputs_that_are_changed_where_autograd_does_not_see_it():
    class Scaled(Net):
        def forward(self, x):
            z = super().forward(x)
            z.data.mul_(2)
            return z

    found = measure(Scaled(), layers="last", measures=KAPPA)["last", KAPPA]
    assert found.method == "ggn"
    assert found.value == pytest.approx(expected(Scaled()), rel=1e-9)


def test_normalised_values_are_those_of_the_rescaled_head():
    net, x = Net(), X.clone()
    with torch.no_grad():
        net.front.bias[2] = -100.0  # a feature that is zero throughout
    features = torch.relu(net.front(x)).detach()
    scale = features.std(dim=0, correction=0)
    kept = scale > 0
    weight = net.last.weight.detach()[:, kept] * scale[kept]
    value = pf.head_flatness(features[:, kept] / scale[kept], weight, net.last.bias.detach(), Y).value
    found = measure(net, [(x[:6], Y[:6]), (x[6:], Y[6:])], layers="last", measures=KAPPA, normalize="std")
    assert found["last", KAPPA].value == pytest.approx(value, rel=1e-10)
    assert found["last", KAPPA].method == "head"
    assert any("1 features that are zero" in note for note in found["last", KAPPA].notes)


def test_nan_and_ignored_targets():
    x, y = X.clone(), Y.clone()
    x[3, 1], y[7] = torch.nan, -100
    data = [(x[:6], y[:6]), (x[6:], y[6:])]
    kept = torch.arange(16) != 3
    with pytest.raises(pf.errors.NonFiniteError, match=r"batch 0: 1 of 6 samples .* layer 'last'"):
        measure(Net(), data, layers="last", measures=KAPPA)
    omitted = measure(Net(), data, layers="last", measures=KAPPA, nan_policy="omit", per_sample=True)["last", KAPPA]
    assert omitted.value == pytest.approx(expected(Net(), x[kept], y[kept]), rel=1e-10)
    assert (omitted.method, omitted.omitted, omitted.samples) == ("head", 1, 15)
    assert omitted.per_sample.isnan().tolist() == (~kept).tolist()
    assert float(omitted.per_sample[7]) == 0
    spread = measure(Net(), data, layers="last", measures=KAPPA, nan_policy="propagate")["last", KAPPA]
    assert bool(torch.tensor(spread.value).isnan())


def test_memory_that_does_not_suffice_halves_the_micro_batch(monkeypatch):
    samples, take = [], SoftmaxVariance.bounded

    def short(self, features, scale=None):
        if len(features) > 4:
            raise RuntimeError("CUDA out of memory")
        samples.append(len(features))
        return take(self, features, scale)

    monkeypatch.setattr(SoftmaxVariance, "bounded", short)
    found = measure(Net(), (X, Y), layers="last", measures=KAPPA)["last", KAPPA]
    assert (sum(samples), max(samples)) == (16, 4)
    assert found.value == pytest.approx(expected(Net()), rel=1e-10)


def test_more_classes_than_there_may_be_cotangents():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2500)).double().eval()
    found = measure(net, (X, Y), layers="2", measures=KAPPA)["2", KAPPA]
    features = net[:2](X).detach()
    weight, p = net[2].weight.detach(), torch.softmax(net(X).detach(), dim=1)
    spread = p @ weight.square().sum(dim=1) - (p @ weight).square().sum(dim=1)  # |φ|² var_p(w), Definition 3
    assert found.value == pytest.approx(float((features.square().sum(dim=1) * spread).mean()), rel=1e-10)


def test_a_convolution_as_one_dense_matrix_is_no_head():
    torch.manual_seed(0)
    net, targets = nn.Conv2d(2, 3, 1).double().eval(), torch.randint(3, (2, 2, 2))
    data = torch.randn(2, 2, 2, 2).double(), targets
    assert measure(net, data, measures=KAPPA)["", KAPPA].method == "head"
    assert measure(net, data, measures=KAPPA, conv="affine")["", KAPPA].method == "ggn"


def test_the_data_are_read_once():
    """A list too: how many samples there are is not counted by a read of its own."""

    class Counted(list):
        reads = 0

        def __iter__(self):
            self.reads += 1
            return super().__iter__()

    data = Counted(BATCHES)
    measure(Net(), data, measures=[KAPPA, "trace"])
    assert data.reads == 1

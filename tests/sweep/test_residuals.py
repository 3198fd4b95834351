"""Hessian values by probes="adaptive": the GGN by cotangents, and the rest of the Hessian by Hessian probes."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.sweep.groups import Tolerance
from pyflatness.sweep.residuals import Predictor, Residuals, fewest
from support import grid, known_stderr, truth
from support.combinations import in_soak, in_turn
from support.covering import share
from support.functions import Once
from support.grid import Net, batches
from support.many_samples import Limited, Sorting, seeded
from support.networks import CASES, LAYERS

CONVEX = [
    (name, layer)
    for name, layer in LAYERS
    if layer not in CASES[name].linear and name not in ("custom loss, Tanh", "indefinite loss, Tanh")
]
LOSS = nn.CrossEntropyLoss()


def smooth(scale, samples=120, width=12):
    """A smooth network, its softmax more peaked the larger the scale, and its data, labelled by what it says."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 12), nn.GELU(), nn.Linear(12, 4)
    model = nn.Sequential(*parts).double().eval()
    with torch.no_grad():
        model[-1].weight.mul_(scale)
    x = torch.randn(samples, 6, generator=seeded(1), dtype=torch.float64)
    return model, (x, model(x).argmax(dim=1))


def adaptive(model, data, layers="0", measures="trace", loss=LOSS, **options):
    return pf.measure(model, loss, data, layers=layers, measures=measures, probes="adaptive", **options)


# --- values -----------------------------------------------------------------------------------------------------------


@in_turn(2, ("name", "layer"), CONVEX)
def test_exact_where_that_takes_fewer_products(name, layer):
    """Attention, recurrences, tokens, ignored targets, checkpointing: to a tight tolerance the Hessian's value."""
    case = CASES[name]
    found = adaptive(
        case.build(), batches(case), layer, ["relative_flatness", "trace"], case.loss, rtol=1e-9, nan_policy="omit"
    )
    matrix, weight = grid.hessian(case, layer), grid.weight_of(case, layer)
    expected = truth.relative_flatness_of(matrix, weight, grid.groups(case, layer)), truth.trace_of(matrix)
    for measure, value in zip(("relative_flatness", "trace"), expected, strict=True):
        estimate = found[layer, measure]
        assert estimate.value == pytest.approx(value, rel=1e-6, abs=1e-10)
        assert (estimate.method, estimate.exact, estimate.stderr) == ("hessian", True, None)


@in_turn(3, ("name", "layer"), CONVEX)
def test_every_estimate_covers(name, layer):
    case = CASES[name]
    inputs, targets = (part.repeat(30, *(1,) * (part.ndim - 1)) for part in (case.inputs, case.targets))
    expected = truth.trace_of(grid.hessian(case, layer))
    estimate = adaptive(case.build(), (inputs, targets), layer, loss=case.loss, rtol=0.5, seed=3)[layer, "trace"]
    assert (estimate.method, estimate.exact) == ("hessian-sampled", False)
    error = 0.0 if math.isnan(estimate.stderr) else estimate.stderr  # of probes that have to agree
    assert abs(estimate.value - expected) <= 4 * error + 1e-9 * abs(expected)


@pytest.mark.parametrize(
    "network", [(20.0, 0.1, 75), *in_soak((20.0, 0.1, 300), (1.0, 0.1, 1500), (20.0, 0.02, 1500), (200.0, 0.1, 1500))]
)
def test_unbiased_and_coverage(network):
    """Of samples of which a few carry the value, so that numbers of probes differ; with the layers' sum."""
    scale, rtol, seeds = network
    slack = max(1.0, math.sqrt(300 / seeds))
    model, data = smooth(scale)
    exact = pf.measure(model, LOSS, data, measures="trace", layers=["0", "2"])
    reports = [adaptive(model, data, ["0", "2"], rtol=rtol, seed=seed) for seed in range(seeds)]
    for key in [("0", "trace"), ("2", "trace"), "trace"]:
        errors = torch.tensor([report[key].value for report in reports]).double() - exact[key].value
        stderrs = torch.tensor([report[key].stderr for report in reports]).double()
        assert abs(float(errors.mean())) <= 4 * float(errors.std()) / math.sqrt(seeds)
        assert float(stderrs.square().mean().sqrt() / errors.std()) == pytest.approx(1, abs=4 / math.sqrt(seeds))
        covered = share((report[key].interval() for report in reports), exact[key].value)
        assert -0.03 * slack <= covered - 0.95 <= 0.04 * slack


@pytest.mark.parametrize("rtol", [0.02, 0.05])
def test_the_tolerance_is_about_reached(rtol):
    model, data = smooth(20.0, samples=400)
    exact = pf.measure(model, LOSS, data, layers="0", measures="trace")["0", "trace"].value
    found = [adaptive(model, data, rtol=rtol, seed=seed)["0", "trace"].stderr for seed in range(8)]
    assert 0.3 * rtol <= sum(found) / 8 / exact <= 1.3 * rtol


def test_layers_of_both_kinds_together():
    """Layers whose value comes by cotangents alone, and layers with residuals, in one call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4)).double()
    data = torch.randn(150, 6, dtype=torch.float64), torch.arange(150) % 4
    measures = ["relative_flatness", "trace", "adaptive_sharpness"]
    layers = ["0", "2", "4"]
    exact = pf.measure(model, LOSS, data, layers=layers, measures=measures)
    found = adaptive(model, data, layers, measures, rtol=0.1, per_sample=True)
    for layer, kind in (("0", "hessian-sampled"), ("2", "ggn-sampled"), ("4", "ggn-sampled")):
        for measure in measures:
            estimate, value = found[layer, measure], exact[layer, measure].value
            if estimate.method != "head" and (layer, measure) != ("4", "trace"):  # a head's trace is exact
                assert (estimate.method, estimate.exact) == (kind, False)
            assert abs(estimate.value - value) <= 4 * known_stderr(estimate) + 1e-9 * value
            if estimate.per_sample is not None:
                assert float(estimate.per_sample.mean()) == pytest.approx(estimate.value, rel=1e-12)


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batches_of_all_sizes(batch):
    model, (x, y) = smooth(5.0, samples=100)
    exact = pf.measure(model, LOSS, (x, y), layers="0", measures="trace")["0", "trace"].value
    found = adaptive(model, list(zip(x.split(batch), y.split(batch), strict=True)), rtol=0.1)["0", "trace"]
    assert 0 < abs(found.value - exact) <= 4 * found.stderr <= 0.8 * exact


def test_one_sample():
    """Nothing is known of it but from its own probes, which must not say how many there are: it is taken exactly."""
    model, data = smooth(1.0, samples=1, width=80)
    exact = pf.measure(model, LOSS, data, layers="0", measures="trace")["0", "trace"].value
    found = adaptive(model, data, rtol=1e-6)["0", "trace"]
    assert (found.value, found.stderr, found.exact) == (pytest.approx(exact, rel=1e-9), None, True)


@pytest.mark.parametrize("policy", ["omit", "propagate"])
def test_samples_that_are_not_finite(policy):
    model, (x, y) = smooth(5.0)
    kept = torch.ones(120, dtype=torch.bool)
    kept[[3, 70]] = False
    bad = torch.where(kept[:, None], x, torch.nan)
    with pytest.raises(pf.errors.NonFiniteError, match=r"(2 of 120|1 of 16) samples"):
        adaptive(model, (bad, y))
    exact = pf.measure(model, LOSS, (x[kept], y[kept]), layers="0", measures="trace")["0", "trace"].value
    found = adaptive(model, (bad, y), nan_policy=policy, per_sample=True, rtol=0.05)["0", "trace"]
    assert torch.equal(found.per_sample.isfinite(), kept)
    if policy == "propagate":
        assert math.isnan(found.value)
        assert math.isnan(found.stderr)
    else:
        assert (found.samples, found.omitted) == (118, 2)
        assert 0 < abs(found.value - exact) <= 4 * found.stderr <= 0.4 * exact


def test_a_loss_that_has_no_curvature():
    """All of the Hessian is residual then: in the tolerance that the value itself sets."""
    model, (x, _) = smooth(1.0)
    y = torch.ones(120, 4, dtype=torch.float64)
    value = lambda f, y: (f * y).sum(dim=1).mean()  # noqa: E731
    exact = pf.measure(model, value, (x, y), layers="0", measures="trace")["0", "trace"].value
    found = adaptive(model, (x, y), loss=value, rtol=0.1)["0", "trace"]
    assert abs(found.value - exact) <= 4 * known_stderr(found) + 1e-9 * abs(exact)
    assert known_stderr(found) <= 0.2 * abs(exact)


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_probes_go_where_the_value_is(hessian_products):
    """At a peaked softmax: for the same standard error three quarters of the rows of probes for every sample alike."""
    model, data = smooth(200.0, samples=400, width=80)
    found = adaptive(model, data, rtol=0.02)["0", "trace"]
    rows = sum(directions * samples for directions, samples in hessian_products)
    hessian_products.clear()
    four = pf.measure(model, LOSS, data, layers="0", measures="trace", probes=4)["0", "trace"]
    needed = (four.stderr / found.stderr) ** 2  # times the probes for the same standard error
    assert rows < 0.75 * needed * sum(directions * samples for directions, samples in hessian_products)


@pytest.mark.parametrize("options", [{"whole": True}, {"most": 20}])
def test_batches_that_cannot_be_cut_and_parts_halved_out_of_memory(options):
    inner, (x, y) = smooth(20.0)
    data = list(zip(x.split(24), y.split(24), strict=True))
    exact = pf.measure(inner, LOSS, data, layers="0", measures="trace")["0", "trace"].value
    model = Limited(inner, **options)
    found = adaptive(model, data, "inner.0", rtol=0.05)["inner.0", "trace"]
    assert 0 < abs(found.value - exact) <= 4 * found.stderr
    alone = adaptive(model, data, "inner.0", rtol=1e-9)["inner.0", "trace"]
    assert (alone.value, alone.stderr) == (pytest.approx(exact, rel=1e-9), None)


class Gated(nn.Module):
    """Calls a layer in batches alone in which some sample needs it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.extra, self.last = nn.Linear(6, 60), nn.Linear(60, 60), nn.Linear(60, 4)
        self.double()

    def forward(self, x):
        h, open_ = torch.tanh(self.first(x)), x[:, :1] > 0
        if bool(open_.any()):
            h = h + open_ * torch.tanh(self.extra(h))
        return self.last(10 * torch.tanh(h))


def test_a_layer_that_runs_in_some_batches():
    """Samples that are wanted once more come without those for which it ran; their part is zero."""
    model, (x, _) = Gated(), smooth(1.0, samples=100)[1]
    x[:, 0] = torch.where(torch.arange(100) < 10, x[:, 0].abs() + 0.01, -x[:, 0].abs())
    y = model(x).argmax(dim=1)
    y[40:50] = (y[40:50] + 1) % 4  # these have the large gradients
    exact = pf.measure(model, LOSS, (x, y), layers="extra", measures="trace")["extra", "trace"].value
    found = adaptive(model, (x, y), "extra", rtol=0.01)["extra", "trace"]
    assert abs(found.value - exact) <= 4 * found.stderr + 1e-9 * exact


def test_rows_in_another_order_are_noticed():
    inner, data = smooth(20.0)
    with pytest.raises(pf.errors.InputError, match=r"layer 'inner\.0': its inputs for the same samples"):
        adaptive(Sorting(inner), data, "inner.0", rtol=0.02)


def test_too_many_products():
    model, data = smooth(1.0)
    with pytest.raises(
        pf.errors.InputError, match=r"takes \d+ Hessian products a sample .* more than max_passes=5; pass a larger"
    ):
        adaptive(model, data, rtol=1e-4, max_passes=5)


def test_functions_that_torch_did_not_write():
    def model_forward():
        def forward(net, x):
            return net.last(Once.apply(net.first(x)))

        return Net(forward, first=nn.Linear(6, 5).double(), last=nn.Linear(5, 4).double())

    _, data = smooth(1.0)
    with pytest.raises(pf.errors.InputError, match="did not write"):
        adaptive(model_forward(), data, "first")
    with pytest.raises(pf.errors.InputError, match="second derivative of a function behind it is missing"):
        adaptive(model_forward(), data, "first", curvature="hessian")
    assert adaptive(model_forward(), data, "first", curvature="ggn")["first", "trace"].method.startswith("ggn")


def test_losses_that_are_not_convex_are_refused():
    model, data = smooth(1.0)
    with pytest.raises(pf.errors.InputError, match="probes='adaptive' is for losses that are convex"):
        adaptive(model, data, loss=lambda f, y: -F.cross_entropy(f, y))


# --- how many probes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [1, 2, 5])
def test_the_fewest_probes(least):
    """By trying out scales: the variance keeps to the bound, and with a per cent fewer probes it does not."""
    sizes = torch.rand(40, generator=seeded(0), dtype=torch.float64) ** 4
    sizes[7] = 0.0

    def variance(scale):
        return float((sizes.square() / (scale * sizes).clamp_min(least)).sum())

    for bound in (2 * variance(0.0), *(variance(scale) for scale in (8.0, 30.0, 1e3, 1e5))):
        found = fewest(sizes, torch.full((2, 3, 40), bound).double(), least)
        assert found.shape == (2, 3, 40)
        counts = found[1, 2]
        assert int(counts.min()) == least
        if bound > variance(0.0):
            assert bool((counts == least).all())
            continue
        assert float((sizes.square() / counts).sum()) <= bound * (1 + 1e-9)
        scale = float((counts / sizes.clamp_min(1e-300)).where(counts > least, 0.0).max())
        low, high = 0.0, scale
        for _ in range(60):  # the smallest scale by bisection
            low, high = ((low + high) / 2, high) if variance((low + high) / 2) > bound else (low, (low + high) / 2)
        assert torch.equal(counts, (high * sizes * (1 - 1e-9)).ceil().clamp_min(least).long())


def test_mean_and_variance_over_all_signs():
    """Of m probes the mean has the mean tr A and the variance 2 (|A|² - Σ A_aa²) / m, as is estimated."""
    form = torch.tensor([[1.0, 0.4, -0.3], [0.4, -2.0, 0.7], [-0.3, 0.7, 0.5]]).double()
    signs = torch.tensor([(1, a, b) for a in (-1, 1) for b in (-1, 1)]).double()  # -r gives what r does
    each, found = torch.einsum("ra,ab,rb->r", signs, form, signs), []
    for values in itertools.product(each.tolist(), repeat=3):  # a pilot of two, and one more
        probes = torch.tensor(values).double().view(3, 1, 1)
        rest = Residuals((1, 1), torch.ones(1).double(), 2, 1000)
        rest.add(0, torch.arange(1), probes[:2], rest.begin(0, 1000))
        rest.want(torch.tensor([[3]]))
        rest.add(0, torch.arange(1), probes[2:], range(2, 3))
        found.append((float(rest.means), float(rest.variances()[0, 0])))
    means, errors = torch.tensor(found).double().T
    expected = float(2 * (form.square().sum() - form.diagonal().square().sum()) / 3)
    assert float(means.mean()) == pytest.approx(float(form.trace()))
    assert float(means.var(correction=0)) == pytest.approx(expected)
    assert float(errors.mean()) == pytest.approx(expected)


def test_no_sample_s_probes_say_how_many_it_gets():
    """Whatever a sample's own pilot gave; that of the others matters."""
    sizes = torch.rand(6, generator=seeded(0), dtype=torch.float64) + 0.1
    ggn, pilot = (torch.rand(*shape, generator=seeded(1)).double() for shape in ((1, 1, 6), (2, 1, 6)))

    def wanted(pilot):
        found = Residuals((1, 1), sizes, 2, 1000)
        found.add(0, torch.arange(6), pilot, found.begin(0, 1000))
        return Predictor(0.05, Tolerance(0.05, 6)).wanted(found, ggn, ggn_is_exact=True)[0]

    before = wanted(pilot)
    assert int(before.min()) > 2
    pilot[:, :, 3] = torch.tensor([[9.0], [-5.0]])
    now = wanted(pilot)
    assert now[3] == before[3]
    assert bool((now != before)[[0, 1, 2, 4, 5]].all())

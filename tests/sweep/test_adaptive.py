"""Values from columns of square-root factors in groups: probes="adaptive"."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyflatness as pf
from pyflatness.model.data import Batches
from pyflatness.passes.recorder import Recorder
from pyflatness.passes.tail import Tail
from pyflatness.sweep import adaptive_sweep
from support import grid, truth
from support.combinations import in_soak, in_turn
from support.covering import share
from support.many_samples import NETWORKS, Limited, Sorting, network, seeded
from support.networks import CASES

LOSS = nn.CrossEntropyLoss()
MEASURES = ("relative_flatness", "trace")
OTHERS = {"gathered tokens", "custom loss, Tanh"}  # can be measured in batches of one sample alone; is not convex
CONVEX = [name for name, case in CASES.items() if case.linear and "indefinite" not in name and name not in OTHERS]


def by_changes(model, data, **how):
    report = pf.cost_of_change(model, LOSS, data, pf.changes.rounded(model, 4), by_trace=True, measured=False, **how)
    assert report["cost_of_change"].exact
    return report["0", "cost_by_trace"]


BY_LAYERS = {
    "measure": lambda model, data, **how: pf.measure(model, LOSS, data, **how)["0", "relative_flatness"],
    "relative_flatness": lambda model, data, **how: pf.relative_flatness(model, LOSS, data, "0", **how),
    "score": lambda model, data, **how: pf.score({"a": model}, LOSS, data, **how)["a", "0", "relative_flatness"],
    "track": lambda model, data, **how: (
        pf.track(model, LOSS, data, **how).record().reports["live"]["0", "relative_flatness"]
    ),
    "cost_of_change": by_changes,
}


def linear_layers(case):
    return [layer for layer in case.layers if layer in case.linear]


def adaptive(model, loss, data, layers=None, **options):
    return pf.measure(model, loss, data, layers=layers, measures=MEASURES, probes="adaptive", **options)


# --- values -----------------------------------------------------------------------------------------------------------


@in_turn(2, "name", CONVEX)
def test_exact_where_every_column_is_alone(name):
    """Whatever the network and the loss: tokens, class weights, ignored targets, squared errors, convex callables."""
    case = CASES[name]
    layers, data = linear_layers(case), [(case.inputs, case.targets)]
    found = adaptive(case.build(), case.loss, data, layers, rtol=1e-9)
    for layer in layers:
        matrix, weight = grid.ggn(case, layer), grid.weight_of(case, layer)
        expected = truth.relative_flatness_of(matrix, weight, grid.groups(case, layer)), truth.trace_of(matrix)
        for measure, value in zip(MEASURES, expected, strict=True):
            assert found[layer, measure].value == pytest.approx(value, rel=1e-6, abs=1e-12)


@in_turn(3, "name", CONVEX)
def test_every_estimate_covers(name):
    case = CASES[name]
    layers = linear_layers(case)
    inputs, targets = (part.repeat(60, *(1,) * (part.ndim - 1)) for part in (case.inputs, case.targets))
    exact = pf.measure(case.build(), case.loss, [(inputs, targets)], layers=layers, curvature="ggn", measures="sweep")
    found = adaptive(case.build(), case.loss, [(inputs, targets)], layers, rtol=0.2, seed=3)
    for layer in layers:
        value = exact[layer, "trace"].value
        estimate = found[layer, "trace"]
        error = 0.0 if estimate.stderr is None or math.isnan(estimate.stderr) else estimate.stderr
        assert abs(estimate.value - value) <= 4 * error + 1e-9 * abs(value) + 1e-14  # NaN: groups without cross terms
        assert estimate.method == ("ggn" if estimate.stderr is None else "ggn-sampled")
        assert estimate.exact is (estimate.stderr is None)


@pytest.mark.parametrize("seeds", [100, *in_soak(400)])
@pytest.mark.parametrize("name", ["peaked", *in_soak("class weights", "flat", "a callable")])
def test_unbiased_and_coverage(name, seeds):
    """The interval holds the value of each layer, and the network's, in 95 %, to what so many seeds can tell."""
    (scale, loss, rtol), slack = NETWORKS[name], math.sqrt(400 / seeds)
    model, data = network(scale)
    exact = pf.measure(model, loss, data, measures="trace")
    reports = [
        pf.measure(model, loss, data, measures="trace", probes="adaptive", rtol=rtol, seed=seed)
        for seed in range(seeds)
    ]
    for key in [("0", "trace"), ("2", "trace"), "trace"]:
        values = torch.tensor([report[key].value for report in reports]).double() - exact[key].value
        errors = torch.tensor([report[key].stderr for report in reports]).double()
        assert abs(float(values.mean())) <= 4 * float(values.std()) / math.sqrt(seeds)
        assert float(errors.square().mean().sqrt() / values.std()) == pytest.approx(1, abs=0.15 * slack)
        covered = share((report[key].interval() for report in reports), exact[key].value)
        assert covered == pytest.approx(0.95, abs=0.03 * slack)


@pytest.mark.parametrize("seeds", [25, *in_soak(100)])
def test_tokens_are_unbiased(seeds):
    """Columns of all terms of a sample are in groups together; the signs cancel the cross terms between terms too."""
    case = CASES["tokens"]
    inputs = torch.randint(7, (80, *case.inputs.shape[1:]), generator=seeded(1))
    targets = case.targets.repeat(27, 1)[:80]
    exact = pf.relative_flatness(case.build(), case.loss, (inputs, targets), "mix").value
    found = [
        pf.relative_flatness(case.build(), case.loss, (inputs, targets), "mix", probes="adaptive", rtol=0.5, seed=seed)
        for seed in range(seeds)
    ]
    values = torch.tensor([estimate.value for estimate in found]).double()
    assert float(values.std()) > 0.005 * exact
    assert abs(float(values.mean()) - exact) <= 4 * float(values.std()) / math.sqrt(seeds)


def test_the_tolerance_is_about_reached():
    model, data = network(5.0, samples=400)
    exact = pf.relative_flatness(model, nn.CrossEntropyLoss(), data, "0").value
    for rtol in (0.003, 0.01, 0.03):
        found = [
            pf.relative_flatness(model, nn.CrossEntropyLoss(), data, "0", probes="adaptive", rtol=rtol, seed=seed)
            for seed in range(5)
        ]
        reached = sum(estimate.stderr for estimate in found) / 5 / exact
        assert 0.2 * rtol <= reached <= 1.5 * rtol


def test_per_sample_values():
    model, data = network(3.0)
    estimate = pf.relative_flatness(model, nn.CrossEntropyLoss(), data, "0", probes="adaptive", per_sample=True)
    assert estimate.per_sample.shape == (240,)
    assert float(estimate.per_sample.mean()) == pytest.approx(estimate.value, rel=1e-12)


def test_a_head_stays_exact_and_draws_stay_draws():
    model, data = network(3.0)
    head = pf.relative_flatness(model, nn.CrossEntropyLoss(), data, probes="adaptive")
    assert (head.method, head.stderr) == ("head", None)
    assert pf.relative_flatness(model, nn.CrossEntropyLoss(), data, "0", probes=2).method == "ggn-sampled"


@pytest.mark.parametrize("name", BY_LAYERS)
def test_rtol_alone_is_enough(name):
    """It is ``probes="adaptive"``; of the cost of a change it is for traces, and the second order stays exact."""
    model, data = network(3.0)
    found, exact = (BY_LAYERS[name](model, data, **how) for how in ({"rtol": 0.05}, {}))
    assert (found.method, exact.stderr) == ("ggn-sampled", None)
    assert 0 < found.stderr < 0.1 * exact.value
    assert found.value == pytest.approx(exact.value, abs=4 * found.stderr)
    if name != "cost_of_change":
        both = BY_LAYERS[name](model, data, rtol=0.05, probes="adaptive")
        assert (found.value, found.stderr) == (both.value, both.stderr)


def test_a_seed_is_one_value():
    model, data = network(3.0)
    values = [adaptive(model, nn.CrossEntropyLoss(), data, seed=seed)["trace"].value for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch):
    """Rows of all signals that went back."""
    rows, gradients, send = [], Recorder.gradients, Tail.send

    def counted(self, outputs, signal, *args, **options):
        rows.append(len(signal))
        return gradients(self, outputs, signal, *args, **options)

    def several(self, cotangents):
        rows.append(cotangents.shape[0] * cotangents.shape[1])
        return send(self, cotangents)

    monkeypatch.setattr(Recorder, "gradients", counted)
    monkeypatch.setattr(Tail, "send", several)
    return rows


def test_fewer_rows_than_classes(sent):
    """At a peaked softmax, to 1 %: less than half of the exact sweep's rows, further forward passes included."""
    model, data = network(30.0, samples=1024)
    exact = pf.relative_flatness(model, nn.CrossEntropyLoss(), data, "0").value
    whole = sum(sent)
    sent.clear()
    estimate = pf.relative_flatness(model, nn.CrossEntropyLoss(), data, "0", probes="adaptive")
    assert whole >= 9 * 1024
    assert sum(sent) < 0.35 * whole
    assert abs(estimate.value - exact) <= 4 * estimate.stderr < 0.06 * exact


def test_how_many_samples_there_are():
    x, cpu = torch.zeros(10, 2), torch.device("cpu")
    assert Batches((x, x), cpu).samples == 10
    assert Batches([(x, x), (x[:3], x[:3])], cpu).samples == 13
    assert Batches(DataLoader(TensorDataset(x, x), batch_size=4), cpu).samples == 10
    assert Batches(iter([(x, x)]), cpu).samples == 0


class Counting(Limited):
    """Counts the samples of its runs."""

    def __init__(self, inner, **limits):
        super().__init__(inner, **limits)
        sizes = []
        self._sizes = lambda: sizes  # a list of its own would be put back after a call

    @property
    def sizes(self):
        return self._sizes()

    def forward(self, x):
        found = super().forward(x)
        self.sizes.append(len(x))
        return found


def test_a_batch_that_cannot_be_cut():
    inner, (x, y) = network(3.0)
    data = list(zip(x.split(24), y.split(24), strict=True))
    exact = pf.measure(inner, nn.CrossEntropyLoss(), data, measures="sweep")
    model = Counting(inner, whole=True)
    found = adaptive(model, nn.CrossEntropyLoss(), data, rtol=0.02)
    assert set(model.sizes) == {24}
    assert abs(found["trace"].value - exact["trace"].value) <= 4 * found["trace"].stderr
    assert adaptive(model, nn.CrossEntropyLoss(), data, rtol=1e-9)["trace"].value == pytest.approx(exact["trace"].value)


def test_samples_are_packed_and_parts_halved_out_of_memory():
    inner, data = network(20.0)
    exact = pf.measure(inner, nn.CrossEntropyLoss(), data)["trace"].value
    model = Counting(inner, most=50)
    assert adaptive(model, nn.CrossEntropyLoss(), data, rtol=1e-9)["trace"].value == pytest.approx(exact, rel=1e-7)
    model.sizes.clear()
    found = adaptive(model, nn.CrossEntropyLoss(), data, rtol=0.02)["trace"]
    assert abs(found.value - exact) <= 4 * found.stderr
    assert sum(model.sizes) > 1.3 * 240


def test_batches_of_all_sizes():
    model, (x, y) = network(5.0, samples=96)
    exact = pf.measure(model, nn.CrossEntropyLoss(), (x, y))["trace"].value
    for data in (list(zip(x.split(1), y.split(1), strict=True)), DataLoader(TensorDataset(x, y), batch_size=77)):
        found = adaptive(model, nn.CrossEntropyLoss(), data, rtol=0.05)["trace"]
        assert 0 < abs(found.value - exact) <= 4 * found.stderr


def test_one_sample_has_an_error():
    model, (x, y) = network(1.0)
    for seed in range(20):
        assert adaptive(model, nn.CrossEntropyLoss(), (x[:1], y[:1]), rtol=0.99, seed=seed)["0", "trace"].stderr > 0


# --- what is refused, and what stays ----------------------------------------------------------------------------------


def refused(match, model, loss, data, layer="0", **options):
    with pytest.raises(pf.errors.InputError, match=match):
        pf.relative_flatness(model, loss, data, layer, **{"probes": "adaptive", **options})


def test_clear_errors():
    model, data = network(3.0)
    loss = nn.CrossEntropyLoss()
    refused("rtol=0.1 says how many probes to take", model, loss, data, probes=3, rtol=0.1)
    refused("or 'adaptive'", model, loss, data, probes="adaptively")
    for rtol in (0, 1, -0.1, math.nan):
        refused(f"rtol={rtol}: a relative standard error between 0 and 1", model, loss, data, rtol=rtol)
    case = CASES["indefinite loss, Tanh"]
    negative = r"convex in the outputs; this one curves down at \d+ of 6 samples: pass probes=k"
    refused(negative, case.build(), case.loss, (case.inputs, case.targets), "2", curvature="ggn")


def test_too_many_cotangents():
    model, data = network(0.1)
    refused(
        r"takes \d+ cotangents a sample .* more than max_passes=3; pass a larger rtol=",
        model,
        nn.CrossEntropyLoss(),
        data,
        rtol=1e-6,
        max_passes=3,
    )


@pytest.mark.parametrize(("scale", "rtol"), [(3.0, 0.02), (3.0, 0.2), (20.0, 0.02)])
def test_rows_in_another_order_are_noticed(scale, rtol):
    """By what comes back from samples that sent nothing, or by the inputs of the rows of another run."""
    inner, data = network(scale)
    match = "layer 'inner.0': its inputs for the same samples"
    refused(match, Sorting(inner), nn.CrossEntropyLoss(), data, "inner.0", rtol=rtol)


@pytest.mark.parametrize("bad", ["inputs", "outputs"])
def test_samples_that_are_not_finite(bad):
    model, (x, y) = network(3.0)
    kept = torch.ones(240, dtype=torch.bool)
    kept[[3, 170]] = False
    if bad == "inputs":
        x = torch.where(kept[:, None], x, torch.nan)
    else:
        model = nn.Sequential(*model, nn.Hardtanh(-1e300, 1e300))
        x = torch.where(kept[:, None], x, 1e308)
    loss = nn.CrossEntropyLoss()
    with pytest.raises(pf.errors.NonFiniteError, match="batch 0: 1 of 30 samples"):
        adaptive(model, loss, (x, y))
    exact = adaptive(model, loss, (x, y), nan_policy="omit", rtol=1e-9)["0", "trace"]
    assert (exact.samples, exact.omitted) == (238, 2)
    found = adaptive(model, loss, (x, y), nan_policy="omit")["0", "trace"]
    assert 0 < abs(found.value - exact.value) <= 4 * found.stderr
    spread = adaptive(model, loss, (x, y), nan_policy="propagate", per_sample=True)["0", "trace"]
    assert torch.equal(spread.per_sample.isfinite(), kept)
    assert math.isnan(spread.stderr)


@pytest.mark.parametrize(("classes", "exact"), [(5, True), (400, False)])
def test_what_is_cheaper_exactly_is_exact(monkeypatch, classes, exact):
    """Values are those of an exact call where probes and their plan would take longer, whatever the batches."""
    monkeypatch.setattr(adaptive_sweep, "PLAN", 1.2e6)
    model = nn.Sequential(nn.Linear(8, 200), nn.ReLU(), nn.Linear(200, classes)).eval()
    data = torch.randn(2000, 8), torch.randint(classes, (2000,))
    for cut in ([*zip(*(part.split(1000) for part in data), strict=True)], data):
        found = pf.measure(model, nn.CrossEntropyLoss(), cut, rtol=0.1, measures="relative_flatness")
        assert (found["relative_flatness"].stderr is None) == exact
        assert found["0", "relative_flatness"].exact == exact
    if exact:
        truth = pf.measure(model, nn.CrossEntropyLoss(), data, measures="relative_flatness")
        assert found["relative_flatness"].value == pytest.approx(truth["relative_flatness"].value, rel=1e-6)

"""Heads of many classes to a tolerance: the error is within the bound, and the bound within the tolerance."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pyflatness as pf
from pyflatness.contractions import Backend, SoftmaxVariance, wide
from pyflatness.contractions.backends import compiled, cuda
from support.cases import classifier
from support.combinations import ENGINES, every

DIRECT = "donot_use_mm_for_euclid_dist"
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2e-3}
N, D, M = 24, 4096, 16  # rows, classes, features besides those that make the logits


def truth(features, weight, bias):
    """|φ|² Σ_s p_s |w_s - μ|² in float64."""
    features, weight, bias = (t.double().cpu() for t in (features, weight, bias))
    p = torch.softmax(features @ weight.t() + bias, 1)
    return features.square().sum(1) * (p * torch.cdist(p @ weight, weight, compute_mode=DIRECT).square()).sum(1)


def from_logits(logits, seed=0):
    """A head with these logits (n, d): a feature for each row, and others that are zero, with random weights."""
    n, d = logits.shape
    generator = torch.Generator().manual_seed(seed)
    others = torch.randn(d, M, generator=generator, dtype=torch.float64)
    weight = torch.cat([logits.t() / 20, others], dim=1)
    features = torch.cat([20 * torch.eye(n, dtype=torch.float64), torch.zeros(n, M, dtype=torch.float64)], dim=1)
    return features, weight, torch.zeros(d, dtype=torch.float64)


def peaked(exponent, alike, rest=0.05):
    """Tails of a power law behind a most probable class; 1 - p_max is ``rest`` in the median, 1/10 to 10 times it."""
    generator = torch.Generator().manual_seed(1)
    tail = -exponent * torch.arange(1.0, D, dtype=torch.float64).log()
    rows = [tail if alike else tail[torch.randperm(D - 1, generator=generator)] for _ in range(N)]
    logits = torch.stack(rows)
    logits -= logits.logsumexp(dim=1, keepdim=True)
    rests = rest * torch.logspace(-1, 1, N, dtype=torch.float64).clamp_max(0.9 / rest)
    return torch.cat([((1 - rests) / rests).log().unsqueeze(1), logits], dim=1)


def flat():
    return torch.randn(N, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / 2


def opposed():
    """Every class of the tail opposite the most probable one, or just there, and the long ones improbable."""
    features, weight, bias = from_logits(peaked(1.5, True))
    weight[1 : D // 2, N:] = -weight[0, N:]
    weight[D // 2 :, N:] = 30 * weight[0, N:]
    return features, weight, bias


def unlike():
    """Rows of very different size and certainty, one that is sure, one with equal logits, masked classes."""
    logits = peaked(1.5, True)
    logits[3] = 0
    logits[4, 1:] -= 60
    features, weight, bias = from_logits(logits)
    bias[1000:1400] = -math.inf
    return features * torch.logspace(-0.5, 0, N, dtype=torch.float64).unsqueeze(1), weight, bias


CASES = {
    "flat": lambda: from_logits(flat()),
    "1.0, alike": lambda: from_logits(peaked(1.0, True)),
    "1.0, independent": lambda: from_logits(peaked(1.0, False)),
    "1.5, alike": lambda: from_logits(peaked(1.5, True)),
    "1.5, independent": lambda: from_logits(peaked(1.5, False)),
    "2.5, alike": lambda: from_logits(peaked(2.5, True)),
    "opposed": opposed,
    "unlike": unlike,
}


@pytest.fixture
def kept(monkeypatch):
    """How many classes the second products were over, one entry for each."""
    classes, right = [], Backend.multiply

    def product(self, a, b, out):
        if a.shape[0] == N and a.shape[1] != N + M:
            classes.append(a.shape[1])
        return right(self, a, b, out)

    monkeypatch.setattr(Backend, "multiply", product)
    return classes


def bounded(case, backend, dtype, rtol, device="cpu", scale=None, **options):
    features, weight, bias = (t.to(dtype).to(device) for t in case)
    head = SoftmaxVariance(weight, bias, backend, rows=N, route="rows", rtol=rtol, memory=2**25, **options)
    return head.bounded(features, scale), truth(features, weight, bias)


def check(found, expected, rtol, dtype, scale=1.0):
    """Row by row the error is within the bound; together the bounds are within the tolerance of the true value."""
    values, bounds = (t.cpu() for t in found)
    rounding = ROUNDING[dtype] * expected
    assert ((values - expected).abs() <= bounds + rounding).all()
    value, bound = float((values * scale).sum()), float((bounds * scale).sum())
    assert bound <= rtol * (value - bound) + 1e-15
    assert abs(value - float((expected * scale).sum())) <= rtol * float((expected * scale).sum()) + float(
        rounding.sum()
    )


@every(engine=ENGINES, name=[*CASES], rtol=[1e-3, 1e-2, 0.1, 0.5], dtype=[torch.float32, torch.float64])
def test_error_within_bound_within_tolerance(engine, name, rtol, dtype):
    found, expected = bounded(CASES[name](), engine.module, dtype, rtol)
    check(found, expected, rtol, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_nothing_is_left_out(cuda_device, dtype):
    """It would take longer."""
    (near, expected), (exact, _) = (bounded(CASES["1.5, alike"](), cuda, dtype, r, cuda_device) for r in (0.1, 0.0))
    assert near.bounds is None
    assert near.values.equal(exact.values)
    assert float(((near.values.cpu() - expected).abs() / expected).max()) < ROUNDING[dtype]


@pytest.mark.parametrize(
    ("name", "rtol", "most"), [("1.5, alike", 1e-2, 0.6), ("2.5, alike", 1e-3, 0.2), ("1.0, alike", 0.1, 0.8)]
)
def test_work_is_saved(kept, name, rtol, most):
    found, expected = bounded(CASES[name](), compiled, torch.float64, rtol)
    check(found, expected, rtol, torch.float64)
    assert sum(kept) <= most * D
    assert float(found.bounds.sum()) > 0


@pytest.mark.parametrize("name", ["1.0, independent", "1.5, independent"])
def test_nothing_is_left_out_where_all_tiles_matter(kept, name):
    found, expected = bounded(CASES[name](), compiled, torch.float64, 1e-3)
    assert sum(kept) == D
    assert found.bounds.count_nonzero() == 0
    check(found, expected, 1e-13, torch.float64)


def test_a_wrong_guess_is_put_right(kept, monkeypatch):
    """Where the tiles first left out do not fit, some are put back, in the end all."""
    right = wide.lightest
    monkeypatch.setattr(wide, "lightest", lambda *given: (right(*given)[0], len(right(*given)[0]) - 1))
    found, expected = bounded(CASES["1.5, alike"](), compiled, torch.float64, 1e-3)
    check(found, expected, 1e-3, torch.float64)
    assert sum(kept) == D


def test_rows_count_as_they_do_in_the_sum(engine):
    """A row of scale 1e6 must not be paid for by the others."""
    scale = torch.ones(N, dtype=torch.float64)
    scale[-1], scale[0] = 1e6, 0
    found, expected = bounded(CASES["unlike"](), engine.module, torch.float64, 0.05, scale=scale)
    check(found, expected, 0.05, torch.float64, scale)


def test_rows_that_are_not_finite_stand_aside(engine):
    features, weight, bias = CASES["1.5, alike"]()
    features[2, 3], features[5, 5] = math.nan, math.inf
    found, expected = bounded((features, weight, bias), engine.module, torch.float64, 1e-2)
    good = [i for i in range(N) if i not in (2, 5)]
    assert found.values.isfinite().tolist() == [i in good for i in range(N)]
    check((found.values[good], found.bounds[good]), expected[good], 1e-2, torch.float64)


# --- the public calls -------------------------------------------------------------------------------------------------


def public(name="1.5, alike", **options):
    features, weight, bias = CASES[name]()
    return pf.head_flatness(features, weight, bias, **options)


def test_the_estimate_carries_the_bound():
    exact, near = public(), public(rtol=0.05, per_sample=True)
    assert (exact.exact, exact.max_error) == (True, None)
    assert not near.exact
    assert near.stderr is None
    assert 0 < near.max_error <= 0.05 * exact.value
    assert abs(near.value - exact.value) <= near.max_error
    assert f"not exact, off by at most {near.max_error:.2g}, method head" in repr(near)
    assert float(near.per_sample.mean()) == pytest.approx(near.value, rel=1e-12)
    assert pf.results.Estimate.from_dict(near.to_dict()) == near
    assert pf.results.Estimate.from_dict(near.to_dict()).max_error == near.max_error


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(weight=torch.rand(D).double()), nn.CrossEntropyLoss(reduction="sum")]
)
def test_the_bound_is_of_the_users_loss(loss):
    targets = torch.arange(N)
    exact, near = public(targets=targets, loss=loss), public(targets=targets, loss=loss, rtol=0.05)
    assert 0 < near.max_error <= 0.05 * exact.value
    assert abs(near.value - exact.value) <= near.max_error


def test_omitted_samples_have_no_part_in_the_bound():
    features, weight, bias = CASES["1.5, alike"]()
    kept = [i for i in range(N) if i != 4]
    expected = pf.head_flatness(features[kept], weight, bias)
    features[4, 4] = math.nan
    near = pf.head_flatness(features, weight, bias, nan_policy="omit", rtol=0.05)
    assert near.omitted == 1
    assert 0 < near.max_error <= 0.05 * expected.value
    assert abs(near.value - expected.value) <= near.max_error


def test_few_classes_and_other_losses_stay_exact():
    x, w = torch.randn(5, 4), torch.randn(10, 4)
    for options in ({}, {"loss": "mse_loss"}, {"loss": "binary_cross_entropy_with_logits"}):
        found = pf.head_flatness(x, w, rtol=0.1, **options)
        assert found.exact
        assert found == pf.head_flatness(x, w, **options)


def test_a_models_head():
    features, weight, bias = CASES["1.5, alike"]()
    model = nn.Sequential(nn.Linear(N + M, D)).double().eval()
    model[0].weight.data, model[0].bias.data = weight, bias
    data = features, torch.arange(N)
    exact = pf.relative_flatness(model, nn.CrossEntropyLoss(), data)
    near = pf.relative_flatness(model, nn.CrossEntropyLoss(), data, rtol=0.05, memory=2**25)
    assert 0 < near.max_error <= 0.05 * exact.value
    assert abs(near.value - exact.value) <= near.max_error
    assert pf.relative_flatness(model, nn.CrossEntropyLoss(), data, rtol=0).max_error is None
    adaptive = pf.relative_flatness(model, nn.CrossEntropyLoss(), data, probes="adaptive", rtol=0.05)
    assert adaptive == exact  # of draws, which a head does not need


def test_elsewhere_it_is_a_standard_error():
    """Of values of layers ``rtol`` alone means probes="adaptive"; what is not sampled stays as it is."""
    model, data, loss = classifier(5, 6, 3), (torch.randn(40, 5), torch.arange(40) % 3), nn.CrossEntropyLoss()
    alone, both = ({"rtol": 0.5}, {"rtol": 0.5, "probes": "adaptive"})
    layer = [pf.relative_flatness(model, loss, data, "0", **how) for how in (alone, both)]
    assert layer[0].value == layer[1].value
    reports = [pf.measure(model, loss, data, measures=["trace", "weight_norm"], **how) for how in (alone, both)]
    assert reports[0] == reports[1]
    assert reports[0]["0", "trace"].method == "ggn-sampled"
    assert reports[0]["0", "weight_norm"].exact
    for rtol in (-0.1, 1, math.nan):
        with pytest.raises(pf.errors.InputError, match=f"rtol={rtol}: a relative error from 0 to less than 1"):
            pf.head_flatness(torch.ones(2, 3), torch.ones(4, 3), rtol=rtol)


# --- memory -----------------------------------------------------------------------------------------------------------

LARGE = (8192, 128256, 4096)


@pytest.mark.parametrize(("half", "keeps"), [(False, False), (False, True), (True, False)])
def test_the_plan_of_a_language_models_head_fits(half, keeps):
    """512 MiB, of which 64 are for the matrix library's workspace, rounded-up blocks and single numbers of rows."""
    planned = wide.plan(*LARGE, torch.float32, cuda.memory, half=half, keeps=keeps)
    assert planned.bytes <= (512 - 64) * 2**20
    if half:
        assert planned.rows >= 1024
        assert planned.tile % 64 == 0
        assert planned.tile >= 4000


class Live(TorchDispatchMode):
    """Bytes of tensors that operations made and that are still there, and the most of them at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self.now += tensor.untyped_storage().nbytes()
                weakref.finalize(tensor, self._gone, tensor.untyped_storage().nbytes())
        self.most = max(self.most, self.now)
        return made

    def _gone(self, size):
        self.now -= size


@pytest.mark.parametrize(("half", "rtol"), [(False, 0.0), (False, 0.1), (True, 0.0)])
def test_the_plan_is_what_is_taken(request, monkeypatch, rtol, half):
    d, m = 6000, 128
    n, memory = (150, 2**18 if rtol == 0 else 2**19) if half else (800, 2**21)  # emulated kernels are slow
    features, weight = torch.randn(n, m) / 8, torch.randn(d, m)
    module = request.getfixturevalue("_emulated_cuda") if half else None
    if isinstance(module, str):
        pytest.skip(module)
    if half:  # a product that promotes has copies that one on a GPU has not
        features, weight = features.bfloat16(), weight.bfloat16()
        monkeypatch.setattr(cuda, "multiply", lambda a, b, out: out.zero_())
        monkeypatch.setattr(cuda, "multiply_add", lambda a, b, total: None)
        for name, value in (("_module", module), ("missing", ""), ("device", "cpu")):
            monkeypatch.setattr(cuda, name, value)
    backend = cuda if half else compiled
    planned = wide.plan(n, d, m, torch.float32, memory, half=half, keeps=rtol > 0)
    assert planned.rows < n
    head = SoftmaxVariance(weight, None, backend, rows=n, route="rows", memory=memory, rtol=rtol)
    gc.collect()
    with Live() as live:
        head(features)
    assert planned.bytes / 2 <= live.most <= 1.2 * planned.bytes

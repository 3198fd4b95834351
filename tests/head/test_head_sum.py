"""The one call of a kernel for heads of cross-entropy with class indices: its sum, its labels, when it is taken."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.contractions.backends import compiled
from pyflatness.contractions.reference import centre, shifted
from support import truth
from support.cases import on_threads
from support.combinations import ENGINES, every
from support.truth import exact_formula_error, tolerance

SHAPES = [(1, 10, 84), (1, 1, 1), (33, 1, 5), (70, 10, 84), (31, 64, 7), (65, 40, 130), (257, 2, 16), (600, 3, 300)]


def problem(n, d, m, dtype=torch.float64):
    return torch.randn(n, m).to(dtype), (torch.randn(d, m) / m**0.5).to(dtype), torch.randn(d).to(dtype)


def row_sum(engine, features, weight, bias, labels=None, *, prepared=None, ignored=-100, values=None):
    return engine.module.softmax_variance_sum(features, weight, bias, prepared, labels, ignored, values)


@every(engine=ENGINES, shape=SHAPES, with_bias=[True, False], dtype=[torch.float32, torch.float64])
def test_sum_and_values(engine, shape, with_bias, dtype):
    features, weight, bias = problem(*shape, dtype)
    bias = bias if with_bias else None
    expected = truth.softmax_variance(features, weight, bias)
    values = torch.full_like(expected, math.nan)
    found = row_sum(engine, features, weight, bias, values=values)
    positive = expected.clamp_min(1e-300)
    limit = tolerance(dtype, exact_formula_error(features, weight, 0 if bias is None else bias, positive))
    torch.testing.assert_close(values, expected, rtol=limit, atol=1e-300)
    assert found.total == pytest.approx(float(values.sum()), rel=1e-13, abs=1e-300)
    assert found.counted == len(features)
    again = row_sum(engine, features, weight, bias, prepared=found.prepared)
    assert again.total == found.total


@pytest.mark.parametrize("ignored", [-100, 0, 2, 7])
def test_ignored_labels_add_nothing(engine, ignored):
    features, weight, bias = problem(100, 3, 9)
    labels = torch.randint(3, (100,))
    labels[::7] = ignored
    kept = labels != ignored
    features[~kept] = math.nan
    values = torch.empty(100, dtype=torch.float64)
    found = row_sum(engine, features, weight, bias, labels, ignored=ignored, values=values)
    alone = row_sum(engine, features[kept], weight, bias, labels[kept], ignored=ignored)
    assert found.counted == alone.counted == int(kept.sum())
    assert found.total == pytest.approx(alone.total, rel=1e-14)
    assert values[~kept].tolist() == [0.0] * int((~kept).sum())


@pytest.mark.parametrize("wrong", [-1, 3, 2**62, -(2**63)])
@pytest.mark.parametrize("place", [0, 30, 99])
def test_a_label_that_is_no_class(engine, place, wrong):
    features, weight, bias = problem(100, 3, 9)
    labels = torch.randint(3, (100,))
    assert row_sum(engine, features, weight, bias, labels) is not None
    labels[place] = wrong
    assert row_sum(engine, features, weight, bias, labels) is None
    labels[place] = -100
    assert row_sum(engine, features, weight, bias, labels).counted == 99


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_sum(engine, bad):
    for at in range(3):
        tensors = problem(40, 5, 9)
        tensors[at].flatten()[7 if at < 2 else 3] = bad
        finite = at == 2 and bad < 0  # a class that is masked
        assert math.isfinite(row_sum(engine, *tensors).total) == finite


def test_memory_layouts(engine):
    features, weight, bias = problem(40, 5, 9)
    expected = row_sum(engine, features, weight, bias, torch.arange(40) % 5).total
    spread = torch.empty(40, 14, dtype=torch.float64)[:, 3:12].copy_(features)
    labels = torch.stack([torch.arange(40) % 5, torch.full((40,), 99)], 1)[:, 0]
    for x, w, b in ((spread, weight, bias), (features.t().contiguous().t(), weight.t().contiguous().t(), bias)):
        assert row_sum(engine, x, w, b, labels).total == pytest.approx(expected, rel=1e-14)
    assert row_sum(engine, features[:0], weight, bias, labels[:0])[:2] == (0.0, 0)


def test_any_number_of_threads_gives_the_same_bits():
    features, weight, bias = problem(9000, 10, 40, torch.float32)
    for isa in compiled.engines():
        with compiled.forced(isa):
            totals = []
            for threads in (1, 2, 3):
                with on_threads(threads):
                    totals.append(compiled.softmax_variance_sum(features, weight, bias, None, None, 0, None).total)
        assert len(set(totals)) == 1


# --- the calls that take it -------------------------------------------------------------------------------------------


def counted_calls(monkeypatch):
    calls = []
    kernel = compiled.softmax_variance_sum
    monkeypatch.setattr(compiled, "softmax_variance_sum", lambda *given: calls.append(given) or kernel(*given))
    return calls


def test_plain_cases_take_one_call_and_others_none(monkeypatch):
    calls = counted_calls(monkeypatch)
    features, weight, bias = problem(50, 4, 6)
    labels = torch.arange(50) % 4
    cases = {
        "labels": (1, {}),
        "sum": (1, {"reduction": "sum"}),
        "smoothing": (1, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}),
        "by sample": (1, {"per_sample": True}),
        "class weights": (0, {"loss": nn.CrossEntropyLoss(weight=torch.ones(4).double())}),
        "normalized": (0, {"normalize": "std"}),
        "reference": (0, {"backend": "reference"}),
    }
    for name, (wanted, options) in cases.items():
        calls.clear()
        value = pf.head_flatness(features, weight, bias, labels, **options).value
        assert len(calls) == wanted, name
        if name in ("labels", "smoothing", "class weights", "reference", "by sample"):
            assert value == pytest.approx(pf.head_flatness(features, weight, bias).value, rel=1e-12), name


def test_a_model_prepares_its_weight_once(monkeypatch):
    calls = counted_calls(monkeypatch)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, y = torch.randn(30, 6).double(), torch.randint(3, (30,))
    value = pf.relative_flatness(model, nn.CrossEntropyLoss(), list(zip(x.split(10), y.split(10), strict=True))).value
    assert [given[3] is None for given in calls] == [True, False, False]
    assert value == pytest.approx(truth.of_model(model, nn.CrossEntropyLoss(), x, y, "2"), rel=1e-12)


def test_other_integers_and_positions_have_the_same_value():
    features, weight, bias = problem(40, 4, 6)
    labels = torch.arange(40) % 4
    expected = pf.head_flatness(features, weight, bias, labels)
    assert pf.head_flatness(features, weight, bias, labels.int()).value == pytest.approx(expected.value, rel=1e-14)
    positions = pf.head_flatness(
        features.view(10, 4, 6), weight, bias, labels.view(10, 4), per_sample=True, nan_policy="omit"
    )
    assert positions.value == expected.value
    assert positions.per_sample.shape == (10,)
    assert float(positions.per_sample.mean()) == pytest.approx(expected.value, rel=1e-14)


@pytest.mark.parametrize("half", ["features", "weight", "bias"])
def test_half_precision_beside_float32(half):
    """It takes no such call, and has the value of the same numbers in float32."""
    given = dict(zip(("features", "weight", "bias"), problem(40, 4, 6, torch.float32), strict=True))
    rounded = {name: tensor.bfloat16() if name == half else tensor for name, tensor in given.items()}
    targets = torch.arange(40) % 4
    expected = pf.head_flatness(**{name: tensor.float() for name, tensor in rounded.items()}, targets=targets).value
    assert pf.head_flatness(**rounded, targets=targets).value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("wrong", [4, -1])
def test_a_wrong_label_is_named(engine, wrong):
    features, weight, bias = problem(40, 4, 6)
    labels = torch.arange(40) % 4
    labels[17] = wrong
    with pytest.raises(
        pf.errors.InputError, match=rf"^targets: class {wrong} does not exist among 4 classes, .*ignore_index"
    ):
        pf.head_flatness(features, weight, bias, labels, backend=engine.backend)
    model = nn.Sequential(nn.Linear(6, 4)).double()
    batches = list(zip(features.split(10), labels.split(10), strict=True))
    with pytest.raises(pf.errors.InputError, match=f"^batch 1: targets: class {wrong} does not exist"):
        pf.relative_flatness(model, nn.CrossEntropyLoss(), batches, backend=engine.backend)


@pytest.mark.parametrize("policy", ["propagate", "omit"])
def test_policies_for_nan(engine, policy):
    features, weight, bias = problem(40, 4, 6)
    labels = torch.arange(40) % 4
    features[5, 2] = math.nan
    options = {"nan_policy": policy, "per_sample": True, "backend": engine.backend}
    found = pf.head_flatness(features, weight, bias, labels, **options)
    others = torch.arange(40) != 5
    alone = pf.head_flatness(features[others], weight, bias, labels[others], per_sample=True)
    assert math.isnan(found.value) == (policy == "propagate")
    assert found.per_sample.isnan().nonzero().flatten().tolist() == [5]
    if policy == "omit":
        assert (found.value, found.omitted) == (pytest.approx(alone.value, rel=1e-12), 1)
    torch.testing.assert_close(found.per_sample[others], alone.per_sample, rtol=1e-12, atol=0)


def test_all_targets_ignored(engine):
    features, weight, bias = problem(4, 3, 5)
    with pytest.raises(pf.errors.InputError, match="every one is ignored"):
        pf.head_flatness(features, weight, bias, torch.full((4,), -100), backend=engine.backend)


def test_values_as_before_the_sum_to_the_last_bit():
    """The kernel centres weight and bias as the operations in torch do, so that each row's value is theirs."""
    for dtype in (torch.float32, torch.float64):
        for n, d, m in SHAPES:
            features, weight, bias = problem(n, d, m, dtype)
            values = torch.empty(n, dtype=torch.float64)
            compiled.softmax_variance_sum(features, weight, bias, None, None, 0, values)
            centred, offsets = weight - centre(weight), shifted(bias, weight)
            distances = compiled.pair_distances(weight)
            assert values.equal(compiled.softmax_variance(features, centred, offsets, distances))

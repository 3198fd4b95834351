"""The head's kernels on CUDA, on a GPU and emulated on the CPU, against their twins and the truth in float64."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyflatness.contractions import SoftmaxVariance
from pyflatness.contractions.backends import cuda, reference
from pyflatness.errors import BackendError
from support import truth
from support.cuda_heads import class_sums, draw, relative
from support.truth import exact_formula_error, tolerance

DTYPES = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]
ORDERS = 3  # in which emulated threads can run


def head(device, n, d, m, dtype, spread=1.0):
    """Features, weight and bias."""
    return (
        draw(device, n, m, dtype=dtype, seed=1),
        draw(device, d, m, dtype=dtype, seed=2) * spread,
        draw(device, d, dtype=dtype, seed=3),
    )


def fused(features, weight, bias):
    return cuda.softmax_variance(features, weight, bias, cuda.pair_distances(weight))


def expected_and_limit(features, weight, bias):
    features, weight, bias = (t.cpu() for t in (features, weight, bias))
    expected = truth.softmax_variance(features, weight, bias)
    error = exact_formula_error(features, weight, bias, expected) if features.dtype == torch.float32 else 0.0
    return expected, tolerance(features.dtype, error)


# --- few classes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (10, 84), (64, 70), (65, 17), (130, 2)])
def test_pair_distances(cuda_device, dtype, shape):
    weight = draw(cuda_device, *shape, dtype=dtype) + 50
    weight[-1] = weight[0]
    found = cuda.pair_distances(weight)
    expected = reference.pair_distances(weight.double())
    assert found.equal(found.t())
    assert found.diagonal().count_nonzero() == 0
    assert found[-1, 0] == 0
    assert ((found - expected).abs() <= (1e-5 if dtype == torch.float32 else 1e-13) * expected).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (1, 2, 1),
        (3, 5, 7),
        (131, 10, 84),
        (40, 10, 85),
        (129, 12, 33),
        (67, 20, 40),
        (33, 64, 130),
        (3, 33, 1),
    ],
)
def test_softmax_variance(cuda_device, dtype, shape):
    features, weight, bias = head(cuda_device, *shape, dtype)
    found = fused(features, weight, bias)
    if shape[1] == 1:
        assert found.tolist() == [0.0] * shape[0]
        return
    expected, limit = expected_and_limit(features, weight, bias)
    assert relative(found, expected) < limit


def test_no_features(cuda_device):
    """Every logit is the bias, and every row of the weight the same: none."""
    features, weight, bias = head(cuda_device, 5, 30, 0, torch.float32)
    assert fused(features, weight, bias).tolist() == [0.0] * 5


def test_weights_too_large_for_shared_memory(cuda_device):
    features, weight, bias = head(cuda_device, 5, 64, 700, torch.float32, spread=0.1)
    expected, limit = expected_and_limit(features, weight, bias)
    assert relative(fused(features, weight, bias), expected) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cut", [(slice(None), slice(1, 41)), (slice(None, None, 3), slice(0, 40)), (slice(2, 9), slice(4, 44))]
)
def test_rows_anywhere_in_memory(cuda_device, dtype, cut):
    """Rows that begin between accesses of 16 bytes, rows further apart, columns further apart."""
    whole, weight, bias = head(cuda_device, 30, 6, 44, dtype)
    features = whole[cut]
    weight = weight[:, : features.shape[1]]
    expected, limit = expected_and_limit(features, weight, bias)
    assert relative(fused(features, weight, bias), expected) < limit
    assert relative(fused(whole.t().contiguous().t()[cut], weight, bias), expected) < limit
    assert relative(cuda.row_dots(features, features), features.double().square().sum(dim=1)) < tolerance(dtype) / 10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rest", [1e-1, 1e-3, 1e-6, 1e-9, 1e-12])
def test_peaked(cuda_device, dtype, rest):
    features, weight, bias = head(cuda_device, 9, 10, 32, dtype, spread=1 / 6)
    bias = torch.zeros_like(bias)
    bias[3] = math.log(1 / rest) + math.log(10)
    expected, limit = expected_and_limit(features, weight, bias)
    assert limit < 3e-5
    assert relative(fused(features, weight, bias), expected) < limit


@pytest.mark.parametrize("d", [7, 30])
def test_ties_and_equal_rows(cuda_device, d):
    features, weight, _ = head(cuda_device, 6, d, 8, torch.float32)
    bias = torch.zeros(d, device=cuda_device)
    assert fused(features, weight[:1].expand(d, 8), bias).tolist() == [0.0] * 6
    weight[4] = weight[1] = weight[1] + 5
    bias[1] = bias[4] = 40
    expected, limit = expected_and_limit(features / 16, weight, bias)
    assert relative(fused(features / 16, weight, bias), expected) < limit


@pytest.mark.parametrize("d", [7, 40])
def test_masked_classes_and_values_that_are_not_finite(cuda_device, d):
    features, weight, bias = head(cuda_device, 8, d, 5, torch.float64)
    bias[2:] = -math.inf
    assert (
        relative(
            fused(features, weight, bias), truth.softmax_variance(features.cpu(), weight[:2].cpu(), bias[:2].cpu())
        )
        < 1e-12
    )
    features[1, 2], features[4, 0], features[6, 4] = math.nan, math.inf, -math.inf
    assert fused(features, weight, bias).isfinite().tolist() == [i not in (1, 4, 6) for i in range(8)]
    bias[:] = -math.inf
    assert not fused(features, weight, bias).isfinite().any()


# --- many classes -----------------------------------------------------------------------------------------------------


def variance(features, weight, bias, route="rows"):
    return SoftmaxVariance(weight, bias, cuda, rows=len(features), route=route, memory=1)(features)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("route", ["fused", "pairs", "rows"])
def test_routes(cuda_device, dtype, route):
    """So little memory gives tiles of sixteen classes and chunks of sixteen rows."""
    features, weight, bias = head(cuda_device, 18, 40, 12, dtype)
    bias[20] += 8
    expected, limit = expected_and_limit(features, weight, bias)
    assert relative(variance(features, weight, bias, route), expected) < 3 * limit


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16])
def test_wide_heads(cuda_device, dtype):
    """Flat, peaked, maxima that rise with every tile, masked classes, equal rows in different tiles, NaN."""
    features, weight, bias = (t.to(dtype) for t in head(cuda_device, 20, 90, 12, torch.float64, spread=0.4))
    features /= 4
    limit = {torch.float32: 3e-5, torch.float64: 1e-11}.get(dtype, 2e-3)
    rising, peaked, masked = torch.arange(90) / 2.0, torch.zeros(90), torch.zeros(90)
    peaked[50], masked[:40] = 18.0, -math.inf
    for changed in (bias, *(b.to(dtype).to(cuda_device) for b in (rising, peaked))):
        expected = truth.softmax_variance(features.cpu(), weight.cpu(), changed.cpu())
        assert relative(variance(features, weight, changed), expected) < limit
    expected = truth.softmax_variance(features.cpu(), weight[40:].cpu(), None)
    assert relative(variance(features, weight, masked.to(dtype).to(cuda_device)), expected) < limit
    weight[77] = weight[3] = weight[3] + 8
    equal = torch.full((90,), math.log(1e-5))
    equal[[3, 77]] = 0
    equal = equal.to(dtype).to(cuda_device)
    expected = truth.softmax_variance(features.cpu() / 4, weight.cpu(), equal.cpu())
    assert relative(variance(features / 4, weight, equal), expected) < limit
    features[7, 2], features[9, 0] = math.nan, math.inf
    assert variance(features, weight, bias).isfinite().tolist() == [i not in (7, 9) for i in range(20)]


class NoWaiting(TorchDispatchMode):
    """Raises at operations whose result the host must know, which a graph could not be made of."""

    WAIT = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1:])
        )
        waits = by_mask or name.startswith(self.WAIT)
        assert not waits, name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("route", ["fused", "pairs", "rows"])
def test_the_host_waits_for_nothing(cuda_device, route, dtype):
    features, weight, bias = (t.to(dtype) for t in head(cuda_device, 20, 40, 12, torch.float64))
    with NoWaiting():
        variance(features, weight, bias, route)
    with pytest.raises(AssertionError, match="nonzero"), NoWaiting():
        features.nonzero()


def test_wrong_tensors_are_refused(cuda_device):
    x = draw(cuda_device, 3, 4)
    with pytest.raises(BackendError, match=r"torch\.float64 logits become float32 or bfloat16, not torch\.bfloat16"):
        cuda.exponentiate_tile(x.double(), None, x[0], 0, class_sums(cuda_device, 3, x.dtype), x.bfloat16())
    with pytest.raises(BackendError, match=r"the weight is torch\.bfloat16 on .* beside it torch\.float64"):
        cuda.norms_about(x.bfloat16(), x[0].double())
    with pytest.raises(BackendError, match="of one dtype"):
        cuda.row_dots(x, x.double())
    with pytest.raises(BackendError, match="contiguous"):
        cuda.exponentiate(x.t(), None, 1.0, x[0].clone())


def test_the_order_of_threads_changes_nothing(request):
    """Bit for bit: no barrier is missing."""
    module = request.getfixturevalue("_emulated_cuda")
    if isinstance(module, str):
        pytest.skip(module)
    cpu = torch.device("cpu")
    found = []
    with cuda.emulated(module):
        for order in range(ORDERS):
            module.set_order(order)
            values = [cuda.pair_distances(draw(cpu, 70, 9))]
            for d in (3, 10, 24, 50):
                values.append(fused(*head(cpu, 35, d, 45, torch.float32)))
            features, weight, bias = head(cpu, 20, 300, 20, torch.float32)
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                values.append(variance(features.to(dtype), weight.to(dtype), bias.to(dtype)))
            values.append(cuda.sigmoid_curvature(features, features, weight[0].square()))
            found.append(values)
    for values in found[1:]:
        assert all(ours.equal(first) for ours, first in zip(values, found[0], strict=True))

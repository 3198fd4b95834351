"""Rows of a wide head that are computed by differences: few or many of them, anywhere among the others."""

import math

import pytest
import torch

from pyflatness.contractions import SoftmaxVariance, wide
from pyflatness.contractions.backends import cuda, reference
from support import truth
from support.cuda_heads import draw

PAIRS = {  # what is computed in, and what the weight is stored in
    "float32": (torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64),
    "bfloat16": (torch.float32, torch.bfloat16),
    "float16": (torch.float32, torch.float16),
}
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-13}


def case(device, n, d, m, dtype, stored):
    """Features, maximum, mean, weight, centre, bias."""
    features, mean = (draw(device, n, m, dtype=dtype, seed=seed) / math.sqrt(m) for seed in (1, 2))
    weight, centre = draw(device, d, m, seed=3).to(stored), draw(device, m, dtype=dtype, seed=4)
    return features, draw(device, n, dtype=dtype, seed=5), mean, weight, centre, draw(device, d, dtype=dtype, seed=6)


def check(given, chosen):
    features, maximum, mean, weight, centre, bias = given
    found = cuda.spread(*given, chosen)
    doubles = (None if t is None else t.double() for t in (features, maximum, mean, weight, centre, bias))
    expected = reference.spread(*doubles, chosen)
    torch.testing.assert_close(found, expected, rtol=LIMIT[features.dtype], atol=0)
    assert found[~chosen].count_nonzero() == 0
    return found


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    ("n", "d", "m"),
    [
        (1, 1, 1),
        (3, 300, 8),  # one tile and a part of another
        (5, 37, 130),  # rows of the weight that begin anywhere, a slice of features that is not whole
        (19, 600, 72),  # three groups of rows
        (40, 9, 64),
    ],
)
def test_rows_that_are_chosen(cuda_device, kind, n, d, m):
    """None, all, every third, the last one alone; with a centre and without."""
    features, maximum, mean, weight, centre, bias = case(cuda_device, n, d, m, *PAIRS[kind])
    every_third = torch.arange(n, device=cuda_device) % 3 == 1
    for chosen in (every_third, torch.zeros_like(every_third), torch.ones_like(every_third)):
        check((features, maximum, mean, weight, centre, bias), chosen)
    every_third[:-1], every_third[-1] = False, True
    check((features, maximum, mean, weight, None, bias), every_third)


def test_more_rows_than_a_block_lists_at_once(cuda_device):
    n = 1500
    chosen = torch.zeros(n, dtype=torch.bool, device=cuda_device)
    chosen[[0, 31, 32, 700, 1023, 1024, 1025, 1499]] = True
    check(case(cuda_device, n, 20, 4, torch.float32, torch.float32), chosen)


def test_more_classes_than_there_are_parts(cuda_device):
    """A part is then several tiles; the last one is not whole."""
    d = 2 * 512 * 256 + 300
    assert cuda.module().spread_splits(d) < d / 256 / 2
    check(case(cuda_device, 2, d, 2, torch.float32, torch.float32), torch.tensor([False, True], device=cuda_device))


@pytest.mark.parametrize("kind", PAIRS)
def test_one_row_does_not_disturb_another(cuda_device, kind):
    """NaN and infinity stay in their rows, of which a group has several; masked classes add nothing."""
    given = case(cuda_device, 12, 40, 24, *PAIRS[kind])
    features, _, mean, _, _, bias = given
    chosen = torch.ones(12, dtype=torch.bool, device=cuda_device)
    bias[5] = -math.inf
    expected = check(given, chosen)
    features[3, 7], features[8, 0], mean[10, 1] = math.nan, math.inf, math.nan
    found = cuda.spread(*given, chosen)
    good = [i for i in range(12) if i not in (3, 8, 10)]
    assert found.isfinite().tolist() == [i in good for i in range(12)]
    assert found[good].equal(expected[good])
    chosen[3] = chosen[8] = chosen[10] = False
    assert cuda.spread(*given, chosen).isfinite().all()


def test_logits_are_as_exact_as_their_exponentials_ask(cuda_device):
    """Logits of a hundred: a sum over all features in float32 is off by 1e-4, and with it the exponential."""
    n, d, m = 4, 50, 4096
    features, _, mean, weight, centre, bias = case(cuda_device, n, d, m, torch.float32, torch.bfloat16)
    features = features + 100 * (weight[:n].float() / m)
    maximum = (features.double() @ (weight.double() - centre.double()).t() + bias.double()).amax(dim=1).float()
    given = features, maximum, mean, weight, centre, bias
    chosen = torch.ones(n, dtype=torch.bool, device=cuda_device)
    expected = reference.spread(*(t.double() for t in given), chosen)
    error = float(((cuda.spread(*given, chosen) - expected).abs() / expected).max())
    assert error < 3e-6


# --- in a head --------------------------------------------------------------------------------------------------------

ILL = [2, 3, 11, 19, 20, 21, 37]


def ill_head(device, dtype, n=40, d=90, m=32):
    """Features, weight and bias; in the rows of ILL two nearly equal rows of the weight share the probability."""
    features, weight = draw(device, n, m, seed=1) / 4, draw(device, d, m, seed=2)
    weight[1::2] = weight[0::2] + 2e-2 * draw(device, d // 2, m, seed=3)
    features[ILL] = 2 * weight[torch.arange(len(ILL), device=device) * 9]
    return features.to(dtype), weight.to(dtype), draw(device, d, seed=4).to(dtype) / 4


@pytest.fixture
def chosen_rows(monkeypatch):
    """Which rows were chosen, for each chunk of rows."""
    found, right = [], cuda.spread

    def spread(*given):
        found.append(given[-1].clone())
        return right(*given)

    monkeypatch.setattr(cuda, "spread", spread)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_ill_conditioned_rows_among_others(cuda_device, chosen_rows, dtype):
    features, weight, bias = ill_head(cuda_device, dtype)
    values = SoftmaxVariance(weight, bias, cuda, rows=40, route="rows", memory=1)(features).cpu()
    expected = truth.softmax_variance(features.cpu(), weight.cpu(), bias.cpu())
    limit = {torch.float32: 3e-5, torch.float64: 1e-11}.get(dtype, 2e-3)
    assert float(((values - expected).abs() / expected).max()) < limit
    assert set(torch.cat(chosen_rows).nonzero().squeeze(1).tolist()) >= set(ILL)


def test_one_call_for_all_classes_of_a_chunk(cuda_device, monkeypatch):
    names, right = [], cuda._kernel

    def kernel(name, *given, **options):
        names.append(name)
        return right(name, *given, **options)

    features, weight, bias = ill_head(cuda_device, torch.bfloat16)
    planned = wide.plan(40, 90, 32, torch.float32, 1, half=True, keeps=False)
    monkeypatch.setattr(cuda, "_kernel", kernel)
    SoftmaxVariance(weight, bias, cuda, rows=40, route="rows", memory=1)(features)
    assert planned.tile < 90
    assert names.count("spread") == -(-40 // planned.rows) == 3


def test_the_order_of_threads_changes_nothing(emulated_cuda):
    """Bit for bit: no barrier is missing."""
    chosen, found = torch.arange(30) % 2 == 0, []
    with cuda.emulated(emulated_cuda):
        for order in range(3):
            emulated_cuda.set_order(order)
            pairs = PAIRS.values()
            found.append([cuda.spread(*case("cpu", 30, 600, 70, *pair), chosen) for pair in pairs])
            found[-1].append(cuda.spread(*case("cpu", 30, 600, 72, torch.float32, torch.bfloat16), chosen))
    for values in found[1:]:
        assert all(ours.equal(first) for ours, first in zip(values, found[0], strict=True))

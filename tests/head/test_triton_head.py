"""Wide heads by Triton's kernels, on a GPU in bfloat16 and interpreted on the CPU in float32, against float64."""

import math

import pytest
import torch

from pyflatness.contractions import SoftmaxVariance
from pyflatness.contractions.backends import reference
from pyflatness.contractions.reference import ClassSums
from support import interpreted, truth

pytest.importorskip("triton", reason="Triton is not installed: pip install 'pyflatness[triton]'")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy", "ignore::RuntimeWarning:triton")  # overflow
ON_GPU = interpreted.ON_GPU
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
LIMIT = 5e-3 if ON_GPU else 2e-5  # a little more than the rounding of one number


@pytest.fixture
def triton_head(monkeypatch):
    interpreted.mend()
    from pyflatness.contractions import triton_head

    if not ON_GPU:  # by small blocks, of which there are several even here
        monkeypatch.setattr(triton_head, "_DTYPES", (torch.float32,))
        monkeypatch.setattr(triton_head.triton, "first_tile", 16)
        monkeypatch.setattr(triton_head, "LARGE", triton_head.Blocks(16, 32, 16, 8, 3))
        monkeypatch.setattr(triton_head, "ROWS", {"ROWS": 64, "WIDTH": 16})
        monkeypatch.setattr(triton_head, "_SPANS", 3)
        monkeypatch.setattr(triton_head, "_AT_ONCE", 2)
    return triton_head.triton


N, D, M = (300, 2900, 136) if ON_GPU else (37, 149, 24)
FIRST = 256 if ON_GPU else 16
BIASES = {
    "flat": {},
    "most probable in the first tile": {3: 40.0},
    "most probable in a later block": {D - 40: 40.0},
    "most probable last": {D - 1: 40.0},
    "far above the first tile": dict.fromkeys(range(FIRST + 7, D), 90.0),
    "far above in the last block alone": dict.fromkeys(range(D - 5, D), 80.0),
    "far above, and then more": {D - 60: 60.0, D - 1: 120.0},
    "masked first tile": dict.fromkeys(range(FIRST), -math.inf),
    "masked from there on": dict.fromkeys(range(FIRST, D), -math.inf),
    "masked everywhere else": dict.fromkeys(range(5, D, 2), -math.inf),
}


def case(name):
    generator = torch.Generator().manual_seed(0)
    features, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((N, M), (D, M), (D,)))
    for s, value in BIASES[name].items():
        bias[s] = bias[s] + value
    return features.to(DEVICE, DTYPE), (weight / M**0.5).to(DEVICE, DTYPE), bias.to(DEVICE)


def ties():
    """All classes alike in blocks of seven, so that each row's largest logit is there seven times."""
    features, weight, bias = case("flat")
    return features, weight[torch.arange(D, device=DEVICE) // 7], torch.zeros_like(bias)


def start(n):
    maximum = torch.full((n,), -math.inf, device=DEVICE)
    rest, moment = torch.zeros(2, n, dtype=torch.float64, device=DEVICE)
    return ClassSums(maximum, torch.full_like(maximum, -1, dtype=torch.int64), rest, moment)


def add(triton_head, features, weight, bias, norms, tiles):
    """Sums over tiles, Σ e_s w_s, and the last tile's exponentials."""
    sums, summed = start(len(features)), torch.zeros_like(features, dtype=torch.float32)
    for first, stop in tiles:
        values, early, late, factor = triton_head.multiply_exponentiate(
            features, weight[first:stop], bias, norms, first, sums
        )
        assert values.shape == (len(features), stop - first)
        assert not bool(((early >= 0) & (late >= 0)).any())
        triton_head.rejoin(summed, weight, None, early, factor)
        summed += values.float() @ weight[first:stop].float()
        triton_head.rejoin(summed, weight, None, late, factor)
    return sums, summed, values


def error(found, expected):
    """The worst one relative to the row's largest number."""
    found, expected = (t.double().reshape(len(t), -1) for t in (found, expected))
    return float(((found - expected).abs().amax(1) / expected.abs().amax(1).clamp_min(1e-300)).max())


@pytest.mark.parametrize("name", [*BIASES, "ties"])
def test_sums_of_tiles(triton_head, name):
    features, weight, bias = ties() if name == "ties" else case(name)
    norms = weight.float().square().sum(1)
    tiles = [(0, FIRST), (FIRST, D - 45), (D - 45, D)]
    sums, summed, _ = add(triton_head, features, weight, bias, norms, tiles)
    logits = features.double() @ weight.double().t() + bias.double()
    top = sums.top.unsqueeze(1)
    assert error(sums.maximum, logits.amax(1)) < 1e-5
    assert float((logits.amax(1) - logits.gather(1, top).squeeze(1)).max()) < LIMIT  # of those that round alike any
    values = (logits - logits.amax(1, keepdim=True)).exp().scatter(1, top, 0.0)
    assert error(sums.rest, values.sum(1)) < LIMIT
    assert error(sums.moment, values @ norms.double()) < LIMIT
    scale = (values @ norms.double().sqrt()).unsqueeze(1)  # at least that of each sum
    assert float(((summed.double() - values @ weight.double()).abs() / scale.clamp_min(1e-300)).max()) < LIMIT


@pytest.mark.parametrize("name", ["flat", "most probable last", "far above the first tile", "masked first tile"])
def test_sums_are_those_of_what_is_written(triton_head, name):
    """In the first tile, where all are relative to the row's maximum."""
    features, weight, bias = case(name)
    norms = weight.float().square().sum(1)
    sums, _, values = add(triton_head, features, weight, bias, norms, [(0, D)])
    assert error(sums.rest, values.double().sum(1)) < 1e-5
    assert error(sums.moment, values.double() @ norms.double()) < 1e-5
    assert bool((values.gather(1, sums.top.unsqueeze(1)) == 0).all())


@pytest.mark.parametrize("name", [*BIASES, "ties"])
def test_values(triton_head, name):
    features, weight, bias = ties() if name == "ties" else case(name)
    head = SoftmaxVariance(weight, bias, triton_head, rows=N, route="rows", memory=2**22 if ON_GPU else 2**15)
    there = bias > -math.inf
    expected = truth.softmax_variance(features[::9].cpu(), weight[there].cpu(), bias[there].cpu())
    found = head(features).cpu()[::9]
    assert float(((found - expected).abs() / expected).max()) < 2 * LIMIT


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite(triton_head, bad):
    features, weight, bias = case("flat")
    expected = SoftmaxVariance(weight, bias, triton_head, rows=N, route="rows", memory=2**24)(features)
    features[7, 2] = bad
    found = SoftmaxVariance(weight, bias, triton_head, rows=N, route="rows", memory=2**24)(features)
    others = torch.arange(N, device=DEVICE) != 7
    assert found.isfinite().equal(others)
    assert found[others].equal(expected[others])


def test_smaller_kernels(triton_head):
    generator = torch.Generator().manual_seed(0)
    features, mean, weight, centre, bias, maximum = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((21, 40), (21, 40), (70, 40), (40,), (70,), (21,))
    )
    weight, chosen = weight.to(DTYPE), torch.arange(21, device=DEVICE) % 3 == 1
    arguments = features, maximum, mean, weight, centre, bias, chosen
    found, expected = triton_head.spread(*arguments), reference.spread(*(t.double() for t in arguments[:-1]), chosen)
    assert bool((found[~chosen] == 0).all())
    assert float(((found - expected).abs() / expected)[chosen].max()) < 1e-5
    assert error(triton_head.row_dots(features, mean), reference.row_dots(features, mean)) < 1e-5
    assert (
        error(triton_head.norms_about(weight, centre), reference.norms_about(weight.double(), centre.double())) < 1e-6
    )
    top, factor = torch.randint(-1, 70, (21,), generator=generator).to(DEVICE), torch.rand(21).double().to(DEVICE)
    for about in (centre, None):
        found, expected = features.clone(), features.double()
        triton_head.rejoin(found, weight, about, top, factor)
        reference.rejoin(expected, weight.double(), None if about is None else about.double(), top, factor)
        assert error(found, expected) < 1e-6


@pytest.mark.parametrize("uncentred", [True, False])
def test_means_of_rows(triton_head, uncentred):
    generator = torch.Generator().manual_seed(0)
    summed, weight, centre = (torch.randn(*shape, generator=generator) for shape in ((21, 40), (70, 40), (40,)))
    rest, maximum = torch.rand(21, generator=generator).double(), torch.zeros(21)
    top = torch.randint(-1, 70, (21,), generator=generator)
    summed, centre, weight = summed.to(DEVICE), centre.to(DEVICE), weight.to(DEVICE, DTYPE)
    sums = ClassSums(*(rows.to(DEVICE) for rows in (maximum, top, rest, rest)))
    expected, whole = summed.double(), sums.rest if uncentred else None
    lengths = reference.mean_row(expected, weight.double(), centre.double(), sums, whole, False)
    found = triton_head.mean_row(summed, weight, centre, sums, whole, False)
    assert error(summed, expected) < 1e-5
    assert error(found.others, lengths.others) < 1e-5
    assert error(found.away, lengths.away) < 1e-5

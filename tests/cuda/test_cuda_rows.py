"""The kernels between and behind a head's products, on a GPU and emulated on the CPU, against their twins in torch."""

import math

import pytest
import torch

from pyflatness.contractions.backends import cuda, reference
from pyflatness.contractions.reference import ClassSums
from support.cuda_heads import class_sums, draw, relative

DTYPES = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]


# --- between and behind products --------------------------------------------------------------------------------------


def same_exponentials(found, expected, limit):
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=limit, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("d", [1, 2, 10, 64, 65, 700])
def test_exponentiate(cuda_device, dtype, weighted, d):
    logits = 5 * draw(cuda_device, 6, d, dtype=dtype)
    logits[1] = -math.inf
    logits[2, d // 2] = math.nan
    logits[3, 0] = math.inf
    logits[4] = logits[4, :1]  # all the same: the first is the maximum
    maximum = torch.full((6,), -math.inf, dtype=dtype, device=cuda_device)
    maximum[5] = 100.0
    norms = draw(cuda_device, d, dtype=dtype, seed=4).square() if weighted else None
    copies = logits.clone(), maximum.clone()
    found = cuda.exponentiate(logits, norms, 0.25, maximum)
    expected = reference.exponentiate(copies[0], norms, 0.25, copies[1])
    limit = 1e-5 if dtype == torch.float32 else 1e-13
    same_exponentials((*found, logits, maximum), (*expected, *copies), limit)
    assert int(found[2][4]) == 0
    assert int(found[2][5]) == -1


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentiate_a_row_longer_than_shared_memory(cuda_device, dtype):
    d = 25_001
    logits = draw(cuda_device, 2, d, dtype=dtype)
    maximum = torch.full((2,), -math.inf, dtype=dtype, device=cuda_device)
    norms = draw(cuda_device, d, dtype=dtype, seed=4).square()
    copies = logits.clone(), maximum.clone()
    found = cuda.exponentiate(logits, norms, 1.0, maximum)
    same_exponentials((*found, logits), (*reference.exponentiate(copies[0], norms, 1.0, copies[1]), copies[0]), 1e-5)


KINDS = [(torch.float32, None), (torch.float64, None), (torch.float32, torch.bfloat16)]  # of logits, of what is rounded


def tiles(backend, device, logits, widths, bias, norms, rounded, padding):
    """All results of a backend, tile by tile: values, what joined, sums."""
    n, dtype = len(logits), logits.dtype
    sums, found, first = class_sums(device, n, dtype), [], 0
    for width in widths:
        values = torch.full((n, width + padding), 7.0, dtype=dtype, device=device)
        values[:, :width] = logits[:, first : first + width]
        out = None if rounded is None else torch.full_like(values, 7.0, dtype=rounded)
        part = None if out is None else out[:, :width]
        joined = backend.exponentiate_tile(values[:, :width], bias, norms, first, sums, part)
        written = values if out is None else out
        assert (written[:, width:] == 7).all()
        found += [written[:, :width].clone(), *joined, *(rows.clone() for rows in sums)]
        first += width
    return found


@pytest.mark.parametrize(("dtype", "rounded"), KINDS)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("widths", "padding"), [((1, 1, 1), 0), ((10, 64, 7), 0), ((9, 70, 3), 1), ((8, 333), 11)])
def test_exponentiate_tile(cuda_device, dtype, rounded, biased, widths, padding):
    """Maxima in every tile, ties, masked classes, NaN and infinity; rows that begin at an access of 16 bytes or not."""
    d = sum(widths)
    logits = 3 * draw(cuda_device, 8, d, dtype=dtype)
    logits[1, d // 2], logits[2, 0] = math.nan, math.inf
    logits[3, d - 1], logits[4, 0] = 50.0, 50.0  # the most probable class in the last tile, in the first
    logits[5], logits[6, : widths[0]] = -math.inf, -math.inf
    logits[7] = logits[7, :1]  # all the same: the first is the maximum
    bias = None if not biased else draw(cuda_device, d, dtype=dtype, seed=5)
    norms = draw(cuda_device, d, dtype=dtype, seed=4).square()
    given = logits, widths, bias, norms, rounded, padding
    found, expected = (tiles(backend, cuda_device, *given) for backend in (cuda, reference))
    limit = 2**-7 if rounded else 1e-5 if dtype == torch.float32 else 1e-13  # exponentials on two sides of a rounding
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=limit, atol=1e-30, equal_nan=True)
    if not biased:
        assert int(found[4][7]) == 0
    values, rest, moment = (found[i].double() for i in (0, 5, 6))  # the first tile: exact sums
    kept = [0, 3, 4, 6, 7]
    torch.testing.assert_close(rest[kept], values[kept].sum(dim=1), rtol=1e-6, atol=0)
    exact = (values * norms[: widths[0]].double()).sum(dim=1)
    torch.testing.assert_close(moment[kept], exact[kept], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3, 64, 1000])
def test_row_dots(cuda_device, dtype, k):
    a, b = draw(cuda_device, 5, k + 3, dtype=dtype)[:, 3:], draw(cuda_device, 5, k, dtype=dtype, seed=1)
    expected = (a.double() * b.double()).sum(dim=1)
    scale = (a.double() * b.double()).abs().sum(dim=1)
    found = cuda.row_dots(a, b)
    assert ((found - expected).abs() <= (1e-6 if dtype == torch.float32 else 1e-14) * scale).all()
    assert cuda.row_dots(a[:0], b[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_curvature(cuda_device, dtype):
    logits = 20 * draw(cuda_device, 4, 75, dtype=dtype)
    coefficients, norms = (
        draw(cuda_device, 4, 75, dtype=dtype, seed=1).abs(),
        draw(cuda_device, 75, dtype=dtype, seed=2).square(),
    )
    logits[2, 3], logits[3, 5] = math.inf, math.nan
    found = cuda.sigmoid_curvature(logits, coefficients, norms)
    expected = reference.sigmoid_curvature(logits.double(), coefficients.double(), norms.double())
    assert found.isnan().tolist() == [False, False, False, True]
    assert relative(found[:3], expected[:3]) < (1e-5 if dtype == torch.float32 else 1e-13)


# --- many classes -----------------------------------------------------------------------------------------------------

PAIRS = [(torch.float32, torch.float32), (torch.float64, torch.float64), *((torch.float32, half) for half in HALVES)]


@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (5, 600), (3, 64)])
def test_rows_of_the_weight(cuda_device, dtype, stored, shape):
    """Norms about the centre, rows that join a sum, spreads: in every dtype that a weight can have."""
    (d, m), n = shape, 6
    weight, centre = draw(cuda_device, d, m).to(stored), draw(cuda_device, m, dtype=dtype, seed=1)
    limit = 1e-5 if dtype == torch.float32 else 1e-13
    doubles = weight.double(), centre.double()
    assert relative(cuda.norms_about(weight, centre), reference.norms_about(*doubles)) < limit

    top = torch.tensor([0, -1, d - 1, -1, d // 2, d + 3], device=cuda_device)  # the last is no class: left alone
    factor = draw(cuda_device, n, dtype=torch.float64, seed=2).exp()
    for about in (centre, None):
        summed = draw(cuda_device, n, m, dtype=dtype, seed=3)
        expected = summed.double()
        reference.rejoin(expected[:5], doubles[0], None if about is None else about.double(), top[:5], factor[:5])
        cuda.rejoin(summed, weight, about, top, factor)
        torch.testing.assert_close(summed.double(), expected, rtol=limit, atol=limit)

    features, mean, bias = (draw(cuda_device, *size, dtype=dtype, seed=4) / 4 for size in ((n, m), (n, m), (d,)))
    chosen = torch.tensor([True, False, True, True, False, True], device=cuda_device)
    maximum = draw(cuda_device, n, dtype=dtype, seed=5)
    found = cuda.spread(features, maximum, mean, weight, centre, bias, chosen)
    expected = reference.spread(*(t.double() for t in (features, maximum, mean)), *doubles, bias.double(), chosen)
    torch.testing.assert_close(found, expected, rtol=limit, atol=0)
    assert found[~chosen].count_nonzero() == 0


@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
@pytest.mark.parametrize("uncentred", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (5, 600), (3, 64)])
def test_mean_row(cuda_device, dtype, stored, shape, uncentred):
    """About a centre or not; a row without other classes, one without any class."""
    (d, m), n = shape, 5
    weight, centre = draw(cuda_device, d, m).to(stored), draw(cuda_device, m, dtype=dtype, seed=1)
    summed = draw(cuda_device, n, m, dtype=dtype, seed=2)
    rest = draw(cuda_device, n, dtype=torch.float64, seed=3).exp()
    rest[1], summed[1] = 0, 0
    top = torch.tensor([0, d - 1, d // 2, -1, d - 1], device=cuda_device)
    inside = rest * 0.75 if uncentred else None
    sums = ClassSums(rest.to(dtype), top, rest, rest)
    expected = summed.double().clone()
    lengths = reference.mean_row(expected, weight.double(), centre.double(), sums, inside, True)
    found = cuda.mean_row(summed, weight, centre, sums, inside, True)
    limit = 2e-6 if dtype == torch.float32 else 1e-13
    for ours, theirs in zip(found, lengths, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=50 * limit, atol=0)
    torch.testing.assert_close(summed.double(), expected, rtol=limit, atol=50 * limit)
    assert cuda.mean_row(summed, weight, centre, sums, inside, False).reach is None


@pytest.mark.parametrize("stored", HALVES)
def test_every_number_in_half_precision(cuda_device, stored):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(stored).to(cuda_device).view(-1, 1)
    summed = torch.zeros(2**10, 1, device=cuda_device)
    for start in range(0, 2**16, 2**14):  # a part of each quarter
        top = torch.arange(start, start + 2**10, device=cuda_device)
        summed.zero_()
        cuda.rejoin(summed, bits, None, top, torch.ones(2**10, dtype=torch.float64, device=cuda_device))
        torch.testing.assert_close(summed, bits[top].float(), rtol=0, atol=0, equal_nan=True)

"""The kernels and their torch twins against float64 truth: every backend, instruction set, dtype and route."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyflatness.contractions import SoftmaxVariance, choose
from pyflatness.contractions.backends import compiled, reference
from pyflatness.errors import BackendError
from support import truth
from support.cases import on_threads
from support.combinations import ENGINES, every
from support.truth import exact_formula_error, tolerance

ROUTES = ["fused", "pairs", "rows"]
DTYPES = [torch.float32, torch.float64]


def softmax_variance(engine, features, weight, bias, route, **options):
    return SoftmaxVariance(weight, bias, engine.module, rows=len(features), route=route, **options)(features)


def relative_error(values, expected):
    assert values.dtype == torch.float64
    assert values.shape == expected.shape
    return float(((values - expected).abs() / expected).max())


@every(
    engine=ENGINES,
    dtype=DTYPES,
    route=ROUTES,
    shape=[(1, 2, 1), (3, 5, 7), (70, 10, 84), (33, 64, 130), (17, 11, 1), (40, 21, 300)],
)
def test_softmax_variance(engine, dtype, route, shape):
    n, d, m = shape
    features, weight, bias = torch.randn(n, m).to(dtype), torch.randn(d, m).to(dtype), torch.randn(d).to(dtype)
    expected = truth.softmax_variance(features, weight, bias)
    limit = tolerance(dtype, exact_formula_error(features, weight, bias, expected))
    assert relative_error(softmax_variance(engine, features, weight, bias, route), expected) < limit


@pytest.mark.parametrize("route", ["pairs", "rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_variance_of_many_classes(engine, dtype, route):
    features, weight, bias = (
        torch.randn(50, 40).to(dtype),
        torch.randn(700, 40).to(dtype) / 6,
        torch.randn(700).to(dtype),
    )
    expected = truth.softmax_variance(features, weight, bias)
    assert relative_error(softmax_variance(engine, features, weight, bias, route), expected) < tolerance(dtype)


@every(engine=ENGINES, dtype=DTYPES, route=ROUTES, rest=[1e-1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12])
def test_peaked_softmax(engine, dtype, route, rest):
    """At a trained minimum plain E|w|² - |Ew|² in float32 is wrong by 3 % at 1 - p_max = 1e-6, by 100 % at 1e-9."""
    d, m = 10, 32
    features, weight = torch.randn(64, m).to(dtype), (torch.randn(d, m) / 6).to(dtype)
    bias = torch.zeros(d, dtype=dtype)
    bias[3] = math.log(1 / rest) + math.log(d)
    expected = truth.softmax_variance(features, weight, bias)
    limit = tolerance(dtype, exact_formula_error(features, weight, bias, expected))
    assert limit < 3e-5  # the budget itself stays one that the plain formula would fail
    assert relative_error(softmax_variance(engine, features, weight, bias, route), expected) < limit


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_flat_softmax_with_an_outlier_row(engine, dtype, route):
    features, weight = torch.randn(20, 16).to(dtype) / 4, torch.randn(12, 16).to(dtype)
    weight[5] *= 1e4
    bias = torch.zeros(12, dtype=dtype)
    bias[5] = -200.0 - 1e4 * 16  # improbable, however long
    expected = truth.softmax_variance(features, weight, bias)
    limit = tolerance(dtype, exact_formula_error(features, weight, bias, expected))
    assert relative_error(softmax_variance(engine, features, weight, bias, route), expected) < limit


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_common_offset_of_the_rows(engine, dtype, route):
    features, weight = torch.randn(20, 16).to(dtype), torch.randn(12, 16).to(dtype)
    shifted = (weight + 128).to(dtype)
    weight = shifted - 128  # what the shift left of it
    expected = truth.softmax_variance(features, weight, torch.zeros(12))
    assert relative_error(softmax_variance(engine, features, shifted, None, route), expected) < tolerance(dtype)


@every(engine=ENGINES, dtype=DTYPES, route=ROUTES, rest=[0.3, 1e-3, 1e-9])
def test_tied_maxima_in_equal_rows(engine, dtype, route, rest):
    """Two equal rows share all but `rest` of the probability: E|w|² - |Ew|² about any centre but them cancels."""
    weight = torch.randn(6, 8).to(dtype)
    weight[4] = weight[1] = weight[1] + 5
    features, bias = torch.rand(10, 8).to(dtype) / 16, torch.full((6,), math.log(rest), dtype=dtype)
    bias[1] = bias[4] = 0
    expected = truth.softmax_variance(features, weight, bias)
    assert relative_error(softmax_variance(engine, features, weight, bias, route), expected) < tolerance(dtype)


@every(engine=ENGINES, dtype=DTYPES, route=ROUTES, scale=[1e4, -1e4])
def test_huge_logits(engine, dtype, route, scale):
    features, weight = (
        torch.tensor([[1.0], [1e-4], [2e-4]], dtype=dtype),
        torch.tensor([[1.0], [0.5]], dtype=dtype) * scale,
    )
    expected = truth.softmax_variance(features, weight, None)
    assert expected[0] == 0
    assert expected[1] > 0
    values = softmax_variance(engine, features, weight, None, route)
    assert values[0] == 0
    limit = tolerance(dtype, exact_formula_error(features[1:], weight, 0, expected[1:]))
    assert relative_error(values[1:], expected[1:]) < limit


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_class_and_equal_rows_are_flat(engine, dtype, route):
    features = torch.randn(5, 3).to(dtype)
    assert softmax_variance(engine, features, torch.randn(1, 3).to(dtype), None, route).tolist() == [0.0] * 5
    same = torch.randn(1, 3).to(dtype).expand(7, 3)
    assert softmax_variance(engine, features, same, torch.randn(7).to(dtype), route).tolist() == [0.0] * 5


@every(engine=ENGINES, dtype=DTYPES, route=ROUTES, bad=[math.nan, math.inf, -math.inf])
def test_non_finite_rows_stay_non_finite_and_alone(engine, dtype, route, bad):
    features, weight = torch.randn(40, 9).to(dtype), torch.randn(13, 9).to(dtype)
    clean = softmax_variance(engine, features, weight, None, route)
    features[7, 4] = bad
    values = softmax_variance(engine, features, weight, None, route)
    assert not values[7].isfinite()
    others = torch.arange(40) != 7
    assert torch.equal(values[others], clean[others])


@every(engine=ENGINES, route=ROUTES, layout=["strided", "transposed", "every other", "expanded", "one row"])
def test_memory_layouts(engine, route, layout):
    make = {
        "strided": lambda: torch.randn(20, 12)[:, :9],
        "transposed": lambda: torch.randn(9, 20).t(),
        "every other": lambda: torch.randn(20, 18)[:, ::2],
        "expanded": lambda: torch.randn(1, 9).expand(20, 9),
        "one row": lambda: torch.randn(9)[None],
    }
    features, weight = make[layout](), torch.randn(24, 9)[::2]
    expected = truth.softmax_variance(features, weight, None)
    assert relative_error(softmax_variance(engine, features, weight, None, route), expected) < 1e-5


@pytest.mark.parametrize("route", ROUTES)
def test_chunks_do_not_change_values(engine, route):
    features, weight, bias = torch.randn(101, 20).double(), torch.randn(9, 20).double(), torch.randn(9).double()
    whole = softmax_variance(engine, features, weight, bias, route)
    cut = softmax_variance(engine, features, weight, bias, route, memory=2 * 8 * 9 * 7)
    assert relative_error(cut, whole) < 1e-13
    assert softmax_variance(engine, features[:0], weight, bias, route).shape == (0,)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_bitwise_equal_for_equal_threads(engine, dtype, route, threads):
    features, weight = torch.randn(3000, 40).to(dtype), torch.randn(30, 40).to(dtype)
    with on_threads(threads):
        first, second = (softmax_variance(engine, features, weight, None, route) for _ in range(2))
    assert torch.equal(first, second)


def test_route_follows_the_cost():
    def route(n, d, m):
        return SoftmaxVariance(torch.zeros(d, m), None, reference, rows=n).route

    assert route(50_000, 10, 84) == "fused"
    assert route(10_000, 1000, 2048) == "pairs"
    assert route(10_000, 1000, 512) == "rows"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60), st.integers(0, 3), st.booleans())
def test_kernels_agree_with_their_twins(n, d, m, seed, double):
    """Any shape: each compiled kernel against the torch function of its name."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    limit = 1e-12 if double else 2e-5

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    features, weight, bias = normal(n, m), normal(d, m) / m**0.5, normal(d)
    logits, coefficients, norms = normal(n, d), normal(n, d).abs(), normal(d).abs()
    for isa in compiled.engines():
        with compiled.forced(isa):
            distances = compiled.pair_distances(weight)
            twin = reference.pair_distances(weight)
            torch.testing.assert_close(distances, twin, rtol=limit, atol=limit)
            assert torch.equal(distances, distances.t())
            assert distances.diagonal().abs().max() == 0
            for name, arguments in {
                "softmax_variance": (features, weight, bias, distances),
                "row_dots": (features, features),
                "sigmoid_curvature": (logits, coefficients, norms),
            }.items():
                values, expected = (getattr(module, name)(*arguments) for module in (compiled, reference))
                torch.testing.assert_close(values, expected, rtol=limit, atol=limit)
            for row_norms in (None, norms):
                ours, theirs = logits.clone(), logits.clone()
                maxima = [normal(n).sub_(1) for _ in range(2)]
                maxima[1].copy_(maxima[0])
                results = [
                    module.exponentiate(z, row_norms, 0.5, maximum)
                    for module, z, maximum in zip((compiled, reference), (ours, theirs), maxima, strict=True)
                ]
                torch.testing.assert_close(results[0], results[1], rtol=limit, atol=limit)
                torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)
                torch.testing.assert_close(*maxima, rtol=0, atol=0)


def test_choosing_a_backend():
    cpu, half = torch.device("cpu"), torch.float16
    assert choose("auto", cpu, torch.float32) is compiled
    assert choose("auto", cpu, half) is reference
    assert choose("auto", torch.device("meta"), torch.float32) is reference
    assert choose("reference", cpu, torch.float32) is reference
    with pytest.raises(BackendError, match=r"float32 and float64, the tensors are torch.float16"):
        choose("compiled", cpu, half)

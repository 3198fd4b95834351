"""The penalty by the kernel in C++ is the composed one: its value, its gradients, and how it fares with bad rows."""

import math

import pytest
import torch

import pyflatness as pf
from pyflatness.contractions.backends import compiled, reference
from pyflatness.losses import penalty
from pyflatness.losses.penalty import weighted_sum
from support.combinations import every


def problem(n, d, m, dtype=torch.float64):
    draw = torch.Generator().manual_seed(n + d + m)
    features, weight, bias = (torch.randn(s, generator=draw).to(dtype) for s in ((n, m), (d, m), (d,)))
    return features, weight, bias, torch.rand(n, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("isa", compiled.engines())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "d", "m"), [(1, 1, 1), (5, 3, 2), (16, 10, 84), (33, 7, 19), (70, 64, 40)])
def test_the_kernel_is_its_twin(n, d, m, dtype, isa):
    features, weight, bias, shares = problem(n, d, m, dtype)
    close = 1e-12 if dtype == torch.float64 else 1e-5  # of the largest entry: others are what is left of larger terms
    with compiled.forced(isa):
        for given in (bias, None):
            found = compiled.softmax_variance_gradient(features, weight, given, shares)
            in_double = [None if tensor is None else tensor.double() for tensor in (features, weight, given)]
            expected = reference.softmax_variance_gradient(*in_double, shares)
            assert found.total == pytest.approx(float(expected.total), rel=close)
            for part, truth in zip(found[1:], expected[1:], strict=True):
                torch.testing.assert_close(part.double(), truth, rtol=0, atol=close * float(truth.abs().max()) + 1e-15)


@every(wide=[False, True], with_bias=[True, False], dtype=[torch.float32, torch.float64])
def test_value_and_gradients_are_the_composed_ones(dtype, with_bias, wide):
    *given, shares = problem(37, 6, 9, dtype)
    shares[5] = 0
    if wide:  # rows of a larger matrix
        given[0] = torch.cat([given[0], given[0]], dim=1)[:, :9]
    given = [tensor.requires_grad_() for tensor in given[: 2 + with_bias]]
    bias = given[2] if with_bias else None
    tolerance = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-3}
    found, expected = penalty.fused(*given[:2], bias, shares), weighted_sum(*given[:2], bias, shares)
    torch.testing.assert_close(found, expected, **tolerance)
    gradients = [torch.autograd.grad(3 * value, given) for value in (found, expected)]
    torch.testing.assert_close(*gradients, **tolerance)


@pytest.mark.parametrize(("n", "d", "m"), [(37, 6, 9), (20, 70, 50)])
def test_gradients_by_torchs_operations_are_the_composed_ones(monkeypatch, n, d, m):
    """As on CUDA, where they come together for more classes than a kernel on the CPU has."""
    monkeypatch.setattr(penalty.backends, "choose", lambda *_: reference)
    *given, shares = problem(n, d, m)
    shares[5] = 0
    given = [tensor.requires_grad_() for tensor in given]
    found, expected = penalty.fused(*given, shares), weighted_sum(*given, shares)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(3 * value, given) for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


def test_the_public_call_takes_the_kernel(monkeypatch):
    calls, kernel = [], compiled.softmax_variance_gradient
    monkeypatch.setattr(compiled, "softmax_variance_gradient", lambda *given: calls.append(1) or kernel(*given))
    for d in (1, 64, 65):
        features, weight, bias, _ = problem(3, d, 2)
        pf.flatness_penalty(features, weight, bias)
    assert len(calls) == 2


def test_rows_that_add_nothing_may_hold_nan():
    features, weight, _, shares = problem(9, 4, 3)
    shares[2], features[2] = 0, torch.nan
    given = [features.requires_grad_(), weight.requires_grad_()]
    value = penalty.fused(*given, None, shares)
    gradients = torch.autograd.grad(value, given)
    assert math.isfinite(value.item())
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][2].any()


def test_a_second_backward_pass_over_a_kept_graph():
    features, weight, bias, _ = problem(9, 4, 3)
    weight.requires_grad_()
    value = pf.flatness_penalty(features, weight, bias)
    (first,) = torch.autograd.grad(value, weight, retain_graph=True)
    (second,) = torch.autograd.grad(2 * value, weight)
    torch.testing.assert_close(2 * first, second)


def test_any_number_of_threads_gives_the_same_bits():
    features, weight, bias, shares = problem(9000, 10, 40, torch.float32)
    before, totals = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            totals.add(compiled.softmax_variance_gradient(features, weight, bias, shares).total)
    finally:
        torch.set_num_threads(before)
    assert len(totals) == 1

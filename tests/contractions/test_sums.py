"""Values do not rest on how a matrix library adds thousands of products of float32.

Each case has an inner dimension of far more terms than :data:`.precision.CHAIN`. They are of about one size, so that
in one chain their rounding adds up. Truth is the same call in float64.
"""

from functools import partial

import pytest
import torch

import pyflatness as pf
from pyflatness.contractions import (
    DenseContraction,
    Geometry,
    LayerContraction,
    SoftmaxVariance,
    TokenContraction,
    product,
)
from pyflatness.contractions.backends import compiled, reference
from pyflatness.measures import head_sums
from pyflatness.model.kinds.linear import Linear
from support.summation import ORDERS

MANY, MEMORY = 30_000, 2**24
QUANTITIES = "squares", "gram_weighted", "weighted", "by_row", "by_column"


def _alike(*shape):
    """Return numbers of about one size."""
    return 1.1 + 0.001 * torch.rand(*shape, dtype=torch.float64)


def _layer(d, m, places, route, quantities, kernel=1, hold=False):
    """Return a case of a layer's weight (d, m), at so many positions."""
    weight, geometry = _alike(1, d, m * kernel**2), Geometry(kernel=(1, kernel, kernel))
    side = places if kernel == 1 else round(places**0.5)
    inputs = _alike(2, m, 1, side + kernel - 1, 1 if kernel == 1 else side + kernel - 1)
    cotangent, coefficients = _alike(2, d, 1, side, 1 if kernel == 1 else side), _alike(2)

    def values(dtype, backend):
        layer = LayerContraction(weight.to(dtype), geometry, backend, quantities, memory=MEMORY, route=route)
        contraction = layer.at([inputs.to(dtype)], 2, MEMORY if hold else 0)
        if hold and contraction.stack_size > 1:
            contraction.hold([cotangent.to(dtype)])
            found = contraction.hold([cotangent.to(dtype)])
        else:
            found = contraction.of([cotangent.to(dtype)])
        if d == MANY:
            return [found.values]
        return [found.values, layer.traces([inputs.to(dtype)], [cotangent.to(dtype)], coefficients)]

    return values


def _tokens(d):
    weight, tokens, cotangent = _alike(1, d, 5), torch.arange(6).view(2, 3) % 5, _alike(2, 3, d)

    def values(dtype, backend):
        return [
            TokenContraction(weight.to(dtype), backend, ["gram_weighted"]).at([tokens], 1).of([cotangent.to(dtype)])[0]
        ]

    return values


class _Identity:
    """Stand in for a convolution as one dense matrix."""

    d = m = MANY
    device = torch.device("cpu")

    def carried(self, delta):
        return delta

    def applied(self, inputs, power):
        return inputs


def _dense():
    inputs, cotangent = _alike(2, 1, MANY), _alike(2, 1, MANY)

    def values(dtype, backend):
        return [
            DenseContraction(_Identity(), backend, QUANTITIES[:2])
            .at([inputs.to(dtype)], 1)
            .of([cotangent.to(dtype)])[0]
        ]

    return values


def _head(route, d, m):
    features, weight = _alike(12, m), _alike(d, m) + torch.randn(d, m, dtype=torch.float64) / m

    def values(dtype, backend):
        head = SoftmaxVariance(weight.to(dtype), None, backend, rows=12, memory=MEMORY, route=route)
        return [head(features.to(dtype))]

    return values


def _split_head():
    features, weight = _alike(12, 4), _alike(50_257, 4)
    return lambda dtype, backend: head_sums._moments(features.to(dtype), weight.to(dtype), None, 2**26)


def _penalty(n, d, m):
    features, weight = _alike(n, m), _alike(d, m) + torch.randn(d, m, dtype=torch.float64)

    def values(dtype, backend):
        given = [features.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        value = pf.flatness_penalty(*given)
        return [value.detach(), torch.autograd.grad(value, given)[1].norm()]

    return values


def _carried():
    delta, weight = _alike(2, MANY), _alike(MANY, 3)
    return lambda dtype, backend: [Linear().carried(delta.to(dtype), (3,), weight.to(dtype))]


PLAIN = QUANTITIES[:2]
CASES = {
    "one position, many features": partial(_layer, 3, MANY, 1, "gram", QUANTITIES),
    "one position, many outputs": partial(_layer, MANY, 3, 1, "gram", QUANTITIES),
    "many positions by their gradients": partial(_layer, 3, 4, MANY, "direct", QUANTITIES),
    "many positions of a kernel": partial(_layer, 3, 2, 170**2, "direct", PLAIN, kernel=3),
    "many features by Gram matrices": partial(_layer, 3, MANY, 4, "gram", PLAIN),
    "many outputs by Gram matrices": partial(_layer, MANY, 3, 4, "gram", PLAIN),
    "many outputs by gradients": partial(_layer, MANY, 3, 4, "direct", QUANTITIES),
    "many positions, several cotangents": partial(_layer, 3, 4, MANY, "direct", PLAIN, hold=True),
    "many features, several cotangents": partial(_layer, 3, MANY, 4, "gram", PLAIN, hold=True),
    "tokens": partial(_tokens, MANY),
    "dense": _dense,
    "head by rows": partial(_head, "rows", 50_257, 4),
    "head of many features": partial(_head, "pairs", 10, MANY),
    "fused head of many features": partial(_head, "fused", 10, MANY),
    "head over ranks": _split_head,
    "penalty of many classes": partial(_penalty, 20, MANY, 4),
    "penalty of many rows": partial(_penalty, MANY, 3, 4),
    "carried cotangent": _carried,
}


@pytest.mark.parametrize("name", CASES)
def test_values_do_not_rest_on_the_order_of_sums(name):
    case = CASES[name]()
    for backend in (reference, compiled):
        expected = case(torch.float64, backend)
        for order in ORDERS.values():
            with order():
                found = case(torch.float32, backend)
            for one, truth in zip(found, expected, strict=True):
                torch.testing.assert_close(one.double(), truth.double(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("shapes", [((3, MANY), (MANY, 2)), ((2, 3, MANY), (2, MANY, 2)), ((3, MANY), (MANY,))])
def test_a_product(shapes):
    a, b = (_alike(*shape) for shape in shapes)
    expected = a @ b
    for order in ORDERS.values():
        with order():
            torch.testing.assert_close(product(a.float(), b.float()).double(), expected, rtol=1e-5, atol=0.0)
    if a.ndim == b.ndim == 2:
        out, bias = torch.empty(3, 2), torch.ones(2)
        assert product(a.float(), b.float(), bias, out=out) is out
        torch.testing.assert_close(out.double(), expected + 1, rtol=1e-5, atol=0.0)

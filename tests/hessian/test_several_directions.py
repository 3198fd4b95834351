"""Operations whose double backward is wrong for several directions at once: they go one after the other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import truth


@torch.library.custom_op("pyflatness_tests::times", mutates_args=())
def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x y; the rule for several of them gives the last one the image of the first."""
    return x * y


@times.register_vmap
def _several(info, in_dims, x, y):
    first, second = (
        part.unsqueeze(0) if dim is None else part.movedim(dim, 0) for part, dim in zip((x, y), in_dims, strict=True)
    )
    found = first * second
    return torch.cat([found[:-1], found[:1]]), 0


def _back(ctx, gradient):
    x, y = ctx.saved_tensors
    return times(gradient, y), times(gradient, x)


times.register_autograd(_back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Behind(nn.Module):
    """A layer, and an operation behind it."""

    def __init__(self, operation):
        super().__init__()
        self.layer, self._operation = nn.Linear(5, 4), operation
        self.centres = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self._operation(self.layer(x), self.centres)


def distances(h, centres):
    return -torch.cdist(h, centres)


def distances_by_products(h, centres):
    return -torch.cdist(h, centres, compute_mode="use_mm_for_euclid_dist")


def squares(h, centres):
    return times(h.tanh(), h) @ centres


def has_second_derivative(operation):
    h = torch.ones(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(operation(h, torch.randn(4, 4)).sum(), h, create_graph=True)
    try:
        torch.autograd.grad(gradient.sum(), h)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("operation", [distances, distances_by_products, squares])
def test_values_are_those_of_one_direction_at_a_time(operation):
    if not has_second_derivative(operation):
        pytest.skip("this torch has no second derivative of it")
    torch.manual_seed(0)
    model, loss = Behind(operation).double(), nn.CrossEntropyLoss()
    data = torch.randn(20, 5, dtype=torch.float64), torch.randint(4, (20,))
    hessian = truth.layer_hessian(model, F.cross_entropy, *data, "layer")
    flatness = truth.relative_flatness_of(hessian, truth.weight_of(model, "layer"))

    alone = pf.relative_flatness(model, loss, data, "layer", curvature="hessian")
    assert alone.value == pytest.approx(flatness, rel=1e-9)
    swept = pf.measure(model, loss, data, layers="layer", measures="sweep", curvature="hessian")
    assert swept["layer", "relative_flatness"].value == pytest.approx(flatness, rel=1e-9)
    assert swept["layer", "trace"].value == pytest.approx(truth.trace_of(hessian), rel=1e-9)
    low, high = pf.relative_flatness(model, loss, data, "layer", curvature="hessian", probes=64).interval(0.999)
    assert low < flatness < high
    assert high - low < abs(flatness)

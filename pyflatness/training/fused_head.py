"""Compute the penalty of a cross-entropy head with its gradients: on the CPU by one pass of a kernel over the rows.

The penalty is a scalar, so that its gradients are known up to one factor when it is. With the kernel's slopes
G_is = a_i |φ_i|² ∂v_i/∂z_is of v_i = var_{p_i}(w), for shares a_i,

    ∂κ/∂φ_i = Σ_s G_is w_s + 2 a_i v_i φ_i        ∂κ/∂b = Σ_i G_i
    ∂κ/∂w_s = Σ_i G_is φ_i + 2 Σ_t A_st (w_s - w_t)        A = Σ_i a_i |φ_i|² p_i p_iᵀ

These are two products of n d m multiply-adds beside that of the logits, and n d² for A. Second derivatives are those of
:mod:`.softmax_variance`, composed of torch's operations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from ..contractions import FUSED_OUTPUTS, backends, compiled, full_precision, product
from ..contractions.centre import centre
from .operators import one_by_one
from .softmax_variance import apart, takes_pairs, weighted_sum

_Gradients = tuple[Tensor, ...]
_Pullback = Callable[[Any], _Gradients]


def fits(weight: Tensor) -> bool:
    """Return whether both come together for heads of this weight, float32 or float64."""
    if weight.is_cuda:  # by fewer of torch's operations, each of which takes the host its time
        return takes_pairs(*weight.shape)
    return compiled.INSTALLED and weight.device.type == "cpu" and len(weight) <= FUSED_OUTPUTS


def penalty(features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor) -> Tensor:
    """Return what :func:`.softmax_variance.weighted_sum` does."""
    given = (features, weight) if bias is None else (features, weight, bias)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    value: Tensor = _Penalty.apply(features, weight, bias, shares, wanted)[0]
    return value


@torch.library.custom_op("pyflatness::head_penalty", mutates_args=())
def _operator(
    features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with full_precision(features):
        counted = (shares != 0).unsqueeze(1)
        whole = features.device.type == "cpu" and bool(counted.all())  # for a GPU the host would wait
        rows = features if whole else torch.where(counted, features, 0.0)
        backend = backends.choose("auto", features.device, features.dtype, "heads")
        found = backend.softmax_variance_gradient(rows, weight, bias, shares)
        value = torch.as_tensor(found.total, dtype=features.dtype, device=features.device)
        if not wanted:
            return value, value.new_empty(0), value.new_empty(0), value.new_empty(0)
        centred, slopes, (twice, scale) = weight - centre(weight), found.slopes, found.factors
        of_features = product(slopes.t(), centred).addcmul_(rows, twice.unsqueeze(1))
        pairs = product(found.probabilities * scale, found.probabilities.t())
        of_weight = product(slopes, rows, apart(pairs, centred))
        return value, of_features, of_weight, slopes.sum(dim=1) if bias is not None else value.new_empty(0)


@_operator.register_fake
def _(features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor, wanted: bool) -> _Gradients:
    made = [
        features.new_empty(tensor.shape if wanted and tensor is not None else 0) for tensor in (features, weight, bias)
    ]
    return features.new_empty(()), *made


_operator.register_vmap(one_by_one(_operator))


class _Penalty(torch.autograd.Function):
    """Give the penalty, and its gradients as outputs that are kept for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor, wanted: bool) -> _Gradients:
        found: _Gradients = _operator(features, weight, bias, shares, wanted)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4], *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        features, weight, bias, shares, *found = ctx.saved_tensors
        if found[0].shape != features.shape:  # they were not seen to be wanted, as under some transforms
            made = _gradients(shares, gradient, features, weight, bias)
        elif torch.compiler.is_compiling() or not torch.is_grad_enabled():  # nothing is differentiated again
            made = tuple(gradient * one for one in found)
        else:
            made = _Scaled.apply(gradient, features, weight, bias, shares, *found)
        return made[0], made[1], None if bias is None else made[2], None, None


class _Scaled(torch.autograd.Function):
    """Multiply the penalty's gradients by that of its value; the derivatives are those of all it depends on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        gradient: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor, *found: Tensor
    ) -> _Gradients:
        return tuple(gradient * one for one in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, features, weight, bias, shares = ctx.saved_tensors
        given = (gradient, features, weight) if bias is None else (gradient, features, weight, bias)
        pull: _Pullback = vjp(partial(_gradients, shares), *given)[1]
        found = pull(gradients[: len(given) - 1])
        return *found, *([None] * (8 - len(found)))


def _gradients(shares: Tensor, gradient: Tensor, *given: Tensor | None) -> _Gradients:
    """Return the gradients of the composed penalty in features, weight and bias."""
    here = [tensor for tensor in given if tensor is not None]

    def composed(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return weighted_sum(features, weight, bias, shares)

    with full_precision(shares):
        pull: _Pullback = vjp(composed, *here)[1]
        return pull(gradient)

"""Compute the curvature of cross-entropy at a head, |φ|² var_p(w), as a scalar that torch can differentiate.

:mod:`pyflatness.contractions.softmax` explains the formulas. In :func:`weighted_sum` they are composed of torch's
operations, for any device and derivative:

- up to 3 m / 2 outputs: var_p(w) = ½ pᵀ D p with D_st = |w_s - w_t|², without cancellation;
- with more outputs: q (var_r(w) + p_t |E_r w - w_t|²), with t the most probable class, q = 1 - p_t and r the
  probabilities of the others.

In :func:`fused` one pass of a kernel over the rows gives the value and its gradients, which the backward pass only
multiplies by a number. With the kernel's gradients in the logits, G_is = a_i |φ_i|² ∂v_i/∂z_is for v_i = var_{p_i}(w)
and weights a_i of the rows,

    ∂κ/∂φ_i = Σ_s G_is w_s + 2 a_i v_i φ_i        ∂κ/∂b = Σ_i G_i
    ∂κ/∂w_s = Σ_i G_is φ_i + 2 Σ_t A_st (w_s - w_t)        A = Σ_i a_i |φ_i|² p_i p_iᵀ

These take two products of n d m multiply-adds in addition to the logits', and n d² for A. Second derivatives are those
of :func:`weighted_sum`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from ..contractions import backends, full_precision, product
from ..contractions.reference import centre, takes_pairs

_Gradients = tuple[Tensor, ...]
_Pullback = Callable[[Any], _Gradients]


def weighted_sum(features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Return ``Σ_i counts_i |φ_i|² var_{p_i}(w)``; rows with count 0 add nothing, even with NaN in them."""
    rows = torch.where((counts != 0).unsqueeze(1), features, 0.0)
    return (softmax_variance(rows, weight, bias).double() * counts).sum().to(features.dtype)


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``|φ_i|² var_{p_i}(w)``, (n,), for features (n, m), weight (d, m) and bias (d,), all of one dtype."""
    weight = weight - centre(weight.detach())
    logits = product(features, weight.t())
    if bias is not None:  # minus its median, which changes no probability and is -inf if most classes are masked
        logits = logits + (bias - bias.detach().median().nan_to_num(0.0, 0.0, 0.0))
    of_rows = _by_pairs if takes_pairs(*weight.shape) else _by_rows
    return features.square().sum(dim=1) * of_rows(logits, weight)


def _by_pairs(logits: Tensor, weight: Tensor) -> Tensor:
    p = torch.softmax(logits, dim=1)
    distances: Tensor = _PairDistances.apply(weight)
    return (p * product(p, distances)).sum(dim=1) / 2


def _by_rows(logits: Tensor, weight: Tensor) -> Tensor:
    top, lowest = logits.detach().argmax(dim=1, keepdim=True), torch.finfo(logits.dtype).min
    others = logits.scatter(1, top, lowest).clamp_min(lowest)  # the softmax of -inf alone, all masked, is NaN
    odds = torch.logsumexp(others, dim=1) - logits.gather(1, top).squeeze(1)
    r = torch.softmax(others, dim=1)
    mean = product(r, weight)
    within = product(r, weight.square().sum(dim=1)) - mean.square().sum(dim=1)
    apart = (mean - weight[top.squeeze(1)]).square().sum(dim=1)
    return torch.sigmoid(odds) * (within + torch.sigmoid(-odds) * apart)


class _PairDistances(torch.autograd.Function):
    """Differentiate ``|w_s - w_t|²`` (d, d) by differences of rows; torch's ``cdist`` has no second derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return backends.reference.pair_distances(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return apart(gradient + gradient.t(), weight)


def apart(pairs: Tensor, weight: Tensor) -> Tensor:
    """Return ``2 Σ_t pairs[s, t] (w_s - w_t)``, (d, m); ``pairs`` (d, d) is symmetric."""
    others = pairs * (1 - torch.eye(len(pairs), dtype=pairs.dtype, device=pairs.device))
    return 2 * (others.sum(dim=1, keepdim=True) * weight - product(others, weight))


def fuses(weight: Tensor) -> bool:
    """Return whether :func:`fused` is faster for a head with this weight, float32 or float64."""
    return backends.kernels(weight.device).fuses_gradient(weight)


def fused(features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Return the value of :func:`weighted_sum`, computed together with its gradients if they are needed."""
    given = (features, weight) if bias is None else (features, weight, bias)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    value: Tensor = _Penalty.apply(features, weight, bias, counts, wanted)[0]
    return value


def one_by_one(operator: Callable[..., Sequence[Tensor]]) -> Callable[..., Any]:
    """Return the rule of an operator for ``torch.func.vmap``: a call for each member of the batch."""

    def rule(info: Any, in_dims: Sequence[int | None], *given: Any) -> tuple[Any, Any]:
        def one(k: int) -> Sequence[Tensor]:
            taken = zip(given, in_dims, strict=True)
            return operator(*(value if dim is None else value.select(dim, k) for value, dim in taken))

        found = [torch.stack(parts) for parts in zip(*map(one, range(info.batch_size)), strict=True)]
        return tuple(found), (0,) * len(found)

    return rule


@torch.library.custom_op("pyflatness::head_penalty", mutates_args=())
def _operator(
    features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with full_precision(features):
        counted = (counts != 0).unsqueeze(1)
        whole = features.device.type == "cpu" and bool(counted.all())  # on a GPU the host would have to wait
        rows = features if whole else torch.where(counted, features, 0.0)
        backend = backends.choose("auto", features.device, features.dtype)
        found = backend.softmax_variance_gradient(rows, weight, bias, counts)
        value = torch.as_tensor(found.total, dtype=features.dtype, device=features.device)
        if not wanted:
            return value, value.new_empty(0), value.new_empty(0), value.new_empty(0)
        centred, of_logits, (twice, scale) = weight - centre(weight), found.of_logits, found.factors
        of_features = product(of_logits.t(), centred).addcmul_(rows, twice.unsqueeze(1))
        pairs = product(found.probabilities * scale, found.probabilities.t())
        of_weight = product(of_logits, rows, apart(pairs, centred))
        return value, of_features, of_weight, of_logits.sum(dim=1) if bias is not None else value.new_empty(0)


@_operator.register_fake
def _(features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, wanted: bool) -> _Gradients:
    made = [
        features.new_empty(tensor.shape if wanted and tensor is not None else 0) for tensor in (features, weight, bias)
    ]
    return features.new_empty(()), *made


_operator.register_vmap(one_by_one(_operator))


class _Penalty(torch.autograd.Function):
    """Return the penalty, and its gradients as further outputs, which are kept for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, wanted: bool) -> _Gradients:
        found: _Gradients = _operator(features, weight, bias, counts, wanted)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4], *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        features, weight, bias, counts, *found = ctx.saved_tensors
        if found[0].shape != features.shape:  # some transforms hide that gradients are needed
            made = _gradients(counts, gradient, features, weight, bias)
        elif torch.compiler.is_compiling() or not torch.is_grad_enabled():  # no second derivatives
            made = tuple(gradient * one for one in found)
        else:
            made = _Scaled.apply(gradient, features, weight, bias, counts, *found)
        return made[0], made[1], None if bias is None else made[2], None, None


class _Scaled(torch.autograd.Function):
    """Multiply the penalty's gradients by that of its value, with derivatives in all tensors they depend on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        gradient: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, *found: Tensor
    ) -> _Gradients:
        return tuple(gradient * one for one in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, features, weight, bias, counts = ctx.saved_tensors
        given = (gradient, features, weight) if bias is None else (gradient, features, weight, bias)
        pull: _Pullback = vjp(partial(_gradients, counts), *given)[1]
        found = pull(gradients[: len(given) - 1])
        return *found, *([None] * (8 - len(found)))


def _gradients(counts: Tensor, gradient: Tensor, *given: Tensor | None) -> _Gradients:
    """Return the gradients of the composed penalty in features, weight and bias."""
    here = [tensor for tensor in given if tensor is not None]

    def composed(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return weighted_sum(features, weight, bias, counts)

    with full_precision(counts):
        pull: _Pullback = vjp(composed, *here)[1]
        return pull(gradient)

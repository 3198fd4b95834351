"""Give the relative flatness of a head as a term of a training loss: a scalar that torch differentiates.

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')        (Petzka et al. 2021, Definition 3)

At a head it has a formula for the losses below, without a derivative. The derivatives of this formula lead the features
and the weight to where the loss is flatter.
"""

from typing import Any

import torch
from torch import Tensor

from .. import losses
from ..contractions import full_precision, promoted
from ..errors import InputError, NotYetError
from ..losses import penalty_terms
from ..measures.tensor_head import check_head
from ..messages import check_tensor
from ..model.spread import is_spread
from ..options import Options
from ..passes.normalize import differentiable_scale


def flatness_penalty(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    loss: Any = "cross_entropy",
    normalize: str | None = None,
) -> Tensor:
    """Return the relative flatness κ of a linear head as a scalar that is differentiable, to be added to a loss.

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')   (Petzka et al. 2021, Definition 3), where E is the loss over this
    batch. Its value is that of :func:`pyflatness.head_flatness`: for cross-entropy κ = mean_i |φ_i|² var_{p_i}(w), the
    variance of the rows of w under the softmax p_i of row i; for squared error κ = 2/d |w|² mean_i |φ_i|²; for binary
    cross-entropy the mean over i and s of |φ_i|² |w_s|² σ'(z_is), with the loss's weights.

    It works inside of ``torch.compile``, ``torch.func`` (in reverse mode) and autocast: half precision is computed in
    float32. Each process of ``DistributedDataParallel`` has the κ of its own batch; gradients are averaged as a loss's.

    Args:
        features: φ, (n, m) or (n, …, m), of any floating-point dtype, with the graph of the network in front of the
            head; the positions between are loss terms of their own.
        weight: w, (d, m), of the features' dtype and device (half precision may stand beside float32).
        bias: (d,) or None.
        targets: what ``loss`` takes, with classes last; they say which rows are ignored and how much the others count.
            None where the curvature does not depend on them. No gradient flows to them.
        loss: ``"cross_entropy"``, ``"mse_loss"``, ``"binary_cross_entropy_with_logits"``, the ``F`` function, or an
            ``nn`` loss module with its options (class weights, smoothing, ``ignore_index``, reduction).
        normalize: ``"std"`` for the measure of Theorem 4, of φ_j / σ_j and w_j σ_j with the batch's deviations σ_j,
            which are differentiated too.

    Returns:
        κ, a tensor without dimensions in the features' dtype, of half precision in float32. NaN where features, weight
        or bias have NaN, and then its gradients are NaN too; rows that are ignored are not looked at. Where all
        rows are ignored it is what torch's losses are: NaN for the reduction "mean", 0 for "sum", with gradients of 0.

    Raises:
        InputError: shapes, dtypes, devices, targets or options that do not fit; the message says what was received.
        NotYetError: a loss that has no formula at a head; a ``DTensor``.

    Example:
        >>> import torch, pyflatness as pf
        >>> w = torch.tensor([[1.0, 0.0], [0.0, 2.0]], requires_grad=True)
        >>> phi = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> penalty = pf.flatness_penalty(phi, w)
        >>> round(penalty.item(), 5)
        1.47459
        >>> penalty.backward()
        >>> w.grad.shape
        torch.Size([2, 2])
    """
    Options(normalize=normalize)
    resolved = losses.known(loss, "formula at a head")
    if isinstance(bias, Tensor) and not bias.is_floating_point():
        raise InputError(f"bias: got {bias.dtype}; the order of arguments is (features, weight, bias, targets)")
    check_head(features, weight, bias)
    for what, tensor in (("features", features), ("weight", weight), ("bias", bias)):
        if tensor is not None and is_spread(tensor):
            raise NotYetError(
                f"{what}: it is spread over ranks (a DTensor, as of FSDP2 or tensor parallelism); a penalty takes a "
                "head that every rank has as a whole, as under DistributedDataParallel, or between forward() and "
                "backward() after fully_shard(head, reshard_after_forward=False); pf.FlatnessPenalty gathers it itself"
            )
    if features.numel() == 0:
        raise InputError(f"features: there are no samples in {tuple(features.shape)}")
    if targets is not None:
        targets = check_tensor("targets", targets).detach().to(features.device)
    with full_precision(features):
        shares, coefficients, added = penalty_terms.of(resolved, features, len(weight), targets)
        rows, weight = promoted(features.flatten(0, -2)), promoted(weight)
        bias = None if bias is None else promoted(bias)
        if normalize:
            eps = torch.finfo(features.dtype).eps
            scale = differentiable_scale(rows, resolved.used(targets), eps).to(rows.dtype)
            dropped = scale == 0  # where a quotient has no derivative, even of entries that are not chosen
            rows, weight = torch.where(dropped, 0.0, rows / torch.where(dropped, 1.0, scale)), weight * scale
        return resolved.penalty(rows, weight, bias, shares, coefficients) + added

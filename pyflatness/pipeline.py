"""From tensors, or a model and its data, to a number: :func:`head_flatness` and :func:`relative_flatness`."""

from typing import Any

import torch
from torch import Tensor, nn

from . import capture, head, losses
from .contractions.softmax import DEFAULT_MEMORY
from .data import Batches
from .errors import InputError, NotYetError
from .measures import relative_flatness as measure
from .report import Estimate


@capture.eager
def head_flatness(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    loss: Any = "cross_entropy",
    normalize: str | None = None,
    per_sample: bool = False,
    nan_policy: str = "raise",
    reduction: str | None = None,
    backend: str = "auto",
) -> Estimate:
    """Relative flatness of a linear head, from its input features: exact, no derivative taken.

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')   (Petzka et al. 2021, Definition 3); for cross-entropy
    κ = mean_i |φ_i|² var_{p_i}(w), the variance of the rows of w under the softmax p_i of row i.

    Args:
        features: φ, (n, m) or (n, …, m), of any floating-point dtype; dimension 0 counts samples, those between are
            positions. Half precision is computed in float32.
        weight: w, (d, m), of the features' dtype and device (half precision may stand beside float32).
        bias: (d,) or None.
        targets: what ``loss`` takes, with classes last: class indices (n, …), or values (n, …, d). None where the
            curvature does not depend on them (cross-entropy without class weights, squared error, binary
            cross-entropy without ``pos_weight``).
        loss: ``"cross_entropy"``, ``"mse_loss"``, ``"binary_cross_entropy_with_logits"``, the ``F`` function, an ``nn``
            loss module with its options, or a callable (outputs, targets) -> scalar.
        normalize: ``"std"`` for the measure of Theorem 4, invariant to every rescaling of neurons.
        per_sample: also return each sample's value.
        nan_policy: ``"raise"``, ``"propagate"`` or ``"omit"`` samples with NaN or infinity.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        backend: ``"auto"``, ``"compiled"`` or ``"reference"``.

    Returns:
        The value in units of the loss, exact up to rounding.

    Raises:
        InputError: shapes, dtypes, devices, targets or options that do not fit; the message says what was received.
        NonFiniteError: NaN or infinity, under ``nan_policy="raise"``.
        BackendError: a backend that does not exist or cannot run here.

    Example:
        >>> import torch, pyflatness as pf
        >>> w = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> phi = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> pf.head_flatness(phi, w)
        Estimate(1.47459: exact, method head, 2 samples, ... backend)
    """
    options = measure.Options(normalize, per_sample, nan_policy, backend, DEFAULT_MEMORY)
    resolved = losses.resolve(loss, reduction)
    with torch.inference_mode(False), torch.no_grad():
        return measure.at_head(head.from_tensors(features, weight, bias, targets, resolved), resolved, options)


@capture.eager
def relative_flatness(
    model: nn.Module,
    loss: Any,
    data: Any,
    layer: str | nn.Module | None = None,
    *,
    curvature: str = "auto",
    probes: int | str | None = None,
    target_stderr: float | None = None,
    conv: str = "filter",
    normalize: str | None = None,
    per_sample: bool = False,
    backend: str = "auto",
    nan_policy: str = "raise",
    reduction: str | None = None,
    forward: capture.Forward | None = None,
    memory: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Estimate:
    """Relative flatness κ of one layer of a model, with the loss over all of ``data`` as one batch.

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')   (Petzka et al. 2021, Definition 3), for w the (d, m) weight matrix
    of ``layer``. In this version the layer must be the model's head: a Linear or 1×1 convolution whose output is the
    model's output, established on every batch. There the value costs one forward pass and is exact.

    Args:
        model: called as ``model(inputs)``, in eval mode; left as it was found. Not for use by several threads at once.
        loss: the loss the model was trained with: an ``nn`` module, ``F`` function, name or callable
            (outputs, targets) -> scalar. Options (class weights, smoothing, ``ignore_index``, …) and reduction count.
        data: a tuple of tensors (inputs, targets), or an iterable of batches such as a DataLoader. How it is cut into
            batches does not change the value. Moved to the model's device.
        layer: qualified name, glob, ``re:…``, ``type:…`` or module; None takes the last Linear that ran.
        curvature: ``"auto"``, ``"ggn"`` or ``"hessian"``; at a head all are one number.
        probes: passes for a sampled value; a head needs none and stays exact.
        target_stderr: standard error to sample down to; a head's is zero.
        conv: ``"filter"``: rows of a convolution are its filters.
        normalize: ``"std"``: the measure of Theorem 4, invariant to every rescaling of neurons; reads the data twice.
        per_sample: also return each sample's value, (n,), whose mean is the value.
        backend: ``"auto"``, ``"compiled"`` or ``"reference"``.
        nan_policy: what to do about NaN or infinity in a sample's features or logits: ``"raise"``, ``"propagate"``
            (its own value, and so the mean, becomes NaN) or ``"omit"`` (left out of the data set, and counted).
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        forward: ``(model, batch) -> (outputs, targets)`` for models and batches that are called otherwise.
        memory: bytes for the working buffers of the contraction; 24 MiB unless given.
        seed: of sampled values; a head draws nothing.
        progress: show a bar; None: on a terminal.

    Returns:
        The value in units of the loss, its method and backend, and how many samples it is over.

    Raises:
        InputError: a layer, batch, target, loss, mode or option that does not fit; the message names it.
        NotYetError: a layer that is not the head, or ``conv="affine"``.
        NonFiniteError: NaN or infinity, under ``nan_policy="raise"``.
        BackendError: a backend that does not exist or cannot run here.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> x, y = torch.randn(100, 4), torch.randint(3, (100,))
        >>> pf.relative_flatness(model, torch.nn.CrossEntropyLoss(), (x, y))
        Estimate(0.399134: exact, method head, layer '2', 100 samples, ... backend)
    """
    if curvature not in ("auto", "ggn", "hessian"):
        raise InputError(f"curvature={curvature!r} does not exist; choose 'auto', 'ggn' or 'hessian'")
    if conv not in ("filter", "affine"):
        raise InputError(f"conv={conv!r} does not exist; choose 'filter' or 'affine'")
    if conv == "affine":
        raise NotYetError("conv='affine' is not there yet; conv='filter' is")
    options = measure.Options(normalize, per_sample, nan_policy, backend, DEFAULT_MEMORY if memory is None else memory)
    resolved = losses.resolve(loss, reduction)
    with capture.observing(model) as module:
        batches = Batches(data, capture.device(module), passes=1 if normalize is None else 2, shown=progress)
        return measure.at_head(head.Head(module, layer, resolved, batches, forward), resolved, options)

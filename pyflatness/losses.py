"""Losses at a head: the curvature that each puts on a row of outputs, and the user's own reduction.

A row is one loss term: a sample's d outputs, or those of one of its positions. The empirical risk is

    E = Σ_i scale_i ℓ_i / Σ_i mass_i   (reduction "mean")        E = Σ_i scale_i ℓ_i   (reduction "sum")

over *all* rows of the data set, whatever the batches, and a loss says for its rows what scale and mass are, and what
⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩ |φ_i|² is, its part of relative flatness (Petzka et al. 2021, Definition 3) at a head.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .contractions import SoftmaxVariance, promoted, squared_norms
from .errors import InputError, NotYetError

Reduction = str


@dataclass
class Terms:
    """Rows of a batch as the loss sees them.

    Attributes:
        scale: (rows,) float64; 0 for a row that adds nothing.
        mass: (rows,) float64, the row's part of the divisor of a mean.
        extra: what the curvature needs besides the features: coefficients or targets, rows first.
        used: (rows,), False for a row that the loss ignores (one of class weight 0 is used); None where all are.
    """

    scale: Tensor
    mass: Tensor
    extra: Tensor | None = None
    used: Tensor | None = None


Curvature = Callable[[Tensor, Terms], Tensor]
"""(features (rows, m), terms) -> (rows,) float64: |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩."""


class Loss(Protocol):
    """What the measures ask of a loss."""

    reduction: Reduction

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """Rows of ``outputs`` (classes in ``class_dim``) and their targets, checked; rows in row-major order."""

    def curvature(self, weight: Tensor, bias: Tensor | None, backend: ModuleType, rows: int, memory: int) -> Curvature:
        """The curvature for one weight matrix, prepared once; about ``rows`` rows will come."""


def resolve(loss: Any, reduction: Reduction | None = None) -> Loss:
    """The loss behind an ``nn`` module, an ``F`` function (or a ``functools.partial`` of one), a name or a callable.

    A callable is a mean over samples unless ``reduction="sum"``.

    Raises:
        InputError: not a loss, or a reduction that is neither mean nor sum.
    """
    if isinstance(loss, str):
        if loss not in _NAMES:
            raise InputError(f"loss={loss!r} is not known; choose {', '.join(_NAMES)}, or pass a loss object")
        loss = _NAMES[loss]
    if isinstance(loss, functools.partial) and isinstance(loss.func, Hashable) and loss.func in _FUNCTIONS:
        loss = _FUNCTIONS[loss.func](*loss.args, **loss.keywords)
    elif isinstance(loss, Hashable) and not isinstance(loss, nn.Module) and loss in _FUNCTIONS:
        loss = _default(loss)
    if not callable(loss):
        raise InputError(f"loss: an nn loss module, an F function, a name or a callable is wanted, got {loss!r}")
    how = reduction or getattr(loss, "reduction", "mean")
    if how not in ("mean", "sum"):
        raise InputError(f"loss: reduction {how!r} gives no number to differentiate; pass reduction='mean' or 'sum'")
    if type(loss) is nn.CrossEntropyLoss:
        return CrossEntropy(loss.weight, loss.ignore_index, loss.label_smoothing, how)
    if type(loss) is nn.MSELoss:
        return SquaredError(how)
    if type(loss) is nn.BCEWithLogitsLoss:
        return BinaryCrossEntropy(loss.weight, loss.pos_weight, how)
    return CustomLoss(loss, how)


@dataclass
class CrossEntropy:
    """Cross-entropy on logits: ∂²ℓ/∂z² = a (diag(p) - p pᵀ) with a = Σ_c t_c ω_c for (smoothed) targets t."""

    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: Reduction

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """See :class:`Loss`."""
        classes = outputs.shape[class_dim]
        if targets is None:
            if self.weight is not None:
                raise InputError("targets: cross-entropy with class weights cannot do without them")
            return _uniform(outputs.numel() // classes, 1.0, 1.0, outputs.device)
        expected = _without(outputs.shape, class_dim)
        if targets.is_floating_point() and tuple(targets.shape) == expected and targets.shape != outputs.shape:
            raise InputError(f"targets: class indices must be int64, got {targets.dtype}; convert with .long()")
        if targets.is_floating_point():
            return self._probability_terms(outputs, targets, class_dim)
        if targets.dtype in (torch.bool, torch.complex64, torch.complex128):
            raise InputError(f"targets: class indices (int64) or probabilities (float) are wanted, got {targets.dtype}")
        if tuple(targets.shape) != expected:
            raise InputError(
                f"targets: class indices of shape {expected} are wanted for outputs {tuple(outputs.shape)} with "
                f"classes in dimension {class_dim % outputs.ndim}, got {tuple(targets.shape)}; for token outputs "
                "(n, T, C), have `forward` return outputs.transpose(1, 2)"
            )
        labels = targets.reshape(-1).long()
        if len(labels) == 0:
            return _uniform(0, 1.0, 1.0, labels.device)
        low, high = (int(bound) for bound in labels.aminmax())
        if self.weight is None and 0 <= low <= high < classes and not low <= self.ignore_index <= high:
            return _uniform(len(labels), 1.0, 1.0, labels.device)
        kept = labels != self.ignore_index
        wrong = labels[kept & ((labels < 0) | (labels >= classes))]
        if len(wrong):
            raise InputError(
                f"targets: class {int(wrong[0])} does not exist among {classes} classes "
                f"(ignore_index is {self.ignore_index})"
            )
        if self.weight is None:  # then smoothing moves weight 1 about between classes of weight 1
            mass = kept.double()
            return Terms(mass, mass, used=kept)
        weight = self._class_weights(classes, labels.device)
        mass = torch.where(kept, weight[labels.clamp(0, classes - 1)], 0.0)
        smooth = torch.where(kept, self.label_smoothing * weight.mean(), 0.0)
        return Terms((1 - self.label_smoothing) * mass + smooth, mass, used=kept)

    def _probability_terms(self, outputs: Tensor, targets: Tensor, class_dim: int) -> Terms:
        rows = _rows_like("target probabilities", targets, outputs, class_dim).double()
        rows = (1 - self.label_smoothing) * rows + self.label_smoothing / rows.shape[1]
        return Terms(rows @ self._class_weights(rows.shape[1], rows.device), rows.new_ones(len(rows)))

    def _class_weights(self, classes: int, device: torch.device) -> Tensor:
        if self.weight is None:
            return torch.ones(classes, dtype=torch.float64, device=device)
        if tuple(self.weight.shape) != (classes,):
            raise InputError(f"loss: {len(self.weight)} class weights for {classes} classes")
        return self.weight.to(device, torch.float64)

    def curvature(self, weight: Tensor, bias: Tensor | None, backend: ModuleType, rows: int, memory: int) -> Curvature:
        """See :class:`Loss`."""
        variance = SoftmaxVariance(weight, bias, backend, rows=rows, memory=memory)
        return lambda features, terms: variance(features)


@dataclass
class SquaredError:
    """Squared error: ∂²ℓ/∂z² = 2 I, the mean over samples, positions and outputs."""

    reduction: Reduction

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """See :class:`Loss`."""
        if targets is not None:
            _rows_like("targets", targets, outputs, class_dim)
        d = outputs.shape[class_dim]
        return _uniform(outputs.numel() // d, 2.0, float(d), outputs.device if targets is None else targets.device)

    def curvature(self, weight: Tensor, bias: Tensor | None, backend: ModuleType, rows: int, memory: int) -> Curvature:
        """See :class:`Loss`."""
        norm = squared_norms(weight, backend, memory).sum()
        return lambda features, terms: norm * squared_norms(features, backend, memory)


@dataclass
class BinaryCrossEntropy:
    """Binary cross-entropy on logits: ∂²ℓ/∂z_s² = ω_s (1 + (π_s - 1) y_s) σ'(z_s), π = ``pos_weight``."""

    weight: Tensor | None
    pos_weight: Tensor | None
    reduction: Reduction

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """See :class:`Loss`."""
        if targets is None:
            if self.pos_weight is not None:
                raise InputError("targets: binary cross-entropy with pos_weight cannot do without them")
            targets = torch.zeros_like(outputs)
        if not targets.is_floating_point():
            raise InputError(f"targets: floating-point labels in [0, 1] are wanted, got {targets.dtype}")
        coefficients = torch.ones_like(outputs)
        if self.pos_weight is not None:
            coefficients = 1 + (self._spread("pos_weight", self.pos_weight, outputs) - 1) * targets
        if self.weight is not None:
            coefficients = coefficients * self._spread("weight", self.weight, outputs)
        _rows_like("targets", targets, outputs, class_dim)
        rows = promoted(_rows_like("coefficients", coefficients, outputs, class_dim).to(outputs.dtype))
        terms = _uniform(len(rows), 1.0, float(rows.shape[1]), rows.device)
        return replace(terms, extra=rows)

    def _spread(self, name: str, value: Tensor, outputs: Tensor) -> Tensor:
        if value.ndim == outputs.ndim and value.shape[0] > 1:
            raise InputError(
                f"loss: {name} of shape {tuple(value.shape)} holds one entry per sample of a batch; only a weight "
                "that is the same for every sample has a value over the data set"
            )
        try:
            value = value.to(outputs)
            squeezed = outputs.shape[-1] == 1 and value.ndim and value.shape[-1] > 1  # the user's outputs had no last 1
            return (value.unsqueeze(-1) if squeezed else value).expand_as(outputs)
        except RuntimeError:
            raise InputError(
                f"loss: {name} of shape {tuple(value.shape)} does not fit outputs {tuple(outputs.shape)}"
            ) from None

    def curvature(self, weight: Tensor, bias: Tensor | None, backend: ModuleType, rows: int, memory: int) -> Curvature:
        """See :class:`Loss`."""
        weight, bias = promoted(weight), None if bias is None else promoted(bias)
        norms = backend.row_dots(weight, weight).to(weight.dtype)
        chunk = max(1, memory // (weight.element_size() * 3 * len(weight)))

        def values(features: Tensor, terms: Terms) -> Tensor:
            assert terms.extra is not None
            parts = []
            for rows, coefficients in zip(features.split(chunk), terms.extra.split(chunk), strict=True):
                rows = promoted(rows)
                logits = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
                parts.append(backend.sigmoid_curvature(logits, coefficients, norms))
            return torch.cat(parts) * squared_norms(features, backend, memory)

        return values


@dataclass
class CustomLoss:
    """Any twice differentiable callable (outputs, targets) -> scalar, one loss term per sample.

    ⟨w wᵀ, H_i⟩ = Σ_r u_rᵀ H_i u_r over the rank(w) columns of U with U Uᵀ = w wᵀ: second derivatives of the loss alone,
    in float64, all samples at once.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    reduction: Reduction
    _first: list[tuple[Tensor, Tensor]] | None = field(default_factory=list)  # until there are two samples; then None

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """See :class:`Loss`."""
        if outputs.ndim != 2 or class_dim % 2 != 1:
            raise NotYetError(
                f"loss: a custom loss on outputs of shape {tuple(outputs.shape)}; this version takes (n, C), one loss "
                "term per sample"
            )
        if targets is None or len(targets) != len(outputs):
            got = "none" if targets is None else tuple(targets.shape)
            raise InputError(f"targets: a custom loss wants one per sample ({len(outputs)}), got {got}")
        self._check_separable(outputs, targets)
        return replace(_uniform(len(outputs), 1.0, 1.0, outputs.device), extra=targets)

    def _check_separable(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise if the loss of the first samples is not that of its parts: they are coupled, or not so reduced."""
        if self._first is None:
            return
        self._first.append((outputs, targets))
        outputs, targets = (torch.cat(parts) for parts in zip(*self._first, strict=True))
        if len(outputs) < 2:
            return
        self._first = None
        whole = self._sum(outputs.double(), targets)
        for cut in {1, (len(outputs) + 1) // 2}:
            parts = self._sum(outputs[:cut].double(), targets[:cut]) + self._sum(outputs[cut:].double(), targets[cut:])
            if not torch.isclose(whole, parts, rtol=1e-6, atol=1e-9):
                raise InputError(
                    f"loss: over the first samples it is not the {self.reduction} of their losses ({float(whole):.6g} "
                    f"together, {float(parts):.6g} in two parts, both as sums): it couples samples, or its reduction "
                    "is not that; pass reduction='sum' or 'mean'"
                )

    def _sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets.double() if targets.is_floating_point() else targets
        value = self.loss(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError(f"loss: a scalar tensor is wanted from a custom loss, got {value!r:.80}")
        return value.reshape(()) * (len(outputs) if self.reduction == "mean" else 1)

    def curvature(self, weight: Tensor, bias: Tensor | None, backend: ModuleType, rows: int, memory: int) -> Curvature:
        """See :class:`Loss`."""
        directions = torch.linalg.qr(weight.double().t()).R

        def values(features: Tensor, terms: Terms) -> Tensor:
            assert terms.extra is not None
            logits = (promoted(features) @ promoted(weight).t()).double() + (0 if bias is None else bias.double())
            with torch.enable_grad():
                logits.requires_grad_()
                loss = self._sum(logits, terms.extra)
                (slope,) = torch.autograd.grad(loss, logits, create_graph=True)
                total = logits.new_zeros(len(logits))
                if slope.requires_grad:  # a loss that is linear in its input has no curvature
                    for u in directions:
                        (turn,) = torch.autograd.grad(slope, logits, u.expand_as(slope), retain_graph=True)
                        total = total + turn @ u
            return total.detach() * squared_norms(features, backend, memory)

        return values


_FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}
_NAMES: dict[str, Any] = {function.__name__: function for function in _FUNCTIONS}


@functools.cache
def _default(function: Any) -> nn.Module:
    return _FUNCTIONS[function]()


def _uniform(rows: int, scale: float, mass: float, device: torch.device) -> Terms:
    """The same scale and mass for all rows, in no memory."""
    numbers = torch.tensor([scale, mass], dtype=torch.float64, device=device)
    return Terms(numbers[:1].expand(rows), numbers[1:].expand(rows))


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    sizes = list(shape)
    del sizes[dim]
    return tuple(sizes)


def _rows_like(what: str, values: Tensor, outputs: Tensor, class_dim: int) -> Tensor:
    """``values``, of the outputs' shape, as (rows, classes)."""
    if values.shape != outputs.shape:
        raise InputError(f"{what}: the outputs' shape {tuple(outputs.shape)} is wanted, got {tuple(values.shape)}")
    values = values.movedim(class_dim, -1)
    return values.reshape(-1, values.shape[-1])

"""Use any callable as a loss."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import interrupts
from ..contractions import Backend, Bounded, product, promoted
from ..errors import InputError
from ..messages import shown
from ..model.outputs import SideBySide
from . import advice
from .base import Curvature, Factors, Loss, Reduction, Terms, dense, marked, uniform, wrong_shape


@dataclass
class CustomLoss(Loss):
    """Represent any twice differentiable callable (outputs, targets) -> scalar, one loss term per sample.

    At a head, ⟨w wᵀ, H_i⟩ = Σ_r u_rᵀ H_i u_r over the columns u_r of U with U Uᵀ = w wᵀ takes second derivatives of the
    loss alone, in float64, for all samples at once. If a sample has several positions, their directions are products of
    these columns with those of K, where K Kᵀ is the Gram matrix of the sample's features.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    reduction: Reduction
    several: SideBySide | None = None  # how several outputs are one tensor, if the loss takes several
    _before: tuple[Tensor, Tensor] | None = None  # a sample of the batch before
    _shape: tuple[int, ...] = ()  # of one sample's outputs in the loss's argument

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """Return one row for each entry of dimension 0, for any ``class_dim``."""
        if targets is None or len(targets) != len(outputs):
            got = "none" if targets is None else tuple(targets.shape)
            raise InputError(f"targets: a custom loss wants one per sample ({len(outputs)}), got {got}")
        if advice.is_elementwise(self.loss) and self.several is None and targets.shape != outputs.shape:
            raise wrong_shape("targets", targets, outputs)
        self._shape = outputs.shape[1:]
        terms = replace(uniform(len(outputs), 1.0, 1.0, outputs.device), extra=(targets,))
        if len(outputs) and not bool(self._value(outputs, targets).isfinite()):
            each = [self._value(*one) for one in zip(outputs.split(1), targets.split(1), strict=True)]
            terms = marked(terms, torch.stack(each).unsqueeze(1))
        good = ~terms.scale.isnan()
        if bool(good.any()):
            self._check_separable(outputs[good], targets[good.to(targets.device)])
        return terms

    def side_by_side(self, returned: Any) -> Tensor:
        several, whole = SideBySide.of(returned)
        if self.several not in (None, several):
            raise InputError(
                f"model: its outputs have other shapes, {several.shapes}, than in the batches before, "
                f"{self.several.shapes}; pass forward=, a function (model, batch) -> (outputs, targets)"
            )
        self.several = several
        return whole

    @torch.no_grad()
    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._sum(outputs.double(), targets)

    def _check_separable(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise if the loss of a batch's samples, and one of the batch before, is not the sum or mean of their losses.

        The one before is what tells class weights from a factor where each batch has samples of one class.
        """
        before, self._before = self._before, (outputs[:1], targets[:1])
        if before is not None and before[0].shape[1:] == outputs.shape[1:] and before[1].shape[1:] == targets.shape[1:]:
            outputs, targets = torch.cat([before[0].to(outputs), outputs]), torch.cat([before[1].to(targets), targets])
        if len(outputs) < 2:
            return
        whole, half = self._sum(outputs.double(), targets), (len(outputs) + 1) // 2
        for cut in {1, half} if before is None else {half}:
            in_two = self._sum(outputs[:cut].double(), targets[:cut]) + self._sum(outputs[cut:].double(), targets[cut:])
            if not torch.isclose(whole, in_two, rtol=1e-6, atol=1e-9):
                raise InputError(
                    f"loss: over {len(outputs)} samples it is not the {self.reduction} of their losses "
                    f"({float(whole):.6g} together, {float(in_two):.6g} in two parts, both as sums): it couples "
                    "samples, or its reduction is not that (pass reduction='sum' or 'mean'), or it is a mean over "
                    f"something else; {advice.for_callable(self.loss)}"
                )

    def _sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets.double() if targets.is_floating_point() else targets
        taken = outputs if self.several is None else self.several.apart(outputs)
        with advice.on_call(self.loss, taken, targets), interrupts.users_code():
            value = self.loss(taken, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            hint = "" if isinstance(value, Tensor) else "; return the tensor itself, without .item()"
            raise InputError(f"loss: a scalar tensor is wanted from a custom loss, got {shown(value)}{hint}")
        if outputs.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
            raise InputError(
                "loss: its value does not come from the outputs by operations that torch differentiates (argmax, "
                "comparisons and .detach() are none), so it has no curvature"
            )
        return value.reshape(()) * (len(outputs) if self.reduction == "mean" else 1)

    def curvature(
        self, weight: Tensor, bias: Tensor | None, backend: Backend, rows: int, memory: int, rtol: float
    ) -> Curvature:
        directions = torch.linalg.qr(weight.double().t()).R

        def values(features: Tensor, scale: Tensor, targets: Tensor) -> Bounded:
            positions = features.unsqueeze(1) if features.ndim == 2 else features.flatten(1, -2)
            span, norms = torch.ones_like(positions[..., :1], dtype=torch.float64), None
            if positions.shape[1] > 1:  # K (n, P, ρ) with K Kᵀ the Gram matrix of a sample's features
                span = torch.linalg.qr(positions.double().mT, mode="r").R.mT
            else:
                norms = backend.squared_norms(positions.flatten(1), memory)
            logits = product(promoted(positions), promoted(weight).t()).double()
            logits = logits if bias is None else logits + bias.double()
            with torch.enable_grad(), advice.on_second_derivative(self.loss):
                logits.requires_grad_()
                loss = self._sum(logits.view(-1, *self._shape), targets)
                (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
                total = logits.new_zeros(len(logits))
                if gradient.requires_grad:  # a loss that is linear in its input has no curvature
                    for column, u in itertools.product(span.unbind(2), directions):
                        direction = column.unsqueeze(2) * u
                        (along,) = torch.autograd.grad(gradient, logits, direction, retain_graph=True)
                        total = total + (along * direction).sum(dim=(1, 2))
            return Bounded(total.detach() if norms is None else total.detach() * norms, None)

        return Curvature(values)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._sum(outputs.double(), targets)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss terms, (n,), by a call of the loss for every sample."""
        pairs = zip(outputs.split(1), targets.split(1), strict=True)
        return torch.stack([self.value(output, target) for output, target in pairs])

    def factors(self, rows: Tensor, terms: Terms, *, alone: bool = False) -> Factors:
        """Return the eigenvectors of the C × C Hessians, √|λ| each, with the signs of λ, in float64."""
        hessians = self._hessians(rows, *terms.extra)
        bad = ~hessians.isfinite().all(dim=(1, 2))  # eigh would fail for all samples
        values, vectors = torch.linalg.eigh(hessians.masked_fill(bad[:, None, None], 0.0))
        values = values.masked_fill(bad[:, None], torch.nan) * terms.scale.unsqueeze(1)
        roots = vectors * values.abs().sqrt().unsqueeze(1)
        column = lambda c: (roots[:, :, c], values[:, c].sign())  # noqa: E731
        return Factors(values.shape[1], column, lambda: dense(roots, values), lambda: values.abs().sum(dim=1))

    def _hessians(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's second derivatives of its loss in its outputs, (rows, C, C), for all samples at once."""
        outputs = rows.detach().double().requires_grad_()
        hessians = outputs.new_zeros(*rows.shape, rows.shape[1])
        with torch.enable_grad(), advice.on_second_derivative(self.loss):
            loss = self._sum(outputs.reshape(-1, *self._shape), targets)
            (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
            for c in range(rows.shape[1] if gradient.requires_grad else 0):
                (row,) = torch.autograd.grad(gradient[:, c].sum(), outputs, retain_graph=True)
                hessians[:, c] = row
        return (hessians + hessians.transpose(1, 2)) / 2

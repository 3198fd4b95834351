"""Compute the Fisher-Rao norm (Liang et al. 2019; Petzka et al. 2021, section 6).

    FR = √ E ⟨θ, ∂ℓ/∂θ⟩²        θ all parameters, ⟨θ, ∂ℓ/∂θ⟩ = ⟨∂ℓ/∂f, (∂f/∂θ) θ⟩

An observation is one loss term, of the weight that it has in E. With terms t_i of E = Σ_i t_i / Σ_i ω_i it is ℓ_i = t_i
/ ω_i, and FR² = Σ_i ω_i ⟨θ, ∂ℓ_i/∂θ⟩² / Σ_i ω_i. For the reduction "sum" it is, as E, without the normaliser. Of a loss
that is a sum over outputs (squared error, binary cross-entropy) all outputs of a sample are one observation. Then ℓ_i
is their mean, or for the reduction "sum" their sum, as of the same loss given as a callable. (∂f/∂θ) θ comes from one
run of the model in forward mode. Behind ReLU, K layers without biases have FR = K √ E ⟨∂ℓ/∂f, f⟩². It is invariant to
layer-wise and neuron-wise rescalings: each parameter times its derivative is.
"""

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import interrupts
from ..errors import InputError, NotYetError
from ..losses import risk
from ..losses.rows import check_squares, of_batch
from ..model import calling, data, parameters
from ..numerics.accumulate import Accumulator, masked, non_finite
from ..numerics.normal_vectors import NormalVectors
from ..report import Estimate
from .base import Measure, Task


def _estimate(task: Task) -> Estimate:
    theta = parameters.every(task.model)
    total, over = 0.0, Accumulator(task.options.nan_policy, task.loss.reduction)
    tangent = _Tangent(task, theta)
    for number, batch in task.cut_batches(derivatives=True).numbered(task.batches):
        if not over.samples:
            _note_cuts(task, theta, batch)
        outputs, change, targets = tangent.of(batch)
        seen = risk.rows(outputs, targets, task.loss, number)
        count = data.size(batch)
        products = seen.of(_gradient(task, outputs, targets) * change.double()).sum(dim=1)
        weights = seen.terms.weights
        if task.loss.elementwise:
            products, weights = (_by_sample(rows, count, number).sum(dim=1) for rows in (products, weights))
            weights = weights if task.loss.reduction == "mean" else torch.ones_like(weights)
        with of_batch(number):
            check_squares(products, weights)
        squares = torch.where(weights > 0, products.square() / weights, 0.0 * products)
        kept = _kept(over, squares.isfinite(), count, number)
        over.add(count, masked(weights, kept).sum())
        total += float(masked(squares.where(squares.isfinite(), torch.nan), kept).sum())
    own = torch.tensor(total, dtype=torch.float64, device="cpu")
    total = float(over.together(task.batches.shard, {"squares": own})["squares"])
    over.check()
    value = math.nan if math.isnan(total) else math.sqrt(total / over.normaliser)
    return Estimate(value, None, over.samples, "forward-mode", exact=True, backend="reference", omitted=over.omitted)


def _note_cuts(task: Task, theta: parameters.Parameters, batch: Any) -> None:
    """Take in what the model cuts from autograd's graph, in a pass of few samples: forward mode has no graph."""
    leaves = {name: values.detach().requires_grad_() for name, values in theta.items()}
    with interrupts.suppressed(), calling.dry_run(), torch.enable_grad():  # an error comes again with the batch
        few = data.first(batch, min(2, data.size(batch)))
        task.forward.watched(partial(task.run, values=leaves), few)
    task.forward.compare_by_itself()


class _Tangent:
    """Compute f and (∂f/∂θ) θ of batches, in forward mode or by two backward passes.

    The backward passes are for operations without forward mode, or whose forward mode overflows (LayerNorm's in
    float16, on small inputs).
    """

    def __init__(self, task: Task, theta: parameters.Parameters) -> None:
        self._task, self._theta = task, theta
        self._reason = ""  # why forward mode does not serve

    def of(self, batch: Any) -> tuple[Tensor, Tensor, Any]:
        """Return outputs, their derivative along θ, and targets."""
        with sdpa_kernel(SDPBackend.MATH):  # other kernels of attention have no forward mode and no second derivative
            if not self._reason:
                try:
                    outputs, change, targets = self._by_forward_mode(batch)
                    if not bool((outputs.isfinite() & ~change.isfinite()).any()):
                        return outputs, change, targets
                    self._reason = "they overflow"
                except NotImplementedError as error:
                    self._reason = str(error).strip().partition("\n")[0] or "torch names no operation"
            return self._by_backward_passes(batch)

    def _by_forward_mode(self, batch: Any) -> tuple[Tensor, Tensor, Any]:
        with warnings.catch_warnings(), forward_ad.dual_level():
            # Torch scripts some of its derivatives at first use, with a warning whose category depends on its version.
            warnings.filterwarnings("ignore", "`torch.jit")
            duals = {name: forward_ad.make_dual(values, values) for name, values in self._theta.items()}
            outputs, targets = self._task.run(batch, duals)
            primal, change = forward_ad.unpack_dual(outputs)
            if change is None:  # also if the model takes a derivative itself, which forward mode does not follow
                raise NotImplementedError("the outputs have no derivative in forward mode")
            return primal, change, targets

    def _by_backward_passes(self, batch: Any) -> tuple[Tensor, Tensor, Any]:
        """Differentiate ⟨v, (∂f/∂θ) θ⟩ = ⟨(∂f/∂θ)ᵀ v, θ⟩, which is linear in v, in v.

        That derivative may be silently wrong (``once_differentiable``), so it is compared with the product itself.
        """
        theta = [*self._theta.values()]
        with torch.enable_grad():
            leaves = [values.detach().requires_grad_() for values in theta]
            named = dict(zip(self._theta, leaves, strict=True))
            outputs, targets = self._task.run(batch, named)
            if not outputs.requires_grad:
                raise calling.without_graph()
            v = NormalVectors().like(outputs).requires_grad_()
            try:
                back = torch.autograd.grad(outputs, leaves, v, create_graph=True, allow_unused=True)
                pairs = zip(back, theta, strict=True)
                terms = [(g.double() * values.double()).sum() for g, values in pairs if g is not None]
                product = torch.stack(terms).sum()
                (change,) = torch.autograd.grad(product, v)
                entries = v.detach().double() * change.double()
                off, size = float(entries.sum() - product.detach()), float(entries.norm())
                if abs(off) > max(1e-3, 32 * torch.finfo(change.dtype).eps) * (size + abs(float(product.detach()))):
                    raise RuntimeError("one of them is missing")
            except RuntimeError as error:
                raise NotYetError(
                    f"fisher_rao: the model has operations without derivatives in forward mode ({self._reason}), and "
                    f"without second ones ({error})"
                ) from None
        return outputs.detach(), change, targets


def _gradient(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ∂ Σ t_i / ∂f, of the outputs' shape, float64."""
    with torch.enable_grad():
        leaf = outputs.detach().double().requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss.value(leaf, targets), leaf)
    return gradient


def _kept(over: Accumulator, fine: Tensor, count: int, number: int) -> Tensor | None:
    """Return which of a batch's loss terms count, (terms,), given which are finite; None if all count."""
    error = partial(non_finite, number, fine, "in them or in their derivative", "loss terms")
    kept = over.kept(fine, error, lambda fine: _by_sample(fine, count, number).all(dim=1))
    return None if kept is None else kept.repeat_interleave(len(fine) // count)


def _by_sample(rows: Tensor, count: int, number: int) -> Tensor:
    """Return rows as (samples, rows of a sample)."""
    if len(rows) % count:
        raise InputError(f"batch {number}: its {len(rows)} loss terms cannot be told apart by its {count} samples")
    return rows.view(count, -1)


FISHER_RAO = Measure(
    name="fisher_rao",
    formula="√E⟨θ, ∂ℓ/∂θ⟩², θ all parameters",
    source="Liang et al. 2019; Petzka et al. 2021, section 6",
    of_network=_estimate,
    invariant="layer-wise, neuron-wise",
    cost="one forward pass in forward mode, about three plain ones",
)

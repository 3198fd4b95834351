"""Compute feature robustness to one feature matrix, and to the worst of norm 1 (Petzka et al. 2021, Definition 1).

    E_F(f, S, αA) = E(w + αwA) - E(w)            features φ + αAφ, labels unchanged                         (Eq. 4, 7)

f is ((δ, S, A), ε)-feature robust for ε = max_{0 ≤ α ≤ δ} |E_F(f, S, αA)|. The worst A of norm at most 1 is the left
side of Theorem 14, whose right side is δ² d/2 κ^φ + O(δ³) at a minimum (:func:`.bounds.uniform_robustness_bound`).

With w = Rᵀ Q, Q of orthonormal rows, wA = Rᵀ B for B = QA, and the B that belong to |A| ≤ 1 are those with |B| ≤ 1.
Over these a linear function ⟨G, B⟩ is largest at the polar factor U Vᵀ of G = U S Vᵀ. The search goes from B to that of
the gradient at B, again and again (the method of Frank and Wolfe with whole steps): where E is convex in w, as at a
head, each step raises E. What is found is a lower bound of the maximum; several starts say how much to trust it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import head
from ..contractions import product, promoted
from ..errors import InputError
from ..losses import risk
from ..messages import check_tensor, in_words, span
from ..model import calling, layers
from ..model.data import size
from ..model.selectors import Selector
from ..numerics import meeting
from ..numerics.accumulate import Accumulator
from ..numerics.meeting import Group
from ..options import Options, check_count, check_number, check_numbers
from ..passes.task import Task
from ..session import public, session
from .noise import orthonormal
from .perturbed import Perturbed, by_weight

_RISE = 1e-9  # by which a step has to raise the loss to go on, relatively


@dataclass(frozen=True, eq=False)
class MatrixRobustness:
    """Hold how much the loss rises when the features Aφ, times α, are added to a layer's features φ.

    Attributes:
        alphas: α, (k,) float64.
        rises: E_F(f, S, αA), (k,) float64, in units of the loss.
        loss: E(w).
        layer: its qualified name.
        samples: of the data.
    """

    alphas: Tensor
    rises: Tensor
    loss: float
    layer: str
    samples: int

    def __repr__(self) -> str:
        return in_words(
            self,
            f"rises {span(self.rises, '.4g')} for α {span(self.alphas, 'g')}",
            f"ε = {self.epsilon:.6g}",
            f"loss {self.loss:.6g}",
            f"layer {self.layer!r}",
            f"{self.samples} samples",
        )

    @property
    def epsilon(self) -> float:
        """Return the largest |E_F| of these α: the ε for which the model is feature robust, as far as they tell."""
        return float(self.rises.abs().max())


@dataclass(frozen=True, eq=False)
class LargestRobustness:
    """Hold the feature matrix of norm 1 that was found to raise the loss most.

    Attributes:
        rise: E_F(f, S, δA), in units of the loss; a lower bound of the maximum over |A| ≤ 1.
        matrix: A, (m, m); (groups, m, m) of a convolution with groups.
        delta: δ.
        rises: of the starts, (starts,) float64, where each of them ended.
        loss: E(w).
        layer: its qualified name.
        samples: of the data.
    """

    rise: float
    matrix: Tensor
    delta: float
    rises: Tensor
    loss: float
    layer: str
    samples: int

    def __repr__(self) -> str:
        return in_words(
            self,
            f"{self.rise:.6g}",
            f"{len(self.rises)} starts {span(self.rises)}" if len(self.rises) > 1 else "1 start",
            f"δ = {self.delta:g}",
            f"matrix {' × '.join(map(str, self.matrix.shape))}",
            f"loss {self.loss:.6g}",
            f"layer {self.layer!r}",
            f"{self.samples} samples",
        )


@public
def matrix_robustness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    layer: Selector | None = None,
    *,
    matrix: Tensor,
    alphas: Iterable[float],
    reduction: str | None = None,
    forward: calling.Forward | None = None,
    progress: bool | None = None,
    process_group: Group = None,
) -> MatrixRobustness:
    """Return feature robustness of a layer to a feature matrix A, at some α.

    E(w + αwA) - E(w)   (Petzka et al. 2021, Definition 1 and Eq. 4). :func:`pyflatness.feature_robustness` has its mean
    over orthogonal A.

    Args:
        model: in eval mode; left as it was found.
        loss: its options and reduction count.
        data: as for :func:`pyflatness.relative_flatness`; read for every α.
        layer: a Linear layer or a convolution, whose rows are its filters; None takes the last Linear that ran.
        matrix: A, (m, m) for m columns of the weight; of a convolution with groups also (groups, m, m).
        alphas: α, of any sign.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        forward: ``(model, batch) -> (outputs, targets)``.
        progress: show a bar.
        process_group: as for :func:`pyflatness.relative_flatness`.

    Returns:
        The rises, and ε.

    Raises:
        InputError: a matrix or options that do not fit.
        NonFiniteError: a loss that is NaN or infinite.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
        >>> data = torch.eye(2).double(), model(torch.eye(2).double()).detach()
        >>> found = pf.matrix_robustness(model, torch.nn.MSELoss(), data, matrix=torch.eye(2), alphas=[0.1, 0.2])
        >>> [round(rise, 6) for rise in found.rises.tolist()], round(found.epsilon, 6)
        ([0.025, 0.1], 0.1)
    """
    steps = check_numbers("alphas", alphas, "numbers", math.isfinite)
    matrix = check_tensor("matrix", matrix)
    with session(
        model,
        loss,
        data,
        reduction=reduction,
        forward=forward,
        reads=1 + len(steps),
        progress=progress,
        process_group=process_group,
    ) as task:
        curve = _Loss(task, layer)
        change = product(curve.weight, curve.fitting(matrix))
        own = curve.at(torch.zeros_like(change))
        rises = [curve.at(alpha * change) - own for alpha in steps]
    grid = torch.tensor(steps, dtype=torch.float64, device="cpu")
    values = torch.tensor(rises, dtype=torch.float64, device="cpu")
    return MatrixRobustness(grid, values, own, curve.name, curve.samples)


@public
def largest_robustness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    layer: Selector | None = None,
    *,
    delta: float,
    starts: int = 4,
    steps: int = 50,
    seed: int = 0,
    reduction: str | None = None,
    forward: calling.Forward | None = None,
    progress: bool | None = None,
    process_group: Group = None,
) -> LargestRobustness:
    """Return the feature matrix of norm 1 to which a layer is least robust, and the rise of the loss with it.

    max_{|A| ≤ 1} E(w + δwA) - E(w), the left side of Theorem 14 (Petzka et al. 2021), by ascent from random orthogonal
    matrices: a lower bound of the maximum.

    Args:
        model: in eval mode; left as it was found.
        loss: its options and reduction count.
        data: as for :func:`pyflatness.relative_flatness`; read up to ``starts * (steps + 1)`` times.
        layer: a Linear layer or a convolution, whose rows are its filters; None takes the last Linear that ran.
        delta: δ, positive.
        starts: of the ascent.
        steps: of each, at most; it ends where the loss rises no more.
        seed: of the starts.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        forward: ``(model, batch) -> (outputs, targets)``.
        progress: show a bar.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        The rise, A, and what each start found.

    Raises:
        InputError: options that do not fit.
        NonFiniteError: a loss that is NaN or infinite.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> data = torch.eye(2).double(), model(torch.eye(2).double()).detach()
        >>> found = pf.largest_robustness(model, torch.nn.MSELoss(), data, delta=0.1)
        >>> round(found.rise, 6)  # |δwA|² / 2 at |wA| = 5
        0.125
    """
    meeting.refuse(process_group, "largest_robustness", "matrix_robustness is, ")
    delta, starts = check_number("delta", delta), check_count("starts", starts, 1)
    steps, options = check_count("steps", steps, 1), Options(seed=seed)
    with session(
        model,
        loss,
        data,
        options,
        reduction=reduction,
        forward=forward,
        reads=1 + starts * (steps + 1),
        progress=progress,
        process_group=False,
    ) as task:
        curve = _Loss(task, layer)
        q, r = torch.linalg.qr(curve.weight.transpose(1, 2))  # w = Rᵀ Qᵀ of the QR decomposition's Q
        own = curve.at(torch.zeros_like(curve.weight))
        generator, found = torch.Generator("cpu").manual_seed(options.seed), []
        for _ in range(starts):
            turned = orthonormal(len(r), r.shape[1], curve.weight.shape[2], generator, curve.weight)
            found.append(_ascent(curve, r.transpose(1, 2), turned, delta, steps))
    values = torch.tensor([value - own for value, _ in found], dtype=torch.float64, device="cpu")
    matrix = q @ found[int(values.argmax())][1]
    rise = float(values.max())
    return LargestRobustness(
        rise, matrix[0] if len(matrix) == 1 else matrix, delta, values, own, curve.name, curve.samples
    )


class _Loss:
    """Evaluate the loss of a model with one layer's weight changed, by a read of the data.

    Attributes:
        name: of the layer.
        weight: w, (groups, d / groups, m).
        samples: of the last read.
    """

    def __init__(self, task: Task, layer: Selector | None) -> None:
        self.name, source = head.find(task, layer)
        task.forward.compare_by_itself()
        self._task, self._perturbed = task, Perturbed(task.model, self.name, task.forward, head=source is not None)
        self._layer = self._perturbed.layer
        matrix = promoted(layers.matrix(self._layer)[0].detach())
        self.weight = matrix.unflatten(0, (layers.groups(self._layer), -1))
        self.samples = 0

    def fitting(self, matrix: Tensor) -> Tensor:
        """Return a feature matrix as (1 or groups, m, m), in the weight's dtype.

        Raises:
            InputError: another shape.
        """
        groups, _, m = self.weight.shape
        if tuple(matrix.shape) not in ((m, m), (groups, m, m)):
            raise InputError(
                f"matrix: layer {self.name!r} has {m} columns, ({m}, {m}) is wanted, got {tuple(matrix.shape)}"
            )
        return matrix.detach().to(self.weight).view(-1, m, m)

    def at(self, change: Tensor) -> float:
        """Return E(w + Δw) for Δw (groups, d / groups, m)."""
        return self._read(change)[0]

    def gradient(self, change: Tensor) -> tuple[float, Tensor]:
        """Return E(w + Δw) and its gradient in Δw."""
        value, gradient = self._read(change.detach().requires_grad_())
        return value, change.new_zeros(change.shape) if gradient is None else gradient

    def _read(self, change: Tensor) -> tuple[float, Tensor | None]:
        task, total = self._task, 0.0
        gradient: Tensor | None = None
        over = Accumulator(task.options.nan_policy, task.loss.reduction)
        for number, batch in enumerate(task.batches):
            outputs, targets = self._perturbed.outputs(batch)
            over.add(size(batch), risk.weight(outputs, targets, task.loss, number))
            with torch.set_grad_enabled(change.requires_grad):
                moved = by_weight(self._layer, layers.as_weight(self._layer, change.flatten(0, 1)))
                (outputs,) = self._perturbed.displaced(moved, (1.0,))
                value = task.loss.value(outputs, targets)
                if change.requires_grad:
                    if not value.requires_grad:
                        raise InputError(
                            f"batch {number}: the loss does not come from the outputs by operations that torch "
                            f"differentiates, so it has no gradient behind layer {self.name!r}"
                        )
                    (found,) = torch.autograd.grad(value, change)
                    gradient = found if gradient is None else gradient + found
            total += _finite(float(value), number)
        summed = {"loss": torch.tensor(total, dtype=torch.float64, device="cpu")}
        total = float(over.together(task.batches.shard, summed)["loss"])
        self.samples = over.samples
        return total / over.normaliser, gradient


def _finite(value: float, number: int) -> float:
    if not math.isfinite(value):
        raise risk.not_finite(number, value, " with changed features")
    return value


def _ascent(curve: _Loss, left: Tensor, turned: Tensor, delta: float, steps: int) -> tuple[float, Tensor]:
    """Return the largest loss on the way, and B there; ``left`` is Rᵀ, ``turned`` the first B."""
    best, at = -math.inf, turned
    for _ in range(steps + 1):
        value, gradient = curve.gradient(delta * left @ turned)
        if not value > best + _RISE * abs(best if math.isfinite(best) else 0.0):
            break
        best, at = value, turned
        u, _, v = torch.linalg.svd(left.transpose(1, 2) @ gradient, full_matrices=False)
        turned = u @ v
    return best, at

"""Hold sharpness against its value at an interpolation (C24, Lemma B.1 and E.2).

For E = (1/n) Σ_i ½|f_i - y_i|², residuals r_i = f_i - y_i of norm at most ε, and m trainable parameters θ_j,

    |Tr ∂²E/∂θ² - (1/n) Σ_i |∂f_i/∂θ|²|  ≤  (1/n) Σ_i Σ_j |⟨r_i, ∂²f_i/∂θ_j²⟩|  ≤  m M ε,   M = max_ij |∂²f_i/∂θ_j²|

and with every term of j times θ_j² the same of adaptive sharpness (Lemma E.2), M = max_ij θ_j² |∂²f_i/∂θ_j²|. A network
that is locally linear in each parameter has no second derivatives, and both sides are zero.

C24: "From Loss Flatness to Compressed Representations".
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import interrupts
from ..errors import InputError
from ..measures.bounds import at_interpolation
from ..messages import in_words
from ..model import calling, parameters
from ..numerics import meeting
from ..numerics.meeting import Group
from ..options import MAX_PASSES, Options, check_flag
from ..passes.task import Task
from ..session import public, session
from ..sweep import diagonal


@dataclass(frozen=True)
class InterpolationError:
    """Hold sharpness of ½|f - y|², its value at an interpolation, and the bounds of their difference.

    Attributes:
        sharpness: Σ_j a_j² ∂²E/∂θ_j², a_j = 1, or θ_j of adaptive sharpness.
        at_interpolation: (1/n) Σ_i Σ_j a_j² |∂f_i/∂θ_j|².
        residual: ε, the largest |f_i - y_i|.
        middle: (1/n) Σ_i Σ_j a_j² |⟨r_i, ∂²f_i/∂θ_j²⟩|; None unless second derivatives were asked for.
        largest: M, the largest a_j² |∂²f_i/∂θ_j²|; likewise.
        parameters: m.
        samples: n.
        adaptive: whether a_j = θ_j.
    """

    sharpness: float
    at_interpolation: float
    residual: float
    middle: float | None
    largest: float | None
    parameters: int
    samples: int
    adaptive: bool

    def __repr__(self) -> str:
        return in_words(
            self,
            f"{'adaptive ' if self.adaptive else ''}sharpness {self.sharpness:.6g}",
            f"at interpolation {self.at_interpolation:.6g}",
            f"difference {self.difference:.4g}",
            "" if self.bound is None else f"at most {self.bound:.4g}",
            f"residual {self.residual:.4g}",
            f"{self.parameters} parameters",
            f"{self.samples} samples",
        )

    @property
    def difference(self) -> float:
        """Return |sharpness - at_interpolation|, the left side."""
        return abs(self.sharpness - self.at_interpolation)

    @property
    def bound(self) -> float | None:
        """Return m M ε, the right side; None where M was not asked for."""
        return None if self.largest is None else self.parameters * self.largest * self.residual


@public
def interpolation_error(
    model: nn.Module,
    data: Any,
    *,
    adaptive: bool = False,
    second_derivatives: bool = False,
    forward: calling.Forward | None = None,
    memory: int | None = None,
    max_passes: int = MAX_PASSES,
    progress: bool | None = None,
    process_group: Group = None,
) -> InterpolationError:
    """Return how far sharpness is from its value at an interpolation, with both sides of Lemma B.1 or E.2 of C24.

    |Σ_j ∂²E/∂θ_j² - (1/n) Σ_i |∂f_i/∂θ|²| ≤ m M ε for E = (1/n) Σ_i ½|f_i - y_i|²   ("From Loss Flatness to Compressed
    Representations", Eq. 19 and 42).

    Args:
        model: in eval mode; left as it was found.
        data: as for :func:`pyflatness.relative_flatness`, with targets of the outputs' shape.
        adaptive: Lemma E.2, of adaptive sharpness.
        second_derivatives: also compute M and the sum between the two sides, by a run and three backward passes for
            every entry of every parameter.
        forward: ``(model, batch) -> (outputs, targets)``.
        memory: bytes for a micro-batch's graph, as for :func:`pyflatness.measure`.
        max_passes: runs, or Hessian products, that exact values may take for a micro-batch.
        progress: show a bar.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        Both numbers, ε, and the bounds.

    Raises:
        InputError: targets of another shape; more entries than ``max_passes`` with ``second_derivatives=True``.
        NonFiniteError: NaN or infinity.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
        >>> x = torch.randn(20, 2).double()
        >>> found = pf.interpolation_error(model, (x, model(x).detach() + 0.01), second_derivatives=True)
        >>> round(found.residual, 6), found.difference <= found.middle <= found.bound
        (0.01, True)
    """
    meeting.refuse(process_group, "interpolation_error", "sharpness and interpolation_sharpness are, ")
    adaptive = check_flag("adaptive", adaptive)
    options = Options(memory=memory, max_passes=max_passes)
    with session(
        model,
        _half_squared_error,
        data,
        options,
        forward=forward,
        reads=3 + check_flag("second_derivatives", second_derivatives),
        progress=progress,
        process_group=False,
    ) as task:
        residual = _residual(task)
        sharpness = diagonal.estimate(task, adaptive=adaptive)
        near = at_interpolation(task, adaptive=adaptive)
        middle, largest = _second(task, adaptive=adaptive) if second_derivatives else (None, None)
        count = sum(w.numel() for w in parameters.trainable(task.model).values())
    return InterpolationError(
        sharpness.value, near.value, residual, middle, largest, count, sharpness.samples, adaptive
    )


def _half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum() / (2 * len(outputs))


def _residual(task: Task) -> float:
    """Return the largest |f_i - y_i|."""
    largest = 0.0
    for number, batch in enumerate(task.batches):
        with torch.no_grad():
            outputs, targets = calling.run(task.model, batch, task.forward)
        if not isinstance(targets, Tensor) or targets.shape != outputs.shape:
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise InputError(
                f"batch {number}: targets of the outputs' shape {tuple(outputs.shape)} are wanted, got {shape}"
            )
        largest = max(largest, float((outputs - targets).double().flatten(1).norm(dim=1).max()))
    return largest


def _second(task: Task, *, adaptive: bool) -> tuple[float, float]:
    """Return the sum between both sides, and M."""
    theta = parameters.trainable(task.model)
    entries = sum(w.numel() for w in theta.values())
    if entries > task.options.max_passes:
        raise InputError(
            f"second_derivatives=True: the {entries} entries of the parameters take a run each, more than "
            f"max_passes={task.options.max_passes}; pass max_passes={entries}, or second_derivatives=False"
        )
    total, largest, samples = 0.0, 0.0, 0
    for batch in task.batches:
        with torch.no_grad():
            outputs, targets = calling.run(task.model, batch, task.forward)
        residuals, samples = (outputs - targets).double().flatten(1), samples + len(outputs)
        for name, weight in theta.items():
            for entry in range(weight.numel()):
                interrupts.check()
                scale = float(weight.flatten()[entry]) ** 2 if adaptive else 1.0
                second = scale * _along(task, batch, theta, name, entry).double().flatten(1)
                total += float((second * residuals).sum(dim=1).abs().sum())
                largest = max(largest, float(second.norm(dim=1).max()))
    return total / samples, largest


def _along(task: Task, batch: Any, theta: parameters.Parameters, name: str, entry: int) -> Tensor:
    """Return ∂²f/∂θ_j² of all outputs: the derivative in u of ∂²⟨u, f⟩/∂θ_j²."""
    direction = torch.zeros_like(theta[name])
    direction.view(-1)[entry] = 1
    step = torch.zeros((), dtype=direction.dtype, device=direction.device, requires_grad=True)
    with torch.enable_grad(), calling.dry_run(), calling.differentiated():
        outputs, _ = parameters.run(task.model, {name: theta[name] + step * direction}, batch, task.forward)
        along = torch.ones_like(outputs, requires_grad=True)
        derivative: Tensor | None = (outputs * along).sum()
        for variable, again in ((step, True), (step, True), (along, False)):
            if derivative is None or not derivative.requires_grad:
                return torch.zeros_like(outputs)
            (derivative,) = torch.autograd.grad(derivative, variable, create_graph=again, allow_unused=True)
    return torch.zeros_like(outputs) if derivative is None else derivative.detach()

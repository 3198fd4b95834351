"""Search for the worst rise of the loss that a change of the weights within a ball gives.

    max_{|T⁻¹ δ| ≤ ρ} E(θ + δ) - E(θ),    |·| the Euclidean or the maximum norm, over all trainable parameters

- T = 1: the sharpness that SAM minimises (Foret et al. 2021), of all data or of groups of m samples;
- T = diag |θ|: adaptive sharpness (Kwon et al. 2021), invariant to rescalings of weights;
- T = diag (|θ| + 1), the maximum norm: Keskar's ε-sharpness (Keskar et al. 2017, Eq. 3), in percent of 1 + E.

In coordinates u = T⁻¹ δ the search is projected gradient ascent with momentum, whose steps are halved where they bring
nothing more, from next to u = 0 and from random points (Andriushchenko et al. 2023, appendix A, after the AutoPGD of
Croce and Hein 2020). What it finds is a lower bound of the maximum; several restarts say how much to trust it.

Beside it stands what the quadratic model of the loss allows in the Euclidean ball, ρ |T ∇E| + ½ ρ² max(λ_max, 0) with
λ_max of T H T: an upper bound of that model's rise, and so of E's as ρ goes to zero.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import interrupts
from ..errors import InputError, NonFiniteError
from ..hessian.eigenvalues import tolerance_of
from ..hessian.parameter_products import ParameterProducts
from ..losses import risk
from ..model import calling, data, parameters
from ..numerics import lanczos, meeting
from ..numerics.meeting import Group
from ..options import Options, check_count, check_flag, check_number
from ..passes.memory import Budget
from ..passes.task import Task
from ..session import public, session

NORMS = ("l2", "linf")
_INSTEAD = "pass process_group=False on one rank, with all data, "
_NEXT = 1e-3  # of the ball's radius: where the first ascent starts, since at a minimum there is no slope
_MOMENTUM, _PATIENCE = 0.75, 4  # of the steps; how many may bring nothing before they are halved


@dataclass(frozen=True)
class WorstCase:
    """Hold the worst rise of the loss that was found. ``float()`` of it is :attr:`value`.

    Attributes:
        value: the rise, a lower bound of the maximum; of groups of samples its mean over them.
        restarts: (restarts,) float64, the best of each start: how far they agree.
        loss: E at the weights.
        gradient_norm: |T ∇E|, Euclidean.
        bound: ρ |T ∇E| + ½ ρ² max(λ_max(T H T), 0) of the loss over all data; None where it was not asked for.
        groups: of samples, each with a maximum of its own.
        samples: of the data.
        rho: ρ.
    """

    value: float
    restarts: Tensor
    loss: float
    gradient_norm: float
    bound: float | None
    groups: int
    samples: int
    rho: float

    def __float__(self) -> float:
        return self.value


@public
def worst_case_sharpness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    rho: float = 0.05,
    norm: str = "l2",
    adaptive: bool = False,
    m: int | None = None,
    steps: int = 20,
    restarts: int = 1,
    bound: bool = False,
    normalize_logits: bool = False,
    seed: int = 0,
    reduction: str | None = None,
    forward: calling.Forward | None = None,
    memory: int | None = None,
    progress: bool | None = None,
    process_group: Group = None,
) -> WorstCase:
    """Return the worst rise of the loss within a ball around the weights, found by projected gradient ascent.

    max_{|T⁻¹ δ| ≤ ρ} E(θ + δ) - E(θ) over all trainable parameters, T = 1 or diag |θ|   (Foret et al. 2021, Eq. 1;
    Kwon et al. 2021, Definition 2; Andriushchenko et al. 2023, Eq. 1).

    Args:
        model: in eval mode; left as it was found.
        loss: its options and reduction count.
        data: as for :func:`pyflatness.relative_flatness`; every step reads them once; of groups they are read twice.
        rho: ρ, the radius of the ball.
        norm: ``"l2"`` or ``"linf"``.
        adaptive: relative to the weights, |δ_j / θ_j|; weights that are zero stay so.
        m: samples of a group that has a maximum of its own (m-sharpness): batches are cut into groups of so many, a
            batch's last one may be smaller, and the value is their mean by samples. None: one maximum for all data.
        steps: of each ascent, a forward and a backward pass each.
        restarts: ascents: the first from next to θ, others from random points of the ball.
        bound: also return what the quadratic model allows (``norm="l2"``): some dozens of Hessian products.
        normalize_logits: divide each sample's outputs f by the root mean square of f - mean(f), so that their scale
            does not count (Andriushchenko et al. 2023, section 3.3).
        seed: of the random points.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        forward: ``(model, batch) -> (outputs, targets)``.
        memory: bytes to hold at a time, for ``bound``; the ascent runs batches whole.
        progress: show a bar.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        The rise; it has no standard error: more steps and restarts, not more draws, improve it.

    Raises:
        InputError: options that do not fit, or see :func:`pyflatness.relative_flatness`; no trainable parameter; a
            group of samples none of whose targets counts.
        NonFiniteError: a loss, or a gradient at the weights, with NaN or infinity.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0]]))
        >>> data = torch.eye(2).double(), torch.tensor([[1.0], [0.0]]).double()
        >>> found = pf.worst_case_sharpness(model, torch.nn.MSELoss(), data, rho=0.1, restarts=2, bound=True)
        >>> round(found.value, 6), round(found.bound, 6)
        (0.005, 0.005)
    """
    adaptive, bound = check_flag("adaptive", adaptive), check_flag("bound", bound)
    if norm not in NORMS:
        raise InputError(f"norm={norm!r} does not exist; choose one of {', '.join(map(repr, NORMS))}")
    if bound and norm == "linf":
        raise InputError("bound=True is for norm='l2': a maximum norm of ρ allows a Euclidean one of ρ √N")
    scale = torch.abs if adaptive else torch.ones_like
    ascent = Ascent(
        scale=scale,
        rho=check_number("rho", rho),
        euclidean=norm == "l2",
        steps=check_count("steps", steps, 1, "a number of steps"),
        restarts=check_count("restarts", restarts, 1, "a number of ascents"),
        seed=seed,
    )
    m = None if m is None else check_count("m", m, 1, "a number of samples")
    meeting.refuse(process_group, "worst_case_sharpness", _INSTEAD)
    options = Options(memory=memory, seed=seed)
    with session(
        *(model, loss, data, options),
        reduction=reduction,
        forward=forward,
        reads=3,
        progress=progress,
        process_group=False,
    ) as task:
        return ascent.of(task, m, normalized=check_flag("normalize_logits", normalize_logits), bounded=bound)


@public
def keskar_sharpness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    epsilon: float = 1e-3,
    steps: int = 20,
    restarts: int = 1,
    seed: int = 0,
    reduction: str | None = None,
    forward: calling.Forward | None = None,
    progress: bool | None = None,
    process_group: Group = None,
) -> WorstCase:
    """Return the ε-sharpness of Keskar et al.: the worst rise within a box, in percent.

    100 (max_{|δ_j| ≤ ε (|θ_j| + 1)} E(θ + δ) - E(θ)) / (1 + E(θ)) over all trainable parameters   (Keskar et al. 2017,
    Metric 2.1, in the whole space).

    Args:
        model: as for :func:`worst_case_sharpness`, like all that follow.
        loss: its options count.
        data: batches.
        epsilon: ε.
        steps: of each ascent.
        restarts: ascents.
        seed: of the random points.
        reduction: ``"mean"`` or ``"sum"``.
        forward: ``(model, batch) -> (outputs, targets)``.
        progress: show a bar.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        The value in percent, a lower bound; ``loss`` is E(θ).

    Raises:
        InputError: see :func:`worst_case_sharpness`.
        NonFiniteError: see :func:`worst_case_sharpness`.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(1.0)
        >>> data = torch.ones(1, 1).double(), torch.ones(1, 1).double()
        >>> round(pf.keskar_sharpness(model, torch.nn.MSELoss(), data, epsilon=0.1, restarts=2).value, 6)
        4.0
    """
    ascent = Ascent(
        scale=lambda w: w.abs() + 1,
        rho=check_number("epsilon", epsilon),
        euclidean=False,
        steps=check_count("steps", steps, 1, "a number of steps"),
        restarts=check_count("restarts", restarts, 1, "a number of ascents"),
        seed=seed,
    )
    meeting.refuse(process_group, "keskar_sharpness", _INSTEAD)
    with session(
        *(model, loss, data, Options(seed=seed)),
        reduction=reduction,
        forward=forward,
        reads=3,
        progress=progress,
        process_group=False,
    ) as task:
        found = ascent.of(task, None)
    percent = 100 / (1 + found.loss)
    return WorstCase(
        found.value * percent,
        found.restarts * percent,
        *(found.loss, found.gradient_norm, None, found.groups, found.samples, found.rho),
    )


@dataclass(frozen=True)
class Ascent:
    """Climb on the loss within a ball.

    Attributes:
        scale: T's diagonal, of a parameter.
        rho: ρ.
        euclidean: whether the ball is, else a box.
        steps: of each ascent.
        restarts: ascents.
        seed: of random starts.
    """

    scale: Callable[[Tensor], Tensor]
    rho: float
    euclidean: bool
    steps: int
    restarts: int
    seed: int

    def of(self, task: Task, m: int | None, *, normalized: bool = False, bounded: bool = False) -> WorstCase:
        """Return what is found on a task's data, in groups of ``m`` samples or all together."""
        task = replace(task, forward=_with_normalized_outputs(task.forward)) if normalized else task
        place = _Place(task, self.scale)
        total = torch.zeros(self.restarts, dtype=torch.float64, device="cpu")
        best, loss, groups, samples, slope = 0.0, 0.0, 0, 0, torch.zeros_like(place.theta)
        for batches, count in _groups(task, m):
            generator = torch.Generator().manual_seed(self.seed)
            start, slope = place.risk(torch.zeros_like(place.theta), batches)
            found = torch.stack([self._climbed(place, batches, number, generator) for number in range(self.restarts)])
            total += count * (found - start)
            best += count * max(0.0, float(found.max()) - start)
            loss, groups, samples = start, groups + 1, samples + count
        whole = None
        if groups > 1:
            loss, slope = place.risk(torch.zeros_like(place.theta), task.batches)
        norm = float(slope.norm())
        if bounded:
            whole = self.rho * norm + 0.5 * self.rho**2 * max(0.0, place.largest_eigenvalue(self.seed))
        return WorstCase(best / samples, total / samples, loss, norm, whole, groups, samples, self.rho)

    def _climbed(self, place: "_Place", batches: Any, number: int, generator: torch.Generator) -> Tensor:
        """Return the largest loss on the way of one ascent."""
        u = self._random(place.theta, generator) * (_NEXT if number == 0 else 1.0)
        before, best, top, size, idle = u, u, -math.inf, 2 * self.rho, 0
        for step in range(self.steps + 1):
            interrupts.check()
            value, gradient = place.risk(u, batches)
            if value > top:
                best, top, idle = u, value, 0
            else:
                idle += 1
            if step == self.steps or not bool(gradient.isfinite().all()):
                break
            if idle == _PATIENCE:
                size, idle, u, before = size / 2, 0, best, best
                value, gradient = place.risk(u, batches)
            direction = gradient / gradient.norm().clamp_min(1e-300) if self.euclidean else gradient.sign()
            stepped = self._projected(u + size * direction)
            u, before = self._projected(u + _MOMENTUM * (stepped - u) + (1 - _MOMENTUM) * (u - before)), u
        return torch.tensor(top, dtype=torch.float64, device="cpu")

    def _projected(self, u: Tensor) -> Tensor:
        if not self.euclidean:
            return u.clamp(-self.rho, self.rho)
        return u * min(1.0, self.rho / max(float(u.norm()), 1e-300))

    def _random(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Return a random point of the ball's surface, or of the box."""
        noise = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like.device)
        return self.rho * noise / noise.norm() if self.euclidean else self.rho * torch.erf(noise / math.sqrt(2))


class _Place:
    """Evaluate the loss and its gradient around the weights, in coordinates u = T⁻¹ δ of all parameters as a vector."""

    def __init__(self, task: Task, scale: Callable[[Tensor], Tensor]) -> None:
        self._task = task
        self._theta = parameters.trainable(task.model)
        self.theta = torch.cat([w.flatten().double() for w in self._theta.values()])
        self._scale = torch.cat([scale(w).flatten().double() for w in self._theta.values()])

    def risk(self, u: Tensor, batches: Any) -> tuple[float, Tensor]:
        """Return E at θ + T u over some batches, and its gradient in u."""
        task, moved = self._task, self._at(u)
        total, weight, gradient = 0.0, 0.0, torch.zeros_like(self.theta)
        for number, batch in enumerate(batches):

            def work(batch: Any = batch, number: int = number) -> tuple[float, float, Sequence[Tensor]]:
                outputs, targets = calling.run(task.model, batch, task.forward)
                own = risk.weight(outputs.detach(), targets, task.loss, number)
                value = task.loss.value(outputs, targets)
                found = torch.autograd.grad(value, [*moved.values()], allow_unused=True, materialize_grads=True)
                return float(value.detach()), own, found

            elsewhere = calling.dry_run() if bool(u.any()) else contextlib.nullcontext()
            with elsewhere, calling.differentiated(), torch.enable_grad():
                value, own, found = parameters.inside(task.model, moved, work)
            total, weight = total + value, weight + own
            gradient += torch.cat([part.flatten().double() for part in found])
        normaliser = weight if task.loss.reduction == "mean" else 1.0
        if normaliser == 0:
            raise InputError(
                "data: no target of a group of samples counts in the loss, whose mean over them is not there; leave "
                "such samples out, or take larger groups (m)"
            )
        value = total / normaliser
        if not math.isfinite(value) and not bool(u.any()):
            raise NonFiniteError(f"the loss at the model's weights is {value}: there is no rise from it")
        return value if math.isfinite(value) else -math.inf, gradient * self._scale / normaliser

    def largest_eigenvalue(self, seed: int) -> float:
        """Return λ_max(T H T) over all data."""
        products = ParameterProducts(self._task)
        budget = Budget.of(self._task.model, self._task.options.memory)
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(1, len(self.theta), generator=generator, dtype=torch.float64, device="cpu")
        basis = max(1, budget.bases // (8 * len(self.theta)))
        search = lanczos.largest(start.to(self.theta.device), tolerance=tolerance_of(products), size=basis)

        def times(vectors: Tensor) -> Tensor:
            return self._scale * products({products.names: vectors * self._scale})[products.names]

        return float(lanczos.solved(search, times).values)

    def _at(self, u: Tensor) -> parameters.Parameters:
        """Return the parameters θ + T u, as leaves of a graph."""
        flat = self.theta + self._scale * u
        parts = flat.split([w.numel() for w in self._theta.values()])
        return {
            name: part.view(w.shape).to(w.dtype).requires_grad_()
            for (name, w), part in zip(self._theta.items(), parts, strict=True)
        }


def _groups(task: Task, m: int | None) -> Iterator[tuple[Any, int]]:
    """Yield the batches of each group of samples, and how many it has."""
    if m is None:
        yield task.batches, sum(data.size(batch) for batch in task.batches)
        return
    for batch in task.batches:
        samples = data.size(batch)
        for start in range(0, samples, m):
            stop = min(start + m, samples)
            yield [data.part(batch, start, stop) if stop - start < samples else batch], stop - start


def _with_normalized_outputs(forward: calling.Forward) -> Any:
    """Return a call of the model, as a task has it, whose outputs are normalised."""

    def normalized(model: Any, batch: Any) -> tuple[Tensor, Any]:
        outputs, targets = calling.run(model, batch, forward)
        return _normalized(outputs), targets

    return normalized


def _normalized(outputs: Tensor) -> Tensor:
    """Return each sample's outputs over the root mean square of their deviations from their mean."""
    if outputs.ndim != 2:
        raise InputError(f"normalize_logits=True is for outputs (n, classes), got {tuple(outputs.shape)}")
    spread = (outputs - outputs.mean(dim=1, keepdim=True)).square().mean(dim=1, keepdim=True).sqrt()
    return outputs / spread

"""Search for the worst rise of the loss that a change of the weights within a ball gives.

    max_{|T⁻¹ δ| ≤ ρ} E(θ + δ) - E(θ),    |·| the Euclidean or the maximum norm, over all trainable parameters

- T = 1: the sharpness that SAM minimises (Foret et al. 2021), of all data or of groups of m samples;
- T = diag |θ|: adaptive sharpness (Kwon et al. 2021), invariant to rescalings of weights;
- T = diag (|θ| + 1), the maximum norm: Keskar's ε-sharpness (Keskar et al. 2017, Eq. 3), in percent of 1 + E.

In coordinates u = T⁻¹ δ the search is projected gradient ascent with momentum. It starts next to u = 0 and at random
points, and halves its steps where they bring nothing more (Andriushchenko et al. 2023, appendix A, after the AutoPGD of
Croce and Hein 2020). What it finds is a lower bound of the maximum; several starts say how much to trust it.

The quadratic model of the loss rises in the Euclidean ball by at most ρ |T ∇E| + ½ ρ² max(λ_max, 0), with λ_max of
T H T. This bounds the rise of E too as ρ goes to zero.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError, NonFiniteError
from ..hessian.parameter_products import ParameterProducts
from ..losses import risk
from ..messages import check_choice, in_words, span
from ..model import calling, data, parameters
from ..numerics import lanczos
from ..numerics.accumulate import all_finite
from ..numerics.signs import RandomVectors
from ..options import CALL, How, Options, check_count, check_flag, check_number
from ..passes.cut_batches import CutBatches
from ..passes.task import Task
from ..session import public, session

NORMS = ("l2", "linf")
_NEXT = 1e-3  # of the ball's radius: the first ascent starts there, since at a minimum the gradient is zero
_MOMENTUM, _PATIENCE = 0.75, 4  # of the steps; the number of steps without a rise after which they are halved


@dataclass(frozen=True)
class WorstCase:
    """Hold the worst rise of the loss that was found. ``float()`` of it is :attr:`value`.

    Attributes:
        value: the rise, a lower bound of the maximum; with groups of samples its mean over groups.
        starts: (starts,) float64, the largest rise of each start, which shows how far they agree.
        loss: E at the weights.
        gradient_norm: |T ∇E|, Euclidean.
        bound: ρ |T ∇E| + ½ ρ² max(λ_max(T H T), 0) of the loss over all data; None where it was not asked for.
        groups: the number of groups of samples, each with its own maximum.
        samples: of the data.
        rho: ρ.
        notes: what a reader of the values should know, such as a bound whose eigenvalue is not converged.
    """

    value: float
    starts: Tensor
    loss: float
    gradient_norm: float
    bound: float | None
    groups: int
    samples: int
    rho: float
    notes: tuple[str, ...] = ()

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return in_words(
            self,
            f"{self.value:.6g}",
            f"{len(self.starts)} starts {span(self.starts)}" if len(self.starts) > 1 else "1 start",
            "" if self.bound is None else f"bound of the quadratic model {self.bound:.6g}",
            f"loss {self.loss:.6g}",
            f"gradient norm {self.gradient_norm:.4g}",
            f"ρ = {self.rho:g}",
            f"{self.groups} groups" if self.groups > 1 else "",
            f"{self.samples} samples",
            *self.notes,
        )


class Ascent:
    """Climb on the loss within a ball by the user's options.

    ``scale`` is T's diagonal, of a parameter. The ball has the Euclidean norm if ``euclidean``; else it is a box.
    """

    def __init__(
        self, scale: Callable[[Tensor], Tensor], rho: float, steps: int, starts: int, how: How, *, euclidean: bool
    ) -> None:
        self.scale, self.euclidean, self.seed = scale, euclidean, how.get("seed", 0)
        self.steps = check_count("steps", steps, 1, "a number of steps")
        self.starts = check_count("starts", starts, 1, "a number of ascents")
        self.rho = check_number("rho", rho)

    def of(self, task: Task, m: int | None, *, normalized: bool = False, bounded: bool = False) -> WorstCase:
        """Return the worst rise on a task's data, in groups of ``m`` samples or over all samples together."""
        cuts = task.cut_batches(derivatives=True)
        task = replace(task, forward=_with_normalized_outputs(task.forward)) if normalized else task
        place, shard = _Place(task, self.scale, cuts), task.batches.shard
        total = torch.zeros(self.starts, dtype=torch.float64, device="cpu")
        best, loss, groups, samples, norm = 0.0, 0.0, 0, 0, 0.0
        for batches, count in _groups(task, m):
            random = RandomVectors(self.seed, place.size, place.device)
            start, slope = place.risk(None, batches)
            norm = _norm(slope)
            del slope
            found = torch.stack([self._climbed(place, batches, number, random) for number in range(self.starts)])
            total += count * (found - start)
            best += count * max(0.0, float(found.max()) - start)
            loss, groups, samples = start, groups + 1, samples + count
        own = torch.tensor([best, groups, samples, *total], dtype=torch.float64, device="cpu")
        sums = shard.sum("the groups of all ranks", {"": own})[""]
        best, groups, samples, total = float(sums[0]), int(sums[1]) if m else 1, int(sums[2]), sums[3:]
        if groups > 1:
            loss, slope = place.risk(None, task.batches)
            norm = _norm(slope)
        whole: float | None = None
        notes = place.notes
        if bounded:
            top, of_bound = place.largest_eigenvalue(self.seed)
            whole, notes = self.rho * norm + 0.5 * self.rho**2 * max(0.0, top), (*notes, *of_bound)
        return WorstCase(best / samples, total / samples, loss, norm, whole, groups, samples, self.rho, notes)

    def _climbed(self, place: "_Place", batches: Any, number: int, random: RandomVectors) -> Tensor:
        """Return the largest loss of one ascent, which keeps four vectors and takes its steps in place."""
        u = self._start(random.draw()).mul_(_NEXT if number == 0 else 1.0).to(place.dtype)
        before, best = u.clone(), u.clone()
        top, size, idle = -math.inf, 2 * self.rho, 0
        for step in range(self.steps + 1):
            value, gradient = place.risk(u, batches)
            if value > top:
                top, idle = value, 0
                best.copy_(u)
            else:
                idle += 1
            if step == self.steps or not all_finite(gradient):
                break
            if idle == _PATIENCE:
                size, idle = size / 2, 0
                u.copy_(best)
                before.copy_(best)
                del gradient
                value, gradient = place.risk(u, batches)
            direction = gradient.div_(max(_norm(gradient), 1e-300)) if self.euclidean else gradient.sign_()
            stepped = self._projected(direction.mul_(size).add_(u))
            # u + momentum (stepped - u) + (1 - momentum) (u - before), in the place of the point before
            before.mul_(_MOMENTUM - 1).add_(u, alpha=2 - 2 * _MOMENTUM).add_(stepped, alpha=_MOMENTUM)
            u, before = self._projected(before), u
            del gradient, direction, stepped
        return torch.tensor(top, dtype=torch.float64, device="cpu")

    def _projected(self, u: Tensor) -> Tensor:
        """Project a point onto the ball, in place."""
        if not self.euclidean:
            return u.clamp_(-self.rho, self.rho)
        return u.mul_(min(1.0, self.rho / max(_norm(u), 1e-300)))

    def _start(self, random: Tensor) -> Tensor:
        """Scale numbers that are uniform in [-1, 1) to a point of the ball's surface, or of the box, in place."""
        return random.mul_(self.rho / (_norm(random) if self.euclidean else 1.0))


class _Place:
    """Evaluate the loss and its gradient around the weights, in coordinates u = T⁻¹ δ of all parameters as a vector.

    Vectors are in the parameters' dtype, of half precision in float32; sums over samples and norms are in float64.
    """

    def __init__(self, task: Task, scale: Callable[[Tensor], Tensor], cuts: CutBatches) -> None:
        self._task, self._scale, self._cuts = task, scale, cuts
        self._theta = parameters.trainable(task.model)
        self.size = sum(w.numel() for w in self._theta.values())
        self.device = next(iter(self._theta.values())).device
        self.dtype = functools.reduce(torch.promote_types, [w.dtype for w in self._theta.values()], torch.float32)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on how batches were cut."""
        return self._cuts.notes

    def risk(self, u: Tensor | None, batches: Any) -> tuple[float, Tensor]:
        """Return E at θ + T u (at θ for None) and its gradient in u; the task's own batches are those of all ranks."""
        task, moved = self._task, self._at(u)
        total, weight = 0.0, 0.0
        gradient = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        with (
            contextlib.nullcontext() if u is None else calling.dry_run(),
            calling.differentiated(),
            calling.differentiated_in_all_parameters(),
            torch.enable_grad(),
            parameters.inside(task.model, moved),
        ):
            for number, part in self._cuts.numbered(batches):
                outputs, targets = task.run(part)
                weight += risk.weight(outputs.detach(), targets, task.loss, number)
                value = task.loss.value(outputs, targets)
                found = torch.autograd.grad(value, [*moved.values()], allow_unused=True, materialize_grads=True)
                total += float(value.detach())
                for summed, each in zip(self._split(gradient).values(), found, strict=True):
                    summed.add_(each)
                del outputs, value, found
        shard = task.batches.shard
        if batches is task.batches and not shard.ranks.alone:
            own = torch.tensor([total, weight], dtype=torch.float64, device="cpu")
            sums = shard.sum("a step of the ascent", {"gradient": gradient, "loss": own})
            gradient = sums["gradient"].to(self.dtype).to(self.device)
            total, weight = sums["loss"].tolist()
        normaliser = weight if task.loss.reduction == "mean" else 1.0
        if normaliser == 0:
            raise InputError(
                "data: no target of a group of samples counts in the loss, whose mean over them is not there; leave "
                "such samples out, or take larger groups (m)"
            )
        mean = total / normaliser
        if not math.isfinite(mean) and u is None:
            raise NonFiniteError(f"the loss at the model's weights is {mean}: there is no rise from it")
        for name, part in self._split(gradient).items():
            part.mul_(self._scale(self._theta[name])).div_(normaliser)
        return mean if math.isfinite(mean) else -math.inf, gradient

    def largest_eigenvalue(self, seed: int) -> tuple[float, tuple[str, ...]]:
        """Return λ_max(T H T) over all data, and notes on it."""
        products = ParameterProducts(self._task)
        budget = self._task.budget()
        start = RandomVectors(seed, self.size, self.device).draw().unsqueeze(0)
        basis = max(1, budget.bases // (8 * self.size))
        search = lanczos.largest(start, tolerance=products.tolerance, size=basis)
        scale = torch.cat([self._scale(w).flatten().double() for w in self._theta.values()])

        def times(vectors: Tensor) -> Tensor:
            return scale * products({products.names: vectors * scale})[products.names]

        found = lanczos.solved(search, times)
        certificate = f"λ_max of the bound: an eigenvalue within {float(found.residuals):.1e}"
        ended = f"{certificate}, not converged after {found.products} products: the true bound may be larger"
        return float(found.values), (*products.notes(""), *(() if found.converged else (ended,)))

    def _at(self, u: Tensor | None) -> parameters.Parameters:
        """Return the parameters θ + T u, as leaves of a graph."""
        if u is None:
            return {name: w.detach().requires_grad_() for name, w in self._theta.items()}
        parts = self._split(u)
        moved = {name: torch.addcmul(w.to(u.dtype), self._scale(w), parts[name]) for name, w in self._theta.items()}
        return {name: part.to(self._theta[name].dtype).requires_grad_() for name, part in moved.items()}

    def _split(self, vector: Tensor) -> parameters.Parameters:
        """Return views of a vector (N,) in the shapes of the parameters."""
        parts = vector.split([w.numel() for w in self._theta.values()])
        return {name: part.view(w.shape) for (name, w), part in zip(self._theta.items(), parts, strict=True)}


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _groups(task: Task, m: int | None) -> Iterator[tuple[Any, int]]:
    """Yield the batches of each group of samples, and its number of samples."""
    if m is None:
        yield task.batches, sum(data.size(batch) for batch in task.batches)
        return
    for batch in task.batches:
        samples = data.size(batch)
        for start in range(0, samples, m):
            stop = min(start + m, samples)
            yield [data.part(batch, start, stop) if stop - start < samples else batch], stop - start


def _with_normalized_outputs(forward: calling.Forward) -> Any:
    """Return a ``forward`` that divides outputs by the root mean square of a sample's deviations from their mean."""

    def normalized(model: Any, batch: Any) -> tuple[Tensor, Any]:
        outputs, targets = calling.run(model, batch, forward)
        if outputs.ndim != 2:
            raise InputError(f"normalize_logits=True is for outputs (n, classes), got {tuple(outputs.shape)}")
        spread = (outputs - outputs.mean(dim=1, keepdim=True)).square().mean(dim=1, keepdim=True).sqrt()
        return outputs / spread, targets

    return normalized


@public(*CALL, "seed", "memory")
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
    starts: int = 1,
    bound: bool = False,
    normalize_logits: bool = False,
    **how: Unpack[How],
) -> WorstCase:
    """Return the worst rise of the loss within a ball around the weights, found by projected gradient ascent.

    max_{|T⁻¹ δ| ≤ ρ} E(θ + δ) - E(θ) over all trainable parameters, T = 1 or diag |θ|   (Foret et al. 2021, Eq. 1;
    Kwon et al. 2021, Definition 2; Andriushchenko et al. 2023, Eq. 1).

    Args:
        data: … Every step reads them once; of groups they are read twice.
        rho: ρ, the radius of the ball.
        norm: ``"l2"`` or ``"linf"``.
        adaptive: relative to the weights, |δ_j / θ_j|; weights that are zero stay so.
        m: the size of groups of samples that have a maximum each (m-sharpness). Batches are cut into groups of m, the
            last of a batch may be smaller, and the value is the mean over groups, weighted by their samples. None: one
            maximum for all data.
        steps: of each ascent; a step is a forward and a backward pass.
        starts: the number of ascents. The first starts next to θ, the others at random points of the ball.
        bound: also return the bound of the quadratic model (``norm="l2"``), by some dozens of Hessian products.
        normalize_logits: divide each sample's outputs f by the root mean square of f - mean(f), so that their scale
            does not count (Andriushchenko et al. 2023, section 3.3).
        memory: … Seven vectors of the parameters' size come on top, in their dtype or float32.
        process_group: … A group of samples is one rank's.

    Returns:
        The rise; it has no standard error: more steps and starts improve it.

    Raises:
        InputError: options that do not fit, or see :func:`pyflatness.relative_flatness`; no trainable parameter; a
            group of samples none of whose targets counts.
        NonFiniteError: a loss, or a gradient at the weights, with NaN or infinity.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0]]))
        >>> data = torch.eye(2).double(), torch.tensor([[1.0], [0.0]]).double()
        >>> found = pf.worst_case_sharpness(model, torch.nn.MSELoss(), data, rho=0.1, starts=2, bound=True)
        >>> round(found.value, 6), round(found.bound, 6)
        (0.005, 0.005)
    """
    adaptive, bound = check_flag("adaptive", adaptive), check_flag("bound", bound)
    check_choice("norm", norm, NORMS)
    if bound and norm == "linf":
        raise InputError("bound=True is for norm='l2': a maximum norm of ρ allows a Euclidean one of ρ √N")
    scale = torch.abs if adaptive else torch.ones_like
    ascent = Ascent(scale, rho, steps, starts, how, euclidean=norm == "l2")
    m = None if m is None else check_count("m", m, 1, "a number of samples")
    with session(model, loss, data, Options.of(how), how, reads=3) as task:
        return ascent.of(task, m, normalized=check_flag("normalize_logits", normalize_logits), bounded=bound)


@public(*CALL, "seed", "memory")
def keskar_sharpness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    rho: float = 1e-3,
    steps: int = 20,
    starts: int = 1,
    **how: Unpack[How],
) -> WorstCase:
    """Return the ε-sharpness of Keskar et al.: the worst rise within a box, in percent.

    100 (max_{|δ_j| ≤ ε (|θ_j| + 1)} E(θ + δ) - E(θ)) / (1 + E(θ)) over all trainable parameters   (Keskar et al. 2017,
    Metric 2.1, in the whole space).

    Args:
        rho: ε.
        steps: of each ascent.
        starts: the number of ascents.
        memory: … See :func:`pyflatness.worst_case_sharpness`.

    Returns:
        The value in percent, a lower bound; ``loss`` is E(θ).

    Raises:
        InputError: see :func:`pyflatness.worst_case_sharpness`.
        NonFiniteError: see :func:`pyflatness.worst_case_sharpness`.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(1.0)
        >>> data = torch.ones(1, 1).double(), torch.ones(1, 1).double()
        >>> round(pf.measures.keskar_sharpness(model, torch.nn.MSELoss(), data, rho=0.1, starts=2).value, 6)
        4.0
    """
    ascent = Ascent(lambda w: w.abs() + 1, rho, steps, starts, how, euclidean=False)
    with session(model, loss, data, Options.of(how), how, reads=3) as task:
        found = ascent.of(task, None)
    percent = 100 / (1 + found.loss)
    return replace(found, value=found.value * percent, starts=found.starts * percent)

"""Climb on the loss within a ball around a network's weights.

In coordinates u = T⁻¹ δ the search is projected gradient ascent with momentum, whose steps are halved where they bring
nothing more, from next to u = 0 and from random points (Andriushchenko et al. 2023, appendix A, after the AutoPGD of
Croce and Hein 2020). What it finds is a lower bound of the maximum; several starts say how much to trust it.

Beside it stands what the quadratic model of the loss allows in the Euclidean ball, ρ |T ∇E| + ½ ρ² max(λ_max, 0) with
λ_max of T H T: an upper bound of that model's rise, and so of E's as ρ goes to zero.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import interrupts
from ..errors import InputError, NonFiniteError
from ..hessian.eigenvalues import tolerance_of
from ..hessian.parameter_products import ParameterProducts
from ..losses import risk
from ..messages import in_words, span
from ..model import calling, data, parameters
from ..numerics import lanczos
from ..passes.task import Task

_NEXT = 1e-3  # of the ball's radius: where the first ascent starts, since at a minimum there is no slope
_MOMENTUM, _PATIENCE = 0.75, 4  # of the steps; how many may bring nothing before they are halved


@dataclass(frozen=True)
class WorstCase:
    """Hold the worst rise of the loss that was found. ``float()`` of it is :attr:`value`.

    Attributes:
        value: the rise, a lower bound of the maximum; of groups of samples its mean over them.
        starts: (starts,) float64, the best of each start: how far they agree.
        loss: E at the weights.
        gradient_norm: |T ∇E|, Euclidean.
        bound: ρ |T ∇E| + ½ ρ² max(λ_max(T H T), 0) of the loss over all data; None where it was not asked for.
        groups: of samples, each with a maximum of its own.
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


@dataclass(frozen=True)
class Ascent:
    """Climb on the loss within a ball.

    Attributes:
        scale: T's diagonal, of a parameter.
        euclidean: whether the ball is, else a box.
    """

    scale: Callable[[Tensor], Tensor]
    rho: float
    euclidean: bool
    steps: int
    starts: int
    seed: int

    def of(self, task: Task, m: int | None, *, normalized: bool = False, bounded: bool = False) -> WorstCase:
        """Return what is found on a task's data, in groups of ``m`` samples or all together."""
        task = replace(task, forward=_with_normalized_outputs(task.forward)) if normalized else task
        place = _Place(task, self.scale)
        total = torch.zeros(self.starts, dtype=torch.float64, device="cpu")
        best, loss, groups, samples, slope = 0.0, 0.0, 0, 0, torch.zeros_like(place.theta)
        for batches, count in _groups(task, m):
            generator = torch.Generator().manual_seed(self.seed)
            start, slope = place.risk(torch.zeros_like(place.theta), batches)
            found = torch.stack([self._climbed(place, batches, number, generator) for number in range(self.starts)])
            total += count * (found - start)
            best += count * max(0.0, float(found.max()) - start)
            loss, groups, samples = start, groups + 1, samples + count
        whole: float | None = None
        notes: tuple[str, ...] = ()
        if groups > 1:
            loss, slope = place.risk(torch.zeros_like(place.theta), task.batches)
        norm = float(slope.norm())
        if bounded:
            top, notes = place.largest_eigenvalue(self.seed)
            whole = self.rho * norm + 0.5 * self.rho**2 * max(0.0, top)
        return WorstCase(best / samples, total / samples, loss, norm, whole, groups, samples, self.rho, notes)

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
            with self._differentiated(u, moved):
                outputs, targets = task.run(batch)
                weight += risk.weight(outputs.detach(), targets, task.loss, number)
                value = task.loss.value(outputs, targets)
                found = torch.autograd.grad(value, [*moved.values()], allow_unused=True, materialize_grads=True)
            total += float(value.detach())
            gradient += torch.cat([part.flatten().double() for part in found])
        normaliser = weight if task.loss.reduction == "mean" else 1.0
        if normaliser == 0:
            raise InputError(
                "data: no target of a group of samples counts in the loss, whose mean over them is not there; leave "
                "such samples out, or take larger groups (m)"
            )
        mean = total / normaliser
        if not math.isfinite(mean) and not bool(u.any()):
            raise NonFiniteError(f"the loss at the model's weights is {mean}: there is no rise from it")
        return mean if math.isfinite(mean) else -math.inf, gradient * self._scale / normaliser

    @contextlib.contextmanager
    def _differentiated(self, u: Tensor, moved: parameters.Parameters) -> Iterator[None]:
        """Have the parameters θ + T u in the model, as leaves of a graph, inside."""
        with contextlib.ExitStack() as stack:
            if bool(u.any()):
                stack.enter_context(calling.dry_run())
            stack.enter_context(calling.differentiated())
            stack.enter_context(calling.differentiated_in_all_parameters())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(parameters.inside(self._task.model, moved))
            yield

    def largest_eigenvalue(self, seed: int) -> tuple[float, tuple[str, ...]]:
        """Return λ_max(T H T) over all data, and what a reader of it should know."""
        products = ParameterProducts(self._task)
        budget = self._task.budget()
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(1, len(self.theta), generator=generator, dtype=torch.float64, device="cpu")
        basis = max(1, budget.bases // (8 * len(self.theta)))
        search = lanczos.largest(start.to(self.theta.device), tolerance=tolerance_of(products), size=basis)

        def times(vectors: Tensor) -> Tensor:
            return self._scale * products({products.names: vectors * self._scale})[products.names]

        found = lanczos.solved(search, times)
        certificate = f"λ_max of the bound: an eigenvalue within {float(found.residuals):.1e}"
        ended = f"{certificate}, not converged after {found.products} products: the true bound may be larger"
        return float(found.values), (*products.notes(""), *(() if found.converged else (ended,)))

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

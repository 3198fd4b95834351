"""Measure how much noise on the parameters a network tolerates: PAC-Bayes flatness.

It is defined by Petzka et al. (2021), appendix C.2, after Jiang et al. (2020).

    σ: mean accuracy of the network at θ + u, u ~ N(0, σ²) on all parameters, is 0.1 below its own;  flatness 1/σ²

found by bisection on [0, 2], in at most 15 steps, until the drop is within 0.01 of 0.1. All steps use the same 10
probes of the noise, so that the drop of each probe is one function of σ. BatchNorm is folded into the layers in front
of it first, so that parameters which only rescale each other do not count. With θ the weights (parameters of two
dimensions and more) of which there are ω, θ⁰ those before training, n samples, ε = 1e-3:

    bound            |θ|² / (4σ²) + log(n/σ) + 10                      initial: |θ-θ⁰|² in the place of |θ|²
    magnitude-aware  ¼ Σ_j log[(ε² + (σ²+1) |θ-θ⁰|²/ω) / (ε² + σ² (θ_j-θ⁰_j)²)] + log(n/σ) + 10

the second also with |θ|² in the place of |θ-θ⁰|² (Jiang et al. 2020). σ of the second, scored as
``pac_bayes_magnitude``, is found by a bisection of its own, u_j ~ N(0, σ²θ_j² + ε²). The authors' code passes σ² (and
σ²θ_j² + ε²) as standard deviations; ``squared=True`` does so. It is not invariant to rescalings.

Standard errors over the probes are by the delta method. Where the mean drop D grows as σ^p,

    stderr(σ) = σ/p √(s²/K + (D - 0.1)²) / D        stderr(1/σ²) = 2/σ³ stderr(σ)        K - 1 degrees of freedom

with s the standard deviation of the K probes' drops; D - 0.1 is what the bisection left. p is the mean of the exponents
between σ and the nearest other values tried, below and above. This is to first order: the 95 % interval of 10 probes
holds 1/σ² of 2,000 probes in 91-92 % of cases, that of 40 in 97 %, where D - 0.1 is as large as the probes' scatter.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError, NonFiniteError
from ..losses import risk
from ..messages import in_words, with_error
from ..model import calling, layers, parameters, state
from ..model.data import size
from ..options import CALL, How, Options, check_count, check_flag, check_number, check_probes
from ..reparameterization.folding import Folding
from ..reparameterization.reparameterize import duplicate
from ..report import Estimate
from ..session import public, session
from .base import Measure, Task

DROP, PROBES, STEPS, TOLERANCE = 0.1, 10, 15, 0.01
LARGEST = 2.0  # σ
EPSILON = 1e-3

_NO_ACCURACY = "the model's outputs have NaN in them, so it has no accuracy; leave such samples out of the data"


@dataclass(frozen=True)
class Bisection:
    """Hold the result of a bisection.

    Attributes:
        sigma: σ, the last value tried.
        bracket: the values between which the σ of the wanted drop lies; the ends of [0, 2] were not tried.
        drops: by how much the accuracy is lower at σ, for each probe.
        reached: whether their mean is within tolerance of the wanted drop.
        stderr: the standard error of ``sigma`` over the probes, with one degree of freedom less than there are probes;
            None for one probe, if the wanted drop was not reached, and if only one σ was tried or the drop does not
            grow with σ.
    """

    sigma: float
    bracket: tuple[float, float]
    drops: tuple[float, ...]
    reached: bool
    stderr: float | None

    def __repr__(self) -> str:
        return in_words(self, *self._facts())

    def _facts(self) -> list[str]:
        sigma, flatness = with_error(self.sigma, self.stderr), with_error(self.flatness, self.flatness_stderr)
        drop = f"drop {self.drop:.4g} of the accuracy{'' if self.reached else ', which is not the wanted one'}"
        return [f"σ = {sigma}", f"flatness {flatness}", drop, f"{len(self.drops)} probes"]

    @property
    def drop(self) -> float:
        """Return the mean of ``drops``."""
        return sum(self.drops) / len(self.drops)

    @property
    def flatness(self) -> float:
        """Return 1/σ², the smaller the flatter."""
        return 1 / self.sigma**2

    @property
    def flatness_stderr(self) -> float | None:
        """Return the standard error of ``flatness``; None where there is none of ``sigma``."""
        return None if self.stderr is None else 2 * self.stderr / self.sigma**3


@dataclass(frozen=True)
class PacBayes(Bisection):
    """Hold the PAC-Bayes flatness of a network; the fields of :class:`pyflatness.results.Bisection` are of σ.

    Attributes:
        accuracy: the network's own.
        samples: n.
        bound: |θ|² / (4σ²) + log(n/σ) + 10.
        magnitude: the search for σ of the magnitude-aware form; None without initial weights.
        magnitude_bound: that form.
        initial_bound: |θ-θ⁰|² / (4σ²) + log(n/σ) + 10; None without initial weights.
        magnitude_origin_bound: the magnitude-aware form with |θ|² in the place of |θ-θ⁰|².
        unfolded: names of BatchNorm layers that follow no layer of their own: their scale and shift stay parameters.
    """

    accuracy: float
    samples: int
    bound: float
    magnitude: Bisection | None = None
    magnitude_bound: float | None = None
    unfolded: tuple[str, ...] = ()
    initial_bound: float | None = None
    magnitude_origin_bound: float | None = None

    def __repr__(self) -> str:
        held = {name: value for name, value in vars(self).items() if name.endswith("bound") and value is not None}
        bounds = [f"{name} {value:.6g}" for name, value in held.items()]
        return in_words(self, *self._facts(), *bounds, f"accuracy {self.accuracy:.6g}", f"{self.samples} samples")


@public(*CALL, "seed")
def pac_bayes(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    drop: float = DROP,
    probes: int = PROBES,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    initial: nn.Module | Mapping[str, Tensor] | None = None,
    squared: bool = False,
    **how: Unpack[How],
) -> PacBayes:
    """Return PAC-Bayes flatness 1/σ²: Gaussian noise of size σ on all parameters costs 0.1 of accuracy.

    (Petzka et al. 2021, appendix C.2, after Jiang et al. 2020.) BatchNorm is folded first. ``pf.measure(…,
    measures="pac_bayes")`` is this with its defaults.

    Args:
        model: … A classifier.
        loss: says where the classes are and which targets are ignored.
        data: … They are read up to ``probes * steps`` times.
        drop: of the mean accuracy, in (0, 1).
        probes: of the noise, the same for every σ.
        steps: of the bisection, at most.
        tolerance: of the drop at which it ends.
        initial: θ⁰, the network before training, for the magnitude-aware form: a module like the model or a state dict.
        squared: noise of standard deviation σ², as in the authors' code.

    Returns:
        σ, flatness, their standard errors, bounds, and the drops of all probes.

    Raises:
        InputError: options, targets or initial weights that do not fit; no classes to be right about.
        NonFiniteError: outputs with NaN.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 4)
        >>> model = torch.nn.Linear(4, 3)
        >>> found = pf.measures.pac_bayes(model, torch.nn.CrossEntropyLoss(), (x, model(x).argmax(1)))
        >>> found.reached, abs(found.drop - 0.1) < 0.01
        (True, True)
    """
    drop = check_number("drop", drop, "a number between 0 and 1", lambda given: 0 < given < 1)
    tolerance, squared = check_number("tolerance", tolerance), check_flag("squared", squared)
    probes, steps = check_probes("probes", probes, 1), check_count("steps", steps, 1)
    reads = _reads(probes, steps) * (1 if initial is None else 2)
    with session(model, loss, data, Options.of(how), how, reads=reads) as task:
        return _Search(task, drop, probes, steps, tolerance, squared=squared).result(initial)


def _reads(probes: int, steps: int) -> int:
    return probes * steps + 1


class _Search:
    """Search by bisection for the noise that a network tolerates on a data set."""

    def __init__(
        self,
        task: Task,
        drop: float = DROP,
        probes: int = PROBES,
        steps: int = STEPS,
        tolerance: float = TOLERANCE,
        *,
        squared: bool = False,
    ) -> None:
        self._task = task
        self._drop, self._steps, self._tolerance, self._squared = drop, steps, tolerance, squared
        self._folding = Folding(task.model, task.batches.peek(), task.forward)
        self._model = self._folding.of(task.model)
        self.unfolded = self._folding.alone
        self._theta = parameters.every(self._model)
        self._cuts = task.cut_batches(lambda some: self._run(some, {}))
        seeds = torch.Generator().manual_seed(task.options.seed)
        self._seeds: list[int] = torch.randint(2**62, (probes,), generator=seeds, device="cpu").tolist()
        self.samples = 0

    def result(self, initial: nn.Module | Mapping[str, Tensor] | None = None) -> PacBayes:
        before = None if initial is None else self._initial(initial)
        accuracy = self.accuracy({})
        found = self.bisected(accuracy, lambda sigma: lambda w: sigma)
        weights = [w.double() for w in self._theta.values() if w.ndim > 1]
        norm = sum(float(w.square().sum()) for w in weights)
        rest = math.log(self.samples / found.sigma) + 10
        magnitude = bound = of_initial = of_origin = None
        if before is not None:
            magnitude = self.bisected(accuracy, by_magnitude)
            steps = [w.double() - before[name].double() for name, w in self._theta.items() if w.ndim > 1]
            step = torch.cat([s.flatten() for s in steps])
            bound, of_origin = (
                _magnitude_bound(step, mean, magnitude.sigma) + math.log(self.samples / magnitude.sigma) + 10
                for mean in (step.square().mean(), norm / len(step))
            )
            of_initial = float(step.square().sum()) / (4 * found.sigma**2) + rest
        return PacBayes(
            *(found.sigma, found.bracket, found.drops, found.reached, found.stderr),
            accuracy=accuracy,
            samples=self.samples,
            bound=norm / (4 * found.sigma**2) + rest,
            magnitude=magnitude,
            magnitude_bound=bound,
            unfolded=self.unfolded,
            initial_bound=of_initial,
            magnitude_origin_bound=of_origin,
        )

    def bisected(self, accuracy: float, spread: Callable[[float], Callable[[Tensor], Any]]) -> Bisection:
        """Return the search for σ of noise that is as large as ``spread`` says for it, in each parameter."""
        lower, upper = 0.0, LARGEST
        tried: dict[float, float] = {}
        for _ in range(self._steps):
            sigma = (lower + upper) / 2
            drops = tuple(accuracy - self._noisy(spread(sigma), key) for key in self._seeds)
            drop = sum(drops) / len(drops)
            if abs(drop - self._drop) < self._tolerance:
                stderr = self._stderr(sigma, drops, tried)
                return Bisection(sigma, (lower, upper), drops, reached=True, stderr=stderr)
            tried[sigma] = drop
            lower, upper = (lower, sigma) if drop > self._drop else (sigma, upper)
        return Bisection(sigma, (lower, upper), drops, reached=False, stderr=None)

    def _stderr(self, sigma: float, drops: Sequence[float], tried: Mapping[float, float]) -> float | None:
        """Return the standard error of σ, by the delta method; ``tried`` are the mean drops at other σ."""
        below, above = ([other for other in tried if (other < sigma) is less] for less in (True, False))
        near = ([max(below)] if below else []) + ([min(above)] if above else [])
        drop = statistics.fmean(drops)
        if len(drops) < 2 or drop <= 0 or not any(tried[other] > 0 for other in near):
            return None
        exponents = [math.log(drop / tried[s]) / math.log(sigma / s) for s in near if tried[s] > 0]
        exponent = statistics.fmean(exponents)
        error = math.hypot(statistics.stdev(drops) / len(drops) ** 0.5, drop - self._drop)
        return sigma * error / (exponent * drop) if exponent > 0 else None

    def _noisy(self, spread: Callable[[Tensor], Any], key: int) -> float:
        """Return the accuracy with one probe of the noise."""

        def deviation(w: Tensor) -> Any:
            return spread(w) ** 2 if self._squared else spread(w)

        noise = parameters.noise(self._theta, torch.Generator(state.device(self._model)).manual_seed(key))
        with calling.dry_run():
            return self.accuracy(parameters.displaced(self._theta, noise, deviation))

    def _run(self, batch: Any, values: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        with parameters.inside(self._model, values):
            return calling.run(self._model, batch, self._task.forward)

    def accuracy(self, values: Mapping[str, Tensor]) -> float:
        """Return the accuracy at other parameters of these names, and count the samples."""
        right = total = samples = 0
        for number, micro_batch in self._cuts.numbered(self._task.batches):
            outputs, targets = self._run(micro_batch, values)
            hits = risk.hits(outputs, targets, self._task.loss, number)
            if not values and bool(outputs.isnan().any()):
                raise NonFiniteError(f"batch {number}: {_NO_ACCURACY}")
            right, total, samples = right + int(hits.sum()), total + len(hits), samples + size(micro_batch)
        counts = torch.tensor([right, total, samples], dtype=torch.float64, device="cpu")
        found = self._task.batches.shard.sum("an accuracy", {"counts": counts})["counts"]
        right, total, samples = map(int, found.tolist())
        if total == 0:
            raise InputError("targets: every one is ignored, so there is no accuracy")
        self.samples = samples
        return right / total

    def _initial(self, initial: nn.Module | Mapping[str, Tensor]) -> parameters.Parameters:
        """Return θ⁰ as the folded model has it."""
        state = layers.unwrap(initial).state_dict() if isinstance(initial, nn.Module) else initial
        other = duplicate(self._task.model)
        try:
            other.load_state_dict({layers.without_compile(name): value for name, value in state.items()})
        except (RuntimeError, TypeError, AttributeError) as error:
            raise InputError(f"initial: it does not fit the model ({' '.join(str(error).split())})") from None
        return parameters.every(self._folding.of(other))


def by_magnitude(sigma: float) -> Callable[[Tensor], Tensor]:
    """Return the deviation √(σ² θ_j² + ε²) of the noise on each entry."""
    return lambda w: (sigma**2 * w.square() + EPSILON**2).sqrt()


def _magnitude_bound(steps: Tensor, mean: float | Tensor, sigma: float) -> float:
    ratios = (EPSILON**2 + (sigma**2 + 1) * mean) / (EPSILON**2 + sigma**2 * steps.square())
    return float(ratios.log().sum()) / 4


def _estimate(name: str, task: Task) -> Estimate:
    """Return 1/σ² of one of the two measures, by name."""
    search = _Search(task)
    found: Bisection
    if name == PAC_BAYES.name:
        found = search.result()
        bound, accuracy = f"; bound {found.bound:.5g}", found.accuracy
    else:
        accuracy, bound = search.accuracy({}), ""
        found = search.bisected(accuracy, by_magnitude)
    low, high = min(found.drops), max(found.drops)
    notes = [
        f"{name}: σ = {found.sigma:.5g} lowers the accuracy of {accuracy:.4g} by {found.drop:.3g} "
        f"({low:.3g} to {high:.3g} in {len(found.drops)} probes){bound}"
    ]
    if not found.reached:
        notes.append(f"{name}: no σ was found at which the accuracy drops by {DROP}; σ is where the search ended")
    if search.unfolded:
        notes.append(f"{name}: BatchNorm that follows no layer of its own: {', '.join(search.unfolded)}")
    return Estimate(
        value=found.flatness,
        stderr=found.flatness_stderr,
        samples=search.samples,
        method="monte-carlo",
        exact=False,
        backend="reference",
        notes=tuple(notes),
        dof=None if found.stderr is None else len(found.drops) - 1,
    )


PAC_BAYES = Measure(
    name="pac_bayes",
    formula="1/σ², σ the noise N(0, σ²) on all parameters that lowers the accuracy by 0.1",
    source="Petzka et al. 2021, appendix C.2; Jiang et al. 2020",
    of_network=partial(_estimate, "pac_bayes"),
    cost=f"up to {_reads(PROBES, STEPS)} forward passes",
    reads=_reads(PROBES, STEPS),
)
PAC_BAYES_MAGNITUDE = Measure(
    name="pac_bayes_magnitude",
    formula="1/σ², σ the noise N(0, σ² θ_j² + 1e-6) on all parameters θ_j that lowers the accuracy by 0.1",
    source="Jiang et al. 2020; Petzka et al. 2021, appendix C.2",
    of_network=partial(_estimate, "pac_bayes_magnitude"),
    cost=PAC_BAYES.cost,
    reads=PAC_BAYES.reads,
)

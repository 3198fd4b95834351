"""Compute both sides of the inequalities of "From Loss Flatness to Compressed Representations" (C24).

Their terms, and when they are guaranteed, are in :mod:`.measures.bounds`.

**Sharpness and its value at an interpolation** (Lemma B.1 and E.2). For E = (1/n) Σ_i ½|f_i - y_i|², residuals
r_i = f_i - y_i of norm at most ε, and m trainable parameters θ_j,

    |Tr ∂²E/∂θ² - (1/n) Σ_i |∂f_i/∂θ|²|  ≤  (1/n) Σ_i Σ_j |⟨r_i, ∂²f_i/∂θ_j²⟩|  ≤  m M ε,   M = max_ij |∂²f_i/∂θ_j²|

and the same for adaptive sharpness with every term of j times θ_j² (Lemma E.2), M = max_ij θ_j² |∂²f_i/∂θ_j²|. For a
network that is locally linear in each parameter both sides are zero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError
from ..measures.base import Measure
from ..measures.bounds import NEEDS, NO_GUARANTEE, LayerTerms, NetworkTerms, at_interpolation, mean, product
from ..measures.layer_values import LayerValues
from ..measures.normalized_sharpness import NORMALIZED_SHARPNESS, Minimum, minimised
from ..measures.sharpness import ADAPTIVE_SHARPNESS, HalfSquaredError
from ..messages import in_words
from ..model import calling, parameters
from ..model.selectors import Selector
from ..numerics.process_groups import refuse
from ..options import READING, How, Options, check_count, check_flag, check_number, check_several
from ..passes.task import Task
from ..report import Estimate, Result, views
from ..session import public, session
from ..sweep import diagonal, jacobians

_ALL = "all"


@dataclass(frozen=True)
class Bound:
    """Hold one inequality: ``left`` is at most ``right`` where it is guaranteed.

    Attributes:
        equation: its number in the paper, and which of its steps.
        layer: the name of its layer; empty for the network.
        what: the left side in words.
        left: the value of the left side.
        right: the value of the right side.
        log: whether both sides are logarithms, as where a power of N appears.
        caveat: the reason why it need not hold; empty where it must hold.
    """

    equation: str
    layer: str
    what: str
    left: float
    right: float
    log: bool = False
    caveat: str = ""

    @property
    def guaranteed(self) -> bool:
        """Return whether the inequality must hold, up to rounding."""
        return not self.caveat


@dataclass(frozen=True, repr=False)
class Bounds(Result):
    """Hold the inequalities of the paper with both sides. ``str(bounds)`` is a table, and so is a data frame.

    Attributes:
        rows: those of each layer, then those of the network.
        sharpness: S; it is that of the chosen layers' weights unless it was given.
        samples: the number of samples in all means.
        outputs: N.
    """

    rows: tuple[Bound, ...]
    sharpness: float
    samples: int
    outputs: int

    def __getitem__(self, key: str | tuple[str, str]) -> Bound:
        layer, equation = ("", key) if isinstance(key, str) else key
        for row in self.rows:
            if (row.layer, row.equation) == (layer, equation):
                return row
        known = ", ".join(dict.fromkeys(row.equation for row in self.rows))
        raise InputError(f"bounds: nothing of layer {layer!r} and equation {equation!r}; equations are {known}")

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for header in ("layer", "equation", "what"):
            table.add_column(header, overflow="fold", no_wrap=header == "layer")
        for header in ("value", "bound"):
            table.add_column(header, justify="right", no_wrap=True)
        guaranteed = [f"{NO_GUARANTEE}: {row.caveat}" if row.caveat else "yes" for row in self.rows]
        longest = max((len(word) for text in guaranteed for word in text.split()), default=0)  # a layer's name, say
        table.add_column("guaranteed", min_width=longest)
        for row, text in zip(self.rows, guaranteed, strict=True):
            table.add_row(row.layer or "network", row.equation, row.what, f"{row.left:.6g}", f"{row.right:.6g}", text)
        facts = f"{self.samples} samples, N = {self.outputs}, S = {self.sharpness:.6g}"
        return "\n".join([*views.text(table, 200), facts])


def _of_layer(net: NetworkTerms, layer: LayerTerms, behind: LayerTerms | None, least: Minimum | None) -> list[Bound]:
    A = mean(layer.s)

    def row(equation: str, what: str, left: float, right: float, *, log: bool = False) -> Bound:
        return Bound(equation, layer.name, what, left, right, log, layer.caveat)

    def difference(what: str, other: Tensor) -> Bound:
        what = f"mean s_max less that {what}"
        return Bound("17", layer.name, what, mean(layer.s - other), layer.sensitivity, caveat=layer.apart)

    factor = float(layer.ratios.max()) ** 2
    square = mean(layer.s.square())
    volume, both = net.log_volumes([layer]), mean(layer.jacobian * layer.x)
    rows = [
        row("5", "mean s_max, by |∂f/∂W|/|x|: B of Eq. 48", A, layer.sensitivity),
        row("6, W", "mean s_max², by the smallest |x| and W", square, product(factor, layer.weights**2)),
        row("6", "mean s_max², by the smallest |x| and S", square, product(factor, net.sharpness)),
        row("9, middle", "log of the mean volume, by |J|_F", volume, net.log_norms([layer]), log=True),
        row("9", "log of the mean volume, by S", volume, net.log_volume([layer]), log=True),
        row("48, C", "mean s_max, by W", A, layer.mls_bound),
        row("11", "mean s_max, by S: D of Eq. 48", A, layer.sharpness_bound(net.sharpness)),
        row("37", "2 mean |J|_F |x|, by g² + |W|²", 2 * both, layer.weights**2 + layer.frobenius**2),
    ]
    if least is not None and layer.rescaled is not None:
        # The minimum of Eq. 36 is proportional to the root of H, which is a sum over samples here; σ' does not change.
        right = least.value / math.sqrt(net.samples)
        rows.append(row("37, least", "the same with σ' of Eq. 36, by Eq. 36", 2 * mean(layer.rescaled), right))
    if layer.passed:
        rows.append(difference("past the layer (of what follows the sum)", layer.past))
    elif behind is not None:
        rows.append(difference("of the next layer", behind.s))
    return rows


def _of_network(net: NetworkTerms) -> list[Bound]:
    every, first, last = net.layers, net.layers[0], net.layers[-1]

    def row(
        equation: str, what: str, left: float, right: float, *, log: bool = False, caveat: str = net.caveat
    ) -> Bound:
        return Bound(equation, "", what, left, right, log, caveat)

    volume = net.log_volumes(every)
    scaled = sum(mean(layer.s) / layer.spread for layer in every)
    return [
        row("10, middle", "log of the sum of mean volumes, by |J|_F", volume, net.log_norms(every), log=True),
        row("10", "log of the sum of mean volumes, by S", volume, net.log_volume(every), log=True),
        row("12", "Σ_l mean s_max", sum(mean(layer.s) for layer in every), net.nmls()),
        row("35", "Σ_l mean s_max / √(mean 1/|x|²), by |W|₂", scaled, sum(one.spectral * one.weights for one in every)),
        row("35, F", "the same, by |W|_F", scaled, sum(one.frobenius * one.weights for one in every)),
        row(
            "17, summed",
            "mean s_max at the first layer less that at the last",
            mean(first.s - last.s),
            sum(layer.sensitivity for layer in every[:-1]),
            caveat="" if net.telescopes else net.caveat,
        ),
    ]


def _by_power(layer: LayerTerms, squares: Tensor, power: int) -> list[Bound]:
    """Return Eq. 6 for another power than 2, in logarithms; ``squares`` are |∂f_i/∂θ|_F², (n,)."""
    left, factor = _log_mean(layer.s, power), power * float(layer.ratios.max().log())
    what = f"log of mean s_max^{power}, by the smallest |x| and "
    return [
        Bound(f"6{of}, k = {power}", layer.name, what + by, left, factor + _log_mean(g, power), True, layer.caveat)
        for of, by, g in ((", W", "W", layer.g), ("", "θ", squares.sqrt()))
    ]


def _log_mean(values: Tensor, power: int) -> float:
    """Return the logarithm of the mean of a power, for powers that would overflow."""
    return float((power * values.log()).logsumexp(dim=0)) - math.log(len(values))


def _adaptive(net: NetworkTerms, weighted: Mapping[str, float], everything: float) -> list[Bound]:
    """Return Eq. 44 of each layer, with its own weight and with all trainable parameters on the right-hand side.

    ``weighted`` is (1/n) Σ_i |W ∘ ∂f_i/∂W|_F², ``everything`` (1/n) Σ_i Σ_j θ_j² |∂f_i/∂θ_j|².
    """
    rows = []
    for layer in net.layers:
        assert layer.scaled is not None
        left, what = mean(layer.scaled) / layer.rows, "mean |J diag(x)|_F² / d, by "
        rows.append(Bound("44, W", layer.name, what + "W ∘ ∂f/∂W", left, weighted[layer.name], caveat=layer.caveat))
        rows.append(Bound("44", layer.name, what + "Eq. 41 over all parameters", left, everything, caveat=layer.caveat))
    return rows


@public(*READING, "nan_policy", "backend", "memory", "max_passes")
def bounds(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    layers: Selector | Sequence[Selector] | None = None,
    sharpness: float | str | None = None,
    normalized: bool = False,
    adaptive: bool = False,
    powers: Sequence[int] = (),
    **how: Unpack[How],
) -> Bounds:
    """Return the bounds of "From Loss Flatness to Compressed Representations", layer by layer, with both sides.

    Eq. 5, 6 (k = 2), 9 to 12, 17 (and its sum over layers, appendix A), 35, 37 at λ = ½ and σ = σ' = 1 or those of
    Eq. 36, 48; see docs/formulas.md for the symbols. They take one forward pass, and one backward pass per output. The
    left side of Eq. 17 of a layer that begins a residual block is taken at the input of what follows the sum.

    Args:
        loss: … Values do not depend on it.
        layers: the layers whose weights are θ; None: all layers that can be measured and ran.
        sharpness: S of more parameters: ``"all"`` takes all trainable ones, as in the paper, by another sweep. A number
            is S as known from elsewhere, (1/n) Σ_i |∂f_i/∂θ|_F². None: S of the chosen layers' weights.
        normalized: also give Eq. 37 at the σ, σ' at which its right-hand side is least, for layers with one position,
            by another sweep. With H_sj = (1/n) Σ_i |∂f_i/∂w_sj|² that is Eq. 36, normalised sharpness at an
            interpolation.
        adaptive: also give Eq. 44 (Proposition E.4), whose right-hand side is adaptive sharpness at an interpolation,
            Eq. 41, of the layer's weight and of all trainable parameters, by two more sweeps.
        powers: k other than 2 for which Eq. 6 is given too, in logarithms. Its θ are the chosen layers' weights, or all
            trainable parameters with ``sharpness="all"``.

    Returns:
        ``bounds[layer, equation]`` and ``bounds[equation]`` are inequalities, ``str(bounds)`` a table.

    Raises:
        FlatnessError: as :func:`pyflatness.representation`; a ``sharpness`` below that of the weights.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> data = torch.randn(100, 4), torch.randint(3, (100,))
        >>> found = pf.theory.bounds(model, torch.nn.CrossEntropyLoss(), data)
        >>> found["12"].guaranteed, found["12"].left <= found["12"].right
        (True, True)
    """
    options = Options.of(how)
    normalized, adaptive = check_flag("normalized", normalized), check_flag("adaptive", adaptive)
    wanted = "whole numbers"
    powers = [check_count("powers", power, 1, wanted) for power in check_several("powers", powers, wanted)]
    if sharpness is not None and not (isinstance(sharpness, str) and sharpness == _ALL):
        sharpness = check_number("sharpness", sharpness, f"a number or {_ALL!r}", lambda given: not math.isnan(given))
        if powers:
            raise InputError(f"powers: Eq. 6 takes |∂f_i/∂θ| of every sample; pass sharpness=None or {_ALL!r}")
    reads = 1 + normalized + 2 * adaptive + (sharpness == _ALL)
    with session(model, loss, data, options, how, reads=reads) as task:
        task = task.of(layers)
        least = _least(task) if normalized else {}
        scales = {name: minimum.columns for name, minimum in least.items()}
        samples = jacobians.measured(task, (*NEEDS, "scaled") if adaptive else NEEDS, scales=scales)
        every = at_interpolation(task, per_sample=bool(powers)) if sharpness == _ALL else None
        weighted = _weighted(task) if adaptive else {}
        everything = at_interpolation(task, adaptive=True).value if adaptive else 0.0
    if every is not None:
        sharpness = every.value
    net = NetworkTerms(samples, None if sharpness is None else float(sharpness))
    squares = net.squares if every is None or every.per_sample is None else every.per_sample.cpu()[samples.kept]
    rows: list[Bound] = []
    for layer, behind in zip(net.layers, [*net.layers[1:], None], strict=True):
        rows += _of_layer(net, layer, behind, least.get(layer.name))
        rows += [bound for power in powers for bound in _by_power(layer, squares, power)]
    rows += _adaptive(net, weighted, everything) if adaptive else []
    return Bounds((*rows, *_of_network(net)), net.sharpness, net.samples, net.outputs)


def _least(task: Task) -> dict[str, Minimum]:
    """Return the minimum of Eq. 36 for each layer but grouped convolutions, where H is a sum over samples."""
    found: dict[str, Minimum] = {}

    def keep(name: str, weight: Tensor, diagonal: Tensor) -> tuple[float, str]:
        if len(weight) == 1:
            found[name] = minimised(diagonal[0].double().cpu(), weight[0].double().cpu())
        return 0.0, ""

    _by_interpolation(task, replace(NORMALIZED_SHARPNESS, of_summands=keep))
    return found


def _weighted(task: Task) -> dict[str, float]:
    """Return (1/n) Σ_i |W ∘ ∂f_i/∂W|_F² of each layer."""
    found = _by_interpolation(task, ADAPTIVE_SHARPNESS)
    return {name: estimate.value / estimate.samples for (name, _), estimate in found.items() if name}


def _by_interpolation(task: Task, measure: Measure) -> dict[tuple[str, str], Estimate]:
    """Return a measure's sums over samples, of ½|f_i - y_i|² at f_i = y_i."""
    options = replace(task.options, curvature="ggn")
    return LayerValues(replace(task, loss=HalfSquaredError(), options=options)).estimates([measure])


@dataclass(frozen=True)
class InterpolationError:
    """Hold the sharpness of ½|f - y|², its value at an interpolation, and bounds of their difference.

    Attributes:
        sharpness: Σ_j a_j² ∂²E/∂θ_j², a_j = 1, or θ_j of adaptive sharpness.
        at_interpolation: (1/n) Σ_i Σ_j a_j² |∂f_i/∂θ_j|².
        residual: ε, the largest |f_i - y_i|.
        middle: (1/n) Σ_i Σ_j a_j² |⟨r_i, ∂²f_i/∂θ_j²⟩|; None unless second derivatives were asked for.
        largest: M, the largest a_j² |∂²f_i/∂θ_j²|; None unless second derivatives were asked for.
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
        """Return m M ε, the right side; None unless second derivatives were asked for."""
        return None if self.largest is None else self.parameters * self.largest * self.residual


@public(*READING, "memory", "max_passes")
def interpolation_error(
    model: nn.Module, data: Any, *, adaptive: bool = False, second_derivatives: bool = False, **how: Unpack[How]
) -> InterpolationError:
    """Return how far sharpness is from its value at an interpolation, with both sides of Lemma B.1 or E.2 of C24.

    |Σ_j ∂²E/∂θ_j² - (1/n) Σ_i |∂f_i/∂θ|²| ≤ m M ε for E = (1/n) Σ_i ½|f_i - y_i|²   ("From Loss Flatness to Compressed
    Representations", Eq. 19 and 42).

    Args:
        data: … With targets of the outputs' shape.
        adaptive: take adaptive sharpness (Lemma E.2).
        second_derivatives: also compute M and the sum between the two sides. This takes a forward pass and three
            backward passes for every entry of every parameter.
        max_passes: forward passes, or Hessian products, that exact values may take for a micro-batch.
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
        >>> found = pf.theory.interpolation_error(model, (x, model(x).detach() + 0.01), second_derivatives=True)
        >>> round(found.residual, 6), found.difference <= found.middle <= found.bound
        (0.01, True)
    """
    refuse(how.get("process_group"), "interpolation_error", "sharpness and interpolation_sharpness are, ")
    adaptive = check_flag("adaptive", adaptive)
    reads = 3 + check_flag("second_derivatives", second_derivatives)
    with session(model, _half_squared_error, data, Options.of(how), how, reads=reads) as task:
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
    largest = 0.0
    for number, micro_batch in task.cut_batches().numbered(task.batches):
        with torch.no_grad():
            outputs, targets = task.run(micro_batch)
        if not isinstance(targets, Tensor) or targets.shape != outputs.shape:
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise InputError(
                f"batch {number}: targets of the outputs' shape {tuple(outputs.shape)} are wanted, got {shape}"
            )
        largest = max(largest, float((outputs - targets).double().flatten(1).norm(dim=1).max()))
    return largest


def _second(task: Task, *, adaptive: bool) -> tuple[float, float]:
    """Return the sum that lies between the two sides, and M."""
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
            outputs, targets = task.run(batch)
        residuals, samples = (outputs - targets).double().flatten(1), samples + len(outputs)
        for name, weight in theta.items():
            for entry in range(weight.numel()):
                scale = float(weight.flatten()[entry]) ** 2 if adaptive else 1.0
                second = scale * _along(task, batch, theta, name, entry).double().flatten(1)
                total += float((second * residuals).sum(dim=1).abs().sum())
                largest = max(largest, float(second.norm(dim=1).max()))
    return total / samples, largest


def _along(task: Task, batch: Any, theta: parameters.Parameters, name: str, entry: int) -> Tensor:
    """Return ∂²f/∂θ_j² of all outputs, as the derivative in u of ∂²⟨u, f⟩/∂θ_j²."""
    direction = torch.zeros_like(theta[name])
    direction.view(-1)[entry] = 1
    step = torch.zeros((), dtype=direction.dtype, device=direction.device, requires_grad=True)
    with torch.enable_grad(), calling.dry_run(), calling.differentiated():
        outputs, _ = task.run(batch, {name: theta[name] + step * direction})
        along = torch.ones_like(outputs, requires_grad=True)
        derivative: Tensor | None = (outputs * along).sum()
        for variable, again in ((step, True), (step, True), (along, False)):
            if derivative is None or not derivative.requires_grad:
                return torch.zeros_like(outputs)
            (derivative,) = torch.autograd.grad(derivative, variable, create_graph=again, allow_unused=True)
    return torch.zeros_like(outputs) if derivative is None else derivative.detach()

"""Choose a format for each layer's weights so that the loss changes least under a budget of bits.

For every layer l and format f let Δ_lf be what keeping the weight in that format changes. One sweep over the data
gives the gradient's ⟨∇E, Δ_a⟩ and the products Δ_aᵀ G Δ_b of all pairs of such changes, also of different layers, in
the GGN G of the whole loss; see :mod:`.change_sweep`. A choice of a format for each layer is then predicted to change
the loss by

    ⟨∇E, Σ_l Δ_l⟩ + ½ Σ_l Σ_m Δ_lᵀ G Δ_m

which :mod:`..numerics.choices` minimises. Sums of what layers cost alone leave out the terms with l ≠ m: rounding
errors of one layer meet those of the next.

A minimum over noise is too low, and a choice follows the noise of its data, be it of few samples or of probes: other
data then lose more than these. So the samples are in folds. How their sums differ tells which share of the first order
is noise, and of the products of different layers, and the choice takes both less by that (as Schäfer and Strimmer 2005
do with correlations). What the choice costs other data is predicted by halves: choices made by one half of the folds
are priced by the other.
"""

import copy
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich import box
from rich.table import Column, Table
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError
from ..losses import remarks
from ..messages import check_choice, check_module, instead, shown
from ..model import layers as kinds
from ..model.selectors import Selector
from ..model.uses import Use
from ..numerics.choices import ChoiceProblem, Indices
from ..options import CALL, How, Options, check_count, check_flag, check_number, check_numbers, check_probes
from ..passes.task import Task
from ..report import Estimate, intervals, views
from ..report.result import Result, write_json
from ..session import public, session
from . import changes
from .change_sweep import ChangeSweep, risk_at
from .changes import Format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LossChange = Callable[[Mapping[str, str]], float]
_BUDGETS = 9  # of a frontier
_FOLDS = 16  # of samples
_LARGE = 0.5  # of the loss: what was predicted to be so large came to 0.6 to 2.3 times that (docs/quantisation.md)
_TOO_LARGE = (
    "the change is predicted to be more than half of the loss, where second order is a poor guide: loss_change is what "
    "measured=True finds"
)


@public(*CALL, "nan_policy", "memory", "seed", "max_passes")
def allocate(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    formats: Sequence[str | Format] = ...,  # type: ignore[assignment]
    *,
    bits: float | None = None,
    size: int | None = None,
    layers: Selector | Sequence[Selector] | None = None,
    fixed: Mapping[str, str | Format] | None = None,
    together: Iterable[Iterable[str]] = (),
    probes: int | None = 16,
    measured: bool = True,
    **how: Unpack[How],
) -> "Allocation":
    """Choose a format for each layer's weights, so that the loss is predicted to change least under a budget of bits.

    The prediction is ⟨∇E, Δ⟩ + ½⟨Δ, G Δ⟩ for the changes Δ of all layers together, with the GGN G of the whole loss in
    the place of its Hessian, from one sweep over the data. It says what the choice costs on other data like these. The
    coarsest formats change weights too much for a second order. So the best choices without them are found too, and one
    of these is taken where its loss on the data is clearly less.

    Args:
        model: …
        loss: …
        data: … They are read once, and with ``measured`` once more for each choice that is tried.
        formats: names such as ``"int4"``, ``"int4-g128"``, ``"fp8"`` or ``"keep"``, all in ``pf.changes``, and formats
            of your own, ``pf.changes.Format(name, bits, function)``.
        bits: the budget, in bits a weight in the mean over the weights of these layers.
        size: the budget in bytes of these weights, in the place of ``bits``.
        layers: selectors; None: all that have changes by ``pf.changes`` and run. The rest stays as it is, uncounted.
        fixed: by name of a layer, the format that it has; it counts in the budget.
        together: groups of names of layers that get one format, as queries, keys and values do. Layers that share a
            weight are such a group, and their weight is counted once.
        probes: random signs of each sample; all columns of the loss's square-root factor where these are no more. None:
            all columns, whatever they are. More samples with fewer probes make better choices in the same time.
        measured: also try the best choices without the coarsest format, without the two coarsest and so on, by a
            forward pass each, and take one whose loss is less by more than the standard error of the prediction.
        nan_policy: ``"raise"``, ``"propagate"`` is of no use here, or ``"omit"``, only without ``measured``.

    Returns:
        ``choice``, the name of each layer's format; ``bits`` of a weight in the mean; ``predicted``, the change of the
        loss; ``loss_change``, what it is on these data; ``gap``, by which another choice could at most be better as
        these probes see it; ``frontier()`` over budgets; ``apply(model)``, a changed copy; and ``export(tool, path)``.

    Raises:
        InputError: no budget, or one below the cheapest choice, which is named; formats or layers that do not exist; a
            format that makes NaN or another shape of a layer's weight; see :func:`pyflatness.relative_flatness`.
        MissingExtraError: without SciPy.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> data = torch.randn(100, 4), torch.randint(3, (100,))
        >>> plan = pf.allocate(model, torch.nn.CrossEntropyLoss(), data, ["int2", "int8"], bits=6)
        >>> plan.choice
        {'0': 'int2', '2': 'int8'}
        >>> round(plan.bits, 3)
        4.571
    """
    if (bits is None) == (size is None):
        raise InputError(
            f"bits={shown(bits)}, size={shown(size)}: one budget is wanted, bits a weight or size in bytes"
        )
    bits = 0.0 if bits is None else check_number("bits", bits, "a number of bits a weight")
    size = None if size is None else check_count("size", size, 1, "a number of bytes")
    probes = None if probes is None else check_probes("probes", probes, 1)
    measured, options = check_flag("measured", measured), Options.of(how, curvature="ggn", probes=probes)
    given = [formats] if isinstance(formats, (str, Format)) else [*formats]
    if not given:
        raise InputError("formats: an empty list; pass names such as 'int4' and 'int8'")
    known = [*{made.name: made for made in map(changes.named, given)}.values()]
    of_layer = {name: changes.named(one) for name, one in (fixed or {}).items()}
    reads = 1 + (len(known) + len(of_layer) if measured else 0)
    with session(model, loss, data, options, how, reads=reads, placed=True) as task:
        plan, loss_change = _planned(task, layers, known, of_layer, [[*names] for names in together])
        budget = bits if size is None else 8 * size / plan.weights
        found = _tried(plan, budget, loss_change) if measured else plan.best(budget)
        task.unite()
    return found


@dataclass(frozen=True)
class _Option:
    """Represent a format for layers that have one together."""

    layers: tuple[str, ...]
    format: Format
    bits: float  # that their weights take, a shared one once
    places: tuple[int, ...]  # of its changes among all; none where it changes nothing


@dataclass(frozen=True)
class _Folds:
    """Hold what folds of the samples give, each its own mean over samples, and the layer of each change."""

    shares: Tensor  # (folds,) of the samples
    first: Tensor  # (folds, changes)
    gram: Tensor  # (folds, changes, changes)
    layer: Tensor  # (changes,)

    def some(self, start: int) -> "_Folds":
        """Return every second fold."""
        return _Folds(self.shares[start::2], self.first[start::2], self.gram[start::2], self.layer)

    def prices(self, places: Sequence[int]) -> Tensor:
        """Return ⟨∇E, Δ⟩ + ½⟨Δ, G Δ⟩ of the sum Δ of some changes, by each fold."""
        of_some = self.gram[:, [*places]][:, :, [*places]]
        return self.first[:, [*places]].sum(dim=1) + 0.5 * of_some.sum(dim=(1, 2))

    def problem(self, options: Sequence[_Option], group: Sequence[int]) -> ChoiceProblem:
        """Return the problem of choosing among options, with the first order and products of layers less their noise.

        The share of noise is of squares, by how folds differ.
        """
        weights = self.shares / self.shares.sum()
        first, gram = weights @ self.first, torch.einsum("f,fab->ab", weights, self.gram)
        alone = gram.diagonal()
        alone = alone.where(alone > 0, torch.inf)
        apart = self.layer.unsqueeze(1) != self.layer
        sizes = alone, (alone.unsqueeze(1) * alone).where(apart, torch.inf)
        noise, count = [0.0, 0.0], len(weights)
        for weight, of_first, of_gram in zip(weights, self.first, self.gram, strict=True):
            for place, off in enumerate((of_first - first, of_gram - gram)):
                noise[place] += float(weight.square() * (off.square() / sizes[place]).sum())
        signal = [1.0, 1.0]  # what one fold tells is taken as it is
        for place, mean in enumerate((first, gram)):
            square = float((mean.square() / sizes[place]).sum())
            if count > 1 and square > 0:
                signal[place] = max(0.0, 1 - noise[place] * count / (count - 1) / square)
        of_option = gram.new_zeros(len(gram), len(options))
        for place, option in enumerate(options):
            of_option[[*option.places], place] = 1.0
        products = of_option.t() @ gram @ of_option
        products = signal[1] * products + (1 - signal[1]) * products.diagonal().diag()
        costs, size = signal[0] * of_option.t() @ first, np.array([option.bits for option in options])
        return ChoiceProblem(np.array(group), costs.numpy(), products.numpy(), size)


@dataclass(frozen=True)
class _Plan:
    """Hold what choices are made of."""

    options: Sequence[_Option]  # those for one group of layers behind those for another
    choices: ChoiceProblem
    folds: _Folds
    halves: Sequence[tuple[ChoiceProblem, _Folds]]  # what one half of the folds chooses by, and the other half
    places: Mapping[str, range]  # of each layer's changes among all of them
    weights: int  # of all groups of layers
    like: Estimate  # a prediction, whose value and error are to be another's
    loss: float  # before
    convex: bool  # whether the loss is
    sizes: Mapping[str, int]  # each layer's weights
    parts: frozenset[str]  # layers that are parts of a parameter, and no module

    def without(self, formats: Collection[str]) -> "_Plan":
        """Return the plan without some formats, but for groups of layers that have no other."""
        other = np.array([option.format.name not in formats for option in self.options])
        kept = np.flatnonzero(other | ~np.isin(self.choices.group, self.choices.group[other]))
        return replace(
            self,
            options=[self.options[place] for place in kept.tolist()],
            choices=self.choices.some(kept),
            halves=[(problem.some(kept), other) for problem, other in self.halves],
        )

    def fits(self, bits: float) -> bool:
        """Return whether a choice has no more bits a weight."""
        return float(self.choices.sizes[self.choices.cheapest()].sum()) <= bits * self.weights * (1 + 1e-12)

    def best(self, bits: float) -> "Allocation":
        """Return the best choice that is found of so many bits a weight."""
        if not self.fits(bits):
            cheapest = self.choices.cheapest()
            least = float(self.choices.sizes[cheapest].sum())
            names = Counter(self.options[place].format.name for place in cheapest)
            listed = ", ".join(f"{name} for {count} layers" for name, count in names.most_common())
            raise InputError(
                f"bits={bits:.6g}: the cheapest choice takes {least / self.weights:.6g} bits a weight, "
                f"{math.ceil(least / 8)} bytes: {listed}"
            )
        chosen, gap = self.choices.best(bits * self.weights)
        taken = [self.options[place] for place in chosen]
        by_layer = {name: option.format.name for option in taken for name in option.layers}
        return Allocation(
            choice={name: by_layer[name] for name in self.places},
            bits=sum(option.bits for option in taken) / self.weights,
            weights=self.weights,
            predicted=self._predicted(chosen, bits),
            loss_change=None,
            gap=gap if self.convex else math.nan,
            _formats={option.format.name: option.format for option in taken},
            _plan=self,
        )

    def _predicted(self, chosen: Indices, bits: float) -> Estimate:
        """Return what choices of so many bits cost data that they were not made by; of one fold, what these cost."""
        if not self.halves:
            return self._noted(float(self.folds.prices(self._changes(chosen))[0]), math.nan, None)
        value = variance = 0.0
        for problem, other in self.halves:
            prices = other.prices(self._changes(problem.good(bits * self.weights)))
            mean, count = float(other.shares @ prices / other.shares.sum()), len(prices)
            value += float(other.shares @ prices)
            spread = float((other.shares * (prices - mean)).square().sum())
            variance += spread * count / (count - 1) if count > 1 else math.nan
        return self._noted(value, math.sqrt(variance), float(len(self.folds.shares) - 2))

    def _noted(self, value: float, stderr: float, dof: float | None) -> Estimate:
        notes = (_TOO_LARGE,) if value > _LARGE * self.loss else ()
        return replace(self.like, value=value, stderr=stderr, dof=dof, notes=(*self.like.notes, *notes))

    def _changes(self, chosen: Indices) -> list[int]:
        return [place for option in chosen for place in self.options[option].places]


def _planned(
    task: Task,
    chosen: Selector | Sequence[Selector] | None,
    formats: Sequence[Format],
    fixed: Mapping[str, Format],
    together: Sequence[Sequence[str]],
) -> tuple[_Plan, LossChange]:
    """Return what one sweep over a task's data gives, and what measures a choice by one more."""
    made = {one.name: changes.of_uses(task.model, one, chosen) for one in formats}
    (first, *_) = made.values()
    for name in (*fixed, *(name for names in together for name in names)):
        if name not in first:
            raise InputError(f"fixed=, together=: {shown(name)} is none of these layers; {instead(name, first)}")
    for name, one in fixed.items():
        made[one.name] = made.get(one.name, {}) | changes.of_format(task.model, one, layers=[name])
    formats_of = {name: [fixed[name]] if name in fixed else formats for name in first}
    changing = {
        name: {one.name: made[one.name][name] for one in formats_of[name] if made[one.name][name].any()}
        for name in first
    }
    task = task.of(None if chosen is None else [*first])
    costs = ChangeSweep(task, {name: [*each.values()] for name, each in changing.items()}, folds=_FOLDS).found()
    places = {
        (name, key): place
        for name, each in costs.places.items()
        for key, place in zip(changing[name], each, strict=True)
    }
    options, group, weights = [], [], 0
    for number, names in enumerate(_groups(first, [*costs.places], together)):
        own = {first[name]: kinds.without_entries(task.selection.modules[name]) for name in reversed(names)}
        weights += sum(matrix.numel() for matrix in own.values())
        keys = [{one.name for one in formats_of[name]} for name in names]
        common = [one for one in formats_of[names[0]] if all(one.name in each for each in keys)]
        if not common:
            raise InputError(f"fixed=: {', '.join(map(repr, names))} have one format together, and others here")
        for one in common:
            bits = sum(one.bits_of(matrix) * matrix.numel() for matrix in own.values())
            changed = tuple(places[name, one.name] for name in names if (name, one.name) in places)
            options.append(_Option(tuple(names), one, bits, changed))
            group.append(number)
    assert costs.folds is not None
    owner = [number for number, each in enumerate(costs.places.values()) for _ in each]
    shares, of_first = costs.folds
    folds = _Folds(shares.cpu(), of_first.cpu(), costs.gram.cpu(), torch.tensor(owner, dtype=torch.int64, device="cpu"))
    halves = [(folds.some(start), folds.some(1 - start)) for start in range(2 if len(folds.shares) > 1 else 0)]
    remarks.refuse_without_curvature(task.forward.notes, "the price of every format")
    sums, method = costs.sums, "ggn-sampled" if costs.sampled else "ggn"
    like = Estimate(0.0, None, sums.samples, method, exact=False, backend="reference", omitted=sums.omitted)
    plan = _Plan(
        options=options,
        choices=folds.problem(options, group),
        folds=folds,
        halves=[(half.problem(options, group), other) for half, other in halves],
        places=costs.places,
        weights=weights,
        like=task.noted(like),
        loss=costs.loss,
        convex=task.loss.convex,
        sizes={name: kinds.without_entries(task.selection.modules[name]).numel() for name in costs.places},
        parts=frozenset(
            name
            for name in costs.places
            if isinstance(layer := task.selection.modules[name], Use) and not layer.source.of_module
        ),
    )

    def loss_change(choice: Mapping[str, str]) -> float:
        chosen = {name: changing[name][key] for name, key in choice.items() if key in changing[name]}
        return risk_at(task, chosen).value - costs.loss

    return plan, loss_change


def _tried(plan: _Plan, bits: float, loss_change: LossChange) -> "Allocation":
    """Return the best choice, or one without the coarsest formats if its loss on the data is less.

    It has to be less by more than the standard error of the prediction: other data differ by as much.
    """
    taken: dict[str, float] = defaultdict(float)
    for option in plan.options:
        taken[option.format.name] += option.bits
    coarsest = sorted(taken, key=taken.__getitem__)
    finer = itertools.takewhile(
        lambda each: each.fits(bits), (plan.without(coarsest[:count]) for count in range(1, len(coarsest)))
    )
    found: dict[tuple[str, ...], Allocation] = {}
    for each in (plan, *finer):
        best = each.best(bits)
        found.setdefault(tuple(best.choice.values()), best)  # each choice is measured once
    changes = {key: loss_change(best.choice) for key, best in found.items()}
    first, least = next(iter(changes)), min(changes, key=changes.__getitem__)
    noise = found[first].predicted.stderr
    if noise is not None and changes[first] - changes[least] <= noise:  # not of NaN, where there is none
        least = first
    return replace(found[least], loss_change=changes[least], _plan=plan)


def _groups(
    owned: Mapping[str, Tensor], ran: Sequence[str], together: Sequence[Sequence[str]]
) -> Iterable[tuple[str, ...]]:
    """Return the layers that have one format, in groups: those named, and those of one weight, which has one change."""
    sharing: dict[Tensor, list[str]] = {}
    for name in ran:
        sharing.setdefault(owned[name], []).append(name)
    group = {name: {name} for name in ran}
    for names in (*sharing.values(), *together):
        united = set().union(*(group[name] for name in names if name in group))
        group |= dict.fromkeys(united, united)
    return dict.fromkeys(tuple(name for name in ran if name in each) for each in group.values())


@dataclass(frozen=True, repr=False, eq=False)
class Allocation(Result):
    """Hold a format for each layer's weights; ``str(plan)`` is a table.

    Attributes:
        choice: by layer, the name of its format.
        bits: of a weight in the mean over the weights of these layers, scales of groups included.
        weights: of these layers; one that layers share counts once.
        predicted: the change ⟨∇E, Δ⟩ + ½⟨Δ, G Δ⟩ of the loss on other data: choices made by one half of the samples are
            priced by the other half, and the two are averaged. It is rather too high, since half of the samples make
            worse choices. Its error is that of other samples and probes, not of what lies beyond second order. Of fewer
            than 4 samples it has no interval, and of one it is the change on that sample.
        loss_change: by how much the choice changes the loss on the data that it was made by, in all orders; None: not
            measured.
        gap: how much better than this choice another one could be at most, of what was minimised; NaN for a loss that
            is not convex in the outputs.
    """

    choice: Mapping[str, str]
    bits: float
    weights: int
    predicted: Estimate
    loss_change: float | None
    gap: float
    _formats: Mapping[str, Any]  # by name, those chosen
    _plan: Any  # which this is a choice of

    def frontier(self, bits: Iterable[float] | None = None) -> "Frontier":
        """Return the choices that are predicted to be best under several budgets, of the same probes; none is measured.

        Args:
            bits: of a weight; None: from the cheapest choice to the largest, each by the same factor more.

        Raises:
            InputError: a budget below the cheapest choice.
        """
        problem, weights = self._plan.choices, self.weights
        least, most = problem.sizes[problem.cheapest()].sum() / weights, problem.largest() / weights
        budgets = np.geomspace(least, most, _BUDGETS) if bits is None else check_numbers("bits", bits)
        return Frontier(tuple(self._plan.best(float(budget)) for budget in budgets))

    def apply(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model whose weights are as the chosen formats keep them; the model is not changed.

        Raises:
            InputError: it has no such layers, or a weight that is computed of others.
        """
        made = copy.deepcopy(check_module("model", model))
        for format_name, held in self._formats.items():
            names = [name for name, chosen in self.choice.items() if chosen == format_name]
            changes.add(made, changes.of_format(made, held, layers=names))
        return made

    def export(self, tool: str, path: str | Path) -> None:
        """Write the choice as a file that another tool reads, which rounds by its own algorithm.

        - ``"llm-compressor"``: a recipe with a ``QuantizationModifier``, as JSON, which is YAML too:
          ``oneshot(model, recipe=path)``.
        - ``"gptqmodel"``: a ``quantize_config.json`` with a ``dynamic`` rule for each layer; layers that are not of the
          plan are left as they are.
        - ``"torchao"``: an ``FqnToConfig``: ``quantize_(model, config_from_dict(json.load(file)), filter_fn=None)``.

        Recipes were held against the schemas of compressed-tensors 0.20, and the last against torchao 0.18. The file
        for GPTQModel follows its documentation (7.7); it was not read by that tool itself.

        Raises:
            InputError: a tool that is none of these; a layer with a format that the tool cannot be told of, or that is
                no module.
        """
        check_choice("tool", tool, tuple(_TOOLS))
        unsaid = {name: self._formats[key] for name, key in self.choice.items()}
        for name, held in unsaid.items():
            if name in self._plan.parts:
                raise InputError(
                    f"layer {name!r} is a part of a parameter and no module, which {tool} cannot be told of"
                )
            if held.scheme is None or not _TOOLS[tool].takes(held):
                raise InputError(f"layer {name!r}: {tool} cannot be told of its format {held.name!r}")
        write_json(_TOOLS[tool].written(self.choice, self._formats), path)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain numbers, strings and dicts."""
        held = {"choice": dict(self.choice), "bits": self.bits, "weights": self.weights}
        return {**held, "predicted": self.predicted.to_dict(), "loss_change": self.loss_change, "gap": self.gap}

    def _rows(self) -> list[dict[str, Any]]:
        sizes = self._plan.sizes
        return [{"layer": name, "weights": sizes[name], "format": chosen} for name, chosen in self.choice.items()]

    def __str__(self) -> str:
        table = Table(Column("layer", no_wrap=True), Column("weights", justify="right"), "format", box=box.SIMPLE_HEAD)
        for name, chosen in self.choice.items():
            table.add_row(name or "(the model)", f"{self._plan.sizes[name]:,}", chosen)
        predicted = intervals.shown(self.predicted.value, self.predicted.interval())
        told = f"{self.bits:.6g} bits a weight of {self.weights}; the loss is predicted to change by {predicted}"
        told += "" if self.loss_change is None else f", and changes by {self.loss_change:.3g} on these data"
        return "\n".join([*views.text(table, 100), told, *self.predicted.notes])


@dataclass(frozen=True, repr=False, eq=False)
class Frontier(Result):
    """Hold choices under several budgets; ``str(frontier)`` is a table.

    Attributes:
        plans: the choices, by their budgets.
    """

    plans: tuple[Allocation, ...]

    def plot(self, path: str | Path | None = None, *, axes: "Axes | None" = None) -> "tuple[Figure, Axes]":
        """Draw the predicted change of the loss, with its interval, over bits a weight.

        Args:
            path: where the figure is written too; its ending is its format.
            axes: matplotlib's, to draw into; None: those of a new figure.

        Raises:
            MissingExtraError: without matplotlib.
        """
        figure, drawn = views.onto(axes)
        values = [plan.predicted.value for plan in self.plans]
        ends = [plan.predicted.interval() or (plan.predicted.value,) * 2 for plan in self.plans]
        drawn.errorbar(
            [plan.bits for plan in self.plans], values, [(high - low) / 2 for low, high in ends], marker="o", capsize=2
        )
        drawn.set_xscale("log", base=2)
        drawn.xaxis.set_major_formatter("{x:g}")
        drawn.set(xlabel="bits a weight", ylabel="predicted change of the loss")
        drawn.grid(alpha=0.3)
        views.save(figure, path)
        return figure, drawn

    def to_dict(self) -> dict[str, Any]:
        """Return the choices as plain numbers, strings and dicts."""
        return {"plans": [plan.to_dict() for plan in self.plans]}

    def _rows(self) -> list[dict[str, Any]]:
        return [{"bits": plan.bits, **plan.predicted.to_dict(), "gap": plan.gap} for plan in self.plans]

    def __str__(self) -> str:
        table = Table("bits a weight", "predicted change of the loss", "gap", box=box.SIMPLE_HEAD)
        for plan in self.plans:
            predicted = intervals.shown(plan.predicted.value, plan.predicted.interval())
            table.add_row(f"{plan.bits:.4g}", predicted, f"{plan.gap:.2g}")
        return "\n".join(views.text(table, 100))


@dataclass(frozen=True)
class _Tool:
    """Represent another tool: which formats it can be told of, and what it reads."""

    takes: Callable[[Format], bool]
    written: Callable[[Mapping[str, str], Mapping[str, Format]], Any]


def _for_llm_compressor(choice: Mapping[str, str], formats: Mapping[str, Format]) -> Any:
    groups = {}
    for key, held in formats.items():
        if held.scheme:
            kind, bits, size = (held.scheme[name] for name in ("type", "bits", "group_size"))
            weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
            weights["strategy"] = "channel" if size is None else "group"
            weights |= {} if size is None else {"group_size": size}
            scale = held.scheme.get("scale")
            if scale is not None:
                weights |= {"scale_dtype": f"torch.{scale}", "zp_dtype": f"torch.{scale}"}
                weights["strategy"] = "tensor_group" if scale == "float8_e4m3fn" else "group"
            targets = [f"re:^{re.escape(name)}$" for name, chosen in choice.items() if chosen == key]
            groups[key] = {"targets": targets, "weights": weights}
    modifier = {"QuantizationModifier": {"config_groups": groups, "ignore": []}}
    return {"allocation_stage": {"allocation_modifiers": modifier}}


def _for_gptqmodel(choice: Mapping[str, str], formats: Mapping[str, Format]) -> Any:
    rules = {
        name: {"bits": held.scheme["bits"], "group_size": held.scheme["group_size"] or -1} if held.scheme else None
        for name, held in ((name, formats[key]) for name, key in choice.items())
    }
    dynamic = {f"{'-' if rule is None else '+'}:^{re.escape(name)}$": rule or {} for name, rule in rules.items()}
    default = next((rule for rule in rules.values() if rule), {"bits": 4, "group_size": -1})
    others: dict[str, Any] = {"-:.*": {}}  # the first rule that matches counts
    whole = {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": True, "desc_act": False}
    return {**default, **whole, "dynamic": {**dynamic, **others}}


def _for_torchao(choice: Mapping[str, str], formats: Mapping[str, Format]) -> Any:
    def config(held: Format) -> Any:
        if not held.scheme:
            return None
        bits, size = held.scheme["bits"], held.scheme["group_size"]
        if held.scheme["type"] == "float":
            rows = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
            return _torchao("Float8WeightOnlyConfig", weight_dtype=_torch_dtype("float8_e4m3fn"), granularity=rows)
        kind, data = ("PerAxis", {"axis": 0}) if size is None else ("PerGroup", {"group_size": size})
        granularity = {"_type": kind, "_version": 1, "_data": data}
        return _torchao("IntxWeightOnlyConfig", weight_dtype=_torch_dtype(f"int{bits}"), granularity=granularity)

    by_name = {name: config(formats[key]) for name, key in choice.items()}
    return {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": by_name, "module_fqn_to_config": by_name}}


def _torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": data}


def _torch_dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


_TOOLS = {
    "llm-compressor": _Tool(lambda held: True, _for_llm_compressor),
    "gptqmodel": _Tool(lambda held: not held.scheme or held.scheme["type"] == "int", _for_gptqmodel),
    "torchao": _Tool(
        lambda held: not held.scheme or held.scheme["type"] == "int" or held.scheme["bits"] == 8, _for_torchao
    ),
}

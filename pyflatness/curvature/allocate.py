"""Choose a format for each layer's weights so that the loss changes least under a budget of bits.

For every layer l and format f let Δ_lf be what keeping the weight in that format changes. One sweep over the data
gives the gradient's ⟨∇E, Δ_a⟩ and the products Δ_aᵀ G Δ_b of all pairs of such changes, also of different layers, in
the GGN G of the whole loss; see :mod:`.change_sweep`. A choice of a format for each layer is then predicted to change
the loss by

    ⟨∇E, Σ_l Δ_l⟩ + ½ Σ_l Σ_m Δ_lᵀ G Δ_m

which :mod:`..numerics.choice_problem` minimises. Adding up what each layer costs alone would leave out the terms with
l ≠ m, by which the rounding errors of one layer act on those of the next.

A minimum over noisy prices is too low: a choice follows the noise of its data, and other data lose more by it. The
samples are therefore put in folds. The differences between folds show which part of the first order, and of the
products of different layers, is noise, and the choice shrinks both by that part (as Schäfer and Strimmer 2005 do with
correlations). Cross-validation shows how much more other data lose: a quarter of the folds loses more by the choice
that the other three quarters make than these three do. This difference is measured, or predicted with
``measured=False``.

Where changes are too large for an expansion at w, one more sweep expands the loss at the weights w* = w + Δ* of a
choice. Other choices then have the prices ⟨∇E(w*), Δ - Δ*⟩ + ½⟨Δ - Δ*, G(w*) (Δ - Δ*)⟩, which are accurate for choices
that differ in few layers. In the changes Δ_lf this is the same problem with another linear term.
"""

import contextlib
import fnmatch
import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich import box
from rich.table import Column, Table
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import interrupts, progress
from ..errors import InputError
from ..losses import divergence, loss_notes
from ..losses.divergence import Divergence
from ..messages import check_choice, check_module, check_path, instead, shown
from ..model import layers as kinds
from ..model import selectors, uses
from ..model.selectors import Selector
from ..model.uses import Use
from ..numerics.choice_problem import ROUNDING, ChoiceProblem, Indices, smallest
from ..options import CALL, How, Options, check_count, check_flag, check_number, check_numbers, check_probes
from ..passes.task import Task
from ..progress import Advance, quiet
from ..reparameterization.reparameterize import duplicate
from ..report import Estimate, intervals, views
from ..report.result import Result, write_json
from ..session import public, session
from . import changes, exports, whole_weights
from .change_sweep import ChangeCosts, ChangeSweep, FoldLosses, fold_losses
from .changes import Copy, Format
from .whole_weights import Weight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Choice = Mapping[str, Format]  # by the name of a weight
Losses = Callable[..., FoldLosses]  # (choices, other data or None) -> their losses
_Search = Callable[[float, Advance], "Allocation"]
_FUSED = (*exports.FUSED, ("query", "key", "value"))
_BUDGETS = 9  # of a frontier
_FOLDS, _PARTS = 16, 4  # folds of the samples; parts of the folds, each of which prices the choice of the others
_LARGE = 0.5  # of the loss: changes that second order predicted to be so large were 0.6 to 2.3 times as large
_TOO_LARGE = (
    "the change is predicted to be more than half of the loss, where second order is a poor guide for choices; what "
    "the loss does is what measured=True finds"
)
_ONE = "there is no interval, since a single sample does not show how samples differ"
_UNMEASURED = (
    "the change is that of these data, to second order and not measured; it leaves out what choosing hides, and has no "
    "interval"
)
_ROUNDS = 3  # expansions at the choice, where the change is so large
_FITTED = 0.1  # of the held-out loss: if the loss of data is less by this part, the model has fitted them


def checked(
    formats: Sequence[str | Format | Copy],
    fixed: Mapping[str, str | Format | Copy] | None,
    tool: str | None,
    bits: float | None,
    size: int | None,
) -> tuple[list[Format | Copy], dict[str, Format | Copy]]:
    """Return the formats, and the fixed ones by names and globs; the command does this before it loads a model.

    Raises:
        InputError: no budget or two, or a tool or formats that do not exist.
    """
    if (bits is None) == (size is None):
        raise InputError(
            f"bits={shown(bits)}, size={shown(size)}: one budget is wanted, bits a weight or size in bytes"
        )
    if not isinstance(formats, (Format, Copy, Iterable)):
        raise InputError(f"formats: names such as 'int4' are wanted, got {shown(formats)}")
    if not (fixed is None or isinstance(fixed, Mapping)):
        raise InputError(f"fixed: a dict of formats by names of layers is wanted, got {shown(fixed)}")
    given = [formats] if isinstance(formats, (str, Format, Copy)) else [*formats]
    if not given:
        raise InputError("formats: an empty list; pass names such as 'int4' and 'int8'")
    if tool is not None:
        exports.check_tool(tool)
    whose = None if tool is None else exports.TOOLS[tool].formats
    own = {one.name: one for one in given if isinstance(one, (Format, Copy))}

    def named(one: str | Format | Copy) -> Format | Copy:
        one = own.get(one, one) if isinstance(one, str) else one
        one = one if isinstance(one, Copy) else changes.named(one, whose)
        if tool is not None and (isinstance(one, Copy) or one.scheme is None):
            raise InputError(f"tool={tool!r}: {tool} cannot be told of the format {one.name!r}")
        return one

    known = [*{made.name: made for made in map(named, given)}.values()]
    return known, {name: named(one) for name, one in (fixed or {}).items()}


@public(*CALL, "nan_policy", "memory", "seed", "max_passes")
def allocate(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    formats: Sequence[str | Format | Copy] = ...,  # type: ignore[assignment]
    *,
    bits: float | None = None,
    size: int | None = None,
    layers: Selector | Sequence[Selector] | None = None,
    fixed: Mapping[str, str | Format | Copy] | None = None,
    together: str | Iterable[Iterable[str]] = (),
    probes: int | None = 16,
    measured: bool = True,
    rounds: int | None = None,
    held_out: Any = None,
    tool: str | None = None,
    **how: Unpack[How],
) -> "Allocation":
    """Choose a format for each layer's weights, so that the loss is predicted to change least under a budget of bits.

    A choice minimises ⟨∇E, Δ⟩ + ½⟨Δ, G Δ⟩ for the changes Δ of all layers together, with the GGN G of the whole loss in
    place of its Hessian, from one sweep over the data. The coarsest formats change weights too much for a second-order
    expansion. The best choices without them are therefore found too, the losses of all are measured, and the choice is
    taken by which other data are expected to lose least. ``predicted`` is what it costs on other data, with an
    interval.

    Args:
        model: …
        loss: … ``"kl"``: the KL divergence of the changed model's predictions from the model's, over the terms of its
            cross-entropy. Its gradient is 0 and its Hessian the GGN; targets count as far as some are ignored.
        data: … They are read once, once more with ``measured``, and up to twice in each of the ``rounds``. The model
            should not have been trained on them.
        formats: names such as ``"int4"``, ``"int4-g128"``, ``"fp8"`` or ``"keep"``, all in ``pf.changes``; formats of
            your own, ``pf.changes.Format(name, bits, function)``; and quantised copies of the model that you have,
            ``pf.changes.Copy("gptq3", 3.25, quantised)``, whose weights a layer then gets.
        bits: the budget, in bits a weight in the mean over the weights of these layers.
        size: the budget in bytes of these weights, in place of ``bits``: as ``tool`` stores them, if you name one whose
            bytes are known, else as planned.
        layers: selectors; None: all that have changes by ``pf.changes`` and run. Other layers stay as they are, and do
            not count.
        fixed: formats that layers have in any case, by name or glob; a name overrides a glob. They count in the budget.
            An expert of a mixture to which no token is routed has no price. It gets its format here, or that of the
            experts that it is ``together`` with, and otherwise stays as it is.
        together: groups of names of layers, or globs, that get one format, as queries, keys and values do; ``"vllm"``:
            those that vLLM runs as one, queries, keys and values, gates and ups, and all experts of a mixture. A weight
            that layers share has one format, changes in all of its uses, and is counted once.
        probes: random cotangents of each sample; all columns of the loss's square-root factor where these are no more.
            None: all columns, however many. More samples with fewer probes make better choices in the same time.
        measured: also try the best choices without the coarsest format, without the two coarsest, and so on. Take the
            choice with the least loss on the data plus what other data are expected to lose more. Cross-validation
            finds that: a quarter of the data loses more by the choice that the other three quarters make than these
            three do. This takes up to five forward passes for each choice.
        rounds: the most times that the loss is expanded again at the weights of the choice. The new choice is taken as
            long as its loss on the data is less. Where the choice before was without some formats, its loss has to be
            expected to be less on other data. A round takes as long as the call without rounds. None: 3 where the
            change is more than half of the loss, else 1, and none with ``"kl"``.
        held_out: data that neither the model nor the choice has seen. ``predicted`` is of these data, and a note says
            where the loss of ``data`` is far below theirs, which means that the model has fitted ``data``.
        tool: the tool whose formats the names mean; a layer gets no format that the tool does not keep it in, see
            ``plan.export``. None: the formats of :mod:`pyflatness.changes`, for all layers.
        nan_policy: ``"raise"``, ``"propagate"`` is of no use here, or ``"omit"``, only without ``measured``.

    Returns:
        ``choice``, the name of each layer's format; ``bits`` of a weight in the mean; ``predicted``, the change of the
        loss on other data; ``loss_change``, its change on these; ``gap``, how much better another choice could be at
        most by these probes' second order, not by the loss; ``frontier()`` over budgets; ``apply(model)``, a changed
        copy; and ``export(tool, path)``.

    Raises:
        InputError: no budget, or one below the cheapest choice, which is named; formats or layers that do not exist; a
            format that makes NaN or another shape of a layer's weight, or a copy without it; see
            :func:`pyflatness.relative_flatness`.
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
    known, of_layer = checked(formats, fixed, tool, bits, size)
    bits = 0.0 if bits is None else check_number("bits", bits, "a number of bits a weight")
    size = None if size is None else check_count("size", size, 1, "a number of bytes")
    probes = None if probes is None else check_probes("probes", probes, 1)
    measured, options = check_flag("measured", measured), Options.of(how, curvature="ggn", probes=probes)
    if held_out is not None and not measured:
        raise InputError("held_out= is measured: leave measured=False out")
    of_kl = isinstance(loss, str) and loss == divergence.NAME
    rounds = None if rounds is None else check_count("rounds", rounds, 0, "a number of expansions")
    if rounds and (of_kl or not measured):
        why = "loss='kl' is expanded at the model's own weights" if of_kl else "measured=False measures no choice"
        raise InputError(f"rounds={rounds}: {why}; leave one of both out")
    base = divergence.trained_with(model) if of_kl else loss
    with session(model, base, data, options, how, reads=1 + measured, placed=True) as task:
        task = replace(task, loss=Divergence.of(task.loss)) if of_kl else task
        read = _planned(task, layers, known, of_layer, together, tool, bits, size)
        plan = read.plan
        budget = bits if size is None else 8 * size / plan.entries
        if measured:
            found = read.measured(budget, rounds, held_out)
        else:
            (found,) = plan.searched([(plan.best, budget)])
        task.unite()
    return found


@dataclass(frozen=True)
class _Option:
    """Represent a format as an option for layers that share one."""

    formats: Mapping[str, Format]  # by layer; a copy of the model gives a format to each
    bits: float  # of their weights, a shared one counted once
    size: float  # what counts in the budget: these bits, or those that a tool stores
    places: tuple[int, ...]  # of its changes among all; none if it changes nothing

    @property
    def name(self) -> str:
        """Return the name of the format."""
        return next(iter(self.formats.values())).name


@dataclass(frozen=True)
class _Folds:
    """Hold first order and Gram matrix of each fold of the samples at some weights, as means over its samples."""

    shares: Tensor  # (folds,) of the samples
    first: Tensor  # (folds, changes)
    gram: Tensor  # (folds, changes, changes)
    group: Tensor  # (changes,), the number of the group of layers that share a format
    made: Tensor  # (changes,), 1 for changes that these weights contain, else 0

    @classmethod
    def of(cls, costs: ChangeCosts, group: Tensor, made: Sequence[int] = ()) -> "_Folds":
        """Return the folds of a sweep at weights that contain some changes."""
        assert costs.folds is not None
        shares, first = costs.folds
        indicator = torch.zeros(len(group), dtype=torch.float64, device="cpu")
        indicator[[*made]] = 1.0
        return cls(shares.cpu(), first.cpu(), costs.gram.cpu(), group, indicator)

    def some(self, places: Tensor) -> "_Folds":
        """Return some of the folds."""
        return replace(self, shares=self.shares[places], first=self.first[places], gram=self.gram[places])

    def prices(self, places: Sequence[int]) -> Tensor:
        """Return ⟨∇E, Δ⟩ + ½⟨Δ, G Δ⟩ in each fold, for the sum Δ of some changes less those that are made."""
        more = -self.made
        more[[*places]] += 1
        return self.first @ more + 0.5 * ((self.gram @ more) @ more)

    def problems(
        self, options: Sequence[_Option], group: Sequence[int]
    ) -> tuple[ChoiceProblem, list[tuple[Tensor, ChoiceProblem]]]:
        """Return the problem of all folds, and for each part of the folds its mask and the problem of the others."""
        of_part = torch.arange(len(self.shares), device="cpu") % _PARTS
        parts = [of_part == part for part in of_part.unique()] if len(self.shares) > 1 else []
        others = [(part, self.some(~part).problem(options, group)) for part in parts]
        return self.problem(options, group), others

    def problem(self, options: Sequence[_Option], group: Sequence[int]) -> ChoiceProblem:
        """Return the problem of choosing among options; first order and products of groups are shrunk by their noise.

        The part that is noise is one of squares, estimated from how folds differ.
        """
        weights = self.shares / self.shares.sum()
        first, gram = weights @ self.first, torch.einsum("f,fab->ab", weights, self.gram)
        alone = gram.diagonal()
        alone = alone.where(alone > 0, torch.inf)
        apart = self.group.unsqueeze(1) != self.group
        sizes = alone, (alone.unsqueeze(1) * alone).where(apart, torch.inf)
        noise, count = [0.0, 0.0], len(weights)
        for weight, of_first, of_gram in zip(weights, self.first, self.gram, strict=True):
            for place, off in enumerate((of_first - first, of_gram - gram)):
                noise[place] += float(weight.square() * (off.square() / sizes[place]).sum())
        signal = [1.0, 1.0]  # a single fold tells of no noise
        for place, mean in enumerate((first, gram)):
            square = float((mean.square() / sizes[place]).sum())
            if count > 1 and square > 0:
                signal[place] = max(0.0, 1 - noise[place] * count / (count - 1) / square)
        of_option = gram.new_zeros(len(gram), len(options))
        for place, option in enumerate(options):
            of_option[[*option.places], place] = 1.0
        gram = torch.where(apart, signal[1] * gram, gram)
        costs = of_option.t() @ (signal[0] * first - gram @ self.made)
        products, size = of_option.t() @ gram @ of_option, np.array([option.size for option in options])
        return ChoiceProblem(np.array(group), costs.numpy(), products.numpy(), size)


@dataclass(frozen=True)
class _Plan:
    """Hold the options that choices are made of, their prices, and facts for the result."""

    options: Sequence[_Option]  # group of layers after group
    choices: ChoiceProblem
    folds: _Folds
    left_out: Sequence[tuple[Tensor, ChoiceProblem]]  # masks of some folds, and the problem of the others
    weights: Mapping[str, Weight]  # by the names of layers
    entries: int  # of all weights
    like: Estimate  # a prediction without its value and error
    loss: float  # before the change; infinite for a divergence, so that no change is large
    told: str  # what a prediction is of
    convex: bool  # whether the loss is
    shown: bool | None  # whether a search shows a bar
    rest: tuple[str, ...]  # linear modules that are not in the plan
    tool: str | None
    tokens: Mapping[str, int]  # of experts
    uncovered: Mapping[str, float]  # weights that have no layer here
    why_uncovered: Mapping[str, str]
    dropped: tuple[str, ...] = ()  # formats that the tool does not keep some layers in, with reasons
    counted: str = ""  # whose bytes the budget is in, in words; empty: those that are planned

    def without(self, formats: Collection[str]) -> "_Plan":
        """Return the plan without some formats, which groups of layers keep that have no other."""
        other = np.array([option.name not in formats for option in self.options])
        kept = np.flatnonzero(other | ~np.isin(self.choices.group, self.choices.group[other]))
        return replace(
            self,
            options=[self.options[place] for place in kept.tolist()],
            choices=self.choices.some(kept),
            left_out=[(places, problem.some(kept)) for places, problem in self.left_out],
        )

    def fits(self, bits: float) -> bool:
        """Return whether a choice has no more bits a weight."""
        return float(self.choices.sizes[self.choices.cheapest()].sum()) <= bits * self.entries * (1 + ROUNDING)

    def by_second_order(self, bits: float, advance: Advance) -> "Allocation":
        """Return the choice found for a budget of bits a weight, with what second order predicts of these data."""
        _refuse_less(bits * self.entries, self.options, self.choices.group, self.entries, self.counted, self.dropped)
        chosen, gap = self.choices.best(bits * self.entries, lambda: advance(0, ""))
        formats = self._formats(chosen)
        predicted = self.estimate(float(self.folds.shares @ self.prices(formats)), math.nan)
        return Allocation(
            choice={layer: formats[name].name for name, weight in self.weights.items() for layer in weight.modules},
            bits=sum(self.options[place].bits for place in chosen) / self.entries,
            weights=self.entries,
            uncovered=self.uncovered,
            why_uncovered=self.why_uncovered,
            predicted=replace(predicted, notes=(*predicted.notes, _UNMEASURED)),
            loss_change=None,
            gap=gap if self.convex else math.nan,
            _formats=formats,
            _of_other_folds=[],
            _plan=self,
        )

    def best(self, bits: float, advance: Advance = quiet) -> "Allocation":
        """Return the choice found for a budget of bits a weight, with what other data are predicted to lose by it."""
        found, shares = self.by_second_order(bits, advance), self.folds.shares
        others = [
            (places, self._formats(problem.good(bits * self.entries, lambda: advance(0, ""))))
            for places, problem in self.left_out
        ]
        prices = self.prices(found._formats)
        hidden = _hidden(shares, [(places, self.prices(other) - prices) for places, other in others])
        predicted = self.estimate(float(shares @ prices), _error(shares, prices), hidden)
        return replace(found, predicted=predicted, _of_other_folds=others)

    def searched(self, searches: "Sequence[tuple[_Search, float]]") -> "list[Allocation]":
        """Return what searches find for their budgets of bits a weight, and show how far they are."""
        found = []
        with progress.bar("choosing formats", len(searches), self.shown) as advance:
            for search, bits in searches:
                found.append(search(bits, advance))
                advance(1, "")
        return found

    def prices(self, choice: Choice) -> Tensor:
        """Return what second order predicts a choice to change the loss of each fold by, (folds,)."""
        chosen = [option for option in self.options if all(choice[name] is one for name, one in option.formats.items())]
        return self.folds.prices([place for option in chosen for place in option.places])

    def estimate(
        self, change: float, error: float, hidden: float = 0.0, *, folds: Tensor | None = None, **facts: Any
    ) -> Estimate:
        """Return the change of the loss on other data: ``change`` on these, plus ``hidden`` that the choice hides.

        The standard error contains all of ``hidden``. ``folds`` are the shares of those of the data, None: the plan's.
        """
        value, dof = change + hidden, len(self.folds.shares if folds is None else folds) - 1
        notes = (*self.like.notes, *((_TOO_LARGE,) if value > _LARGE * self.loss else ()), *(() if dof else (_ONE,)))
        stderr = math.hypot(error, hidden)
        return replace(self.like, value=value, stderr=stderr, dof=float(dof) or None, notes=notes, **facts)

    def _formats(self, chosen: Indices) -> dict[str, Format]:
        """Return the format of each weight."""
        found = {name: one for place in chosen for name, one in self.options[place].formats.items()}
        return {name: found[name] for name in self.weights}


def _refuse_less(
    budget: float, options: Sequence[_Option], group: Any, entries: int, counted: str, dropped: Sequence[str]
) -> None:
    """Raise if a budget of bits for all weights is below the cheapest choice of an option for each group."""
    cheapest = [options[place] for place in smallest(np.array(group), np.array([option.size for option in options]))]
    least = sum(option.size for option in cheapest)
    if least > budget * (1 + ROUNDING):
        names = Counter(option.name for option in cheapest)
        listed = ", ".join(f"{name} for {count} layers" for name, count in names.most_common())
        raise InputError(
            f"bits={budget / entries:.6g}, {budget / 8:.0f} bytes: the cheapest choice takes {least / entries:.6g} "
            f"bits a weight, {math.ceil(least / 8)} bytes{counted}: {'; '.join([listed, *dropped])}"
        )


def _planned(
    task: Task,
    chosen: Selector | Sequence[Selector] | None,
    formats: Sequence[Format | Copy],
    fixed: Mapping[str, Format | Copy],
    together: str | Iterable[Iterable[str]],
    tool: str | None,
    bits: float,
    size: int | None,
) -> "_Read":
    """Return the plan that one sweep over a task's data gives, with functions that read the data again.

    Raises:
        InputError: see :func:`allocate`; a budget that is too small is noticed before the sweep, where the layers that
            a dry run shows tell.
    """
    stored = size is not None and tool is not None and exports.TOOLS[tool].stored is not None
    counted = f" as {tool} stores them" if stored else ""
    task, _ = whole_weights.taken(task.of(chosen))
    task, computed = whole_weights.stored(task)
    modules = task.selection.modules
    owner = {
        layer: name
        for name, module in modules.items()
        for layer in (*whole_weights.modules_of(task.model, name, module), name)
    }
    own, groups = _fixed(fixed, owner), _groups(together, owner)
    formats_of: dict[str, Sequence[Format | Copy]] = {name: [own[name]] if name in own else formats for name in modules}
    dropped: tuple[str, ...] = ()
    if tool is not None:
        task, formats_of, refused, dropped = _of_tool(task, tool, formats_of)
        modules, computed = task.selection.modules, computed | refused
    changing = {name: [one.name for one in each if one.changes] for name, each in formats_of.items()}

    @functools.cache
    def of_layer(name: str) -> dict[str, Format]:
        weight = Weight.of(task.model, name, modules[name])
        return {one.name: weight.format_of(one, kinds.weight_of(modules[name])) for one in formats_of[name]}

    @functools.cache
    def made(name: str) -> list[Tensor]:
        with torch.no_grad():
            return [changes.of_layer(name, modules[name], of_layer(name)[one].change) for one in changing[name]]

    def swept(first: Callable[[Collection[str]], None] = lambda ran: None) -> ChangeCosts:
        counts = {name: len(each) for name, each in changing.items()}
        return ChangeSweep(task, counts, made, folds=_FOLDS, first=first).found()

    def choosable(
        weights: Mapping[str, Weight], places: Mapping[tuple[str, str], int]
    ) -> tuple[list[_Option], list[int], int]:
        """Return the options of weights, the number of the group of each, and the entries of all these weights."""
        options, group, entries = list[_Option](), list[int](), 0
        for number, names in enumerate(_united(weights, groups)):
            once = {weights[name].key: name for name in reversed(names)}.values()
            entries += sum(weights[name].matrix.numel() for name in once)
            common = [one for one in of_layer(names[0]) if all(one in of_layer(name) for name in names)]
            if not common:
                raise InputError(f"fixed=: {', '.join(map(repr, names))} have one format together, and others here")
            for one in common:
                matrices = [(of_layer(name)[one], weights[name].matrix) for name in once]
                planned = sum(held.bits_of(matrix) * matrix.numel() for held, matrix in matrices)
                kept = [exports.stored(tool, weights[name], of_layer(name)[one]) for name in once] if stored else []
                changed = tuple(places[name, one] for name in names if (name, one) in places)
                counting = 8.0 * sum(map(sum, kept)) if stored else planned
                options.append(_Option({name: of_layer(name)[one] for name in names}, planned, counting, changed))
                group.append(number)
        return options, group, entries

    def refuse_less(ran: Collection[str]) -> None:
        """Raise if no choice fits the budget, unless layers that did not run yet could lower the mean."""
        weights = {name: Weight.of(task.model, name, module) for name, module in modules.items()}
        others = [
            one.bits_of(weight.matrix) if isinstance(one, Format) else 0.0
            for name, weight in weights.items()
            if name not in ran
            for one in formats_of[name]
        ]
        if size is None and min(others, default=math.inf) < bits:
            return
        options, group, entries = choosable({name: weights[name] for name in weights if name in ran}, {})
        _refuse_less(bits * entries if size is None else 8.0 * size, options, group, entries, counted, dropped)

    costs = swept(refuse_less)
    ran = costs.places.keys()
    told = {*own, *(name for names in groups if not names.isdisjoint(ran) for name in names)}
    idle: set[str] = set()  # layers that did not run, and have a format all the same
    for name, module in modules.items():
        if name in told and name not in ran and not (isinstance(module, Use) and not module.routed):
            idle.add(name)
            if isinstance(module, Use):  # its matrix is as those of the other experts
                module.kind = next((other.kind for other in module.source.uses.values() if other.ran), module.kind)
    weights = {name: Weight.of(task.model, name, modules[name]) for name in modules if name in ran or name in idle}
    places = {
        (name, one): place
        for name, each in costs.places.items()
        for one, place in zip(changing[name], each, strict=True)
    }
    options, group, entries = choosable(weights, places)
    of_change = torch.full(costs.gram.shape[1:2], -1, dtype=torch.int64, device="cpu")  # -1: of a layer without options
    for option, number in zip(options, group, strict=True):
        of_change[[*option.places]] = number
    folds = _Folds.of(costs, of_change)
    choices, left_out = folds.problems(options, group)
    loss_notes.refuse_without_curvature(task.forward.notes, "the price of every format")
    sums, method = costs.sums, "ggn-sampled" if costs.sampled else "ggn"
    like = Estimate(0.0, None, sums.samples, method, exact=False, backend="reference", omitted=sums.omitted)
    uncovered = uses.left_out(task.model, [modules[name] for name in weights]) if chosen is None else {}
    plan = _Plan(
        options=options,
        choices=choices,
        folds=folds,
        left_out=left_out,
        weights=weights,
        entries=entries,
        like=task.noted(like),
        loss=math.inf if isinstance(task.loss, Divergence) else costs.loss,
        told="the KL divergence from the model is" if isinstance(task.loss, Divergence) else "the loss changes by",
        convex=task.loss.convex,
        shown=task.progress,
        rest=tuple(
            name
            for name, layer in selectors.layers(task.model).items()
            if not any(name in weight.modules for weight in weights.values())
            and whole_weights.kind_name(layer) in exports.LINEAR
        ),
        tool=tool,
        tokens=costs.tokens,
        uncovered=uncovered,
        why_uncovered=uses.reasons(task.model, uncovered)
        | {key: computed[own] for key in uncovered for own in (key, key.rpartition(".")[0]) if own in computed},
        dropped=dropped,
        counted=counted,
    )

    def losses(choices: Sequence[Choice], others: Any = None) -> FoldLosses:
        each = [{name: one.name for name, one in choice.items() if one.name in changing[name]} for choice in choices]
        made_of = [{name: made(name)[changing[name].index(one)] for name, one in some.items()} for some in each]
        return fold_losses(task if others is None else task.on(others), made_of, _FOLDS)

    def at(choice: Choice) -> _Plan:
        with _kept(task.model, weights, choice):
            costs = swept()
        made_here = [places[name, one.name] for name, one in choice.items() if (name, one.name) in places]
        folds = _Folds.of(costs, of_change, made_here)
        choices, left_out = folds.problems(options, group)
        return replace(plan, choices=choices, left_out=left_out, folds=folds)

    return _Read(plan, losses, at)


@contextlib.contextmanager
def _kept(model: nn.Module, weights: Mapping[str, Weight], choice: Choice) -> Iterator[None]:
    """Give a model the weights of a choice while the context is open."""
    with interrupts.undone():
        for weight, held in _once(weights, choice):
            own = weight.in_model(kinds.unwrap(model))
            interrupts.later(functools.partial(own.copy_, own.clone()))
            weight.keep(own, held)
        yield


def _once(weights: Mapping[str, Weight], choice: Choice) -> Iterable[tuple[Weight, Format]]:
    """Return each weight with its format, one that layers share once."""
    return {weights[name].key: (weights[name], held) for name, held in choice.items()}.values()


def _of_tool(
    task: Task, tool: str, formats_of: Mapping[str, Sequence[Format | Copy]]
) -> tuple[Task, dict[str, Sequence[Format | Copy]], dict[str, str], tuple[str, ...]]:
    """Return the task with the layers that a tool keeps in some of the formats, and these formats by layer.

    Then follow, by layer, why the tool keeps it in none, and in words the formats that it does not keep some layers in.

    Raises:
        InputError: the tool keeps a layer that was named, or all layers, in none of the formats.
    """
    kept: dict[str, Sequence[Format | Copy]] = {}
    refused: dict[str, str] = {}
    dropped: Counter[tuple[str, str]] = Counter()
    for name, formats in formats_of.items():
        weight = Weight.of(task.model, name, task.selection.modules[name])
        reasons = {one.name: exports.why_not(tool, weight, one) for one in formats}
        able = [one for one in formats if not reasons[one.name]]
        if able:
            kept[name] = able
            dropped.update((one, reason) for one, reason in reasons.items() if reason)
        else:
            refused[name] = reasons[formats[0].name]
    told = tuple(f"no {one} in {count} of the layers: {reason}" for (one, reason), count in dropped.items())
    return whole_weights.without(task, refused), kept, refused, told


def _fixed(fixed: Mapping[str, Format | Copy], owner: Mapping[str, str]) -> dict[str, Format | Copy]:
    """Return the fixed formats by the names of weights; a name overrides a glob."""
    found: dict[str, tuple[str, str, Format | Copy]] = {}
    for pattern, one in sorted(fixed.items(), key=lambda item: item[0] not in owner):
        for layer in _matching(pattern, owner):
            other, by, earlier = found.setdefault(owner[layer], (layer, pattern, one))
            if earlier != one and (by not in owner or pattern in owner):
                same = f"{other!r} and {layer!r} are one weight" if other != layer else f"{layer!r} is meant by both"
                raise InputError(f"fixed=: {by!r} is {earlier.name!r} and {pattern!r} is {one.name!r}, but {same}")
    return {name: one for name, (_, _, one) in found.items()}


def _matching(pattern: str, owner: Mapping[str, str]) -> list[str]:
    """Return the layers that a name or glob of ``fixed=`` or ``together=`` matches."""
    found = [pattern] if pattern in owner else [name for name in owner if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise InputError(f"fixed=, together=: {shown(pattern)} is none of these layers; {instead(pattern, owner)}")
    return found


def _groups(together: str | Iterable[Iterable[str]], owner: Mapping[str, str]) -> list[set[str]]:
    """Return the groups of names of weights that are to share a format."""
    if isinstance(together, str):
        check_choice("together", together, ("vllm",))
        fused: dict[object, set[str]] = {}
        for layer, name in owner.items():
            fused.setdefault(_fused(layer), set()).add(name)
        return [*fused.values()]
    return [{owner[name] for pattern in patterns for name in _matching(pattern, owner)} for patterns in together]


def _fused(layer: str) -> object:
    """Return a key that layers share which vLLM runs as one: projections of one input, experts of one mixture."""
    experts = re.match(r"(.*\bexperts)[.\[]", layer)
    if experts:
        return experts[1]
    parent, _, last = layer.rpartition(".")
    return (parent, next((names for names in _FUSED if last in names), layer))


def _united(weights: Mapping[str, Weight], groups: Iterable[Collection[str]]) -> Iterable[tuple[str, ...]]:
    """Return the groups of layers that share a format: those that were named, and those of one weight."""
    sharing: dict[object, list[str]] = {}
    for name, weight in weights.items():
        sharing.setdefault(weight.key, []).append(name)
    group = {name: {name} for name in weights}
    for names in (*sharing.values(), *groups):
        united = set().union(*(group[name] for name in names if name in group))
        group |= dict.fromkeys(united, united)
    return dict.fromkeys(tuple(name for name in weights if name in each) for each in group.values())


@dataclass(frozen=True)
class _Read:
    """Hold a plan, with functions that read the data again."""

    plan: _Plan
    losses: Losses
    at: Callable[[Choice], _Plan]  # the plan expanded at the weights of a choice, by a sweep

    def measured(self, bits: float, rounds: int | None, held_out: Any) -> "Allocation":
        """Return the choice that measured losses show to be best."""
        plan = self.plan
        tried = self._tried(plan.searched([(each.best, bits) for each in self._without_coarsest(bits)]))
        taken = min(tried, key=lambda each: each.expected)
        hidden, notes = taken.hidden, tuple[str, ...]()
        if taken is not tried[0]:
            loss = f"{tried[0].expected:.3g}"
            notes = (f"taken instead of the best by second order, which is expected to change the loss by {loss}",)
        if rounds is None:  # a divergence is expanded at the model's own predictions alone
            rounds = 0 if math.isinf(plan.loss) else _ROUNDS if taken.change > _LARGE * plan.loss else 1
        if len(plan.options) == len(np.unique(plan.choices.group)):  # there is nothing to choose
            rounds = 0
        of_all = taken is tried[0]
        for _ in range(rounds):
            (step,) = plan.searched([(self.at(taken.choice._formats).best, bits)])
            if step.choice == taken.choice.choice:
                break
            (other,) = self._tried([step])
            # Where both were chosen among all formats, both hide about as much, and their losses compare better.
            if not (other.change < taken.change if of_all else other.expected < taken.expected):
                break
            taken, hidden, of_all = other, hidden + other.hidden, True
        error = float(taken.losses.errors[taken.place])
        predicted = plan.estimate(taken.change, error, hidden, method="definition")
        predicted = replace(predicted, notes=(*predicted.notes, *notes))
        if held_out is not None:
            others = self.losses([taken.choice._formats], held_out)
            of_others, error = float(others.changes[0] @ others.shares), float(others.errors[0])
            facts: dict[str, Any] = {"method": "definition", "samples": others.samples}
            predicted = plan.estimate(of_others, error, folds=others.shares, **facts)
            predicted = replace(predicted, notes=(*predicted.notes, *_fitted(taken.losses, others)))
        return replace(taken.choice, predicted=predicted, loss_change=taken.change, _plan=plan)

    def _without_coarsest(self, bits: float) -> "list[_Plan]":
        """Return the plan, and those without the coarsest format, the two coarsest and so on that fit the budget."""
        bits_of: dict[str, float] = defaultdict(float)
        for option in self.plan.options:
            bits_of[option.name] += option.bits
        coarsest = sorted(bits_of, key=bits_of.__getitem__)
        finer = (self.plan.without(coarsest[:count]) for count in range(1, len(coarsest)))
        return [self.plan, *itertools.takewhile(lambda each: each.fits(bits), finer)]

    def _tried(self, best: "Sequence[Allocation]") -> "list[_Tried]":
        """Measure choices, and the choices that are made without each part of the folds, by one read of the data.

        A choice that occurs several times is measured once.
        """
        every = [choice for each in best for choice in (each._formats, *(other for _, other in each._of_other_folds))]
        choices = {_names(choice): choice for choice in every}
        losses = self.losses([*choices.values()])
        place_of = {names: place for place, names in enumerate(choices)}
        tried = []
        for each in best:
            place = place_of[_names(each._formats)]
            worse = [
                (places, losses.changes[place_of[_names(other)]] - losses.changes[place])
                for places, other in each._of_other_folds
            ]
            tried.append(_Tried(each, losses, place, _hidden(losses.shares, worse)))
        return tried


@dataclass(frozen=True)
class _Tried:
    """Hold a choice and what was measured of it."""

    choice: "Allocation"
    losses: FoldLosses  # of all choices that were tried together
    place: int  # of this choice among them
    hidden: float  # how much more other data are expected to lose

    @property
    def change(self) -> float:
        """Return the change of the loss of all samples."""
        return float(self.losses.changes[self.place] @ self.losses.shares)

    @property
    def expected(self) -> float:
        """Return the expected change of the loss on other data, by cross-validation."""
        return self.change + self.hidden


def _hidden(shares: Tensor, worse: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return how much more other data lose than the data that made a choice, by cross-validation.

    ``worse`` has for each part of the folds, a mask (folds,), how much more each fold loses by the choice that is made
    without this part. The folds that made that choice lose more by it too, since they are fewer data; this is
    subtracted. The rest is negative only by chance.
    """
    found = 0.0
    for places, more in worse:
        others = (shares * more)[~places].sum() / shares[~places].sum()
        found += float((shares * (more - others))[places].sum())
    return max(0.0, found)


def _names(choice: Choice) -> tuple[str, ...]:
    return tuple(held.name for held in choice.values())


def _fitted(own: FoldLosses, other: FoldLosses) -> tuple[str, ...]:
    """Return a note if the loss of the data is below that of others by more than a tenth and three standard errors."""
    fitted, held = (float(each.shares @ each.before) for each in (own, other))
    error = math.hypot(*(_error(each.shares, each.before) for each in (own, other)))
    if not held - fitted > max(_FITTED * held, 3 * error):
        return ()
    return (
        f"the loss of data is {fitted:.3g} and that of held_out {held:.3g}: the model has fitted data, which tell less "
        "of how it changes elsewhere; plan with data that it has not seen",
    )


def _error(shares: Tensor, of_folds: Tensor) -> float:
    """Return the standard error of a mean from the differences between folds; NaN of one fold."""
    count, off = len(of_folds), of_folds - shares @ of_folds
    return math.sqrt(float((shares * off).square().sum()) * count / (count - 1)) if count > 1 else math.nan


@dataclass(frozen=True, repr=False, eq=False)
class Allocation(Result):
    """Hold a format for each layer's weights; ``str(plan)`` is a table.

    Attributes:
        choice: by layer, the name of its format.
        bits: of a weight in the mean over the weights of these layers, scales of groups included.
        weights: the number of weights of these layers; one that layers share counts once.
        uncovered: weights of the model that stay as they are, since no layer that can be changed has them, by the name
            of the parameter, each with its share of all weights; empty where layers were chosen.
        why_uncovered: for some of these the reason.
        predicted: the change of the loss on other data like these, with an interval: ``loss_change`` plus how much more
            other data lose, by cross-validation. Its standard error has two parts: that of other samples, and the whole
            difference from ``loss_change``. With ``held_out=`` it is the change on those data. Without ``measured`` it
            is of second order, without higher ones.
        loss_change: the change of the loss on the data that made the choice; None if it was not measured.
        gap: how much better than this choice another one could be at most, in what was minimised; NaN for a loss that
            is not convex in the outputs.
    """

    choice: Mapping[str, str]
    bits: float
    weights: int
    uncovered: Mapping[str, float]
    why_uncovered: Mapping[str, str]
    predicted: Estimate
    loss_change: float | None
    gap: float
    _formats: Mapping[str, Any]  # by the name of a weight in the plan
    _of_other_folds: Any  # [(Tensor, Choice)]: masks of parts of the folds, and the choices of the others
    _plan: Any  # which this is a choice of

    def frontier(self, bits: Iterable[float] | None = None) -> "Frontier":
        """Return the choices that are predicted to be best under several budgets, by the same probes, unmeasured.

        ``predicted`` of each is the change of the loss of the data of the plan, to second order. It leaves out what
        choosing hides and has no interval: plan with the budget that you like to measure these.

        Args:
            bits: budgets in bits a weight, as ``tool`` stores it where the plan has a ``size``; None: from the cheapest
                choice to the largest, each by the same factor larger.

        Raises:
            InputError: a budget below the cheapest choice.
        """
        problem, weights = self._plan.choices, self.weights
        least, most = problem.sizes[problem.cheapest()].sum() / weights, problem.largest() / weights
        budgets = np.geomspace(least, most, _BUDGETS) if bits is None else check_numbers("bits", bits)
        found = self._plan.searched([(self._plan.by_second_order, float(budget)) for budget in budgets])
        return Frontier((*{_names(each._formats): each for each in found}.values(),), self)

    def apply(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model whose weights are as the chosen formats keep them; the model is not changed.

        Raises:
            InputError: it has no such layers, or a weight that is computed of others.
        """
        made = duplicate(check_module("model", model))
        for weight, held in _once(self._plan.weights, self._formats):
            weight.keep(weight.in_model(kinds.unwrap(made)), held)
        return made

    def export(self, tool: str, path: str | Path) -> None:
        """Write the choice as a file that another tool reads; see ``docs/allocation.md`` for how each is used.

        - ``"torchao"``: an ``FqnToConfig``: ``quantize_(model, config_from_dict(json.load(file)), filter_fn=None)``.
        - ``"transformers"``: the same as a ``quantization_config`` for ``from_pretrained``.
        - ``"bitsandbytes"``: a ``quantization_config`` with nf4 and a list of modules that are skipped.
        - ``"llm-compressor"``: a recipe with a ``QuantizationModifier``, as JSON, which is YAML too.
        - ``"gptqmodel"``: a ``quantize_config.json`` with a ``dynamic`` rule for each layer; ``"auto-round"``: a
          ``layer_config``. Both round by data of their own, on the grid of the plan.
        - ``"modelopt"``: a configuration for ``mtq.quantize``.
        - ``"gguf"``: lines for ``llama-quantize --tensor-type-file``, with llama.cpp's names of tensors.

        Layers outside of the plan stay as they are. A weight that several modules share is in the file for each.

        Raises:
            InputError: a tool that is none of these; a layer with a format that is not the tool's, or in which the tool
                does not keep it, with the reason.
        """
        exports.check_tool(tool)
        weights = self._plan.weights
        for name, held in self._formats.items():
            why = exports.why_not(tool, weights[name], held)
            if why:
                raise InputError(f"layer {name!r}: {why}")
        of_modules = {
            layer: held
            for name, held in self._formats.items()
            for layer, kind in zip(weights[name].modules, weights[name].kinds, strict=True)
            if kind
        }
        written = exports.TOOLS[tool].written(of_modules, self._plan.rest)
        if isinstance(written, str):
            check_path("path", path).write_text(written, "utf-8")
        else:
            write_json(written, path)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain numbers, strings and dicts.

        ``tool`` and the ``bytes`` that it stores are None where they are not known, ``interval`` is of 95 %.
        """
        held = {"choice": dict(self.choice), "bits": self.bits, "weights": self.weights, "tool": self._plan.tool}
        held |= {"bytes": self._stored(), "interval": self.predicted.interval()}
        return {**held, "predicted": self.predicted.to_dict(), "loss_change": self.loss_change, "gap": self.gap}

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, weight in self._plan.weights.items():
            held = self._formats[name]
            stored = exports.stored(self._plan.tool, weight, held)
            for place, layer in enumerate(weight.modules):
                row = {"layer": layer, "weights": weight.matrix.numel(), "format": held.name}
                row["bits"] = held.bits_of(weight.matrix)
                if self._plan.tokens:
                    row["tokens"] = self._plan.tokens.get(name)
                if stored:
                    row["bytes"] = stored[place]
                rows.append(row | ({"shared": weight.modules[0]} if place else {}))
        return rows

    def _stored(self) -> int | None:
        """Return the bytes that the tool of the plan stores; None where they are not known."""
        rows = self._rows()
        return sum(row["bytes"] for row in rows) if "bytes" in rows[0] else None

    def __str__(self) -> str:
        rows = self._rows()
        more = [name for name in ("tokens", "bytes") if name in rows[0]]
        right = [Column(name, justify="right") for name in ("bits", *more)]
        table = Table(
            Column("layer", no_wrap=True), Column("weights", justify="right"), "format", *right, box=box.SIMPLE_HEAD
        )
        for row in rows:
            numbers = ["" if row[name] is None else f"{row[name]:,}" for name in more]
            cells = f"{row['weights']:,}", row["format"], f"{row['bits']:.4g}", *numbers
            table.add_row(row["layer"] or "(the model)", *cells)
        planned, stored = math.ceil(self.bits * self.weights / 8), self._stored()
        size = [f"{planned:,} bytes as planned"]
        if stored is not None:
            size.append(f"{stored:,} as {self._plan.tool} stores them")
        predicted = intervals.shown(self.predicted.value, self.predicted.interval())
        of_these = self.loss_change is None and self.predicted.interval() is None
        whose = "on these data" if of_these else "on unseen data"
        predicted = f"{self.predicted.value:.6g}" if of_these else f"{predicted} (95 %)"
        told = f"{self.bits:.6g} bits a weight of {self.weights}; {whose} {self._plan.told} {predicted}"
        why = {name: self.why_uncovered.get(name, "in no layer that can be changed") for name in self.uncovered}
        left_out = [f"without {names}: {reason}" for names, reason in views.by_reason(why)]
        told += ", to second order" if self.loss_change is None else f", on these by {self.loss_change:.3g}"
        told += f" from {self._plan.loss:.4g}" if math.isfinite(self._plan.loss) else ""
        left_out += self._plan.dropped
        return "\n".join([*views.text(table, 100), told, ", ".join(size), *left_out, *self.predicted.notes])


@dataclass(frozen=True, repr=False, eq=False)
class Frontier(Result):
    """Hold choices under several budgets; ``str(frontier)`` is a table.

    Its bits are those of the formats, as of ``plan.bits``. A plan for a tool whose bytes are known has these too. What
    it predicts is of the data of the plan, to second order and not measured, and so has no interval.

    Attributes:
        plans: the choices; one that is best under several of the budgets is there once.
    """

    plans: tuple[Allocation, ...]
    _of: Allocation  # the plan whose probes these are

    def plot(self, path: str | Path | None = None, *, axes: "Axes | None" = None) -> "tuple[Figure, Axes]":
        """Draw the predicted change of the loss over bits a weight.

        Args:
            path: where the figure is written too; its ending is its format.
            axes: matplotlib's, to draw into; None: those of a new figure.

        Raises:
            MissingExtraError: without matplotlib.
        """
        figure, drawn = views.onto(axes)
        drawn.plot([plan.bits for plan in self.plans], [plan.predicted.value for plan in self.plans], marker="o")
        drawn.set_xscale("log", base=2)
        drawn.xaxis.set_major_formatter("{x:g}")
        drawn.set(xlabel="bits a weight, as planned", ylabel="change of the loss on these data, to second order")
        drawn.grid(alpha=0.3)
        views.save(figure, path)
        return figure, drawn

    def to_dict(self) -> dict[str, Any]:
        """Return the choices as plain numbers, strings and dicts."""
        return {"plans": [plan.to_dict() for plan in self.plans]}

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"bits": plan.bits, **({} if (stored := plan._stored()) is None else {"bytes": stored})}
            | {**plan.predicted.to_dict(), "gap": plan.gap}
            for plan in self.plans
        ]

    def __str__(self) -> str:
        stored = [plan._stored() for plan in self.plans]
        known = None not in stored
        sizes = ["bits a weight, as planned", *(["bytes, as stored"] if known else [])]
        table = Table(*sizes, "change to second order, unmeasured", "gap", box=box.SIMPLE_HEAD)
        for plan, size in zip(self.plans, stored, strict=True):
            predicted = f"{plan.predicted.value:.3g}"
            table.add_row(f"{plan.bits:.4g}", *([f"{size:,}"] if known else []), predicted, f"{plan.gap:.2g}")
        made, of_plan = self._of, float(self._of._plan.folds.shares @ self._of._plan.prices(self._of._formats))
        told = "changes of the loss on these data, without what choosing hides and so without intervals; "
        told += f"the plan of {made.bits:.4g} bits is at {of_plan:.3g} to second order"
        told += "" if made.loss_change is None else f", and at {made.loss_change:.3g} as measured"
        return "\n".join([*views.text(table, 100), told])

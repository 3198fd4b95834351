"""Measure any layers of a model: run a sweep, and make estimates of its totals, with notes."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..contractions.quantities import QUANTITIES
from ..errors import InputError, NotYetError
from ..model import layers, spread
from ..numerics.accumulate import omits
from ..passes import linearity
from ..passes.runner import Runner
from ..passes.task import Task
from ..report import Estimate
from ..sweep.activations import ACTIVATIONS, INPUTS
from ..sweep.adaptive_sweep import AdaptiveSweep
from ..sweep.layer_sweep import Sweep, Values
from ..sweep.subset import Subset
from ..sweep.totals import Sums, Totals, layer_error
from . import Measure

_LOG = logging.getLogger("pyflatness")
Attempt = Callable[[Measure], contextlib.AbstractContextManager[None]]
_LARGEST_MATRIX = 2**30  # bytes of block traces
_FIRST_PART, _PARTS = 128, 4  # samples of the first part, which tells how many are needed; parts at most
_MARGIN, _CLOSE = 1.1, 1.05  # factor on the samples that a standard error seems to take; factor within which it counts


class LayerValues:
    """Measure the chosen layers of a model together."""

    def __init__(self, task: Task) -> None:
        self._task, self._model, self._selected = task, task.model, task.selection.modules
        self._loss, self._options = task.loss, task.options
        self._subset: Subset | None = None
        self._runner = Runner(
            task,
            self._approve,
            second_order=not self._options.by_ggn,
            order_matters=self._options.by_sample or not task.loss.convex,
        )

    def _approve(self, nonlinear: Mapping[str, str]) -> None:
        """Raise if there are no values of layers in whose weights the model is not linear."""
        linearity.refuse_custom_functions(self._options, nonlinear)
        linearity.refuse_ggn_of_derivatives(self._options, nonlinear)
        if self._options.probes == "adaptive":
            linearity.refuse_ggn_of_derivatives(replace(self._options, curvature="ggn"), nonlinear, "probes='adaptive'")
        if nonlinear and not self._options.by_ggn:
            first = next(iter(nonlinear))
            if self._options.fraction:
                raise InputError(
                    f"layer {first!r}: fraction= is of GGN values, and the model is not linear in this layer's weight, "
                    "so that its Hessian value is another; pass curvature='ggn', or leave fraction= out"
                )
            what = f"a value of second derivatives, as of layer {first!r}, in whose weight the model is not linear,"
            spread.refuse(what, "pass curvature='ggn' for the GGN value, or ")

    def estimates(
        self, measures: Sequence[Measure], attempt: Attempt = lambda _: contextlib.nullcontext()
    ) -> dict[tuple[str, str], Estimate]:
        """Return (layer, measure) -> value for every layer that ran, and for the network under the name ``""``.

        ``attempt`` is the context of what concerns one measure alone, whose errors are that measure's.
        """
        wanted = tuple(dict.fromkeys(measure.quantity for measure in measures if measure.quantity))
        kind = AdaptiveSweep if self._options.probes == "adaptive" else Sweep
        sweep = kind(self._runner, self._loss, self._options, wanted)
        draws = self._options.draws
        for chosen, left in self._parts():
            if left is not None:
                options = replace(self._options, probes="adaptive", fraction=None)
                sweep = AdaptiveSweep(self._runner, self._loss, options, wanted)
            by_groups = isinstance(sweep, AdaptiveSweep)
            totals = self._totals(sampled=draws is not None and not by_groups)
            if isinstance(sweep, AdaptiveSweep):
                sweep.by_groups(totals.add, self._subset, left or 1.0)
            else:
                self._runner.each(sweep.work(draws), totals.add, chosen=chosen)
            sweep.unite()
            self._sums = totals.sums()
        found: dict[tuple[str, str], Estimate] = {}
        notes = {name: self._notes(name, sweep) for name in (*self._runner.modules, "")}
        for measure in measures:
            estimates = self._estimates(str(measure.quantity), sweep, self._sums, notes)
            with attempt(measure):
                if measure.of_summands is not None:
                    estimates = self._of_summands(measure, self._sums, sweep, estimates)
                found |= {(name, measure.name): estimate for name, estimate in estimates.items()}
        for (name, measure_name), estimate in found.items() if self._options.rtol else ():
            for note in missed(estimate.value, estimate.stderr, self._options.rtol):
                _LOG.warning("%s of %s: %s", measure_name, repr(name) if name else "the network", note)
        return found

    def _parts(self) -> Iterator[tuple[Tensor | None, float | None]]:
        """Yield for each read of the data which samples it sends backward, (n,), None if all, and how.

        The second is the fraction of the variance that is left to groups of columns, or None: by the options' probes.
        The sums of a read are set before the next one.
        """
        fraction, rtol = self._options.fraction, self._options.rtol or 0.0
        if fraction is None:
            yield None, None
            return
        subset = self._subset = Subset.of(self._task)
        samples, ranks = subset.over.samples, self._runner.batches.shard.ranks
        count, left = _FIRST_PART if rtol else float(fraction) * samples, None
        variance = 0.0  # of a sample's one probe, over t²
        for _ in range(_PARTS):
            if (rtol and count > samples / 2) or not subset.choose(count):
                self._subset = None
                if rtol:
                    more = "fraction='auto' where more than half of the data are needed"
                    ranks.refuse(more, "pass a larger rtol= or probes=k without it, ")
                yield None, 1.0 if rtol else None
                return
            yield subset.chosen, left
            excess = self._sums.relative_error / rtol if rtol else 0.0
            if excess <= _CLOSE:
                return
            growth = _MARGIN * excess**2
            if ranks.alone:
                variance = growth * (variance or rtol**2 / subset.spread())
                count, left = subset.part(variance, rtol**2)
            else:  # one process alone sends groups
                count *= growth

    def _estimates(
        self, quantity: str, sweep: Sweep, sums: Sums, notes: Mapping[str, tuple[str, ...]]
    ) -> dict[str, Estimate]:
        """Return the estimates of a quantity in the layers, and last in the network, ``""``, from the sums."""
        column, of_activations = sweep.quantities.index(quantity), quantity in ACTIVATIONS
        has_neurons = of_activations or QUANTITIES[quantity].neurons is not None
        found: dict[str, Estimate] = {}
        every = True
        for name, noted in notes.items():
            layers_of, row = ([name], self._runner.places[name]) if name else ([*self._runner.modules], -1)
            by = sweep.method(layers_of, quantity)
            sampled = sums.errors is not None and (self._subset is not None or sweep.draws(layers_of, quantity))
            stderr, dof = sums.uncertainty(row, column) if sampled else (None, None)
            is_hessian = self._is_hessian(name, by, sweep) if name else every
            every = every and is_hessian
            by = "ggn" if sampled and by == "head" else by
            value = sums.numbers[row][column]
            found[name] = Estimate(
                value=value,
                stderr=stderr,
                samples=sums.samples,
                method=f"{by}-sampled" if sampled else by,
                exact=not sampled and is_hessian,
                backend="reference" if of_activations else sweep.backend,
                per_sample=None if sums.per_sample is None else sums.per_sample[row, column],
                layer=name,
                omitted=sums.omitted,
                notes=(*noted, *missed(value, stderr, self._options.rtol)),
                per_neuron=sums.further.get((name, quantity)) if has_neurons else None,
                dof=dof,
            )
        return found

    def _of_summands(
        self, measure: Measure, sums: Sums, sweep: Sweep, estimates: Mapping[str, Estimate]
    ) -> dict[str, Estimate]:
        """Return estimates by a measure's own function of a quantity's summands, and their sum for the network."""
        assert measure.of_summands is not None
        found = {}
        for name in self._runner.modules:
            estimate = estimates[name]
            value, note = measure.of_summands(name, sweep.weight(name), sums.further[name, str(measure.quantity)])
            notes = (*estimate.notes, note) if note else estimate.notes
            exact = estimate.exact and not note
            found[name] = replace(estimate, value=value, per_sample=None, exact=exact, notes=notes)
        value, exact = sum(e.value for e in found.values()), all(e.exact for e in found.values())
        found[""] = replace(estimates[""], value=value, per_sample=None, exact=exact)
        return found

    def check_options(self, measure: Measure) -> None:
        """Raise for options under which a measure has no value."""
        if measure.quantity is None:
            return
        if measure.quantity in ACTIVATIONS:
            self._check_activations(measure)
            return
        quantity = QUANTITIES[measure.quantity]
        if self._options.sampled and not quantity.sampled:
            raise InputError(
                f"{measure.name} has no sampled value: pass probes=None and fraction=None, or leave it out of measures="
            )
        if quantity.squared_entries and omits(self._options.nan_policy):
            raise InputError(f"{measure.name} is of all samples together: nan_policy='omit' can leave none of them out")
        for name, module in self._selected.items() if self._options.conv == "affine" else ():
            repeated = not quantity.of_repeated and layers.kind_of(module).repeats_inputs
            if repeated or (not quantity.of_dense and layers.is_convolution(module)):
                of = "one whose padding repeats pixels" if repeated else "a convolution"
                raise NotYetError(
                    f"layer {name!r}: there is no {measure.name} of the dense matrix (conv='affine') of {of} yet; "
                    "conv='filter' gives that of its filters"
                )

    def _check_activations(self, measure: Measure) -> None:
        """Raise for options or layers for which a measure of activations has no value."""
        if self._options.probes == "adaptive":
            raise InputError(f"{measure.name} has no value by probes='adaptive': pass probes=k, a number of probes")
        if self._options.fraction is not None:
            raise no_part(measure)
        if measure.quantity == INPUTS:
            spread.refuse(measure.name)
            without = [name for name, module in self._selected.items() if not layers.kind_of(module).has_input]
            if without:
                listed = ", ".join(map(repr, without[:4])) + (", …" if len(without) > 4 else "")
                raise InputError(
                    f"{measure.name}: layer {listed} has no input with a derivative in it that its weight multiplies "
                    "(an embedding, a bilinear layer, a normalisation, a weight in several kinds of uses); choose "
                    "others by layers=, 'type:Linear' say"
                )

    def block_traces(self) -> Tensor:
        """Return the (d, d) block traces of the one layer."""
        sweep = Sweep(self._runner, self._loss, self._options, ["squares"])
        totals = self._totals()
        blocks: list[Tensor] = []

        def take(found: tuple[Tensor, Values]) -> None:
            traces, values = found
            totals.add(values)
            blocks[:] = [blocks[0] + traces if blocks else traces]

        sweep.block_traces(_LARGEST_MATRIX, take)
        own = {"blocks": blocks[0]} if blocks[0].ndim else {}  # a layer may run in the samples of other ranks alone
        (total,) = totals.over.together(self._task.batches.shard, own).values()
        matrix: Tensor = torch.block_diag(*(total / totals.over.normaliser))
        return matrix

    def _totals(self, *, sampled: bool = False) -> Totals:
        error = partial(layer_error, self._runner.selected)
        shard = self._task.batches.shard
        return Totals(self._loss.reduction, self._options, error, sampled=sampled, shard=shard, subset=self._subset)

    def _is_hessian(self, name: str, by: str, sweep: Sweep) -> bool:
        """Return whether an exact value of the layer, computed by this method, is certain to be the Hessian's."""
        why = self._runner.why_not_linear(name)
        if why == linearity.UNASKED:
            return by == "head"
        return not why or (name in sweep.by_hessian and why != linearity.CUSTOM)

    def _notes(self, name: str, sweep: Sweep) -> tuple[str, ...]:
        alone = not name or len(self._selected) == 1
        of_all = self._subset.notes if self._subset is not None and alone else ()
        if alone and sweep.fewer:
            of_all = (*of_all, sweep.fewer)
        if not name:
            return of_all
        notes = [*of_all, *layers.tie_notes(self._model, self._selected[name])]
        if name in sweep.by_hessian and self._runner.why_not_linear(name) == linearity.CUSTOM:
            notes.append(linearity.TAKEN_AS_THEY_ARE)
        return (*notes, *sweep.notes(name), *self._runner.notes)


def missed(value: float, stderr: float | None, rtol: float | None) -> tuple[str, ...]:
    """Return a note if a value's standard error is larger than what was asked for, relative to the value."""
    if rtol is None or stderr is None or not stderr > _CLOSE * rtol * abs(value):
        return ()
    if value == 0:
        return (f"rtol={rtol:g} was missed: the value is 0, with a standard error of {stderr:.2g}; pass probes=k",)
    error = stderr / abs(value)
    return (
        f"rtol={rtol:g} was missed: the standard error is {error:.2g} of the value; rtol={rtol**2 / error:.2g} aims at "
        "what was asked for, and the exact value takes neither rtol= nor probes=",
    )


def no_part(measure: Measure) -> InputError:
    """Return the error for a measure that has no value from a part of the data."""
    return InputError(
        f"{measure.name} has no value by a part of the data: pass fraction=None, or leave it out of measures="
    )

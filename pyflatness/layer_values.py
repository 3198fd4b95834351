"""Measures of any layers of a model: a sweep, its totals, and what is said about them."""

import contextlib
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from . import capture, curvature, layers
from .contractions.layer import NEURONS
from .data import Batches
from .errors import InputError
from .losses import Loss
from .measures import Measure
from .options import Options
from .report import Estimate
from .runner import Runner
from .selectors import Selection
from .signals import PASSES
from .sweep import Sweep, Values
from .totals import Sums, Totals

_LARGEST_MATRIX = 2**30  # bytes of block traces
_FIRST_STAGE, _LATER_STAGES = (
    4,
    3,
)  # draws from which the number for a standard error is found; how often it is corrected
_CLOSE = 1.05  # a standard error within this of the one that was asked for is that


class LayerValues:
    """The chosen layers of a model, measured together.

    Args:
        model: inside :func:`.capture.observing`.
        selection: the layers.
        loss: from :func:`.losses.resolve`.
        batches: the data.
        forward: see :func:`.capture.run`.
        options: of the user.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        loss: Loss,
        batches: Batches,
        forward: capture.Forward | None,
        options: Options,
    ) -> None:
        self._model, self._loss, self._options = model, loss, options
        order = options.per_sample or options.nan_policy == "omit" or not loss.convex
        self._runner = Runner(
            model,
            selection,
            batches,
            forward,
            options.memory,
            self._check,
            second_order=options.curvature != "ggn",
            order_matters=order,
        )

    def estimates(self, measures: Sequence[Measure]) -> dict[tuple[str, str], Estimate]:
        """(layer, measure) -> value, for every layer that ran, and for the network under the name ``""``.

        Raises:
            InputError: also for options under which a measure has no value.
        """
        for measure in measures:
            self._check_options(measure)
        quantities = tuple(dict.fromkeys(measure.quantity for measure in measures if measure.quantity))
        sweep = Sweep(self._runner, self._loss, self._options, quantities)
        sums = self._sums(sweep)
        selected = [*self._runner.selected]
        found: dict[tuple[str, str], Estimate] = {}
        for measure in measures:
            column = quantities.index(str(measure.quantity))
            for name in (*self._runner.modules, ""):
                row = selected.index(name) if name else -1
                layers_of = [name] if name else [*self._runner.modules]
                by = "hessian" if sweep.by_hessian.intersection(layers_of) else "ggn"
                found[name, measure.name] = Estimate(
                    value=float(sums.values[row, column]),
                    stderr=None if sums.errors is None else float(sums.errors[row, column]),
                    samples=sums.samples,
                    method=by if sums.errors is None else f"{by}-sampled",
                    exact=sums.errors is None and all(self._is_hessian(layer, sweep) for layer in layers_of),
                    backend=sweep.backend,
                    per_sample=None if sums.per_sample is None else sums.per_sample[row, column],
                    layer=name,
                    omitted=sums.omitted,
                    notes=self._notes(name, sweep) if name else (),
                    per_neuron=sums.parts.get((name, quantities[column])) if quantities[column] in NEURONS else None,
                )
            if measure.of_parts is not None:
                found.update(self._of_parts(measure, sums, sweep, found))
        return found

    def _of_parts(
        self, measure: Measure, sums: Sums, sweep: Sweep, sweeps: Mapping[tuple[str, str], Estimate]
    ) -> dict[tuple[str, str], Estimate]:
        """A measure's values by its own function, and their sum, in the sweep's estimates."""
        assert measure.of_parts is not None
        found = {}
        for name in self._runner.modules:
            key, estimate = (name, measure.name), sweeps[name, measure.name]
            value, note = measure.of_parts(name, sweep.weight(name), sums.parts[name, str(measure.quantity)])
            notes = (*estimate.notes, note) if note else estimate.notes
            found[key] = replace(estimate, value=value, per_sample=None, exact=estimate.exact and not note, notes=notes)
        value, exact = sum(e.value for e in found.values()), all(e.exact for e in found.values())
        found["", measure.name] = replace(sweeps["", measure.name], value=value, per_sample=None, exact=exact)
        return found

    def _check_options(self, measure: Measure) -> None:
        if measure.quantity in (*NEURONS, "diagonal") and self._options.sampled:
            raise InputError(
                f"{measure.name} has no sampled value: pass probes=None and target_stderr=None, or leave it out of "
                "measures="
            )
        if measure.quantity == "diagonal" and self._options.nan_policy == "omit":
            raise InputError(f"{measure.name} is of all samples together: nan_policy='omit' can leave none of them out")

    def block_traces(self) -> Tensor:
        """(d, d) of the one layer."""
        sweep = Sweep(self._runner, self._loss, self._options, ("squares",))
        totals = Totals(self._loss.reduction, self._options.nan_policy)
        blocks: Tensor | None = None
        with contextlib.closing(sweep.block_traces(_LARGEST_MATRIX)) as parts:
            for part, values in parts:
                totals.add(values, self._runner.selected)
                blocks = part if blocks is None else blocks + part
        assert blocks is not None, "data without samples is refused where it is read"
        matrix: Tensor = torch.block_diag(*(blocks / totals.divisor))
        return matrix

    def _sums(self, sweep: Sweep) -> Sums:
        """Exact, by so many draws, in groups, or by as many draws as a standard error takes.

        For the last, a first stage of a few draws says how many there have to be in all, and a later one is added where
        that was too few. No stage looks at the values, and all count by their draws (after Stein 1945), which keeps the
        coverage of the interval.
        """
        target, probes = self._options.target_stderr, self._options.probes
        if probes == "adaptive":
            return self._totalled(sweep.by_groups())
        if target is None:
            return self._summed(sweep, None if probes is None else range(int(probes)))
        sums, draws = self._summed(sweep, range(_FIRST_STAGE)), _FIRST_STAGE
        for _ in range(_LATER_STAGES):
            assert sums.errors is not None
            excess = float(sums.errors.max()) / target
            if excess <= _CLOSE:
                break
            needed = math.ceil(draws * excess**2)
            if needed >= sweep.exact_passes:
                return self._summed(sweep, None)
            if needed > PASSES:
                raise InputError(
                    f"target_stderr={target:g} takes about {needed} draws (the standard error of {draws} is "
                    f"{excess * target:.3g}), more than {PASSES}; pass a larger one, or probes="
                )
            sums, draws = sums.pooled(self._summed(sweep, range(draws, needed)), draws / needed), needed
        return sums

    def _summed(self, sweep: Sweep, draws: range | None) -> Sums:
        return self._totalled(sweep.values(draws), sampled=draws is not None)

    def _totalled(self, values: Generator[Values, None, None], *, sampled: bool = False) -> Sums:
        options, reduction = self._options, self._loss.reduction
        totals = Totals(reduction, options.nan_policy, per_sample=options.per_sample, sampled=sampled)
        with contextlib.closing(values) as parts:  # hooks go with an error, not at some later time
            for part in parts:
                totals.add(part, self._runner.selected)
        return totals.sums()

    def _check(self, bent: Mapping[str, str]) -> None:
        """Raise where there is no telling whether a value would be the Hessian's."""
        opaque = [name for name, why in bent.items() if why == curvature.OPAQUE]
        if self._options.curvature == "auto":
            curvature.refuse_opaque(opaque)

    def _is_hessian(self, name: str, sweep: Sweep) -> bool:
        """Whether an exact value of the layer is certain to be the Hessian's."""
        why = self._runner.why_not_linear(name)
        return not why or (name in sweep.by_hessian and why != curvature.OPAQUE)

    def _notes(self, name: str, sweep: Sweep) -> tuple[str, ...]:
        notes = [*layers.tie_notes(self._model, self._runner.modules[name])]
        if name in sweep.by_hessian and self._runner.why_not_linear(name) == curvature.OPAQUE:
            notes.append(curvature.TAKEN_AS_THEY_ARE)
        return (*notes, *sweep.notes(name))

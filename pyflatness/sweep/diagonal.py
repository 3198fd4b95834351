"""Sum the diagonal of the loss Hessian over all trainable parameters of a network.

    Σ_j a_j² ∂²E/∂θ_j²,    a_j = 1: the trace,    a_j = θ_j: adaptive sharpness

Entries of the Hessian between two parameters do not count, so each parameter tensor is treated alone: if the model is
certified to be locally linear in it (:func:`.linearity.nonlinear_parameters`), by cotangents s_ic,

    Σ_i Σ_c σ_ic |a ∘ ∂⟨s_ic, f_i⟩/∂θ|² / Σ_i ω_i

and otherwise by second derivatives: exact, a Hessian product for every entry; sampled, ⟨a∘r, H (a∘r)⟩ for per-sample
random signs r. The gradients of a linear or convolutional layer's weight and bias come from its inputs φ and
output gradients δ (Σ_p δ_p φ_pᵀ and Σ_p δ_p); those of other parameters, and all second derivatives, from a run with
per-sample parameters (:mod:`.per_sample_parameters`). The summands by parameter are the diagonal
itself (:func:`by_parameter`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import contractions
from ..errors import InputError, NonFiniteError
from ..model import parameters
from ..model.selectors import Selection
from ..numerics.accumulate import non_finite
from ..numerics.signs import Signs
from ..options import Options
from ..passes import cotangents, linearity
from ..passes.cotangents import Cotangents
from ..passes.limit import MANY
from ..passes.runner import Run, Runner
from ..passes.task import Task
from ..report import Estimate
from .entry_sums import EntrySums
from .layer_gradients import LayerGradients
from .layer_sweep import Values
from .per_sample_diagonal import PerSampleDiagonal
from .per_sample_parameters import Group, PerSampleParameters
from .totals import OR_OVERFLOW, Sums, Totals


class Diagonal:
    """Sum the diagonal for the samples of a task's data, by one read of them.

    a_j = θ_j if ``adaptive``, else 1; ``theta`` are all parameters that require gradients by default; ``entries`` maps
    a number of probes to the sums of single entries.
    """

    def __init__(
        self,
        task: Task,
        *,
        adaptive: bool = False,
        certify: bool = True,
        theta: parameters.Parameters | None = None,
        entries: Callable[[int], EntrySums] | None = None,
    ) -> None:
        self._task, self._certify, self._made_entries = task, certify, entries
        self.theta = parameters.trainable(task.model) if theta is None else theta
        self._scales = self.theta if adaptive else {}
        self.nonlinear: dict[str, str] = {}
        self.sampled = False
        self._passes = 0  # of exact values, the most of any batch
        self._layers = LayerGradients(task, self.theta, adaptive=adaptive, by_entry=entries is not None)
        options = task.options
        self._per_sample = PerSampleParameters(task)
        self._runner = Runner(
            replace(task, selection=Selection(self._layers.modules, frozenset(), optional=True)),
            second_order=not options.by_ggn,
            order_matters=options.by_sample or not task.loss.convex or options.sampled,
            certify=certify,
            halved=True,
        )

    @property
    def backend(self) -> str:
        """Return the name of the contractions' backend."""
        return self._layers.backend

    @property
    def fewer(self) -> str:
        """Return a note on what fewer passes would give if exact values take many; otherwise nothing."""
        if self._passes <= MANY:
            return ""
        return f"{self._passes} backward passes a batch; probes=2 takes two, with standard errors"

    def sums(self, draws: range | None = None) -> Sums:
        """Return the sums over all samples: exact, or for the probes of these numbers."""
        signs = None if draws is None else Signs(self._task.options.seed, draws)
        error = partial(_non_finite, self.theta)
        shard = self._task.batches.shard
        totals = Totals(self._task.loss.reduction, self._task.options, error, sampled=draws is not None, shard=shard)
        self._runner.each(partial(self._values, signs=signs), totals.add)
        facts: dict[str, dict[str, Any]] = {"not linear": self.nonlinear, "passes": {str(self._passes): True}}
        facts["sampled"] = {"": True} if self.sampled else {}
        united = shard.united("parameters that the model is not linear in", facts)
        self.nonlinear.update(united["not linear"])
        self.sampled, self._passes = bool(united["sampled"]), max(map(int, united["passes"]))
        return totals.sums()

    def _values(self, run: Run, signs: Signs | None) -> Values:
        sent = cotangents.of_run(run, self._task.loss)
        draws = 1 if signs is None else len(signs.draws)
        values = torch.zeros(draws, run.samples, dtype=torch.float64, device=run.outputs.device)
        entries = None if self._made_entries is None else self._made_entries(draws)
        signs_of_factors = None if entries is not None and sent.passes <= draws else signs
        if signs is None:
            self._passes = max(self._passes, sent.passes)
            if self.fewer:
                self._runner.batches.tell(lambda: self.fewer)
        by_layer = self._by_layer(run)
        if by_layer:
            self._add_layers(run, sent, signs_of_factors, by_layer, values, entries)
            self.sampled = self.sampled or signs_of_factors is not None
        done = {parameter for name in by_layer for parameter in self._layers.parameters(name)}
        rest = {name: w for name, w in self.theta.items() if name not in done}
        if rest:

            def add(group: Group) -> None:
                values[:, group.place] += self._of_group(run, group, signs_of_factors, signs, entries)

            unknown = {name: w for name, w in rest.items() if name not in self.nonlinear}
            if self._certify and unknown:
                self._note(self._per_sample.shared(run, unknown, linearity.nonlinear_parameters))
            self._per_sample.each(run, rest, add)
        sizes = sent.sizes() if signs is not None and draws == 1 else None
        values = sent.marked(values)[:, None, None]
        summands = {} if entries is None else entries.summands(lost=bool(values.isnan().any()))
        return Values(values, sent.sample_weights, run.number, sizes=sizes, summands=summands, lost=sent.bad)

    def _by_layer(self, run: Run) -> list[str]:
        """Return the layers whose parameters' squared gradients are taken from the layers' inputs and cotangents."""
        with contractions.full_precision(run.outputs):
            self._layers.check(run, self._per_sample)
        usable = [name for name in self._layers.usable(run) if name not in run.differentiated]
        for name in usable:
            if name in run.nonlinear:
                self._note(dict.fromkeys(self._layers.parameters(name), self._runner.why_not_linear(name)))
        return [name for name in usable if name not in run.nonlinear or self._task.options.by_ggn]

    def _note(self, nonlinear: dict[str, str]) -> None:
        """Register the parameters in which the model is not linear."""
        linearity.refuse_custom_functions(self._task.options, nonlinear, "parameter")
        self.nonlinear.update(nonlinear)

    def _add_layers(
        self,
        run: Run,
        sent: Cotangents,
        signs: Signs | None,
        names: Sequence[str],
        values: Tensor,
        entries: EntrySums | None,
    ) -> None:
        with contractions.full_precision(run.outputs):
            squares = self._layers.squares(run, names, sent.passes if signs is None else len(values), entries)
        send = partial(run.recorder.gradients, run.outputs, names=names)
        for draw, cotangent, sign in sent.sent(signs, run.numbers, self._task.options.max_passes, send):
            gradients = send(cotangent)
            with contractions.full_precision(run.outputs):
                place = draw if signs is not None else slice(None)
                values[place] += squares(place, gradients, sign)

    def _of_group(
        self, run: Run, group: Group, signs_of_factors: Signs | None, signs: Signs | None, entries: EntrySums | None
    ) -> Tensor:
        """Return the values of a group's samples, (probes, n), or one row for all probes."""
        most, numbers = self._task.options.max_passes, run.numbers[group.place]
        diagonal = PerSampleDiagonal(group, numbers, self._task.loss, self._scales, most, entries)
        if not group.outputs.requires_grad:  # they depend on none of the parameters
            return diagonal.zeros(signs)
        by_ggn = self._task.options.by_ggn
        nonlinear = [] if by_ggn else [name for name in group.leaves if name in self.nonlinear]
        linear = [name for name in group.leaves if name not in nonlinear]
        values = diagonal.by_factors(linear, signs_of_factors) if linear else diagonal.zeros(signs_of_factors)
        self.sampled = self.sampled or (signs if nonlinear else signs_of_factors) is not None
        if nonlinear:
            order = [*self.theta]
            streams = {name: cotangents.STREAM + 1 + order.index(name) for name in nonlinear}
            custom = [name for name in nonlinear if self.nonlinear[name] == linearity.CUSTOM]
            values = values + diagonal.by_hessian(streams, signs, custom)
        return values


@dataclass(frozen=True)
class ByParameter:
    """Hold the diagonal itself."""

    total: Estimate  # the sum of all entries
    values: Mapping[str, Tensor]  # by parameter, of its shape or (rows,), float64 on the CPU
    errors: Mapping[str, Tensor] | None  # standard errors given the data; None if the values are exact


def by_parameter(task: Task, theta: parameters.Parameters, *, rows: bool, certify: bool) -> ByParameter:
    """Return the diagonal in some parameters, or summed over all dimensions but ``rows``, as the options set."""
    diagonal = Diagonal(task, certify=certify, theta=theta, entries=lambda draws: EntrySums(theta, draws, rows=rows))
    sums = diagonal.sums(task.options.draws)
    return ByParameter(
        _estimate(diagonal, sums if diagonal.sampled else replace(sums, errors=None), task.options),
        {name: EntrySums.mean(sums, name) for name in theta},
        {name: EntrySums.error(sums, name) for name in theta} if diagonal.sampled else None,
    )


def estimate(task: Task, *, adaptive: bool = False, certify: bool = True) -> Estimate:
    """Return the sum over the task's data: exact, or sampled as its options set."""
    options = task.options
    if options.probes == "adaptive":
        raise InputError(
            "probes='adaptive' is for sums over layers; a value over all trainable parameters takes probes=k, a "
            "number of probes"
        )
    diagonal = Diagonal(task, adaptive=adaptive, certify=certify)
    return _estimate(diagonal, diagonal.sums(options.draws), options)


def _estimate(diagonal: Diagonal, sums: Sums, options: Options) -> Estimate:
    by = "hessian" if diagonal.nonlinear and not options.by_ggn else "ggn"
    taken = by == "hessian" and linearity.CUSTOM in diagonal.nonlinear.values()
    sampled = sums.errors is not None
    stderr, dof = sums.uncertainty(-1, 0)
    return Estimate(
        value=float(sums.values[-1]),
        stderr=stderr,
        samples=sums.samples,
        method=f"{by}-sampled" if sampled else by,
        exact=not sampled and not taken and (by == "hessian" or not diagonal.nonlinear),
        backend=diagonal.backend,
        per_sample=None if sums.per_sample is None else sums.per_sample[-1, 0],
        omitted=sums.omitted,
        notes=tuple(note for note in (diagonal.fewer, linearity.TAKEN_AS_THEY_ARE if taken else "") if note),
        dof=dof,
    )


def _non_finite(theta: parameters.Parameters, part: Values, fine: Tensor) -> NonFiniteError:
    """Return the error of a parameter with NaN or infinity in it, or else of samples that are not fine."""
    for name, values in theta.items():
        if not bool(values.isfinite().all()):
            count = int((~values.isfinite()).sum())
            return NonFiniteError(f"parameter {name!r}: it has {count} entries of NaN or infinity")
    return non_finite(part.number, fine, f"{OR_OVERFLOW} in their targets, outputs or derivatives")

"""Plan the steps of a measurement from measures, layers and options, and take them: shared work is done once.

A step reads the data for all of its measures. There is a sweep for each way of normalising; in its place a forward
pass, where the relative flatness of one layer is asked for and that is the model's head; a sweep for the Jacobians; and
steps of their own for measures that are computed by themselves (eigenvalues, all parameters). Derived measures take the
values of others and read nothing.
"""

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from . import head, losses
from .errors import InputError, NoGraphError
from .measures import RELATIVE_FLATNESS, Measure, head_sums, with_bases
from .measures.base import Estimates
from .measures.layer_values import LayerValues, no_part
from .messages import is_out_of_memory
from .model import calling, data, layers, spread, uses
from .model.data import OtherSamplesError
from .model.selectors import Selector
from .numerics.accumulate import check_followed
from .numerics.ranks import Ranks
from .options import Options
from .passes import cotangents
from .passes.limit import MANY
from .passes.task import Task
from .report import Estimate
from .sweep import jacobians


@dataclass(frozen=True)
class Plan:
    """Hold the steps that some measures take."""

    wanted: tuple[Measure, ...]  # the measures that were asked for
    sweeps: Mapping[str | None, tuple[Measure, ...]]  # by normalisation, those made of one sweep's quantities
    networks: tuple[Measure, ...]  # those of a sweep whose network's value takes a data read of its own
    computed: tuple[Measure, ...]  # those that are computed by themselves
    jacobians: tuple[Measure, ...]  # those of the Jacobians' sweep
    derived: tuple[Measure, ...]  # those that follow from the values of others
    reads: int  # how often all of them read the data


def plan(wanted: Sequence[Measure], options: Options, *, networks: bool = False) -> Plan:
    """Return the steps that measures take, those among them that some are derived from.

    ``networks``: a network's value is wanted where it takes a sweep of its own.
    """
    rows = with_bases(wanted)
    sweeps: dict[str | None, tuple[Measure, ...]] = {}
    for row in rows:
        if row.quantity is not None:
            how = options.normalize or row.normalize
            sweeps[how] = (*sweeps.get(how, ()), row)
    computed = tuple(row for row in rows if row.compute is not None)
    of_network = tuple(row for row in chain(*sweeps.values()) if row.of_network is not None) if networks else ()
    of_jacobians = tuple(row for row in rows if row.of_jacobians is not None)
    alone = sum(row.reads for row in computed) + len(of_network)
    swept = sum(options.normalized(how).reads for how in sweeps)
    jacobians = bool(of_jacobians) + sum(row.reads - 1 for row in of_jacobians)
    reads = swept + jacobians + alone
    derived = tuple(row for row in rows if row.derive is not None)
    return Plan(tuple(wanted), sweeps, of_network, computed, of_jacobians, derived, reads)


def shared(measures: Sequence[Measure], options: Options, *, layers: int) -> list[tuple[Measure, ...]]:
    """Return measures in groups that share their reads of the data, for so many layers.

    For one layer relative flatness is by itself, since a forward pass may be enough for it.
    """
    rows = {row.name: row for row in with_bases(measures)}
    steps: dict[Hashable, list[Measure]] = {}
    for measure in measures:
        row = rows[measure.base] if measure.base else measure
        alone = layers == 1 and (measure.quantity == RELATIVE_FLATNESS.quantity or measure.of_network is not None)
        step: Hashable = row.name
        if row.of_jacobians is not None:
            step = "jacobians"
        elif row.quantity is not None and not alone:
            step = "sweep", options.normalize or row.normalize
        steps.setdefault(step, []).append(measure)
    return [tuple(step) for step in steps.values()]


def by_one_probe(task: Task) -> Task:
    """Return the task as it is, or by one probe of the GGN where each token's exact value takes passes of its own."""
    with calling.aside(), torch.no_grad():
        outputs, targets = task.run(data.first(task.batches.peek(), 1))
        sent = cotangents.prepare(outputs, losses.tensor_targets(targets, 0), task.loss, 1)
    many = sent.used.shape[1] > 1 and sent.places > MANY
    if not any(task.batches.shard.ranks.exchange("whether exact values take many passes", many)):
        return task
    task.batches.tell(
        lambda: (
            f"exact values of this language model take about {sent.places} backward passes a batch, so the GGN is "
            "measured by one probe of each sample, with a standard error; rtol=0.05 or probes= take more, and "
            f"max_passes={sent.places} allows exact values"
        )
    )
    return replace(task, options=replace(task.options, curvature="ggn", probes=1))


def of_layer(row: Measure, task: Task, layer: Selector | None) -> tuple["Measurement", str]:
    """Return the measurement of one layer (None: the last Linear that ran), and its name.

    For a measure of the network alone it is that of all layers, and the name is empty.
    """
    if row.of_network_alone:
        task = replace(task, options=task.options.of_layers)
        return Measurement(plan([row], task.options), task.of(None), named=True), ""
    name, source = head.find(task, layer)
    dense = task.options.conv == "affine" and layers.is_convolution(uses.layer(task.model, name))
    if source is None or dense or row.quantity != RELATIVE_FLATNESS.quantity:
        task, source = replace(task, options=task.options.of_layers), None
    return Measurement(plan([row], task.options), task.only(name), named=True, source=source), name


class Measurement:
    """Take the steps of a plan on a task.

    A measure that has no value here is left out, and the reason is kept. An error of the sweep with relative flatness
    is raised, since it concerns the model, loss and data, and so is NaN under ``nan_policy="raise"``. Where none of the
    measures ``named`` by the user has a value, the first reason is raised. ``source`` is the task's only layer, for
    which the head's formula takes the place of the sweep if it is the head in all batches.
    """

    def __init__(self, steps: Plan, task: Task, *, named: bool, source: head.Head | None = None) -> None:
        self._steps, self._task, self._named, self._source = steps, task, named, source
        self._values: dict[str, Estimates] = {}
        self._reasons: dict[str, str] = {}
        self._first: InputError | None = None  # of what stood in the way of a measure
        self.measured: set[str] = set()

    @property
    def _ranks(self) -> Ranks:
        return self._task.batches.shard.ranks

    @property
    def skipped(self) -> dict[str, str]:
        """Return for each measure why there is no value of it, or none of the network."""
        return {row.name: self._reasons[row.name] for row in self._steps.wanted if row.name in self._reasons}

    def estimates(self) -> dict[tuple[str, str], Estimate]:
        """Take all steps; return (layer, measure) -> value, ``""`` the network."""
        self._ranks.check_alike("the choice of measures", {"measures": [row.name for row in self._steps.wanted]})
        for how, rows in self._steps.sweeps.items():
            options = self._task.options.normalized(how)
            if self._source is not None and self._take_head(self._source, rows, options):
                continue
            layer_values = LayerValues(replace(self._task, options=options))
            possible = [row for row in rows if self._is_possible(row, layer_values)]
            if not possible:
                continue
            with self._attempt_sweep(possible):
                attempt = partial(self._attempt, together=False)
                for (name, measure), estimate in layer_values.estimates(possible, attempt).items():
                    self._values.setdefault(measure, {})[name] = estimate
        self._keep_what_ran()
        for row in chain(*self._steps.sweeps.values()):
            if row.of_network is not None and row.name in self._values:
                self._take_network(row)
        for row in self._steps.computed:
            assert row.compute is not None
            with self._attempt(row):
                if row.reads:
                    self._refuse(row)
                self._values[row.name] = row.compute(self._task)
        self._take_jacobians()
        self._derive()
        self.measured.update(*self._values.values())
        has_value = any(row.name in self._values for row in self._steps.wanted)
        if self._named and not has_value and self._first is not None:
            raise self._first
        self._task.unite()
        return {
            (name, row.name): self._task.noted(estimate)
            for row in self._steps.wanted
            for name, estimate in self._values.get(row.name, {}).items()
        }

    def _take_head(self, source: head.Head, rows: Sequence[Measure], options: Options) -> bool:
        """Take the value by the head's formula; return False if the sweep has to: no head in all batches, no memory.

        The sweep cuts batches that are too large, and asks in every micro-batch whether the layer is the head.
        """
        again = self._task.batches.repeatable and not self._task.forward.by_user  # which may count its calls
        again = all(self._ranks.exchange("whether the data can be read again", again))
        try:
            with self._ranks.agreed("the pass for the head"):
                estimate = head_sums.Total(source, self._task.loss, options).estimate()
        except Exception as error:
            by_sweep = isinstance(error, head.NotTheHeadError) or is_out_of_memory(error)
            if not by_sweep or options.tolerance or not again:
                raise
            return False
        self._values.update((row.name, {estimate.layer: estimate}) for row in rows)
        return True

    def _is_possible(self, row: Measure, layer_values: LayerValues) -> bool:
        """Return whether there is such a measure under the user's options; else the reason is kept."""
        with self._attempt(row, together=False):
            layer_values.check_options(row)
        return row.name not in self._reasons

    def _keep_what_ran(self) -> None:
        """Leave the task with the layers that have values: one report is of one set of layers."""
        if self._values:
            ran, chosen = {name for values in self._values.values() for name in values}, self._task.selection
            modules = {name: module for name, module in chosen.modules.items() if name in ran}
            self._task = replace(self._task, selection=replace(chosen, modules=modules))

    def _take_network(self, row: Measure) -> None:
        """Take the network's value of a measure; where it cannot be had, the layers' values are kept without it."""
        assert row.of_network is not None
        values = self._values[row.name]
        if "" not in self._task.selection.modules:  # that of a model which is a layer itself stands there
            values.pop("", None)
        if row in self._steps.networks:
            try:
                with self._ranks.agreed(f"{row.name} of the network"):
                    self._refuse(row)
                    values[""] = row.of_network(self._task)
            except InputError as error:
                check_followed(self._task.options.nan_policy, error)
                self._reasons[row.name] = f"of the network: {error}"

    def _take_jacobians(self) -> None:
        rows = self._steps.jacobians
        if not rows:
            return
        with self._attempt(*rows):
            self._refuse(*rows)
            samples = jacobians.measured(self._task, {need for row in rows for need in row.needs})
            self.measured.update(samples.layers)
            for row in rows:
                with self._attempt(row):
                    assert row.of_jacobians is not None
                    self._values[row.name] = row.of_jacobians(samples)

    def _refuse(self, *rows: Measure) -> None:
        """Raise where measures that are not of a sweep over layers cannot be had."""
        if self._task.options.fraction is not None:
            raise no_part(rows[0])
        spread.refuse(", ".join(row.name for row in rows))

    def _derive(self) -> None:
        for row in self._steps.derived:
            assert row.derive is not None
            assert row.base is not None
            if row.base in self._reasons:
                self._reasons[row.name] = self._reasons[row.base]
                continue
            with self._attempt(row, together=False):
                values = row.derive(self._task.model, self._task.options, self._values[row.base])
                assert "" in values, f"{row.name}: derive= gives no value of the network, under the name ''"
                self._values[row.name] = values

    @contextlib.contextmanager
    def _attempt_sweep(self, rows: Sequence[Measure]) -> Iterator[None]:
        """Let what stands in the way of all measures of a sweep be an error inside, unless others do without one."""
        try:
            alone = contextlib.nullcontext() if RELATIVE_FLATNESS in rows else self._attempt(*rows)
            with self._ranks.agreed("a sweep"), alone:
                yield
        except NoGraphError as error:
            if not self._steps.networks:
                raise
            self._leave_out(rows, error)

    @contextlib.contextmanager
    def _attempt(self, *rows: Measure, together: bool = True) -> Iterator[None]:
        """Let what stands in the way of these measures inside be a reason to leave them out.

        Ranks have to agree on it ``together``, but where all find the same by themselves, out of the same options,
        weights and sums.
        """
        try:
            with self._ranks.agreed(", ".join(row.name for row in rows)) if together else contextlib.nullcontext():
                yield
        except InputError as error:
            check_followed(self._task.options.nan_policy, error)
            self._leave_out(rows, error)

    def _leave_out(self, rows: Sequence[Measure], error: InputError) -> None:
        if self._named and isinstance(error, OtherSamplesError):
            raise error
        self._first = self._first or error
        self._reasons.update((row.name, str(error)) for row in rows)

"""Several measures of one model and its data, computed together: what they share is paid for once."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .errors import InputError, NoGraphError, NonFiniteError, NotYetError
from .measures import RELATIVE_FLATNESS, Measure, with_bases
from .measures.base import Values
from .measures.layer_values import LayerValues
from .numerics.accumulate import check_followed
from .options import Options
from .passes.task import Task
from .report import Estimate
from .sweep import jacobians


class Together:
    """Measures of a task: sweeps are shared, and bases of derived measures.

    Args:
        wanted: the measures.
        task: of what, and how.
        named: they were asked for by name, so that what cannot be had is an error. Else such a measure is left out and
            the reason kept, but for what stands in the way of relative flatness too: errors of its sweep concern the
            model, loss and data, and NaN under ``nan_policy="raise"`` concerns them as well.
        networks: whether to make a sweep for network values that are not the sum of their layers'.

    Attributes:
        measured: layers that values are of, those of the network alone too.
    """

    def __init__(self, wanted: Sequence[Measure], task: Task, *, named: bool, networks: bool) -> None:
        self._wanted, self._rows, self._task, self._named = wanted, with_bases(wanted), task, named
        self._networks = networks
        self._values: dict[str, Values] = {}
        self._skipped: dict[str, str] = {}
        self.measured: set[str] = set()

    def estimates(self) -> tuple[dict[tuple[str, str], Estimate], dict[str, str]]:
        """(layer, measure) -> value, ``""`` the network; and measure -> why there is none, or none of the network.

        Raises:
            FlatnessError: of a measure that was named, or of all of them.
        """
        self._sweep()
        for row in self._rows:
            if row.compute is not None:
                with self._attempt(row):
                    self._values[row.name] = row.compute(self._task)
        self._take_jacobians()
        for row in self._rows:
            if row.derive is not None and row.base is not None:
                if row.base in self._skipped:
                    self._skipped[row.name] = self._skipped[row.base]
                    continue
                with self._attempt(row):
                    self._values[row.name] = row.derive(self._task.model, self._task.options, self._values[row.base])
        self.measured.update(name for values in self._values.values() for name in values)
        found = {
            (name, row.name): estimate
            for row in self._wanted
            for name, estimate in self._values.get(row.name, {}).items()
        }
        return found, {row.name: self._skipped[row.name] for row in self._wanted if row.name in self._skipped}

    def _sweep(self) -> None:
        task = self._task
        for how, rows in by_sweep(self._rows, task.options).items():
            options = replace(task.options, normalize=how)
            sweep = LayerValues(task.model, task.selection, task.loss, task.batches, task.forward, options)
            possible = []
            for row in rows:
                with self._attempt(row):
                    sweep.check_options(row)
                    possible.append(row)
            with self._attempt_sweep(possible):
                for (name, measure), estimate in sweep.estimates(possible, self._attempt).items():
                    self._values.setdefault(measure, {})[name] = estimate
        if self._values:  # one report is of one set of layers
            ran, chosen = {name for values in self._values.values() for name in values}, task.selection
            modules = {name: module for name, module in chosen.modules.items() if name in ran}
            self._task = replace(task, selection=replace(chosen, modules=modules))
        for row in self._rows:
            if row.of_network is not None and row.name in self._values:
                self._take_network(row)

    def _take_network(self, row: Measure) -> None:
        """Of a measure whose layers have their values: without its network's they are still worth having."""
        assert row.of_network is not None
        values = self._values[row.name]
        if "" not in self._task.selection.modules:  # that of a model which is a layer itself stands there
            values.pop("", None)
        if self._networks:
            try:
                values[""] = row.of_network(self._task)
            except (InputError, NotYetError, NonFiniteError) as error:
                check_followed(self._task.options.nan_policy, error)
                self._skipped[row.name] = f"of the network: {error}"

    def _take_jacobians(self) -> None:
        rows = [row for row in self._rows if row.of_jacobians is not None]
        if not rows:
            return
        with self._attempt(*rows):
            samples = jacobians.measured(self._task, {need for row in rows for need in row.needs})
            self.measured.update(samples.layers)
            for row in rows:
                with self._attempt(row):
                    assert row.of_jacobians is not None
                    self._values[row.name] = row.of_jacobians(samples)

    @contextlib.contextmanager
    def _attempt_sweep(self, rows: Sequence[Measure]) -> Iterator[None]:
        """Inside, what stands in the way of all measures of a sweep is an error, unless others do without one."""
        try:
            with contextlib.nullcontext() if RELATIVE_FLATNESS in rows else self._attempt(*rows):
                yield
        except NoGraphError as error:
            if self._named or not self._networks:
                raise
            self._skipped.update((row.name, str(error)) for row in rows)

    @contextlib.contextmanager
    def _attempt(self, *rows: Measure) -> Iterator[None]:
        """Inside, what these measures cannot be had for is an error if they were named, else a reason."""
        try:
            yield
        except (InputError, NotYetError, NonFiniteError) as error:
            check_followed(self._task.options.nan_policy, error)
            if self._named:
                raise
            self._skipped.update((row.name, str(error)) for row in rows)


def reads(wanted: Sequence[Measure], options: Options, *, networks: bool = False) -> int:
    """How often the data is read."""
    rows = with_bases(wanted)
    swept = sum(replace(options, normalize=how).reads for how in by_sweep(rows, options))
    shared = any(row.of_jacobians is not None for row in rows)
    computed = [row.reads for row in rows if row.compute is not None]
    computed += [1 for row in rows if row.of_network is not None and networks]
    return swept + shared + sum(computed) + (options.target_stderr is not None and any(computed))


def by_sweep(wanted: Sequence[Measure], options: Options) -> dict[str | None, list[Measure]]:
    """The measures of each sweep, by how it is normalised."""
    sweeps: dict[str | None, list[Measure]] = {}
    for row in wanted:
        if row.quantity:
            sweeps.setdefault(options.normalize or row.normalize, []).append(row)
    return sweeps

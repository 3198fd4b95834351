"""Score many models: what is asked of them, what of it a store has already, and the rest on an executor."""

import functools
import itertools
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from .. import plan
from ..errors import InputError, printable
from ..measures import Measure, named
from ..model import selectors
from ..model.layers import unwrap
from ..numerics.ranks import ALONE, Ranks
from . import keys, result_files
from .result_files import ResultFile
from .store import Store
from .units import Pair, WorkUnit
from .worker import AGREED, Bench, Outcome, Setup, measure

Take = Callable[[WorkUnit, Outcome], None]  # what is done with the outcome of a unit

_TRIES = 3  # of a unit whose worker dies
_KILLED = "it was killed, as by a system without memory left, or crashed in compiled code"


def drive(executor: Executor, setup: Setup, units: Iterable[WorkUnit], take: Take) -> None:
    """Measure all units, as many at a time as the executor has workers; an interruption loses no finished unit."""
    window = int(getattr(executor, "workers", None) or getattr(executor, "_max_workers", None) or 1)
    waiting, deaths = deque(units), Counter[int]()
    pending: dict[Future[Outcome], WorkUnit] = {}
    try:
        while waiting or pending:
            while waiting and len(pending) < window:
                unit = waiting.popleft()
                pending[_submitted(executor, setup, unit)] = unit
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                unit = pending.pop(future)
                if not isinstance(future.exception(), BrokenExecutor):
                    take(unit, future.result())
                    continue
                deaths[id(unit)] += 1
                if deaths[id(unit)] < _TRIES:
                    waiting.append(unit)
                else:
                    error = future.exception()
                    why = _KILLED if isinstance(error, BrokenProcessPool) else printable(str(error))
                    take(unit, Outcome.failed(unit, f"the worker died {_TRIES} times in this unit: {why}"))
    except KeyboardInterrupt:
        for future, unit in pending.items():
            if future.done() and future.exception() is None:
                take(unit, future.result())
        raise


def _submitted(executor: Executor, setup: Setup, unit: WorkUnit) -> "Future[Outcome]":
    try:
        return executor.submit(measure, setup, unit)
    except BrokenExecutor as error:
        raise InputError(f"executor: it is broken and takes no more units ({error}); what was done is kept") from error


Models = Mapping[str, Path | nn.Module]  # by name, which rows have: the path of a checkpoint, or the network itself


class ScoringRun:
    """Hold some models and what is asked of them.

    All ranks have the data, measure each model together, and the first one decides what is done.
    """

    def __init__(self, models: Models, setup: Setup, ranks: Ranks = ALONE) -> None:
        ranks.check_alike("the models", {"models": ", ".join(models), "measures": setup.measures})
        self.models, self.ranks = models, ranks
        self.bench = Bench(setup, ranks)
        self._pairs = functools.cache(self._pairs_of)  # most models are of the same network,
        self._units = functools.cache(self._units_of)  # and have the same to do

    @property
    def setup(self) -> Setup:
        """Return what is the same for all units."""
        return self.bench.setup

    def network(self, name: str) -> nn.Module:
        """Return the network that a model is, or whose weights a checkpoint has."""
        held = self.models[name]
        if isinstance(held, nn.Module):
            return held
        if self.bench.network is None:
            raise InputError(f"model=: {name!r} is a path; pass what makes the network of such checkpoints")
        return self.bench.network

    def pairs(self, name: str) -> list[Pair]:
        """Return the values that are asked of a model."""
        return self._pairs(self.network(name))

    def units(self, name: str, pairs: Iterable[Pair], content: str = "") -> list[WorkUnit]:
        """Return some of a model's pairs as units of work."""
        found = self._units(self.network(name), tuple(pairs))
        return [replace(unit, weights=self.models[name], content=content) for unit in found]

    def _pairs_of(self, network: nn.Module) -> list[Pair]:
        """Return the values that are asked of a network, in the order of their rows.

        With several layers a measure has a value of the network too. Measures of the network alone have only that one,
        over all layers whatever was chosen.
        """
        chosen = tuple(selectors.select(unwrap(network), self.setup.selectors).modules)
        rows = named(self.setup.measures)
        pairs = [Pair(layer, row.name) for layer in chosen for row in rows if not row.of_network_alone]
        for row in rows:
            if row.of_network_alone:
                pairs.append(Pair((), row.name))
            elif "network" in row.granularity and len(chosen) != 1:
                pairs.append(Pair(() if self.setup.selectors is None else chosen, row.name))
        return pairs

    def _units_of(self, network: nn.Module, pairs: Iterable[Pair]) -> list[WorkUnit]:
        """Return some of the pairs of a network in groups that share their reads of the data."""
        rows = {row.name: row for row in named(self.setup.measures)}
        every = tuple(selectors.select(unwrap(network), None).modules)
        by_measure: dict[str, list[Pair]] = {name: [] for name in rows}
        for pair in pairs:
            by_measure[pair.measure].append(pair)
        by_layers: dict[tuple[str, ...], list[Measure]] = {}
        for name, own in by_measure.items():
            if own:  # a value of the network takes all of its layers
                places = [place if isinstance(place, tuple) else (place,) for place, _ in own]
                needed = tuple(dict.fromkeys(itertools.chain(*places))) if all(places) else every
                by_layers.setdefault(needed, []).append(rows[name])
        units = [
            WorkUnit(
                tuple(pair for row in group for pair in by_measure[row.name]),
                None if all(row.of_network_alone for row in group) else self._selecting(needed, every),
            )
            for needed, wanted in by_layers.items()
            for group in plan.shared(wanted, self.setup.options, layers=len(needed))
        ]
        units.sort(key=lambda unit: self.setup.measures.index(unit.measures[0]))
        # Of units that read no data themselves, the first one reads them for loss and accuracy, if no other unit does.
        reading = [any(rows[name].reads for name in unit.measures) for unit in units]
        first = reading.index(True) if any(reading) else 0
        return [replace(unit, fit=reading[place] or place == first) for place, unit in enumerate(units)]

    def _selecting(self, needed: tuple[str, ...], every: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return what selects these layers: those of a pattern need not run, as in the user's own."""
        if self.setup.selectors is None and needed == every and len(every) > 1:
            return None
        own = needed if len(needed) == 1 else self.setup.selectors or ()
        return tuple(name if not name or name in own else f"re:{re.escape(name)}" for name in needed)

    def reads(self, units: Iterable[WorkUnit]) -> int:
        """Return how often units read the data; those of spectra are not known before, and not counted."""
        counts = Counter((*unit.measures,) for unit in units if not unit.spectrum)
        return sum(count * plan.plan(named(names), self.setup.options).reads for names, count in counts.items())

    def go(self, units: Iterable[WorkUnit], executor: Executor | None, take: Take) -> None:
        """Measure units by :func:`drive`, or here without an executor; over ranks, those that the first one has."""
        if executor is None:
            for unit in self._of_first(units):
                take(unit, self.bench.outcome(unit))
            return
        if not self.ranks.alone:
            raise InputError(
                f"executor: the {self.ranks.size} ranks of a process group measure each model together, one after the "
                "other, and there are no other workers; leave the executor out, or start one process without torchrun"
            )
        if not self.setup.data.is_made:
            raise InputError(
                "data: the workers of an executor load them by themselves; pass a function that returns them"
            )
        if any(isinstance(held, nn.Module) for held in self.models.values()):
            raise InputError("models: the workers of an executor read weights by themselves; save them, and pass paths")
        drive(executor, self.setup, units, take)

    def _of_first(self, units: Iterable[WorkUnit]) -> Iterable[WorkUnit]:
        """Return the units that the first rank has, on all ranks."""
        if self.ranks.alone:
            return units
        names, own = {id(held): name for name, held in self.models.items()}, [*units]
        told = [(names[id(unit.weights)], replace(unit, weights=Path())) for unit in own]
        found = self.ranks.first("the units of work", told)
        return own if self.ranks.rank == 0 else [replace(unit, weights=self.models[name]) for name, unit in found]


@dataclass(frozen=True)
class Kept:
    """Hold what a store has of a run."""

    setting: int  # the store's number of what is the same for all values
    contents: dict[str, str]  # of the checkpoints, by name
    units: list[WorkUnit]  # what is to be computed
    notes: tuple[str, ...]  # why values will not be found again
    spectra: ResultFile | None = None  # what they are written as, but for weights and result; None: none are wanted

    def commit(self, store: Store, unit: WorkUnit, outcome: Outcome) -> None:
        """Write what came of a unit into the store."""
        if outcome.unknown:
            store.forget(self.setting)
        if self.spectra is None or not unit.spectrum:
            store.commit(self.setting, unit.content, outcome)
        else:
            held = self.spectra._replace(content=unit.content, file=outcome.file, error=outcome.error)
            if outcome.unknown:
                held = held._replace(setting="")
            result_files.put(store, held)

    def failures(self, store: Store) -> list[tuple[str, str]]:
        """Return the models whose spectrum could not be computed, each with its error."""
        if self.spectra is None:
            return []
        return result_files.failures(store, self.spectra.setting, self.contents.values())


def keep(run: ScoringRun, store: Store, *, retry: bool = False, ends: bool = False, spectrum: int = 0) -> Kept:
    """Ask a store for the values of a run, and return what is to be computed.

    Its workers' data are held to the fingerprint. ``ends``: the first and last batch are enough to know the data by. So
    many eigenvalues (``spectrum``) of each model are wanted too, with the density of all; 0: none.
    """
    bench, setup = run.bench, run.setup
    ordered = setup.options.of_layers.sampled or setup.options.by_sample
    fingerprint = keys.of_data(bench.data, ordered=ordered, ends=ends)
    code, files_of = bench.code(), functools.cache(keys.files_of)  # most networks have the same files
    contents: dict[str, str] = {}
    unknown = [*code.unknown]
    for name, held in run.models.items():
        if isinstance(held, nn.Module):
            found = keys.Described.network(held, version=setup.version)
            files, _, others = files_of(found.modules) if setup.version is None else ({}, (), ())
            own = [*filter(None, [found.unknown]), *others]
            contents[name] = keys.of_json([keys.of_state(held), found.facts, sorted(files.values()), keys.once(own)])
            unknown += own
        else:
            contents[name] = keys.of_file(held)
    AGREED.append(code)  # as threads of this process have it
    bench.setup = replace(setup, fingerprint=fingerprint, code=code)
    key = {
        "model": code.model,
        "data": fingerprint,
        "loss": code.loss,
        "code": sorted({*code.files.values()}),
        "options": keys.of_options(setup.options),
        "values version": keys.VALUES_VERSION,
        **keys.once(code.unknown),
    }
    shown = {"model": setup.model and setup.model.text(), "data": setup.data.text()}
    setting = store.setting({"key": key, "shown": shown})
    paths = {name: None if isinstance(held, nn.Module) else str(held.absolute()) for name, held in run.models.items()}
    store.name({name: (paths[name], content) for name, content in contents.items()})
    first: dict[str, str] = {}  # the first name of each content
    for name, content in contents.items():
        first.setdefault(content, name)
    missing = store.ask(setting, {content: run.pairs(name) for content, name in first.items()}, retry=retry)
    units = [unit for content, pairs in missing.items() for unit in run.units(first[content], pairs, content)]
    said = tuple(map(keys.measured_anew, dict.fromkeys(unknown)))
    if not spectrum:
        return Kept(setting, contents, units, said)
    options = {"curvature": setup.options.curvature, "seed": setup.options.seed, "k": spectrum}
    of_all = f"{keys.of_json({**key, 'options': {}})} {keys.of_json(options)}"
    there = result_files.there(store, "spectrum", of_all, failed=not retry)
    units += [
        WorkUnit(weights=run.models[name], content=content, spectrum=spectrum)
        for content, name in first.items()
        if content not in there
    ]
    return Kept(setting, contents, units, said, ResultFile("", "", "spectrum", setup.data.text(), of_all, b""))

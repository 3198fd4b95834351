"""Measure units where an executor sends them: the model and the data are loaded once, the weights for each checkpoint.

What is sent to a worker is where the model, data and weights are, and what comes back are numbers.
"""

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..messages import is_out_of_memory, reason
from ..model import state
from ..model.data import Batches, size, used_up
from ..numerics.ranks import ALONE, Ranks, is_the_end
from . import checkpoints, cutting, data_specs, described, keys, measuring, pretrained, specs
from .cutting import Cut
from .measuring import Outcome, Step
from .units import Request, WorkUnit


@dataclass(frozen=True)
class Maker:
    """Name what makes the model or the data, so that each worker can make it.

    Attributes:
        maker: a SPEC (see :func:`.data_specs.resolve`), a callable, or, for data, what it would return.
        arguments: of the callable, by name.
        name: what messages call it.
        to: of a model: ``device`` and ``dtype``, as ``nn.Module.to`` takes them.
    """

    maker: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    to: Mapping[str, Any] = field(default_factory=dict)

    def made(self) -> Any:
        """Return what the callable returns.

        Raises:
            InputError: it cannot be imported, or fails.
        """
        maker = self.function()
        return specs.bind(maker, dict(self.arguments), self.name)() if callable(maker) else maker

    def function(self) -> Any:
        """Return the callable, or the data themselves."""
        return data_specs.resolve(self.maker) if isinstance(self.maker, str) else self.maker

    def described(self) -> Any:
        """Return what it is, besides what it makes, for a store's keys.

        Of a network that a library knows by name this is nothing: what is made says it all, wherever its files are.
        """
        return None if pretrained.is_named(self.maker) else [self.function(), {**self.arguments}]

    def text(self) -> str:
        """Return what a reader knows it by."""
        maker = self.maker if isinstance(self.maker, str) else getattr(self.maker, "__qualname__", None)
        arguments = json.dumps(self.arguments, default=repr) if self.arguments else ""
        return f"{maker or type(self.maker).__name__} {arguments}".strip()

    @property
    def is_made(self) -> bool:
        """Return whether workers can make it, without being sent it."""
        return isinstance(self.maker, str) or callable(self.maker)


@dataclass(frozen=True)
class Setup:
    """Hold what is the same for all units of a run.

    Attributes:
        token: a name that no other run has.
        model: of the network that the checkpoints are of; None where each brings its own.
        data: the batches.
        batch_size: the most samples that go through the network together; None: as the batches are; ``"auto"``: as
            they are, and half as many whenever the memory does not suffice.
        limit: the first so many samples of the data, or this part of them; None: all.
        fingerprint: of the data, which every worker's are held against; None where values are not kept.
        code: likewise, of model and loss.
        version: what stands for the user's code; None: it is looked at.
        request: what is asked of each checkpoint.
    """

    token: str
    model: Maker | None
    data: Maker
    request: Request
    batch_size: int | str | None = None
    limit: float | None = None
    fingerprint: described.Facts | None = None
    code: keys.Code | None = None
    version: str | None = None


@dataclass(frozen=True)
class Job:
    """Hold a unit and where its weights are: a file, or a network itself; ``content`` is the key of the file's bytes.

    ``fit`` says whether loss and accuracy are wanted too. With ``spectrum``, so many eigenvalues are wanted, and the
    unit has no values.
    """

    unit: WorkUnit
    weights: Path | nn.Module
    content: str = ""
    fit: bool = True
    spectrum: int = 0


class Bench:
    """Hold the network and the data, made once, and know whose weights the network has.

    Args:
        setup: of the run.
        ranks: that measure each unit together.

    Attributes:
        data: all of them.

    Raises:
        InputError: the model or the data cannot be made.
    """

    def __init__(self, setup: Setup, ranks: Ranks = ALONE) -> None:
        self.setup, self.ranks = setup, ranks
        self.network = None if setup.model is None else specs.build_model(setup.model.made, setup.model.to)
        self.data = setup.data.made()
        if hasattr(self.data, "__next__"):
            raise used_up(self.data, "and every model reads them", setup.data.name.rstrip("="))
        Batches(self.data, torch.device("cpu"))  # raises for what are no data, before any model is measured
        self._mine, self._counts = self.data, True
        if not ranks.alone:
            self._mine, samples = cutting.dealt(self.data, ranks, setup.limit)
            self._counts = samples > 0
        if setup.batch_size is not None or setup.limit is not None:
            device = torch.device("cpu") if self.network is None else state.device(self.network)
            most = setup.batch_size if isinstance(setup.batch_size, int) else None
            self.data = Cut(self.data, device, most=most, limit=setup.limit)
            self._mine = self.data if ranks.alone else Cut(self._mine, device, most=most)
        self._held: tuple[Path, str] | None = None
        self._notes: tuple[str, ...] = ()  # on reading what is held

    def batches(self) -> int:
        """Return the number of batches that are measured here; 0 if the data cannot tell."""
        return len(Batches(self._mine, torch.device("cpu")))

    def code(self, folders: Iterable[Path] = ()) -> keys.Code:
        """Return what the user's code is here, with the source files in these folders."""
        setup = self.setup
        made = None if setup.model is None else setup.model.described()
        return keys.Code.of(self.network, made, setup.request.loss, setup.data.function(), setup.version, folders)

    def check(self) -> None:
        """Raise if the data, the model or the loss are not those of the program that hands out the work.

        Raises:
            InputError: they differ, as data with an unseeded split or noise do in each process, and code that was
                edited since the program began.
        """
        fingerprint, code = self.setup.fingerprint, self.setup.code
        if code is not None and self.code().differs(code):
            raise InputError(
                "model, loss: a worker that made them got others than the process that hands out the work; have their "
                "callables make the same in every process, leave the source files as they are while the work goes on, "
                "and set what a module holds in its file, not later"
            )
        if fingerprint is None:
            return
        if keys.of_data(self.data, ordered="order" in fingerprint, ends="ends" in fingerprint) != fingerprint:
            raise InputError(
                "data: a worker that loaded them got other samples than the process that hands out the work; have the "
                "callable return the same data whenever it is called (seed what is drawn)"
            )

    def outcome(self, job: Job, step: Step = lambda part: None) -> Outcome:
        """Measure a unit; what goes wrong with its checkpoint or its measures is in its values.

        Raises:
            RankError: see :func:`.measuring.measured`.
        """
        try:
            with self.ranks.agreed("a checkpoint"):
                model, notes = self._with_weights(job)
        except Exception as error:  # a damaged file can raise anything
            if is_the_end(error):
                raise
            return Outcome.failed(job.unit, reason(error))
        while True:
            request, data, ranks = self.setup.request, self._mine, self.ranks
            if job.spectrum:
                found = measuring.spectrum_of(model, data, request, job.spectrum, ranks)
            else:
                found = measuring.measured(
                    *(model, data, request, job.unit, step), fit=job.fit, counts=self._counts, ranks=ranks
                )
            if self.setup.batch_size != "auto" or not self._halved(found):
                return replace(found, batch_size=data.most if isinstance(data, Cut) else None, notes=notes)

    def _halved(self, found: Outcome) -> bool:
        """Halve the batches if memory did not suffice, for this unit and those that follow; return whether."""
        if not any(self.ranks.exchange("the memory", any(map(is_out_of_memory, found.errors)))):
            return False
        most = self._mine.most or max(map(size, self._mine), default=1)
        further = any(self.ranks.exchange("the batches", most > 1))
        self._mine.most = max(1, most // 2) if further else 0
        return further

    def _with_weights(self, job: Job) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the network with its weights, and the notes on reading them."""
        if isinstance(job.weights, nn.Module):
            return job.weights, ()
        assert self.network is not None
        if self._held != (job.weights, job.content):
            self._held = None  # a file that does not fit leaves a part of itself behind
            checkpoint = checkpoints.read(job.weights)
            self._notes = checkpoint.notes + checkpoints.load(self.network, checkpoint.state)
            if job.content and keys.of_file(job.weights) != job.content:
                raise InputError("the file changed after the run had begun")
            self._held = job.weights, job.content
        return self.network, self._notes


_here = threading.local()  # whose bench units that are measured in this thread use


def adopt(bench: Bench | None) -> None:
    """Let units that are measured in this thread use a bench that is there already."""
    _here.bench = bench


def measure(setup: Setup, job: Job) -> Outcome:
    """Measure a unit in the thread or process that this is called in: the function that executors are given.

    Raises:
        InputError: the model or the data cannot be made, or are others than they were.
    """
    bench: Bench | None = getattr(_here, "bench", None)
    if bench is None or bench.setup.token != setup.token:
        bench = Bench(setup)
        bench.check()
        _here.bench = bench
    return bench.outcome(job)

"""Divide the bytes of ``memory=``, and cut batches into micro-batches whose graphs fit their share."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..model import walk

DEFAULT_MEMORY = 512 * 2**20
_CPU = torch.device("cpu")
_BUFFERS = 24 * 2**20  # about the size of a processor's caches
_HELD_BACK = 48 * 2**20
_MUCH = 2 * 2**30  # on a GPU: with less a graph of few samples would leave it idle
_BASES = 2**30
_LEAST_BASES = 4 * _BASES
_SECOND_ORDER = 3  # memory of a graph with that of its derivatives, about, in units of the graph's


@dataclass
class Budget:
    """Divide the bytes of ``memory=`` among the things that a sweep holds at the same time.

    - ``buffers``: an eighth, at most 24 MiB but on a GPU, for the working buffers of a layer's contraction, one layer
      at a time.
    - ``held_back``: an eighth, at most 48 MiB but on a GPU, and there a half from 2 GiB on, for cotangents of all
      layers that are contracted several at a time; nothing if ``halved``.
    - ``work``: a half if ``halved``, else nothing, for what a measure holds besides: per-sample parameters with their
      graph, or rows kept of all data.
    - ``graph``: the rest, for the graph of a micro-batch, with its layer inputs and output gradients.

    Two things that some measures hold from one read of the data to the next come on top:

    - ``blocks``: as much as ``memory=`` again, for the float64 Hessians of one layer's rows where they are written out.
    - ``bases``: 1 GiB, or ``memory=`` where that is more, for the vectors that Lanczos keeps, of one layer's rows or of
      all blocks of λ_max. With fewer vectors it takes more products, each of which may read the data.

    Vectors that a search cannot do without may take ``least_bases``: 4 GiB where the user names no ``memory``.

    Attributes:
        asked: the user's ``memory``, in bytes; None takes :data:`DEFAULT_MEMORY`, on a GPU a quarter of all that it has
            (and not of what is free, so that the same call cuts the same micro-batches every time).
        halved: whether a measure holds something besides.
    """

    asked: int | None
    halved: bool = False
    device: torch.device = _CPU

    def __post_init__(self) -> None:
        self.on_gpu = self.device.type == "cuda"
        total = self.asked or DEFAULT_MEMORY
        if self.on_gpu and not self.asked:
            total = int(torch.cuda.get_device_properties(self.device).total_memory) // 4
        held_back = total // (2 if total >= _MUCH else 8) if self.on_gpu else min(_HELD_BACK, total // 8)
        self.buffers = total // 8 if self.on_gpu else min(_BUFFERS, total // 8)
        self.held_back, self.work = (0, total // 2) if self.halved else (held_back, 0)
        self.graph = total - self.buffers - self.held_back - self.work
        self.blocks, self.bases = total, max(_BASES, total)
        self.least_bases = self.bases if self.asked else max(_LEAST_BASES, total)

    @classmethod
    def of(cls, model: nn.Module, asked: int | None, *, halved: bool = False) -> "Budget":
        """Return the budget for work on a model, which is where its first parameter is."""
        first = next(iter(walk.parameters(model)), None)
        return cls(asked, halved, _CPU if first is None else first.device)


@dataclass
class Place:
    """Name the samples from ``start`` to ``stop`` of a batch, and whether they are ``done``."""

    start: int
    stop: int
    done: bool = False

    @property
    def slice(self) -> slice:
        """Return the place as a slice."""
        return slice(self.start, self.stop)


class MicroBatches:
    """Cut batches into micro-batches of at most ``largest`` samples, 1 until :meth:`plan` is called."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.largest, self.cuttable = 1, True
        self.notes: tuple[str, ...] = ()

    def plan(self, needed: int, *, cuttable: bool) -> None:
        """Set the sizes from the bytes needed per sample, and from whether the model runs on parts of batches."""
        needed, asked = max(1, needed), self._budget.asked
        if asked and needed > asked and cuttable:
            self.notes = (f"one sample takes about {needed:,} bytes at a time, more than memory={asked:,}",)
        self.cuttable = cuttable
        self.largest = max(1, self._budget.graph // needed) if cuttable else sys.maxsize

    def make_room_for_second_order(self) -> None:
        """Reduce the sizes for second derivatives, which need the graph of the first ones besides."""
        if self.cuttable:
            self.largest = max(1, self.largest // _SECOND_ORDER)

    def halve(self, samples: int) -> None:
        """Halve the sizes, as the memory did not suffice for this many samples."""
        self.largest = samples // 2

    def places(self, samples: int, first: Callable[[], int | None] = lambda: None) -> Iterator[Place]:
        """Yield places of about equal size; the first one has at most ``first()`` samples.

        The samples of a place that is not done come again, cut by the sizes that are known then.
        """
        start = 0
        while start < samples:
            left = samples - start
            count = -(-left // self.largest)
            size = -(-left // count)
            if start == 0 and self.cuttable:
                size = min(size, first() or size)
            place = Place(start, start + size)
            yield place
            start = place.stop if place.done else start

"""Cut batches into micro-batches whose graph fits the memory."""

from collections.abc import Iterator
from dataclasses import dataclass

DEFAULT_MEMORY = 512 * 2**20  # bytes that the graph, the layers' inputs and output gradients of a micro-batch may take
_SECOND_ORDER = 3  # about the memory that a graph takes together with that of its derivatives


@dataclass
class Place:
    """Name the samples from ``start`` to ``stop`` of a batch, and whether they are ``done``."""

    start: int
    stop: int
    done: bool = False

    @property
    def slice(self) -> slice:
        """The same as a slice."""
        return slice(self.start, self.stop)


class MicroBatches:
    """Know how many samples may go through the model together.

    Args:
        memory: bytes for the graph, layer inputs and output gradients of a micro-batch; None takes
            :data:`DEFAULT_MEMORY`.

    Attributes:
        largest: how many samples go together at most; 1 until :meth:`plan` was told what they take.
        cuttable: whether the model runs on other numbers of samples than a batch has.
        notes: what a reader of a value should know.
    """

    def __init__(self, memory: int | None) -> None:
        self._asked, self._memory = memory, memory or DEFAULT_MEMORY
        self.largest, self.cuttable = 1, True
        self.notes: tuple[str, ...] = ()

    def plan(self, needed: int, samples: int, *, cuttable: bool) -> None:
        """Take in what a batch of some samples needs: bytes a sample, and whether the model runs on some of them."""
        needed = max(1, needed)
        if self._asked and needed > self._asked and cuttable:
            self.notes = (f"one sample takes about {needed:,} bytes at a time, more than memory={self._asked:,}",)
        self.cuttable = cuttable
        self.largest = max(1, self._memory // needed) if cuttable else samples

    def make_room_for_second_order(self) -> None:
        """Take in that second derivatives are taken from now on: the graph of the first ones comes on top."""
        if self.cuttable:
            self.largest = max(1, self.largest // _SECOND_ORDER)

    def halve(self, samples: int) -> None:
        """Take in that the memory did not suffice for so many samples."""
        self.largest = samples // 2

    def places(self, samples: int, limit: int) -> Iterator[Place]:
        """Cut samples into places of about equal size, at most ``limit``.

        One that is not done when the next is asked for comes again, cut by what is known then.
        """
        start = 0
        while start < samples:
            left = samples - start
            count = -(-left // min(self.largest, limit))
            place = Place(start, start + -(-left // count))
            yield place
            start = place.stop if place.done else start

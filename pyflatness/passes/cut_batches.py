"""Cut batches that are only run forward, or are differentiated as a whole, into micro-batches that fit the memory."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import private
from ..model import calling, data
from .guards import check_of_user
from .memory import Budget, MicroBatches

_FEW = 4  # samples that are run first, to see how much memory they take


class CutBatches:
    """Cut batches, after a few samples of the first larger batch have shown how much memory ``work`` on a sample takes.

    ``compare`` has the next batch compared with two of its samples; with ``derivatives`` the work builds a graph.
    """

    def __init__(
        self, work: Callable[[Any], Any], budget: Budget, compare: Callable[[], None], *, derivatives: bool = False
    ) -> None:
        self._work, self._compare, self._derivatives = work, compare, derivatives
        self._cuts = MicroBatches(budget)
        self._is_planned = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader of a value should know about how batches were cut."""
        return self._cuts.notes

    def numbered(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the micro-batches of all batches, each with its batch's number."""
        for number, batch in enumerate(batches):
            for micro_batch in self.of(batch):
                yield number, micro_batch

    def of(self, batch: Any) -> Iterator[Any]:
        """Yield the micro-batches of a batch, or the batch as it is where it fits or cannot be cut."""
        samples = data.size(batch)
        if samples > _FEW and not self._is_planned:
            self._is_planned = True
            self._plan(batch)
        if samples <= max(_FEW, self._cuts.largest):
            yield batch
            return
        for place in self._cuts.places(samples):
            place.done = True
            yield data.part(batch, place.start, place.stop)

    def _plan(self, batch: Any) -> None:
        needed, cuttable = 0, True
        try:
            with calling.dry_run(), torch.set_grad_enabled(self._derivatives), _Alive() as alive:
                kept = self._work(data.part(batch, 0, _FEW))
            needed = (alive.most + 2 * self._derivatives * alive.largest) // _FEW
            del kept
        except Exception as error:
            # The batch cannot be cut; an error of the model itself comes again with the whole batch.
            check_of_user(error)
            cuttable = False
        self._compare()
        self._cuts.plan(needed, cuttable=cuttable)


class _Alive(private.TorchDispatchMode):
    """Note the peak of the bytes alive at once that operations inside allocated, and the size of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(returned):
            if storage._cdata not in given:
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._held = {key: each for key, each in self._held.items() if not each[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return returned


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in private.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            with contextlib.suppress(NotImplementedError):  # it may be sparse
                yield leaf.untyped_storage()

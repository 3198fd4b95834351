"""Read data as batches: a tuple of tensors or an iterable of batches, moved to the model's device."""

import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from .. import progress
from ..errors import InputError
from ..messages import check_tensor, received, without_values
from ..numerics.shard import WHOLE
from .fingerprint import Fingerprint
from .generators import watched

_BATCH_SIZE = 256  # samples in a batch that is cut from a tuple of tensors


class OtherSamplesError(InputError):
    """Tell that the data gave other samples at a later read, so that no measure with several reads is possible."""


class Batches:
    """Iterate over the user's data as often as a measure needs.

    The data are a tuple of tensors with the samples in dimension 0, or an iterable of batches. A one-shot iterator is
    refused for more than one of ``reads``, and later reads of a loader are compared with the first. If ``ordered``,
    samples have to come in the same order at each read. ``shard`` is this rank's part of all data; ``shown`` is whether
    a read shows its progress.
    """

    def __init__(
        self, data: Any, device: torch.device, *, reads: int = 1, ordered: bool = False, shown: bool | None = None
    ) -> None:
        self._device, self._shown, self._ordered, self.shard = device, shown, ordered, WHOLE
        self._told = shown is False
        self.count_by: Callable[[Whole], int] | None = None  # counts the samples of a batch that is not cut
        self._tensors: tuple[Tensor, ...] = ()
        if isinstance(data, tuple) and data and isinstance(data[0], (Tensor, np.ndarray)):
            self._tensors = _parts(data)
        elif isinstance(data, (Tensor, Mapping, str, Dataset, enumerate)) or not hasattr(data, "__iter__"):
            raise InputError(f"data: a tuple of tensors or an iterable of batches is wanted, {received('data', data)}")
        elif hasattr(data, "__next__") and reads > 1:
            more = "(normalize=, fraction=, measured= and some measures take more than one)"
            raise used_up(data, f"and {reads} reads are needed {more}")
        self._data, self.repeatable = data, not hasattr(data, "__next__")  # whether they can be read again
        self._compared = reads > 1 and not isinstance(data, (tuple, list))
        self._first: Fingerprint | None = None  # of the first read
        self._begun: tuple[list[Any], Iterator[Any]] | None = None  # a read: batches that were peeked at, and the rest

    def peek(self) -> Any:
        """Return the first batch that is not empty; the next read gives it again."""
        if self.is_empty():
            raise no_samples(self._data)
        assert self._begun is not None
        return to_device(self._begun[0][-1], self._device)

    def is_empty(self) -> bool:
        """Return whether there are no samples; see :meth:`peek`."""
        if self._begun is None:
            taken: list[Any] = []
            source = self._fetched()
            for batch in source:
                taken.append(batch)
                if checked_size(batch, len(taken) - 1) > 0:
                    break
            self._begun = taken, source
        taken, _ = self._begun
        return not taken or size(taken[-1]) == 0

    def _fetched(self) -> Iterator[Any]:
        """Yield the user's batches, wrapped in :class:`Whole` if they are not cut."""
        if isinstance(self._data, (tuple, list)):
            yield from map(self._whole, self._cut())
            return
        with watched():  # the user's code runs
            source = iter(self._cut())
        while True:
            with watched():
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield self._whole(batch)

    def _whole(self, batch: Any) -> Any:
        """Return a batch, wrapped in :class:`Whole` if it holds objects with tensors that cannot be cut."""
        if self.count_by is None or not any(map(_holds_tensors, leaves(batch))):
            return batch
        return to_device(Whole(batch, self.count_by), self._device)

    def __len__(self) -> int:
        """Return the number of batches; 0 if it is not known."""
        if self._tensors:
            return -(-len(self._tensors[0]) // _BATCH_SIZE)
        try:
            return len(self._data)
        except TypeError:
            return 0

    @property
    def samples(self) -> int:
        """Return about how many samples there are; 0 if it is not known."""
        if self._tensors:
            return len(self._tensors[0])
        if isinstance(self._data, (tuple, list)):
            return sum(max(0, size(batch)) for batch in self._data)
        try:
            return len(self._data.sampler)
        except (AttributeError, TypeError):
            return 0

    def __iter__(self) -> Iterator[Any]:
        empty, read = True, Fingerprint()
        begun, self._begun = self._begun, None
        source = self._fetched() if begun is None else itertools.chain(*begun)
        with progress.bar("batches", len(self), self._shown) as advance:
            for number, batch in enumerate(source):
                is_whole = isinstance(batch, Whole)
                if is_whole or checked_size(batch, number) > 0:
                    empty = False
                    if self._compared:
                        read.add(with_samples(batch, size(batch)), size(batch), whole=is_whole)
                    yield to_device(batch, self._device)
                advance(1, "")
        if empty:
            raise no_samples(self._data)
        if self._compared:
            self._compare(read)

    def tell(self, text: Callable[[], str]) -> None:
        """Print a line on a step that will take long; only the first call prints."""
        if not self._told:
            self._told = True
            print(f"pyflatness: {text()}", file=sys.stderr, flush=True)

    def count(self) -> int:
        """Return the exact number of samples, by a read of the data if necessary."""
        if self._tensors or isinstance(self._data, (tuple, list)):
            return self.samples
        if _promised(self._data) and self._data.collate_fn is default_collate:
            return _sampled(self._data)
        if not self.repeatable:
            places = "since random probes belong to samples by their places in the data of all ranks"
            raise used_up(self._data, f"and its samples have to be counted before they are measured, {places}")
        self._compared = True
        return sum(size(batch) for batch in self)

    def _compare(self, read: Fingerprint) -> None:
        """Raise if a later read gave other data than the first."""
        if self._first is None:
            self._first = read
        elif not read.same_samples(self._first):
            raise OtherSamplesError(
                "data: they are read several times, and a later read gave other samples than the first (an "
                "augmentation, noise, or a draw of samples at each read), so that the value would be of no one data "
                "set; pass the batches of one read, as list(loader), or switch that off. What reads the data once: "
                "relative_flatness, and pf.measure without measures=, both without normalize="
            )
        elif self._ordered and not read.same_order(self._first):
            raise OtherSamplesError(
                "data: they are read several times, and a later read gave the samples in another order than the first, "
                "while samples are told apart by it (per_sample=, nan_policy='omit', fraction=); pass a loader with "
                "shuffle=False, or the batches of one read, as list(loader)"
            )

    def _cut(self) -> Iterable[Any]:
        if not self._tensors:
            return _read(self._data)
        return zip(*(held.split(_BATCH_SIZE) for held in self._tensors), strict=True)


def _read(data: Iterable[Any]) -> Iterator[Any]:
    """Yield the user's batches."""
    why = (
        "something that reads the data (a generator, a dataset's __getitem__, a collate function) calls next() on an "
        "iterator that is exhausted"
    )
    number = 0
    try:
        for batch in data:
            yield batch
            number += 1
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):
            raise
        raise InputError(f"data: reading batch {number} raised StopIteration: {why}") from error
    if number < _promised(data):
        raise InputError(f"data: the loader ended after {number} of its {_promised(data)} batches: {why}")


def _promised(data: Any) -> int:
    """Return the exact number of a loader's batches; 0 if it is not known."""
    if type(data) is not DataLoader or type(data.batch_sampler) is not BatchSampler:
        return 0
    return len(data) if type(data.batch_sampler.sampler) in (SequentialSampler, RandomSampler) else 0


def _sampled(loader: Any) -> int:
    """Return how many samples a loader of torch's takes from its sampler."""
    batches = loader.batch_sampler  # unlike the loader's sampler, this one counts if the user made it
    count = len(batches.sampler)
    return count - count % batches.batch_size if batches.drop_last else count


def distributed(data: Any) -> tuple[DistributedSampler[Any], int] | None:
    """Return torch's sampler of one rank's samples, and how many of these a loader takes; None for other data."""
    plain = isinstance(data, DataLoader) and type(data.batch_sampler) is BatchSampler
    if not plain or type(data.batch_sampler.sampler) is not DistributedSampler:  # a subclass may distribute otherwise
        return None
    return data.batch_sampler.sampler, _sampled(data)


def repeated(data: Any) -> int:
    """Return how many samples accelerate's loaders repeat, on all ranks together, to give all as many batches."""
    sampler: Any = getattr(data, "batch_sampler", None)
    if type(sampler).__name__ != "BatchSamplerShard" or not sampler.even_batches or sampler.drop_last:
        return 0
    batches = len(sampler) * (1 if sampler.split_batches else sampler.num_processes)
    return batches * sampler.batch_size - len(sampler.batch_sampler.sampler) if sampler.batch_size else 0


def used_up(data: Any, why: str, option: str = "data") -> InputError:
    """Return the error for an iterator, which can be read once, if more reads are needed."""
    kind = type(data).__name__
    return InputError(f"{option}: {kind} can be read once, {why}; pass a list of batches or a DataLoader")


def no_samples(data: Any = None) -> InputError:
    """Return the error for data without samples."""
    spent = hasattr(data, "__next__")
    hint = "; an iterator that was read before is at its end: pass a list of batches or a DataLoader" if spent else ""
    return InputError(f"data: there are no samples in it{hint}")


def _parts(data: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return a tuple of tensors that can be cut into batches."""
    tensors = tuple(check_tensor(f"data[{place}]", part) for place, part in enumerate(data))
    if not all(part.ndim for part in tensors):
        shapes = [tuple(part.shape) for part in tensors]
        raise InputError(f"data: tensors with samples in dimension 0 are wanted, got shapes {shapes}")
    if len({len(part) for part in tensors}) > 1:
        raise InputError(f"data: tensors of different lengths: {[len(part) for part in tensors]}")
    return tensors


def checked_size(batch: Any, number: int) -> int:
    """Return the number of samples of a user's batch, or raise if it has none."""
    for part in leaves(batch):
        if isinstance(part, np.ndarray) or (isinstance(part, Tensor) and (without_values(part) or part.is_nested)):
            check_tensor(f"data: batch {number}", part)
    samples = size(batch)
    if samples < 0:
        parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
        inside = f" of {', '.join(type(part).__name__ for part in parts)}" if parts else ""
        if isinstance(batch, Mapping) and any(isinstance(part, list) for part in parts):
            inside += "; a tokenizer gives tensors with return_tensors='pt'"
        raise InputError(
            f"data: batch {number} holds no tensor with samples in dimension 0: it is a {type(batch).__name__}{inside}"
            "; batches are (inputs, targets) pairs of tensors, or mappings of them with `labels`"
        )
    return samples


def with_samples(batch: Any, samples: int) -> Iterator[Tensor]:
    """Yield the tensors of a batch with its samples in dimension 0; for a batch that is not cut all, (1, entries)."""
    if isinstance(batch, Whole):
        yield from (tensor.reshape(1, -1) for tensor in batch.tensors)
        return
    for part in leaves(batch):
        if isinstance(part, Tensor) and part.ndim and len(part) == samples:
            yield part


class Whole:
    """Hold a batch that is not cut, of objects with tensors inside, such as a batch of graphs.

    Its samples are those of the model's outputs; ``count`` finds their number by a forward pass, unless it is known.
    """

    def __init__(self, batch: Any, count: "Callable[[Whole], int]", counted: int | None = None) -> None:
        self.batch, self._count, self.counted = batch, count, counted
        self.tensors = _tensors_in(batch)

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        if self.counted is None:
            self.counted = self._count(self)
        return self.counted

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Whole":
        """Return the batch with ``change`` applied to every tensor in it; the batch itself if none changes."""
        changed = {id(tensor): change(tensor) for tensor in self.tensors}
        if all(changed[id(tensor)] is tensor for tensor in self.tensors):
            return self
        return Whole(_mapped(lambda tensor: changed.get(id(tensor), tensor), self.batch), self._count, self.counted)


class NotCutError(InputError):
    """Tell that some samples were requested of a batch that is not cut."""


class _Changing(TorchFunctionMode):
    """Put ``change`` of each tensor, in place of its copy, into deep copies of objects that are made inside."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._change(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _mapped(change: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return a copy of any object with its tensors changed."""
    with _Changing(change):
        return copy.deepcopy(batch)


def _tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors that any object holds."""
    found: list[Tensor] = []
    _mapped(found.append, batch)
    return found


def _holds_tensors(leaf: Any) -> bool:
    """Return whether an object that is no tensor holds some."""
    if leaf is None or isinstance(leaf, (Tensor, str, bytes, int, float, complex, np.ndarray, np.generic)):
        return False
    try:
        return bool(_tensors_in(leaf))
    except Exception:  # the object cannot be copied
        return False


def leaves(batch: Any) -> list[Any]:
    """Return the tensors and other objects in a batch, in nested tuples, lists and mappings."""
    found: list[Any] = []
    waiting: list[tuple[Any, tuple[int, ...]]] = [(batch, ())]  # with the identities of what it is in
    while waiting:
        part, holders = waiting.pop()
        if isinstance(part, Whole):
            found += part.tensors
        elif isinstance(part, Tensor) or not isinstance(part, (tuple, list, Mapping)):
            found.append(part)
        elif id(part) in holders:
            raise InputError(f"data: a {type(part).__name__} in a batch contains itself; pass one that holds tensors")
        else:
            inner = part if isinstance(part, (tuple, list)) else part.values()
            waiting += zip(reversed([*inner]), itertools.repeat((*holders, id(part))))
    return found


def size(batch: Any) -> int:
    """Return the samples of a batch, the length of its ``labels``, or of its first tensor; -1 if it has no tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else -1
    if isinstance(batch, Whole):
        return batch.samples
    parts: Iterable[Any] = ()
    if isinstance(batch, (tuple, list)):  # before Mapping, whose check is slow
        parts = batch
    elif isinstance(batch, Mapping):
        parts = [batch["labels"]] if isinstance(batch.get("labels"), Tensor) else batch.values()
    for part in parts:
        if (found := size(part)) >= 0:
            return found
    return -1


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on ``device``, detached, and usable in autograd."""

    def moved(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device, non_blocking=True)
        if tensor.is_inference():
            return tensor.clone()
        return tensor.detach() if tensor.requires_grad else tensor

    return map_tensors(moved, batch)


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply ``change`` to every tensor of a batch; tuples, lists and mappings keep their type."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Whole):
        return batch.mapped(change)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, part) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(change, part) for part in batch)
    if isinstance(batch, MutableMapping):
        mapped = copy.copy(batch)
        for key, part in batch.items():
            mapped[key] = map_tensors(change, part)
        return mapped
    return batch


def part(batch: Any, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` of a batch; tensors without its samples in dimension 0 stay whole."""
    samples = size(batch)
    if stop - start == samples:
        return batch
    check_cut(batch)
    return map_tensors(lambda held: held[start:stop] if held.ndim and len(held) == samples else held, batch)


def check_cut(batch: Any) -> None:
    """Raise for a batch that is not cut."""
    if isinstance(batch, Whole):
        raise NotCutError(
            f"data: some samples of a batch are wanted by themselves here, and a {type(batch.batch).__name__} that "
            "holds its tensors in a way of its own is not cut; pass smaller batches, down to one sample each"
        )


def take(batch: Any, index: Tensor) -> Any:
    """Return the samples of a batch at these places, which may repeat."""
    samples = size(batch)
    check_cut(batch)
    return map_tensors(lambda held: held[index.to(held.device)] if held.ndim and len(held) == samples else held, batch)


def joined(batches: Sequence[Any]) -> Any:
    """Return batches as one; None if shapes differ beyond the number of samples, as for padded sequences."""
    columns, shapes = [], []
    for batch in batches:
        samples, tensors = size(batch), [part for part in leaves(batch) if isinstance(part, Tensor)]
        holding = [part.ndim > 0 and len(part) == samples for part in tensors]
        shapes.append([(by, part.shape[int(by) :]) for by, part in zip(holding, tensors, strict=True)])
        columns.append(tensors)
    if any(shape != shapes[0] for shape in shapes):
        return None
    whole = (torch.cat(of) if by else of[0] for (by, _), of in zip(shapes[0], zip(*columns, strict=True), strict=True))
    return map_tensors(lambda _: next(whole), batches[0])


def rows_of(tensor: Tensor, samples: int, index: Tensor) -> Tensor:
    """Return the rows of the samples at some places, of a tensor with the same number of rows for each sample."""
    rows: Tensor = tensor.unflatten(0, (samples, -1))[index.to(tensor.device)].flatten(0, 1)
    return rows


def description(batch: Any) -> str:
    """Return a description of a batch: shapes and dtypes of tensors, and types of other objects."""
    if isinstance(batch, Whole):
        return description(batch.batch)
    if isinstance(batch, Tensor):
        return f"{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {description(part)}" for key, part in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        return f"{type(batch).__name__} [" + ", ".join(map(description, batch)) + "]"
    return type(batch).__name__


def same(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same tensors, entry by entry."""
    pairs = [(a, b) for a, b in zip(leaves(one), leaves(other), strict=False) if isinstance(a, Tensor)]
    return all(
        a.is_meta or (a.shape == b.shape and (torch.equal(a, b) or torch.allclose(a, b, 0, 0, equal_nan=True)))
        for a, b in pairs
    )


def copied(batch: Any) -> Any:
    """Return the batch with copies of its tensors."""
    return map_tensors(torch.clone, batch)


def first(batch: Any, count: int) -> Any:
    """Return the first ``count`` samples of a batch; all of a batch that is not cut."""
    return batch if isinstance(batch, Whole) else part(batch, 0, count)

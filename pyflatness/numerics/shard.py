"""Combine the results of the ranks of a process group, each of its part of the data, at the end of a read of the data.

Sums are in float64 and in the order of the ranks, for every backend.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import RankError
from .ranks import ALONE, Ranks

Key = Any  # a string, or a tuple of strings
Summands = Mapping[Key, Tensor]  # what this rank adds to the sum of each key
_Shapes = dict[Key, tuple[int, ...]]

_CHUNK = 2**23  # numbers of all ranks that are summed at a time
_FEW = 256  # numbers of a rank that are sent in one message with their shapes


@dataclass(frozen=True)
class Shard:
    """Represent this rank's part of a data set.

    A rank without samples (``counts`` is False) runs on a batch of another, and adds nothing.
    """

    ranks: Ranks = ALONE  # the ranks that the data are spread over
    counts: bool = True
    start: int = 0  # the place in all data of its first sample
    step: int = 1  # between the places of two of its samples
    notes: tuple[str, ...] = ()  # notes of estimates on how the data are spread

    def numbers(self, done: int, samples: int) -> Tensor:
        """Return the places in all data of ``samples`` samples, int64, that follow the first ``done`` of this rank."""
        if self.start == 0 and self.step == 1:
            return torch.arange(done, done + samples, device="cpu")
        return self.start + self.step * torch.arange(done, done + samples, device="cpu")

    def every(self, step: str, fact: Any) -> list[Any]:
        """Return the facts of the ranks that have samples, in the order of the ranks; see :meth:`Ranks.exchange`."""
        if self.ranks.alone:
            return [fact]
        found = self.ranks.exchange(step, [self.counts, fact])
        return [each for counts, each in found if counts]

    def united(self, step: str, facts: Mapping[str, Any]) -> dict[str, dict[Key, Any]]:
        """Return the union of all ranks' mappings; for a key of several ranks, the first one's entry."""
        united: dict[str, dict[Key, Any]] = {name: {} for name in facts}
        for each in self.every(step, facts):
            for name, entries in each.items():
                united[name] = {**entries, **united[name]}
        return united

    def sum(self, step: str, summands: Summands) -> dict[Key, Tensor]:
        """Return sums over the ranks, in float64; a rank that lacks a summand adds nothing to its sum."""
        if self.ranks.alone:
            return dict(summands)
        own = summands if self.counts else {}
        shapes = {key: tuple(summand.shape) for key, summand in own.items()}
        few = sum(map(math.prod, shapes.values())) <= _FEW
        told = self.ranks.exchange(step, (shapes, _laid_out(own, shapes) if few else None))
        shapes = _united(step, (held for held, _ in told))
        if all(numbers is not None for _, numbers in told):
            flat = _added([_laid_out(_cut(numbers, held), shapes) for held, numbers in told])
        else:
            flat = self._summed(step, _laid_out(own, shapes))
        return {
            key: piece.to(summands[key].device if key in summands else piece.device)
            for key, piece in _cut(flat, shapes).items()
        }

    def _summed(self, step: str, own: Tensor) -> Tensor:
        """Return the sum of all ranks' numbers, some at a time."""
        total = torch.empty_like(own)
        for place, chunk in zip(*(held.split(max(1, _CHUNK // self.ranks.size)) for held in (total, own)), strict=True):
            place.copy_(_added(self.ranks.gathered(chunk, step)))
            step = ""  # the ranks need to confirm once only
        return total

    def each(self, step: str, summands: Summands) -> list[dict[Key, Tensor]]:
        """Return the summands of every rank that has samples, in float64 on the CPU, in the order of the ranks."""
        if self.ranks.alone:
            return [dict(summands)]
        own = {
            key: summand.detach().to("cpu", torch.float64, copy=True, memory_format=torch.contiguous_format)
            for key, summand in (summands if self.counts else {}).items()
        }
        return self.every(step, own)

    def rows(self, step: str, rows: Tensor) -> Tensor:
        """Return the values (…, n) of the samples of all ranks, by their places in all data, on the CPU."""
        if self.ranks.alone:
            return rows
        found = self.each(step, {"rows": rows, "places": self.numbers(0, rows.shape[-1])})
        whole = torch.cat([each["rows"] for each in found], dim=-1)
        if self.step == 1:  # shards follow each other, even if places are not known
            return whole
        return whole[..., torch.cat([each["places"] for each in found]).argsort(stable=True)]


WHOLE = Shard()


def _united(step: str, told: Iterable[_Shapes]) -> _Shapes:
    """Return the shapes of all ranks' summands."""
    shapes: _Shapes = {}
    for each in told:
        for key, shape in each.items():
            if shapes.setdefault(key, shape) != shape:
                raise RankError(
                    f"ranks have values of different shapes, {shapes[key]} and {shape}, of {key} at {step}; every rank "
                    "has to have the same model"
                )
    return shapes


def _laid_out(summands: Summands, shapes: _Shapes) -> Tensor:
    """Return summands of these shapes as one vector, in float64 on the CPU, with zeros for those that are missing."""
    flat = torch.zeros(sum(map(math.prod, shapes.values())), dtype=torch.float64, device="cpu")
    for key, place in _cut(flat, shapes).items():
        if key in summands:
            place.copy_(summands[key].detach())
    return flat


def _cut(flat: Tensor, shapes: _Shapes) -> dict[Key, Tensor]:
    """Return the parts of one vector as views of these shapes."""
    pieces = flat.split([math.prod(shape) for shape in shapes.values()])
    return {key: piece.view(shape) for (key, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _added(every: Sequence[Tensor]) -> Tensor:
    """Return the sum in the order of the ranks."""
    first, *others = every
    for other in others:
        first = first + other
    return first

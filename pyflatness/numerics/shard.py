"""Put together what the ranks of a process group found in their parts of the data, where a read of the data ends.

Sums are taken in float64 and in the order of the ranks, whatever the backend does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import RankError
from .ranks import ALONE, Ranks

Key = Any
"""A string, or a tuple of strings."""
Parts = Mapping[Key, Tensor]

_CHUNK = 2**23  # numbers of all ranks that are summed at a time


@dataclass(frozen=True)
class Shard:
    """Represent this rank's part of a data set.

    Attributes:
        ranks: that have the parts.
        counts: whether this rank has samples of its own. One that has none runs on a batch that it was lent, and adds
            nothing.
        start: the place in all data of its first sample.
        step: between the places of two of its samples.
        notes: what a reader of a value should know of how the data are spread.
    """

    ranks: Ranks = ALONE
    counts: bool = True
    start: int = 0
    step: int = 1
    notes: tuple[str, ...] = ()

    def numbers(self, done: int, samples: int) -> Tensor:
        """Return the places (samples,) int64 in all data of the next samples, after so many."""
        if self.start == 0 and self.step == 1:
            return torch.arange(done, done + samples, device="cpu")
        return self.start + self.step * torch.arange(done, done + samples, device="cpu")

    def every(self, step: str, fact: Any) -> list[Any]:
        """Return what the ranks that have samples have to say at a step, in their order; see :meth:`Ranks.exchange`."""
        if self.ranks.alone:
            return [fact]
        found = self.ranks.exchange(step, [self.counts, fact])
        return [each for counts, each in found if counts]

    def united(self, step: str, facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the entries of all ranks' mappings, of each that of the first rank that has it."""
        united: dict[str, dict[str, Any]] = {name: {} for name in facts}
        for each in self.every(step, facts):
            for name, entries in each.items():
                united[name] = {**entries, **united[name]}
        return united

    def sum(self, step: str, parts: Parts) -> dict[Key, Tensor]:
        """Return sums over the ranks, in float64; a rank that lacks a part adds nothing to it.

        Args:
            step: of the call.
            parts: tensors by name, of the same shape on all ranks that have them.

        Raises:
            RankError: other shapes on other ranks.
        """
        if self.ranks.alone:
            return dict(parts)
        shapes = self._shapes(step, parts)
        sizes = [math.prod(shape) for shape in shapes.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
        for key, place in zip(shapes, flat.split(sizes), strict=True):
            if self.counts and key in parts:
                place.copy_(parts[key].detach().flatten())
        pieces = torch.cat([self._summed(chunk) for chunk in flat.split(max(1, _CHUNK // self.ranks.size))]).split(
            sizes
        )
        return {
            key: piece.view(shape).to(parts[key].device if key in parts else piece.device)
            for (key, shape), piece in zip(shapes.items(), pieces, strict=True)
        }

    def _summed(self, chunk: Tensor) -> Tensor:
        first, *others = self.ranks.gathered(chunk)
        for other in others:
            first = first + other
        return first

    def _shapes(self, step: str, parts: Parts) -> dict[Key, tuple[int, ...]]:
        """Return the shapes of all ranks' parts."""
        shapes: dict[Key, tuple[int, ...]] = {}
        for each in self.every(step, _told(parts)):
            for key, shape in _heard(each).items():
                if shapes.setdefault(key, shape) != shape:
                    raise RankError(
                        f"ranks have values of different shapes, {shapes[key]} and {shape}, of {key} at {step}; "
                        "every rank has to have the same model"
                    )
        return shapes

    def each(self, step: str, parts: Parts) -> list[dict[Key, Tensor]]:
        """Return the parts of every rank that has samples, in float64 on the CPU, in the order of the ranks."""
        if self.ranks.alone:
            return [dict(parts)]
        told = self.ranks.exchange(step, [self.counts, _told(parts)])
        shapes = [_heard(each) for _, each in told]
        flat = torch.zeros(max(map(_numel, shapes)), dtype=torch.float64, device="cpu")
        own = [part.numel() for part in parts.values()]
        for part, place in zip(parts.values(), flat[: sum(own)].split(own), strict=True):
            place.copy_(part.detach().flatten())
        found = []
        for (counts, _), held, numbers in zip(told, shapes, self.ranks.gathered(flat), strict=True):
            if counts:
                pieces = numbers[: _numel(held)].split([math.prod(shape) for shape in held.values()])
                found.append({key: piece.view(held[key]) for key, piece in zip(held, pieces, strict=True)})
        return found

    def rows(self, step: str, rows: Tensor) -> Tensor:
        """Return the numbers (…, n) of the samples of all ranks, by their places in all data, on the CPU."""
        if self.ranks.alone:
            return rows
        found = self.each(step, {"rows": rows, "places": self.numbers(0, rows.shape[-1])})
        whole = torch.cat([each["rows"] for each in found], dim=-1)
        if self.step == 1:  # one shard after another, also where it is not known how many samples are in front
            return whole
        return whole[..., torch.cat([each["places"] for each in found]).argsort(stable=True)]


WHOLE = Shard()


def _told(parts: Parts) -> list[Any]:
    """Return names and shapes of tensors as JSON has them."""
    return [[[*key] if isinstance(key, tuple) else key, [*part.shape]] for key, part in parts.items()]


def _heard(told: Sequence[Any]) -> dict[Key, tuple[int, ...]]:
    """Return what :func:`_told` was made of."""
    return {tuple(key) if isinstance(key, list) else key: tuple(shape) for key, shape in told}


def _numel(shapes: Mapping[Key, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())

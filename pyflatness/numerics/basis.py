"""Hold an orthonormal basis that grows, once: nothing here makes a copy of it."""

import torch
from torch import Tensor

_CHUNK = 6  # vectors that room is made for at a time, so that what is not needed is not taken
_COLUMNS = 2**12  # entries of all vectors that are turned at a time


class Basis:
    """Hold orthonormal vectors (m, N) in float64, in chunks."""

    def __init__(self, most: int, size: int, device: torch.device) -> None:
        self.most, self._size, self._device = most, size, device
        self._chunks: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, vector: Tensor) -> None:
        """Take in a vector (N,) of norm 1 that is orthogonal to all others; it is copied."""
        room = sum(map(len, self._chunks))
        if self._count == room:
            rows = min(_CHUNK, self.most - room)
            self._chunks.append(torch.empty(rows, self._size, dtype=torch.float64, device=self._device))
        self._chunks[self._count // _CHUNK][self._count % _CHUNK] = vector
        self._count += 1

    def newest(self, count: int) -> Tensor:
        """Return so many of the last vectors, (count, N): a view where one chunk has them all."""
        first = self._count - count
        chunk, start = divmod(first, _CHUNK)
        if start + count <= _CHUNK:
            return self._chunks[chunk][start : start + count]
        return torch.stack([self._chunks[row // _CHUNK][row % _CHUNK] for row in range(first, self._count)])

    def take_out(self, vectors: Tensor) -> Tensor:
        """Take the parts along the basis out of (b, N) vectors in place, twice for rounding.

        Return coefficients (b, m).
        """
        coefficients = vectors.new_zeros(len(vectors), self._count)
        for _ in range(2):
            start = 0
            for chunk in self._used():
                part = vectors @ chunk.mT
                vectors.addmm_(part, chunk, alpha=-1)
                coefficients[:, start : start + len(chunk)] += part
                start += len(chunk)
        return coefficients

    def turn(self, turn: Tensor) -> None:
        """Put combinations of the vectors in their place, (m, r) orthonormal columns for the first r of them."""
        used, count = self._used(), turn.shape[1]
        for start in range(0, self._size, _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            turned = turn.mT @ torch.cat([chunk[:, columns] for chunk in used])
            for chunk, rows in zip(self._chunks, torch.split(turned, _CHUNK), strict=False):
                chunk[: len(rows), columns] = rows
        self._count = count

    def released(self) -> Tensor:
        """Return all vectors, (m, N), and hold them no longer."""
        self._chunks = self._used()
        found = torch.cat(self._chunks)
        self._chunks, self._count = [], 0
        return found

    def _used(self) -> list[Tensor]:
        """Return the chunks as far as they have vectors."""
        whole, rest = divmod(self._count, _CHUNK)
        return [*self._chunks[:whole], *([self._chunks[whole][:rest]] if rest else [])]

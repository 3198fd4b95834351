"""Hold a Krylov basis with its products by a symmetric matrix H, for Ritz pairs and residuals without more products.

    H Qᵀ = Qᵀ C + Pᵀ A        Q (m, N) orthonormal, C (m, m); P (b, N) remainders of the newest products, A (b, m)
    |H y - θ y|² = |C s - θ s|² + |Pᵀ A s|²        of a Ritz vector y = Qᵀ s

C has all coefficients of the products as computed, also if H is not symmetric. So the residuals are those that a
product with y itself would give, up to rounding in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .signs import RandomVectors

_NOTHING = 1e-12  # of the matrix's norm: a remainder this small is rounding
_PARALLEL = 1e-3  # of a vector's norm: a smaller remainder is orthogonalised against the whole basis again


@dataclass(frozen=True)
class Ritz:
    """Hold the Ritz pairs of a basis, ascending."""

    values: Tensor  # (m,) float64; all three are on the CPU
    vectors: Tensor  # (m, m), with coefficients s in the basis as columns
    left: Tensor  # (m,), |Pᵀ A s|: the residuals if H is symmetric

    @property
    def norm(self) -> float:
        """Return the largest absolute value."""
        return float(self.values.abs().max())

    def ends(self, upper: int, lower: int) -> list[int]:
        """Return the places of ``upper`` and ``lower`` values at both ends, or of all if there are fewer."""
        count = len(self.values)
        return [*range(lower), *range(count - upper, count)] if count >= upper + lower else [*range(count)]


_CHUNK = 6  # vectors that are allocated at a time, so that little memory is unused
_COLUMNS = 2**12  # entries of all vectors that are combined at a time


class Basis:
    """Hold orthonormal vectors (m, N) in float64, in chunks, and change them without a copy of all."""

    def __init__(self, most: int, size: int, device: torch.device) -> None:
        self.most, self._size, self._device = most, size, device
        self._chunks: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, vector: Tensor) -> None:
        """Append a copy of a vector (N,) of norm 1 that is orthogonal to all others."""
        room = sum(map(len, self._chunks))
        if self._count == room:
            rows = min(_CHUNK, self.most - room)
            self._chunks.append(torch.empty(rows, self._size, dtype=torch.float64, device=self._device))
        self._chunks[self._count // _CHUNK][self._count % _CHUNK] = vector
        self._count += 1

    def newest(self, count: int) -> Tensor:
        """Return the last ``count`` vectors, (count, N): a view if one chunk has them all."""
        first = self._count - count
        chunk, start = divmod(first, _CHUNK)
        if start + count <= _CHUNK:
            return self._chunks[chunk][start : start + count]
        return torch.stack([self._chunks[row // _CHUNK][row % _CHUNK] for row in range(first, self._count)])

    def take_out(self, vectors: Tensor) -> Tensor:
        """Orthogonalise vectors (b, N) against the basis, in place, twice; return coefficients (b, m)."""
        coefficients = vectors.new_zeros(len(vectors), self._count)
        for _ in range(2):
            start = 0
            for chunk in self._used():
                part = vectors @ chunk.mT
                vectors.addmm_(part, chunk, alpha=-1)
                coefficients[:, start : start + len(chunk)] += part
                start += len(chunk)
        return coefficients

    def combine(self, coefficients: Tensor) -> None:
        """Replace the vectors by r combinations of them, given by orthonormal columns (m, r)."""
        used, count = self._used(), coefficients.shape[1]
        for start in range(0, self._size, _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            combined = coefficients.mT @ torch.cat([chunk[:, columns] for chunk in used])
            for chunk, rows in zip(self._chunks, torch.split(combined, _CHUNK), strict=False):
                chunk[: len(rows), columns] = rows
        self._count = count

    def released(self) -> Tensor:
        """Return all vectors, (m, N), and release them."""
        self._chunks = self._used()
        found = torch.cat(self._chunks)
        self._chunks, self._count = [], 0
        return found

    def _used(self) -> list[Tensor]:
        """Return the parts of the chunks that hold vectors."""
        whole, rest = divmod(self._count, _CHUNK)
        return [*self._chunks[:whole], *([self._chunks[whole][:rest]] if rest else [])]


class KrylovSpace:
    """Extend a basis by products with a matrix, to at most ``most`` vectors."""

    def __init__(self, random: RandomVectors, most: int) -> None:
        self._random, size, device = random, random.size, random.device
        self._size, self._device = size, device
        self._basis = Basis(most, size, device)
        self._newest = 0  # number of vectors that have not been multiplied yet
        self._rests = torch.zeros(0, size, dtype=torch.float64, device=device)  # P
        self._after = _small(0, 0)  # A
        self._columns = _small(most, most)  # C, and in the rows of the newest vectors the coefficients of P
        self._dropped, self._times = _small(most, most), 0  # Σ_e D_eᵀD_e, D_e left out of C and A; the number of e

    def __len__(self) -> int:
        return len(self._basis)

    @property
    def most(self) -> int:
        """Return the largest number of vectors."""
        return self._basis.most

    @property
    def newest(self) -> Tensor:
        """Return the vectors (b, N) whose products are needed next."""
        return self._basis.newest(self._newest)

    def take(self, images: Tensor) -> Ritz:
        """Add the products of the newest vectors, which are overwritten, and return the Ritz pairs."""
        count = len(self)
        newest = slice(count - self._newest, count)
        self._columns[:count, newest] = self._basis.take_out(images).mT.cpu()
        self._rests, self._after = images, _small(self._newest, count)
        self._after[:, newest] = torch.eye(self._newest, dtype=torch.float64, device="cpu")
        known = self._columns[:count, :count]
        values, vectors = torch.linalg.eigh(known.triu() + known.triu(1).mT)
        return Ritz(values, vectors, self._of_rests(vectors))

    def extend(self, count: int, norm: float) -> None:
        """Extend the basis by the remainders of the newest products, or by a random vector if a remainder is 0."""
        before, order = len(self), self._rests.norm(dim=1).argsort(descending=True)
        for place, row in enumerate(order[:count].tolist()):
            self._append(self._beside(self._rests[row : row + 1], place), norm)
        self._newest = count
        rests = (self.newest @ self._rests.mT).cpu()
        self._columns[before : before + count, :before] = rests @ self._after
        if count < len(self._rests):
            left = self._rests - rests.mT.to(self._device) @ self.newest
            self._drop(self._after.mT @ _products(left) @ self._after)
        self._rests = self._rests[:0].clone()  # their memory is for the next products

    def restart(self, kept: Tensor) -> None:
        """Replace the basis by some Ritz vectors, given by orthonormal columns of coefficients (m, r)."""
        before, count = len(self), kept.shape[1]
        self._basis.combine(kept.to(self._device))
        images = self._columns[:before, :before] @ kept
        inside = kept.mT @ images
        left, dropped = images - kept @ inside, kept.mT @ self._dropped[:before, :before] @ kept
        self._columns.zero_()
        self._dropped.zero_()
        self._columns[:count, :count], self._dropped[:count, :count] = inside, dropped
        self._drop(left.mT @ left)
        self._after = self._after @ kept

    def start(self, count: int) -> None:
        """Extend the basis by random vectors in place of the remainders of the newest products."""
        if len(self):
            self._drop(self._after.mT @ _products(self._rests) @ self._after)
        self._rests = self._rests[:0].clone()
        for _ in range(count):
            self._append(self._rests.new_zeros(1, self._size), 0.0)
        self._newest = count

    def pairs(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Rayleigh quotients, vectors and residuals of the Ritz vectors with coefficients ``chosen`` (m, k).

        This overwrites the basis.
        """
        count = len(self)
        known = self._columns[:count, :count]
        values, order = (chosen * (known @ chosen)).sum(dim=0).sort(descending=True)
        chosen = chosen[:, order]
        images = known @ chosen
        inside = (images - values * chosen).norm(dim=0)
        # By Cauchy-Schwarz |Σ_e D_e s|² ≤ (number of e) Σ_e |D_e s|².
        dropped = self._times * (chosen * (self._dropped[:count, :count] @ chosen)).sum(dim=0).clamp_min(0)
        residuals = torch.hypot(inside, self._of_rests(chosen)) + dropped.sqrt()
        self._rests = self._rests[:0].clone()
        self._basis.combine(chosen.to(self._device))
        return values, self._basis.released(), residuals

    def _of_rests(self, vectors: Tensor) -> Tensor:
        combined = self._after @ vectors
        return (combined * (_products(self._rests) @ combined)).sum(dim=0).clamp_min(0).sqrt()

    def _drop(self, products: Tensor) -> None:
        """Add D_eᵀD_e (m, m), D_e the part left out of the products of the first m vectors."""
        count = len(products)
        self._dropped[:count, :count] += products
        self._times += 1

    def _beside(self, rest: Tensor, others: int) -> Tensor:
        """Return a remainder (1, N), orthogonal to all earlier vectors, orthogonalised to the ``others`` newest too."""
        if not others:
            return rest
        rest, length, newest = rest.clone(), float(rest.norm()), self._basis.newest(others)
        for _ in range(2):
            rest.addmm_(rest @ newest.mT, newest, alpha=-1)
        if float(rest.norm()) < _PARALLEL * length:
            self._basis.take_out(rest)
        return rest

    def _append(self, vector: Tensor, norm: float) -> None:
        """Extend the basis by a vector (1, N), or by a random one if it is negligible against the matrix's norm."""
        length = float(vector.norm())
        if length <= _NOTHING * norm:
            vector = self._random.draw().unsqueeze(0)
            self._basis.take_out(vector)
            length = float(vector.norm())
        self._basis.append(vector[0] / length)


def _small(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64, device="cpu")


def _products(rests: Tensor) -> Tensor:
    """Return P Pᵀ, (b, b)."""
    return (rests @ rests.mT).cpu()

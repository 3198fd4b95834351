"""Hold a basis with what a symmetric matrix H makes of it: Rayleigh-Ritz pairs and their residuals, without a product.

    H Qᵀ = Qᵀ C + Pᵀ A        Q (m, N) orthonormal, C (m, m); P (b, N) the rests of the newest products, A (b, m)
    |H y - θ y|² = |C s - θ s|² + |Pᵀ A s|²        of a Ritz vector y = Qᵀ s

C has all coefficients of the products as they were, rounded, and of an H that is not symmetric too. So residuals are
those of a product of its own with y, but for rounding in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .basis import Basis
from .signs import RandomVectors

_NOTHING = 1e-12  # of the matrix's norm: a rest of so little is rounding
_PARALLEL = 1e-3  # of a vector's norm: a rest of less is taken apart from the whole basis once more


@dataclass(frozen=True)
class Ritz:
    """Hold the Ritz pairs of a basis, ascending."""

    values: Tensor  # (m,) float64, on the CPU like all here
    vectors: Tensor  # (m, m), their columns are the coefficients s in the basis
    left: Tensor  # (m,), |Pᵀ A s|: the residuals of an H that is symmetric

    @property
    def norm(self) -> float:
        """Return the largest absolute value."""
        return float(self.values.abs().max())

    def ends(self, upper: int, lower: int) -> list[int]:
        """Return which are so many at both ends, or all if there are fewer."""
        count = len(self.values)
        return [*range(lower), *range(count - upper, count)] if count >= upper + lower else [*range(count)]


class KrylovSpace:
    """Extend a basis by products with a matrix, to at most ``most`` vectors."""

    def __init__(self, random: RandomVectors, most: int) -> None:
        self._random, size, device = random, random.size, random.device
        self._size, self._device = size, device
        self._basis = Basis(most, size, device)
        self._newest = 0  # how many vectors were not multiplied yet
        self._rests = torch.zeros(0, size, dtype=torch.float64, device=device)  # P
        self._after = _small(0, 0)  # A
        self._columns = _small(most, most)  # C, and below, in the rows of the newest vectors, what they have of P
        self._dropped, self._times = _small(most, most), 0  # DᵀD of what was left out of C and A, and how often

    def __len__(self) -> int:
        return len(self._basis)

    @property
    def most(self) -> int:
        """Return how many vectors there may be."""
        return self._basis.most

    @property
    def newest(self) -> Tensor:
        """Return the vectors (b, N) whose product is wanted next."""
        return self._basis.newest(self._newest)

    def take(self, images: Tensor) -> Ritz:
        """Take in the products of the newest vectors, which are overwritten, and return the Ritz pairs."""
        count = len(self)
        newest = slice(count - self._newest, count)
        self._columns[:count, newest] = self._basis.take_out(images).mT.cpu()
        self._rests, self._after = images, _small(self._newest, count)
        self._after[:, newest] = torch.eye(self._newest, dtype=torch.float64, device="cpu")
        known = self._columns[:count, :count]
        values, vectors = torch.linalg.eigh(known.triu() + known.triu(1).mT)
        return Ritz(values, vectors, self._of_rests(vectors))

    def extend(self, count: int, norm: float) -> None:
        """Extend the basis by what the newest products have beside it; by random vectors where that is nothing."""
        before, order = len(self), self._rests.norm(dim=1).argsort(descending=True)
        for place, row in enumerate(order[:count].tolist()):
            self._append(self._beside(self._rests[row : row + 1], place), norm)
        self._newest = count
        rests = (self.newest @ self._rests.mT).cpu()
        self._columns[before : before + count, :before] = rests @ self._after
        if count < len(self._rests):
            left = self._rests - rests.mT.to(self._device) @ self.newest
            self._drop(self._after.mT @ _products(left) @ self._after)
        self._rests = self._rests[:0].clone()  # no more is needed of them, and the next products take their room

    def restart(self, kept: Tensor) -> None:
        """Go on with some Ritz vectors, (m, r) orthonormal columns of coefficients, in the basis' place."""
        before, count = len(self), kept.shape[1]
        self._basis.turn(kept.to(self._device))
        turned = self._columns[:before, :before] @ kept
        inside = kept.mT @ turned
        left, dropped = turned - kept @ inside, kept.mT @ self._dropped[:before, :before] @ kept
        self._columns.zero_()
        self._dropped.zero_()
        self._columns[:count, :count], self._dropped[:count, :count] = inside, dropped
        self._drop(left.mT @ left)
        self._after = self._after @ kept

    def start(self, count: int) -> None:
        """Go on with random vectors in the place of what the newest products have beside the basis."""
        if len(self):
            self._drop(self._after.mT @ _products(self._rests) @ self._after)
        self._rests = self._rests[:0].clone()
        for _ in range(count):
            self._append(self._rests.new_zeros(1, self._size), 0.0)
        self._newest = count

    def pairs(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Rayleigh quotients, vectors and residuals of Ritz vectors by coefficients (m, k).

        The basis is lost.
        """
        count = len(self)
        known = self._columns[:count, :count]
        values, order = (chosen * (known @ chosen)).sum(dim=0).sort(descending=True)
        chosen = chosen[:, order]
        images = known @ chosen
        inside = (images - values * chosen).norm(dim=0)
        # |Σ_e D_e s| is at most the root of so many times Σ_e |D_e s|².
        dropped = self._times * (chosen * (self._dropped[:count, :count] @ chosen)).sum(dim=0).clamp_min(0)
        residuals = torch.hypot(inside, self._of_rests(chosen)) + dropped.sqrt()
        self._rests = self._rests[:0].clone()
        self._basis.turn(chosen.to(self._device))
        return values, self._basis.released(), residuals

    def _of_rests(self, vectors: Tensor) -> Tensor:
        turned = self._after @ vectors
        return (turned * (_products(self._rests) @ turned)).sum(dim=0).clamp_min(0).sqrt()

    def _drop(self, products: Tensor) -> None:
        """Take in DᵀD (m, m) of what is left out of the products of the first m vectors."""
        count = len(products)
        self._dropped[:count, :count] += products
        self._times += 1

    def _beside(self, rest: Tensor, others: int) -> Tensor:
        """Return a rest (1, N), which is orthogonal to the basis but for so many newest vectors, without these."""
        if not others:
            return rest
        rest, length, newest = rest.clone(), float(rest.norm()), self._basis.newest(others)
        for _ in range(2):
            rest.addmm_(rest @ newest.mT, newest, alpha=-1)
        if float(rest.norm()) < _PARALLEL * length:
            self._basis.take_out(rest)
        return rest

    def _append(self, vector: Tensor, norm: float) -> None:
        """Extend the basis by a vector (1, N), or by a random one if it is nothing beside the matrix's norm."""
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

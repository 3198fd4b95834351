"""Find eigenpairs at both ends of a symmetric matrix, and the density of its eigenvalues, from products with vectors.

Eigenpairs: an orthonormal basis Q (k, N) is extended by the product of its last row, fully reorthogonalised, and
restarted from the Ritz vectors at its ends (Wu and Simon 2000). One Krylov space has one vector of every eigenspace, so
that copies of a multiple eigenvalue are missed. When all wanted pairs are found they are therefore deflated: a search
among the vectors orthogonal to them has to find nothing beyond the innermost of them at either end, and what it finds
beyond is taken in.

Density: of a random unit vector v, ⟨v, f(H) v⟩ is Σ_i τ_i f(θ_i) to a good approximation, with the Ritz values θ_i of
its Krylov space and τ_i the squared first components of T's eigenvectors (stochastic Lanczos quadrature, Ubaru, Chen
and Saad 2017).
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .lanczos import bordered, orthogonalised

_LONGEST = 300  # vectors of a basis, where more are not wanted: T is diagonalised at every step
_NOTHING = 1e-12  # of a matrix's norm: a rest of so little is rounding
_SLACK = 10  # of the tolerance: what residuals may be above it for the products' rounding


@dataclass(frozen=True)
class Pairs:
    """Hold eigenpairs.

    Attributes:
        values: (k,) float64, descending.
        vectors: (k, N), orthonormal.
        residuals: (k,) |H y - θ y|, measured: an eigenvalue lies so near to each value.
        products: how many were taken.
        converged: whether all were brought to the tolerance, as measured too, and nothing beyond them was left.
        limited: whether it ended by the limit of products instead.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int
    converged: bool
    limited: bool = False


def least_vectors(pairs: int, size: int) -> int:
    """Return how many vectors (N,) the search for so many pairs holds at least."""
    return min(size, 2 * pairs + 2) if pairs else 0


class Search:
    """Search for eigenpairs of one matrix at both ends of its spectrum.

    Args:
        generator: of random starts, on the CPU.
        size: N.
        device: of the vectors.
        tolerance: for residuals, relative to the matrix's norm as seen so far.
        room: vectors that memory has room for; a few more than are wanted are taken in any case.
        limit: products at most, besides those that measure the residuals.
    """

    def __init__(
        self, generator: torch.Generator, size: int, device: torch.device, *, tolerance: float, room: int, limit: int
    ) -> None:
        self._generator, self._size, self._device = generator, size, device
        self._tolerance, self._room, self._limit = tolerance, room, limit
        self._products, self._norm, self._converged, self._limited = 0, 0.0, True, False

    def pairs(self, largest: int, smallest: int, *, copies: bool = True) -> Generator[Tensor, Tensor, Pairs]:
        """Yield vectors (b, N), want their products with the matrix, and return so many pairs at each end.

        Args:
            largest: pairs, algebraically; with the smallest ones all of the matrix's at most.
            smallest: pairs.
            copies: whether further copies of a multiple eigenvalue are searched for.
        """
        nothing = torch.zeros(0, self._size, dtype=torch.float64, device=self._device)
        if not largest + smallest:
            return Pairs(nothing[:, 0], nothing, nothing[:, 0], 0, converged=True)
        values, vectors = yield from self._ends(largest, smallest, nothing)
        while copies and self._converged and len(vectors) < self._size:
            more, others = yield from self._ends(min(largest, 1), min(smallest, 1), vectors)
            beyond, slack = torch.zeros_like(more, dtype=torch.bool), self._tolerance * self._norm
            if largest:
                beyond |= more > values[largest - 1] + slack
            if smallest:
                beyond |= more < values[-smallest] - slack
            if not bool(beyond.any()):
                break
            values, order = torch.cat([values, more[beyond]]).sort(descending=True)
            vectors = torch.cat([vectors, others[beyond]])[order]
            kept = [*range(largest), *range(len(values) - smallest, len(values))]
            values, vectors = values[kept], vectors[kept]
        if not len(vectors) or not bool(vectors.isfinite().all()):
            return Pairs(values, vectors, torch.full_like(values, torch.nan), self._products, converged=False)
        images = yield vectors
        self._products += len(vectors)
        values = (vectors * images).sum(dim=1)
        values, order = values.sort(descending=True)
        vectors, images = vectors[order], images[order]
        residuals = (images - values.unsqueeze(1) * vectors).norm(dim=1)
        # Of a product that is not symmetric (a second derivative that is wrong) the recursion says nothing.
        small = bool((residuals <= _SLACK * self._tolerance * self._norm).all())
        return Pairs(values, vectors, residuals, self._products, self._converged and small, self._limited)

    def _ends(self, upper: int, lower: int, locked: Tensor) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return the values, descending, and vectors at both ends among vectors orthogonal to the locked ones."""
        dimensions = self._size - len(locked)
        upper = min(upper, dimensions)
        lower = min(lower, dimensions - upper)
        most = min(dimensions, max(least_vectors(upper + lower, dimensions), min(self._room, _LONGEST)))
        basis = self._random(locked, locked[:0])
        projected = basis.new_zeros(1, 0, 0)
        while True:
            image = yield basis[-1:]
            self._products += 1
            if not bool(image.isfinite().all()):  # the caller said that NaN is to be handed on
                self._converged = False
                return image.new_full((upper + lower,), torch.nan), image.expand(upper + lower, -1) * torch.nan
            rest = _apart(image, locked)
            coefficients, rest = orthogonalised(basis.unsqueeze(0), rest)
            projected = bordered(projected, coefficients)
            values, vectors = (part[0] for part in torch.linalg.eigh(projected))
            self._norm = max(self._norm, float(values.abs().max()))
            ends = [*range(lower), *range(len(values) - upper, len(values))]
            left = float(rest.norm()) * vectors[-1].abs()
            whole = len(basis) == dimensions
            done = whole or (len(values) >= upper + lower and bool((left[ends] <= self._tolerance * self._norm).all()))
            if done or self._products >= self._limit:
                self._converged &= done
                self._limited |= not done
                chosen = ends[::-1] if len(values) >= upper + lower else [*range(len(values))][::-1]
                return values[chosen], F.normalize(vectors[:, chosen].mT @ basis, dim=1)
            if len(basis) >= most:
                kept = _outer(len(values), upper, lower, most)
                basis, projected = vectors[:, kept].mT @ basis, torch.diag(values[kept]).unsqueeze(0)
            if float(rest.norm()) <= _NOTHING * self._norm:  # an invariant subspace, which has no more to tell
                following = self._random(locked, basis)
            else:
                following = F.normalize(_apart(rest, locked), dim=1)
            basis = torch.cat([basis, following])

    def _random(self, *others: Tensor) -> Tensor:
        """Return a random unit vector (1, N) that is orthogonal to others."""
        vector = torch.randn(1, self._size, generator=self._generator, dtype=torch.float64, device="cpu")
        return F.normalize(_apart(vector.to(self._device), torch.cat([*others])), dim=1)


def quadrature(starts: Tensor, steps: int) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Yield vectors (b, N), want their products, and return the nodes and weights of each start's quadrature.

    Args:
        starts: (b, N) random.
        steps: products of each, N at most.

    Returns:
        (b, steps) ascending, and (b, steps) whose sums are 1.
    """
    basis = F.normalize(starts, dim=1).unsqueeze(1)
    projected = starts.new_zeros(len(starts), 0, 0)
    for step in range(steps):
        image = yield basis[:, -1]
        coefficients, rest = orthogonalised(basis, image)
        projected = bordered(projected, coefficients)
        if step + 1 < steps:
            norm = rest.norm(dim=1, keepdim=True)
            there = norm > _NOTHING * projected.abs().amax(dim=(1, 2)).unsqueeze(1)
            basis = torch.cat([basis, torch.where(there, rest / norm, 0.0).unsqueeze(1)], dim=1)
    nodes, vectors = torch.linalg.eigh(projected)
    return nodes, vectors[:, 0].square()


def _apart(vectors: Tensor, others: Tensor) -> Tensor:
    """Return vectors (b, N) without their parts along orthonormal others (k, N); twice, for rounding."""
    for _ in range(2):
        vectors = vectors - (vectors @ others.mT) @ others
    return vectors


def _outer(count: int, upper: int, lower: int, most: int) -> list[int]:
    """Return which of so many ascending Ritz vectors a restart keeps: those wanted, and as many more as leave room."""
    spare = max(0, (most - 1 - upper - lower) // 2)
    more = spare * upper // max(1, upper + lower)
    below = lower + (spare - more if lower else 0)
    return [*range(below), *range(count - upper - more, count)]

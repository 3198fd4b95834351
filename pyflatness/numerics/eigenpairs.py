"""Find eigenpairs at both ends of a symmetric matrix, and the density of its eigenvalues, from products with vectors.

Eigenpairs: an orthonormal basis Q (m, N) is extended by the products of its newest vectors, fully reorthogonalised, and
restarted from the Ritz vectors at both ends (Wu and Simon 2000). The Krylov space of one start has one vector of every
eigenspace, so that copies of a multiple eigenvalue are missed. If copies count, there are two starts, whose products
are computed together (block Lanczos, Golub and Underwood 1977): their space has two vectors of every eigenspace. If it
shows two copies of an eigenvalue, there may be more. Then the wanted pairs are kept, and the search continues from two
new starts orthogonal to them, until it finds no further copy.

Residuals need no further product (:mod:`.krylov`).

Density: of a random unit vector v, ⟨v, f(H) v⟩ is Σ_i τ_i f(θ_i) to a good approximation, with the Ritz values θ_i of
its Krylov space and τ_i the squared first components of T's eigenvectors (stochastic Lanczos quadrature, Ubaru, Chen
and Saad 2017).
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .accumulate import all_finite
from .krylov import KrylovSpace, Ritz
from .lanczos import bordered, orthogonalised
from .signs import RandomVectors

_STARTS = 2  # if copies of eigenvalues count
_LONGEST = 300  # the most vectors of a basis, unless more pairs are wanted, as T is diagonalised at every step
_FEWEST = 4  # the fewest products of each new start, since fewer may not show a large eigenvalue
_NOTHING = 1e-12  # of a matrix's norm: a remainder this small is rounding
BESIDE = 2 * _STARTS + 2  # vectors in memory in addition to the basis of a search: sums and buffers of products
BESIDE_STEPS = 4  # vectors in memory in addition to the steps of a quadrature, for each of its starts
_SLACK = 10  # the factor by which rounding of products may raise residuals above the tolerance


@dataclass(frozen=True)
class Pairs:
    """Hold eigenpairs."""

    values: Tensor  # (k,) float64, descending
    vectors: Tensor  # (k, N), orthonormal
    residuals: Tensor  # (k,) |H y - θ y|: an eigenvalue is within this distance of each value
    products: int  # number of products
    converged: bool  # whether all residuals are within the tolerance, and no copy of an eigenvalue is missing
    limited: bool = False  # whether the limit of products ended the search instead


def least_vectors(pairs: int, size: int) -> int:
    """Return the least number of vectors (N,) in the basis of a search for ``pairs`` eigenpairs."""
    return min(size, 2 * pairs + 2) if pairs else 0


class Search:
    """Search for eigenpairs of one matrix at both ends of its spectrum, by at most ``max_products`` products.

    ``tolerance`` is that of residuals, relative to the largest Ritz value so far. ``room`` is the number of basis
    vectors that fit in memory, in addition to :data:`BESIDE` others; :func:`least_vectors` are used in any case.
    """

    def __init__(self, random: RandomVectors, *, tolerance: float, room: int, max_products: int) -> None:
        self._random, self._size, self._device = random, random.size, random.device
        self._tolerance, self._room, self._max_products = tolerance, room, max_products
        self._products, self._norm, self._converged, self._limited = 0, 0.0, True, False

    def pairs(self, largest: int, smallest: int, *, copies: bool = True) -> Generator[Tensor, Tensor, Pairs]:
        """Yield vectors (b, N), receive their products, and return the outermost pairs.

        Every copy of a multiple eigenvalue counts as a pair, unless ``copies`` is False.
        """
        wanted = largest + smallest
        if not wanted:
            nothing = torch.zeros(0, self._size, dtype=torch.float64, device=self._device)
            return Pairs(nothing[:, 0], nothing, nothing[:, 0], 0, converged=True)
        copies = copies and max(largest, smallest) > 1 and wanted < self._size
        self._starts = min(_STARTS, self._size, self._max_products) if copies else 1
        most = min(self._size, max(least_vectors(wanted, self._size), min(self._room, _LONGEST)))
        space = KrylovSpace(self._random, most)
        space.start(self._starts)
        ritz = yield from self._ends(space, largest, smallest, fewest=0)
        again = copies and ritz is not None and self._is_multiple(ritz, largest, smallest)
        while again and self._converged and ritz is not None:
            if self._products >= self._max_products:
                self._converged, self._limited = False, True
                break
            before = ritz
            space.restart(ritz.vectors[:, ritz.ends(largest, smallest)])
            space.start(min(self._starts, self._size - wanted, self._max_products - self._products))
            fewest = self._products + _FEWEST * self._starts
            ritz = yield from self._ends(space, largest + bool(largest), smallest + bool(smallest), fewest)
            again = ritz is not None and self._is_beyond(ritz, before, largest, smallest)
        if ritz is None:
            values = torch.full((wanted,), torch.nan, dtype=torch.float64, device="cpu")
            vectors = torch.full((wanted, self._size), torch.nan, dtype=torch.float64, device=self._device)
            return Pairs(values, vectors, values, self._products, converged=False)
        chosen = F.normalize(ritz.vectors[:, ritz.ends(largest, smallest)], dim=0)
        values, vectors, residuals = space.pairs(chosen)
        if self._converged and not self._are_small(residuals):
            # After many restarts residuals are only bounds, or the products are not those of a symmetric matrix.
            for place in range(wanted):
                image = yield vectors[place : place + 1]
                residuals[place] = float((image[0] - values[place].item() * vectors[place]).norm())
            self._products += wanted
        self._converged &= self._are_small(residuals)
        return Pairs(values, vectors, residuals, self._products, self._converged, self._limited)

    def _ends(self, space: KrylovSpace, upper: int, lower: int, fewest: int) -> Generator[Tensor, Tensor, Ritz | None]:
        """Return the Ritz pairs at both ends, after at least ``fewest`` products; None if a product is not finite."""
        upper = min(upper, self._size)
        lower = min(lower, self._size - upper)
        while True:
            images = yield space.newest
            self._products += len(images)
            if not all_finite(images):  # only for nan_policy="propagate"
                self._converged = False
                return None
            ritz = space.take(images)
            del images  # their memory is for the next products
            self._norm = max(self._norm, ritz.norm)
            count = len(space)
            small = bool((ritz.left[ritz.ends(upper, lower)] <= self._tolerance * self._norm).all())
            done = count == self._size or (small and count >= upper + lower and self._products >= fewest)
            if done or self._products >= self._max_products:
                self._converged &= done
                self._limited |= not done
                return ritz
            more = min(self._starts, self._size - count, self._max_products - self._products)
            if count + more > space.most:
                space.restart(ritz.vectors[:, _outer(count, upper, lower, space.most - more)])
            space.extend(more, self._norm)

    def _is_multiple(self, ritz: Ritz, largest: int, smallest: int) -> bool:
        """Return whether an eigenvalue outside the innermost wanted one, at an end, has as many copies as starts.

        Further copies of the innermost value itself would change nothing.
        """
        upper, lower, same = ritz.values.flip(0)[:largest], -ritz.values[:smallest], 2 * self._slack
        for values in (upper, lower):
            beyond = values[: max(0, len(values) - self._starts + 1)]
            close = beyond - values[self._starts - 1 :] <= same
            if len(values) and bool((close & (beyond > values[-1] + self._slack)).any()):
                return True
        return False

    def _is_beyond(self, ritz: Ritz, before: Ritz, largest: int, smallest: int) -> bool:
        """Return whether a wanted value is further out than before, because the search found another copy."""
        upper = ritz.values.flip(0)[:largest] - before.values.flip(0)[:largest]
        lower = before.values[:smallest] - ritz.values[:smallest]
        return bool((torch.cat([upper, lower]) > self._slack).any())

    def _are_small(self, residuals: Tensor) -> bool:
        """Return whether residuals are within the tolerance, up to the products' rounding."""
        return bool((residuals <= _SLACK * self._slack).all())

    @property
    def _slack(self) -> float:
        """Return the distance within which two values count as equal."""
        return self._tolerance * self._norm


def quadrature(starts: Tensor, steps: int) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Yield vectors (b, N), receive their products, and return the nodes and weights of each start's quadrature.

    Both are (b, steps); nodes are ascending, and weights sum to 1. The memory of ``starts`` is freed at the first
    product, if the caller keeps no reference.
    """
    basis = starts.new_empty(len(starts), steps, starts.shape[1])
    torch.div(starts, starts.norm(dim=1, keepdim=True), out=basis[:, 0])
    del starts
    projected = basis.new_zeros(len(basis), 0, 0)
    for step in range(steps - 1):
        coefficients, rest = orthogonalised(basis[:, : step + 1], (yield basis[:, step]))
        projected = bordered(projected, coefficients)
        norm = rest.norm(dim=1, keepdim=True)
        there = norm > _NOTHING * projected.abs().amax(dim=(1, 2)).unsqueeze(1)
        basis[:, step + 1] = torch.where(there, rest / norm, 0.0)
        del rest  # its memory is for the next products
    projected = bordered(projected, torch.einsum("bkn,bn->bk", basis, (yield basis[:, -1])))
    nodes, vectors = torch.linalg.eigh(projected)
    return nodes, vectors[:, 0].square()


def _outer(count: int, upper: int, lower: int, most: int) -> list[int]:
    """Return the numbers of the Ritz vectors that a restart keeps: those wanted, and half of the room for others."""
    spare = max(0, (most - upper - lower) // 2)
    more = spare * upper // max(1, upper + lower)
    below = lower + (spare - more if lower else 0)
    return [*range(below), *range(count - upper - more, count)]

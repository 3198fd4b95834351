"""Find the largest eigenvalue of symmetric matrices from products with vectors, by restarted Lanczos.

The basis is fully reorthogonalised. Axes: ``b`` matrices at once, each (N, N); ``k`` vectors of the basis. One product
is one for all matrices together.

    basis Q (b, k, N) orthonormal rows       T = Q H Qᵀ (b, k, k)       θ, s: the largest eigenvalue of T, its vector
    Ritz value θ,  Ritz vector y = Qᵀ s,  residual r = |H y - θ y|:  an eigenvalue of H is within r of θ

That bound holds for any y and any symmetric H (Parlett 1998, Theorem 4.5.1), and r is measured at the end by one more
product. No vector has a larger quotient than the largest eigenvalue, so θ is never above it by more than the products'
rounding. It is not certified that no larger eigenvalue was missed: one is if the random start has (nearly) no component
along its eigenvectors.
"""

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .accumulate import all_finite

MAX_PRODUCTS = 200  # the most products of a search by default
_FEWEST = 4  # the fewest vectors of a basis before a restart


@dataclass(frozen=True)
class LargestEigenvalues:
    """Hold the largest eigenvalues of some matrices."""

    values: Tensor  # (b,) float64
    residuals: Tensor  # (b,), an eigenvalue is within this distance of the value
    products: int  # number of products
    converged: bool  # whether every residual is within the tolerance


Key = TypeVar("Key", bound=Hashable)
Search = Generator[Tensor, Tensor, LargestEigenvalues]
"""Yields vectors (b, N), receives their products with the matrices (b, N), and returns the eigenvalues."""


def largest(start: Tensor, *, tolerance: float, size: int, max_products: int | None = None) -> Search:
    """Return the algebraically largest eigenvalue of each matrix, from random starts (b, N) float64.

    ``tolerance`` is that of the residual, relative to the matrix's norm (the largest Ritz value so far). A full basis
    of ``size`` vectors is restarted from its upper half of Ritz vectors. There are at most ``max_products`` products,
    and one for the residual.
    """
    max_products = MAX_PRODUCTS if max_products is None else max_products
    basis = torch.nn.functional.normalize(start, dim=1).unsqueeze(1)
    projected = start.new_zeros(len(start), 0, 0)
    found, done = torch.zeros_like(start), torch.zeros(len(start), dtype=torch.bool, device=start.device)
    products = 0
    while True:
        image = yield basis[:, -1]
        products += 1
        if not all_finite(image):  # only for nan_policy="propagate"
            nothing = start.new_full((len(start),), torch.nan)
            return LargestEigenvalues(nothing, nothing, products, converged=False)
        coefficients, rest = orthogonalised(basis, image)
        projected = bordered(projected, coefficients)
        values, vectors = torch.linalg.eigh(projected)
        norm = rest.norm(dim=1)
        small = norm * vectors[:, -1, -1].abs() <= tolerance * values.abs().amax(dim=1)
        fresh = ~done  # a matrix that is done keeps its value: its Krylov space may be exhausted
        found[fresh] = torch.einsum("bk,bkn->bn", vectors[fresh, :, -1], basis[fresh])
        done |= small
        if bool(done.all()) or products >= max_products:
            break
        if basis.shape[1] >= max(size, _FEWEST):
            # H maps the upper half of the Ritz vectors to itself and one direction.
            kept = basis.shape[1] // 2
            basis, projected = vectors[:, :, -kept:].mT @ basis, torch.diag_embed(values[:, -kept:])
        following = torch.where(norm > 0, 1 / norm, 0.0).unsqueeze(1) * rest
        basis = torch.cat([basis, following.unsqueeze(1)], dim=1)
    found = torch.nn.functional.normalize(found, dim=1)
    image = yield found
    quotients = (found * image).sum(dim=1)
    residuals = (image - quotients.unsqueeze(1) * found).norm(dim=1)
    return LargestEigenvalues(quotients, residuals, products + 1, bool(done.all()))


def solved(search: Search, times: Callable[[Tensor], Tensor]) -> LargestEigenvalues:
    """Run a search with products from a function, and return its result."""
    return solved_in_step({0: search}, lambda vectors: {0: times(vectors[0])})[0]


def solved_in_step(
    searches: Mapping[Key, Search], times: Callable[[Mapping[Key, Tensor]], Mapping[Key, Tensor]]
) -> dict[Key, LargestEigenvalues]:
    """Run several searches, with one call for the products of all that are not done, and return their results."""
    wanted, found = {key: next(search) for key, search in searches.items()}, {}
    while wanted:
        for key, image in times(wanted).items():
            try:
                wanted[key] = searches[key].send(image)
            except StopIteration as end:
                found[key] = end.value
                del wanted[key]
    return found


def orthogonalised(basis: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return coefficients (b, k) and the remainder (b, N), by two passes, as after one rounding revives old vectors."""
    coefficients = image.new_zeros(basis.shape[:2])
    for _ in range(2):
        part = torch.einsum("bkn,bn->bk", basis, image)
        image = image - torch.einsum("bk,bkn->bn", part, basis)
        coefficients += part
    return coefficients, image


def bordered(projected: Tensor, coefficients: Tensor) -> Tensor:
    """Return T with the coefficients of the newest vector's product as last row and column."""
    size = coefficients.shape[1]
    bordered = projected.new_zeros(len(projected), size, size)
    bordered[:, :-1, :-1] = projected
    bordered[:, -1] = bordered[:, :, -1] = coefficients
    return bordered

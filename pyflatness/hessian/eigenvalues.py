"""Find the largest eigenvalues of several blocks of the loss Hessian; each data read gives a product for all blocks."""

from collections.abc import Sequence

from ..numerics import lanczos
from ..numerics.lanczos import LargestEigenvalues
from ..numerics.signs import RandomVectors
from ..passes.memory import Budget
from .products import Names, Products

# Residuals relative to the block's norm, in double and in other precisions; with products in single precision they
# cannot become much smaller. An eigenvalue's error is the squared residual over the distance to the next eigenvalue.
_TOLERANCE, _COARSE_TOLERANCE = 1e-8, 1e-5


def largest(products: Products, blocks: Sequence[Names], budget: Budget, seed: int) -> dict[Names, LargestEigenvalues]:
    """Return the algebraically largest eigenvalue of each block; a block is that of some layers together."""
    sizes = {names: products.size(names) for names in blocks}
    basis = max(1, budget.bases // (8 * sum(sizes.values())))
    tolerance = tolerance_of(products)
    searches = {}
    for names, size in sizes.items():
        start = products.allowed(names, RandomVectors(seed, size, products.device).draw().unsqueeze(0))
        searches[names] = lanczos.largest(start, tolerance=tolerance, size=basis)
    return lanczos.solved_in_step(searches, products)


def tolerance_of(products: Products) -> float:
    """Return the smallest residuals that can be reached, relative to the block's norm."""
    return _TOLERANCE if products.eps < _TOLERANCE else max(_COARSE_TOLERANCE, products.eps)

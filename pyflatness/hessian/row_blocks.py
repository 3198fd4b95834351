"""Hold the blocks H_ss = ∂²E/∂w_s² of all rows of a weight matrix, and find each one's largest eigenvalue.

Axes: ``b`` rows of the weight, those of all its groups in turn; ``m`` columns; ``n`` samples. Blocks have one of two
forms, both of which add up over samples:

    one position:  H_ss = Σ_i h_is φ_i φ_iᵀ,  h_is = ∂²ℓ_i/∂z_is² (GGN: Σ_c σ_ic (δ_is^c)²)    φ and h are kept
    otherwise:     H_ss = Σ_i σ_i M_is M_isᵀ,  M_is row s of a sample's weight gradient        blocks are dense

From φ and h, the products of all blocks with a vector each are two matrix products, φᵀ (h ∘ (φ Vᵀ)). So Lanczos finds
the eigenvalues, for all rows at once, unless the blocks are so small that dense ones cost less.
"""

import torch
from torch import Tensor

from ..numerics import lanczos
from ..numerics.lanczos import LargestEigenvalues
from ..numerics.signs import RandomVectors
from ..passes.memory import Budget

TOLERANCE = 1e-6  # of the residuals, relative to each block's norm
_USUAL = 25  # products that Lanczos is expected to take


class RowBlocks:
    """Hold the blocks of a layer, summed over micro-batches, in float64; ``full`` if they fit in memory in no form.

    ``columns`` (b, m) is False for entries that ``normalize`` drops. If φ and h need more than ``memory``, the blocks
    become dense.
    """

    def __init__(self, columns: Tensor, memory: int, budget: Budget) -> None:
        self._columns, self._memory, self._budget, self.full = columns, memory, budget, False
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._blocks: Tensor | None = None

    def add_weighted(self, features: Tensor, weights: Tensor) -> None:
        """Add φ (n, m) and h (n, b) of samples with one position."""
        self._kept.append((features.clone(), weights))  # the model may write into its tensors later
        if self.full or sum(x.numel() * x.element_size() for pair in self._kept for x in pair) > self._memory:
            if fit(self._columns, self._budget):
                self._write_out()
            else:
                self._kept.clear()
                self.full = True

    def add_blocks(self, blocks: Tensor) -> None:
        """Add dense H_ss, (b, m, m)."""
        self._allocated().add_(blocks)

    def largest(self, seed: int) -> LargestEigenvalues:
        """Return the algebraically largest eigenvalue of each block, (b,); NaN if the block is not finite."""
        b, m = self._columns.shape
        samples = sum(len(features) for features, _ in self._kept)
        written_out = 2 * samples * b * m**2 + 10 * b * m**3  # for dense blocks, and all their eigenvalues
        products = _USUAL * (4 * samples * b * m + (0 if self._blocks is None else 2 * b * m**2))
        if written_out <= products and fit(self._columns, self._budget):
            return self._dense()
        return lanczos.solved(search(self._columns, seed, self._budget), self._times)

    def _dense(self) -> LargestEigenvalues:
        self._write_out()
        blocks = self._allocated()
        finite = blocks.isfinite().all(dim=2).all(dim=1)
        size = blocks.abs().sum(dim=2).amax(dim=1, keepdim=True)
        below = torch.diag_embed(torch.where(self._columns, 0.0, -1 - size))  # below all other eigenvalues
        values = torch.linalg.eigvalsh(torch.where(finite[:, None, None], blocks + below, 0.0))[:, -1]
        values = torch.where(finite, values, torch.nan)
        return LargestEigenvalues(values, torch.zeros_like(values), 0, converged=bool(finite.all()))

    def _times(self, vectors: Tensor) -> Tensor:
        """Return H_ss v_s for all rows, (b, m)."""
        product = torch.zeros_like(vectors)
        for features, weights in self._kept:
            phi = features.double()
            product += (weights * (phi @ vectors.t())).t() @ phi
        return product if self._blocks is None else product + (self._blocks @ vectors.unsqueeze(2)).squeeze(2)

    def _write_out(self) -> None:
        blocks = self._allocated()
        for features, weights in self._kept:
            phi = features.double()
            for block, weight in zip(blocks, weights.t(), strict=True):
                block.addmm_(phi.t() * weight, phi)
        self._kept.clear()

    def _allocated(self) -> Tensor:
        if self._blocks is None:
            self._blocks = empty(self._columns)
        return self._blocks


def fit(columns: Tensor, budget: Budget) -> bool:
    """Return whether the dense blocks of a layer with weights (b, m) fit in the memory."""
    b, m = columns.shape
    return 8 * b * m**2 <= budget.blocks


def empty(columns: Tensor) -> Tensor:
    """Return blocks (b, m, m) of zeros."""
    b, m = columns.shape
    return torch.zeros(b, m, m, dtype=torch.float64, device=columns.device)


def add_gradients(blocks: Tensor, gradients: Tensor, signs: Tensor | None) -> None:
    """Add Σ_i σ_i M_is M_isᵀ for M (n, b, m) and signs (n,), None if all are +1."""
    rows = gradients.transpose(0, 1).double()  # b, n, m
    blocks.baddbmm_(rows.mT, rows if signs is None else rows * signs.view(1, -1, 1))


def search(columns: Tensor, seed: int, budget: Budget, tolerance: float = TOLERANCE) -> lanczos.Search:
    """Return the search for the largest eigenvalue of every row's block at once."""
    start = RandomVectors(seed, columns.numel(), columns.device).draw().view(columns.shape) * columns
    size = max(1, budget.bases // (8 * columns.numel()))
    return lanczos.largest(start, tolerance=tolerance, size=size)

"""The blocks H_ss = ∂²E/∂w_s² of all rows of a weight matrix, and the largest eigenvalue of each.

Axes: ``b`` rows of the weight, those of all its groups in turn; ``m`` columns; ``n`` samples. Either form adds up:

    one position:  H_ss = Σ_i h_is φ_i φ_iᵀ,  h_is = ∂²ℓ_i/∂z_is² (GGN: Σ_c σ_ic (δ_is^c)²)    φ and h are kept
    else:          H_ss = Σ_i σ_i M_is M_isᵀ,  M_is row s of a sample's weight gradient           blocks written out

A product of all kept blocks with a vector each is two matrix products, φᵀ (h ∘ (φ Vᵀ)); so their eigenvalues come by
Lanczos, for all rows at once, unless the blocks are so small that writing them out costs less.
"""

import torch
from torch import Tensor

from . import lanczos
from .errors import NotYetError
from .lanczos import Ritz

TOLERANCE = 1e-6  # of the residuals, relative to each block's norm
_LIMIT = 200  # products at most
_USUAL = 25  # products that are reckoned with
_LARGEST_BLOCKS = 2**30  # bytes of all blocks of a layer
_BASIS = 2**30  # bytes of the bases


class RowBlocks:
    """The blocks of a layer, added up over parts of the data, all in float64.

    Args:
        name: of the layer, for errors.
        columns: (b, m), False for a column that drops out.
        memory: bytes of rows φ and weights h to keep; beyond, they go into the blocks.
    """

    def __init__(self, name: str, columns: Tensor, memory: int) -> None:
        self._name, self._columns, self._memory = name, columns, memory
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._blocks: Tensor | None = None

    def add_weighted(self, features: Tensor, weights: Tensor) -> None:
        """Take in φ (n, m) and h (n, b) of samples with one position."""
        self._kept.append((features, weights))
        if sum(x.numel() * x.element_size() for pair in self._kept for x in pair) > self._memory:
            self._write_out()

    def add_gradients(self, gradients: Tensor, signs: Tensor | None) -> None:
        """Take in M (n, b, m) and its signs (n,), None if all are +1."""
        rows = gradients.transpose(0, 1).double()  # b, n, m
        self._allocated().baddbmm_(rows.mT, rows if signs is None else rows * signs.view(1, -1, 1))

    def add_blocks(self, blocks: Tensor) -> None:
        """Take in H_ss themselves, (b, m, m)."""
        self._allocated().add_(blocks)

    def is_finite(self) -> bool:
        """Whether everything taken in last was."""
        finite = self._blocks is None or bool(self._blocks.isfinite().all())
        return finite and all(bool(x.isfinite().all()) for x in (self._kept[-1] if self._kept else ()))

    def largest(self, seed: int) -> Ritz:
        """The algebraically largest eigenvalue of each block, (b,); NaN where one is not finite."""
        b, m = self._columns.shape
        samples = sum(len(features) for features, _ in self._kept)
        written_out = 2 * samples * b * m**2 + 10 * b * m**3  # the blocks, and all their eigenvalues
        products = _USUAL * (4 * samples * b * m + (0 if self._blocks is None else 2 * b * m**2))
        return self._dense() if written_out <= products else self._by_lanczos(seed)

    def _dense(self) -> Ritz:
        self._write_out()
        blocks = self._allocated()
        finite = blocks.isfinite().all(dim=2).all(dim=1)
        size = blocks.abs().sum(dim=2).amax(dim=1, keepdim=True)
        below = torch.diag_embed(torch.where(self._columns, 0.0, -1 - size))  # under every other eigenvalue
        values = torch.linalg.eigvalsh(torch.where(finite[:, None, None], blocks + below, 0.0))[:, -1]
        values = torch.where(finite, values, torch.nan)
        return Ritz(values, torch.zeros_like(values), 0, converged=bool(finite.all()))

    def _by_lanczos(self, seed: int) -> Ritz:
        b, m = self._columns.shape
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(b, m, generator=generator, dtype=torch.float64).to(self._columns.device)
        size = max(1, _BASIS // (8 * b * m))
        search = lanczos.largest(start * self._columns, tolerance=TOLERANCE, limit=_LIMIT, size=size)
        return lanczos.solved(search, self._times)

    def _times(self, vectors: Tensor) -> Tensor:
        """H_ss v_s for all rows, (b, m)."""
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
            b, m = self._columns.shape
            if 8 * b * m**2 > _LARGEST_BLOCKS:
                raise NotYetError(
                    f"layer {self._name!r}: the Hessians of its {b} rows are {b} matrices of {m} x {m}, more than "
                    f"{_LARGEST_BLOCKS >> 20} MiB; their eigenvalues from products alone are there for one position "
                    "in a sample and rows that fit memory="
                )
            self._blocks = torch.zeros(b, m, m, dtype=torch.float64, device=self._columns.device)
        return self._blocks

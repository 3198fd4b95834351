"""Compute a factor R of the Gram matrix w wᵀ = RᵀR, for the Gram-weighted norm |R M|² = ⟨w wᵀ, M Mᵀ⟩."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .precision import float32_products

_MANY_ROWS = 1024
"""The rows of R from which its rounding to bfloat16 averages out in |R M|², if all its entries are of one size."""

_ROWS, _COLUMNS = 128, 1024  # rows of w wᵀ that are computed at a time, and columns of w converted to float64


def gram_factor(weight: Tensor) -> Tensor:
    """Return R (G, min(d, m), d) with RᵀR = w wᵀ for weights w (G, d, m); see :func:`gram_factors`."""
    ((factor, _),) = gram_factors([weight])
    return factor


def gram_factors(weights: Sequence[Tensor]) -> list[tuple[Tensor, bool]]:
    """Return for each weight R, wᵀ itself if it has no more rows, and whether R is triangular.

    R is the Cholesky factor of w wᵀ in float64, whose rounding is below float32's even after squaring. A thin QR of wᵀ
    takes several times as long, and stalls if other processes share the cores.
    """
    found: list[tuple[Tensor, bool]] = []
    failures = {}
    for number, weight in enumerate(weights):
        columns: Tensor = weight.mT
        if columns.shape[1] <= columns.shape[2]:
            found.append((columns, False))
            continue
        gram = lower_gram(weight)
        upper, failed = gram.mT, gram.new_empty(len(gram), dtype=torch.int32)
        torch.linalg.cholesky_ex(upper, upper=True, out=(upper, failed))  # in place, since LAPACK is column-major
        failures[number] = failed.any()
        found.append((upper.to(weight.dtype), True))
    if failures and bool(torch.stack([failed.to(weights[0].device) for failed in failures.values()]).any()):
        for number in (number for number, failed in failures.items() if bool(failed)):
            weight = weights[number]  # w wᵀ is singular, for example with rows of zeros
            values, vectors = torch.linalg.eigh(lower_gram(weight).nan_to_num(0.0))
            factor: Tensor = (vectors * values.clamp_min(0).sqrt().unsqueeze(1)).mT
            found[number] = factor.to(weight.dtype), False
    return found


def lower_gram(weight: Tensor) -> Tensor:
    """Return the lower half of w wᵀ, (G, d, d) float64; entries above the diagonal are not all computed."""
    groups, d, _ = weight.shape
    gram = weight.new_zeros(groups, d, d, dtype=torch.float64)
    for part in weight.split(_COLUMNS, dim=2):
        part = part.double()
        for start in range(0, d, _ROWS):
            stop = start + _ROWS
            gram[:, start:stop, :stop].baddbmm_(part[:, start:stop], part[:, :stop].mT)
    return gram


def half_factor(factor: Tensor | None, weight: Tensor) -> Tensor | None:
    """Return R in bfloat16 for products with cotangents of bfloat16; None if its rounding could show.

    R = wᵀ is rounded already. Another R is multiplied by a random orthogonal matrix, which leaves |R M|² unchanged and
    makes entries of about one size: Cholesky's factor has few large ones, whose rounding would not average out.
    """
    _, d, m = weight.shape
    if factor is None or weight.dtype != torch.bfloat16 or min(d, m) < _MANY_ROWS:
        return None
    if m > d:
        directions = torch.randn(
            d, d, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
        ).to(factor.device)
        with float32_products(tf32=False):
            factor = torch.linalg.qr(directions).Q @ factor
    return cast(Tensor, factor).bfloat16()


def multiply_adds(d: int, m: int) -> int:
    """Return about how many multiply-adds R needs: for the lower half of w wᵀ, and for its Cholesky factor."""
    return 0 if m <= d else d**2 * (3 * m + d) // 6

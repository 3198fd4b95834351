"""Compute singular values of Jacobians, given by their rows.

Shapes: n samples, C outputs, M inputs; all results are float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 2**19  # entries of J that are converted to float64 at a time
_CLEAR = 1e-4  # an eigenvalue of G above this fraction of the largest is accurate as a squared singular value of J


def gram(rows: Sequence[Tensor]) -> Tensor:
    """Return G = J Jᵀ, (n, C, C), for J's C rows of (n, M) each."""
    samples, inputs = rows[0].shape
    total = torch.zeros(samples, len(rows), len(rows), dtype=torch.float64, device=rows[0].device)
    step = max(1, _BLOCK // (len(rows) * samples))
    for start in range(0, inputs, step):
        block = torch.stack([row[:, start : start + step] for row in rows], dim=1).double()
        total.baddbmm_(block, block.mT)
    return total


def log_volumes(rows: Sequence[Tensor], squares: Tensor, top: int | None = None) -> Tensor:
    """Return Σ log s_c (n,) over all C singular values of J, or its ``top`` largest; -inf if the rank is smaller.

    They come from the eigenvalues of G, ``squares`` (n, C) ascending, if these have a relative error of about 1e-12.
    Otherwise they come from a QR decomposition of Jᵀ, given by C rows (n, M): the logarithms of R's diagonal, without
    squares. The rank is numerical: it counts singular values above 4 C ε of the largest, with ε of J's dtype.
    """
    inputs, outputs = rows[0].shape[1], len(rows)
    count = outputs if top is None else min(top, outputs)
    result: Tensor = 0.5 * squares[:, outputs - count :].log().sum(dim=1)
    if inputs < count:
        return torch.where(result.isnan(), torch.nan, torch.full_like(result, -torch.inf))
    unclear = (squares[:, outputs - count] <= _CLEAR * squares[:, -1]).nonzero().flatten()
    for index in unclear.split(max(1, _BLOCK // (outputs * inputs))):
        matrices = torch.stack([row[index] for row in rows], dim=1).double()
        result[index] = _by_qr(matrices, count, 4 * outputs * torch.finfo(rows[0].dtype).eps).to(result.device)
    return result


def _by_qr(matrices: Tensor, count: int, tolerance: float) -> Tensor:
    """Return the result of :func:`log_volumes` for J (n, C, M), by QR.

    Singular values below ``tolerance`` of the largest count as 0.
    """
    triangles = torch.linalg.qr(matrices.mT, mode="r").R
    values = torch.linalg.svdvals(triangles)
    if count == triangles.shape[2]:
        logs = triangles.diagonal(dim1=1, dim2=2).abs().log().sum(dim=1)
    else:
        logs = values[:, :count].log().sum(dim=1)
    full = values[:, count - 1] > tolerance * values[:, 0]
    return torch.where(full, logs, -torch.inf)

"""Compute norms of layers' effective weights in float64, without a float64 copy of a weight."""

import math

import torch
from torch import Tensor, nn

from ..contractions.factor import lower_gram
from ..numerics import lanczos
from ..numerics.directions import Directions
from . import layers

_ENTRIES = 2**18  # of a weight that are in float64 at a time
_WRITTEN_OUT = 1024  # rows of a Gram matrix, at most
_TOLERANCE, _PRODUCTS, _BASIS = 1e-11, 2000, 64


def squared(module: nn.Module) -> float:
    """Return |w|² of the layer's effective weight."""
    weight = layers.matrix(module)[0]
    return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in _parts(weight))


def spectral(module: nn.Module) -> float:
    """Return the largest singular value of the layer's weight matrix, or over a grouped convolution's groups.

    It comes from the smaller Gram matrix, whose largest eigenvalue is as accurate; for many rows from Lanczos, without
    that matrix. A weight with NaN or infinity in it gives NaN.
    """
    weight = layers.matrix(module)[0].unflatten(0, (layers.groups(module), -1))
    size = min(weight.shape[1:])
    if size > _WRITTEN_OUT:
        found = [_by_products(matrix) for matrix in weight]
        if None not in found:
            return max(value for value in found if value is not None)
    gram = lower_gram(weight if weight.shape[1] == size else weight.mT)
    if not bool(gram.isfinite().all()):  # for which there are no eigenvalues
        return math.nan
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram).max())))


def _by_products(matrix: Tensor) -> float | None:
    """Return the root of the largest eigenvalue of wᵀw; None if it is not found to rounding."""
    start = Directions().like(matrix.new_empty(1, matrix.shape[1], dtype=torch.float64))

    def times(vectors: Tensor) -> Tensor:
        total = torch.zeros_like(vectors[0])
        for part in _parts(matrix):
            rows = part.double()
            total += rows.t() @ (rows @ vectors[0])
        return total.unsqueeze(0)

    search = lanczos.largest(start, tolerance=_TOLERANCE, limit=_PRODUCTS, size=_BASIS)
    ritz = lanczos.solved(search, times)
    return math.sqrt(max(0.0, float(ritz.values))) if ritz.converged else None


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of a matrix in pieces, each as large as may be copied."""
    rows: tuple[Tensor, ...] = weight.split(max(1, _ENTRIES // max(1, weight.shape[1])))
    return rows

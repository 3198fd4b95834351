"""Prepare what the compiled kernels of heads are called with, on the CPU and on CUDA alike.

Each function takes the arguments of its namesake in :mod:`.reference` and returns a :class:`Given`. The kernels take
its ``arguments`` in this order, and then the number of threads or the stream.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..errors import BackendError
from .arrays import array, dense, dense_rows, strided

Results = TypeVar("Results")


@dataclass(frozen=True)
class Given(Generic[Results]):
    """Hold the call of a kernel.

    Attributes:
        tensors: those that have to be of one dtype, and where the kernel runs.
        arguments: of the kernel.
        results: what it writes.
    """

    tensors: list[Tensor]
    arguments: tuple[Any, ...]
    results: Results


def pair_distances(weight: Tensor) -> Given[Tensor]:
    """Return the call for :func:`.reference.pair_distances`."""
    weight = dense(weight)
    d, m = weight.shape
    out = weight.new_empty(d, d)
    return Given([weight], (array(weight), d, m, array(out)), out)


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Given[Tensor]:
    """Return the call for :func:`.reference.softmax_variance`."""
    features, weight, bias, distances = dense_rows(features), dense(weight), dense(bias), dense(distances)
    (n, m), d = features.shape, weight.shape[0]
    out = features.new_empty(n, dtype=torch.float64)
    arrays = array(weight), array(bias), array(distances)
    arguments = strided(features), features.stride(0), *arrays, n, m, d, array(out)
    return Given([features, weight, bias, distances], arguments, out)


def exponentiate(
    logits: Tensor, row_norms: Tensor | None, top_value: float, maximum: Tensor
) -> Given[tuple[Tensor, Tensor | None, Tensor]]:
    """Return the call for :func:`.reference.exponentiate`."""
    n, d = logits.shape
    norms = logits.new_empty(0) if row_norms is None else dense(row_norms)
    rest = logits.new_empty(n, dtype=torch.float64)
    moment = rest.new_empty(0 if row_norms is None else n)
    top = logits.new_empty(n, dtype=torch.int64)
    arguments = array(logits), array(norms), top_value, n, d, array(maximum), array(rest), array(moment), array(top)
    return Given([logits, norms, maximum], arguments, (rest, None if row_norms is None else moment, top))


def row_dots(a: Tensor, b: Tensor) -> Given[Tensor]:
    """Return the call for :func:`.reference.row_dots`."""
    a, b = dense_rows(a), dense_rows(b)
    n, k = a.shape
    out = a.new_empty(n, dtype=torch.float64)
    return Given([a, b], (strided(a), a.stride(0), strided(b), b.stride(0), n, k, array(out)), out)


def sigmoid_curvature(logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Given[Tensor]:
    """Return the call for :func:`.reference.sigmoid_curvature`."""
    logits, coefficients, row_norms = dense(logits), dense(coefficients), dense(row_norms)
    n, d = logits.shape
    out = logits.new_empty(n, dtype=torch.float64)
    arguments = array(logits), array(coefficients), array(row_norms), n, d, array(out)
    return Given([logits, coefficients, row_norms], arguments, out)


def small_eigenvalues(matrices: Tensor) -> Given[Tensor]:
    """Return the call for :func:`.reference.small_eigenvalues`.

    Raises:
        BackendError: matrices that are not float64.
    """
    matrices = dense(matrices)
    n, size, _ = matrices.shape
    out = matrices.new_empty(n, size)
    if matrices.dtype != torch.float64:
        raise BackendError(f"small_eigenvalues: wants float64, got {matrices.dtype}")
    return Given([matrices], (array(matrices), n, size, array(out)), out)

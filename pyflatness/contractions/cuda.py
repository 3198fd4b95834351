"""Gather the kernels on CUDA, with the names and signatures of :mod:`.reference`."""

from torch import Tensor

from . import head_arguments
from .cuda_device import HALF, emulated, launch, missing, module, unavailable
from .cuda_head import (
    exponentiate,
    exponentiate_tile,
    mean_row,
    norms_about,
    pair_distances,
    rejoin,
    row_dots,
    sigmoid_curvature,
    softmax_variance,
    softmax_variance_gradient,
    spread,
)
from .cuda_layers import patches, products
from .reference import gram, patch_gram

__all__ = [
    "HALF",
    "emulated",
    "exponentiate",
    "exponentiate_tile",
    "gram",
    "mean_row",
    "missing",
    "module",
    "norms_about",
    "pair_distances",
    "patch_gram",
    "patches",
    "products",
    "rejoin",
    "row_dots",
    "sigmoid_curvature",
    "small_eigenvalues",
    "softmax_variance",
    "softmax_variance_gradient",
    "spread",
    "unavailable",
]

AUTOMATIC = frozenset({"heads", "layers", "eigenvalues"})
"""Works, of :data:`.backends.Work`, for which ``backend="auto"`` takes these kernels: they are faster than before."""


def small_eigenvalues(matrices: Tensor) -> Tensor:
    """See :func:`.reference.small_eigenvalues`; at most ``_cuda.MAX_EIGEN_SIZE`` rows."""
    given = head_arguments.small_eigenvalues(matrices)
    launch("small_eigenvalues", given.tensors, *given.arguments)
    return given.results

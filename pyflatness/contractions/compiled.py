"""Call the kernels in C++, with the names and signatures of :mod:`.reference`.

This is the only module that imports ``_C``.
"""

import functools
import importlib
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError
from . import head_arguments
from .arrays import array, dense, dense_rows, layer_sizes, plain, span, strided
from .class_sums import ClassSums, MeanRow, RowSlopes, add_tile, mean_row_by
from .geometry import Geometry
from .precision import promoted_dtype
from .reference import (
    Products,
    RowSum,
    norms_about,
    patches,
    products,
    rejoin,
    spread,
)

__all__ = [
    "INSTALLED",
    "Products",
    "RowSlopes",
    "RowSum",
    "direct",
    "direct_gathered",
    "exponentiate",
    "exponentiate_tile",
    "forced_direct_form",
    "forced_instruction_set",
    "gathering_pays",
    "gram",
    "instruction_set",
    "instruction_sets",
    "mean_row",
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
    "softmax_variance_sum",
    "spread",
    "unavailable",
]

_NONE = 0, 0  # the array that is not given
_SUFFIX = {torch.float32: "_f32", torch.float64: "_f64"}


def _hidden() -> Path | None:
    """Return the folder of an installation with kernels that this package, from a clone, is found in front of."""
    here = Path(__file__).resolve().parents[1]
    places = (Path(path, here.name) for path in sys.path)
    return next((place for place in places if place.resolve() != here and any(place.glob("_C.*"))), None)


_C: Any
try:
    # After torch, so that both use the OpenMP runtime that torch brings and not a pool of threads each.
    _C = importlib.import_module("pyflatness._C")
    _MISSING = ""
except ImportError as error:
    _C = None
    _MISSING = (
        f"the compiled kernels are not here ({error}): install pyflatness with `pip install .` (or `pip install -e .`) "
        "from its root, which needs a C++ compiler, and start Python elsewhere: in the root its sources hide what is "
        'installed; or pass backend="reference"'
    )
    if (_found := _hidden()) is not None:
        warnings.warn(
            f"Python found the sources of pyflatness in {Path(__file__).resolve().parents[2]} in front of the package "
            f"installed in {_found.parent}. They have no compiled kernels, so that plain torch computes everything, "
            "slower. Start Python in another folder, or install with `pip install -e .`",
            RuntimeWarning,
            stacklevel=2,
        )
INSTALLED = _C is not None


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why tensors of this kind cannot be served; empty if they can."""
    if _MISSING:
        return _MISSING
    _require()
    if device.type != "cpu":
        return f"the compiled kernels run on the CPU, the tensors are on {device}"
    if dtype not in _SUFFIX:
        return f"the compiled kernels take float32 and float64, the tensors are {dtype}"
    return ""


def instruction_sets() -> list[str]:
    """Return the instruction sets that this build and processor have, widest first; none without the module."""
    return [] if _C is None else list(_C.instruction_sets())


def instruction_set() -> str:
    """Return the instruction set in use."""
    _require()
    return str(_C.instruction_set())


@contextmanager
def forced_instruction_set(name: str) -> Iterator[None]:
    """Use one instruction set inside a ``with`` block (for tests; users set ``PYFLATNESS_ISA``)."""
    before = instruction_set()
    _C.select_instruction_set(name)
    try:
        yield
    finally:
        _C.select_instruction_set(before)


@contextmanager
def forced_direct_form(name: str) -> Iterator[None]:
    """Make M from "patches", or where it can be from "tiles2" or "tiles4", inside a ``with`` block.

    Tests use this. ``DirectForm`` in csrc/cpu/kernels.h says what the forms are; otherwise the kernel takes the
    fastest.
    """
    _require()
    before = str(_C.direct_form())
    _C.select_direct_form(name)
    try:
        yield
    finally:
        _C.select_direct_form(before)


def pair_distances(weight: Tensor) -> Tensor:
    """See :func:`.reference.pair_distances`."""
    given = head_arguments.pair_distances(weight)
    _kernel("pair_distances", *given.tensors)(*given.arguments, torch.get_num_threads())
    return given.results


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
    """See :func:`.reference.softmax_variance`; at most ``_C.MAX_FUSED_OUTPUTS`` outputs."""
    given = head_arguments.softmax_variance(features, weight, bias, distances)
    _kernel("softmax_variance", *given.tensors)(*given.arguments, torch.get_num_threads())
    return given.results


def softmax_variance_sum(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prepared: Tensor | None,
    labels: Tensor | None,
    ignored: int,
    values: Tensor | None,
) -> RowSum | None:
    """See :func:`.reference.softmax_variance_sum`; at most ``_C.MAX_FUSED_OUTPUTS`` outputs."""
    features, weight = dense_rows(features), dense(weight)
    bias, labels = None if bias is None else dense(bias), None if labels is None else dense(labels)
    (n, m), d, fresh = features.shape, weight.shape[0], prepared is None
    constants = weight.new_empty(d * (_C.packed_columns(m) + 1 + d)) if prepared is None else prepared
    kernel = _kernel("softmax_variance_sum", features, weight, constants, weight if bias is None else bias)
    total, counted = kernel(
        strided(features), features.stride(0), array(weight), _NONE if bias is None else array(bias),
        array(constants), fresh, _NONE if labels is None else array(labels), ignored, n, m, d,
        _NONE if values is None else array(values), torch.get_num_threads(),
    )  # fmt: skip
    return None if counted < 0 else RowSum(total, counted, constants)


def softmax_variance_gradient(features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor) -> RowSlopes:
    """See :func:`.reference.softmax_variance_gradient`; at most ``_C.MAX_FUSED_OUTPUTS`` outputs."""
    features, weight, shares = dense_rows(features), dense(weight), dense(shares)
    bias = None if bias is None else dense(bias)
    (n, m), d = features.shape, weight.shape[0]
    prepared = weight.new_empty(d * (_C.packed_columns(m) + 1 + d))
    found = RowSlopes(0.0, weight.new_empty(d, n), weight.new_empty(d, n), weight.new_empty(2, n))
    kernel = _kernel("softmax_variance_gradient", features, weight, weight if bias is None else bias)
    total = kernel(
        strided(features), features.stride(0), array(weight), _NONE if bias is None else array(bias), array(prepared),
        array(shares), n, m, d, *map(array, found[1:]), torch.get_num_threads(),
    )  # fmt: skip
    return found._replace(total=total)


def exponentiate(
    logits: Tensor, row_norms: Tensor | None, top_value: float, maximum: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See :func:`.reference.exponentiate`; ``logits`` and ``maximum`` must be contiguous, as they change in place."""
    given = head_arguments.exponentiate(logits, row_norms, top_value, maximum)
    _kernel("exponentiate", *given.tensors)(*given.arguments, torch.get_num_threads())
    return given.results


def exponentiate_tile(
    logits: Tensor,
    bias: Tensor | None,
    norms: Tensor,
    first: int,
    sums: ClassSums,
    rounded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`.reference.exponentiate_tile`; ``logits`` contiguous."""
    return add_tile(exponentiate, logits, bias, norms, first, sums, rounded)


def mean_row(
    summed: Tensor, weight: Tensor, centre: Tensor, sums: ClassSums, uncentred: Tensor | None, reach: bool
) -> MeanRow:
    """See :func:`.reference.mean_row`."""
    return mean_row_by(row_dots, summed, weight, centre, sums, uncentred, reach)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """See :func:`.reference.row_dots`."""
    given = head_arguments.row_dots(a, b)
    _kernel("row_dots", *given.tensors)(*given.arguments, torch.get_num_threads())
    return given.results


def sigmoid_curvature(logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
    """See :func:`.reference.sigmoid_curvature`."""
    given = head_arguments.sigmoid_curvature(logits, coefficients, row_norms)
    _kernel("sigmoid_curvature", *given.tensors)(*given.arguments, torch.get_num_threads())
    return given.results


def direct(
    inputs: Tensor, cotangent: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None
) -> Products:
    """See :func:`.reference.direct`; inputs and cotangent may have any strides."""
    inputs, cotangent = plain(inputs), plain(cotangent)
    sizes, threads = layer_sizes(inputs, cotangent, geometry), torch.get_num_threads()
    (n, groups, channels, d), *_ = sizes
    factor_rows = 0 if factor is None else factor.shape[1]
    given_factor, given_weight = (inputs.new_empty(0) if t is None else dense(t) for t in (factor, weight))
    weighted = weight is not None
    splits = 1 if n * groups >= threads else min(threads, channels)  # few matrices: threads share the columns
    totals = inputs.new_empty(n, groups, splits, 3, dtype=torch.float64)
    by_column = totals.new_empty((n, groups * channels) if weighted else 0)
    by_row = totals.new_empty((n, groups, splits, d) if weighted else 0)
    kernel = _kernel("direct", inputs, cotangent, given_factor, given_weight)
    workspace = inputs.new_empty(_kernel("direct_workspace", inputs)(sizes, factor_rows, weighted, threads))
    kernel(
        sizes, span(inputs), inputs.stride(), span(cotangent), cotangent.stride(), array(given_factor), factor_rows,
        array(given_weight), splits, array(totals), array(by_column), array(by_row),
        array(workspace), threads,
    )  # fmt: skip
    squares, gram_weighted, weighted_squares = totals.sum(dim=(1, 2)).unbind(1)
    return Products(
        squares,
        None if factor is None else gram_weighted,
        weighted_squares if weighted else None,
        by_column if weighted else None,
        by_row.sum(dim=2).flatten(1) if weighted else None,
    )


def gathering_pays(inputs: Tensor, geometry: Geometry, rows: int) -> bool:
    """Return whether several cotangents of so many rows of a group are better contracted by :func:`direct_gathered`."""
    (n, groups, channels, _), *sizes = layer_sizes(inputs, None, geometry)
    taken = inputs.new_empty(0, dtype=promoted_dtype(inputs.dtype))
    return bool(_kernel("gathered_pays", taken)(((n, groups, channels, rows), *sizes)))


def direct_gathered(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    geometry: Geometry,
    factor: Tensor | None,
    positions: Tensor | None = None,
) -> Products:
    """See :func:`.reference.direct_gathered`; inputs and cotangents may have any strides."""
    inputs, cotangents = plain(inputs), [plain(cotangent) for cotangent in cotangents]
    rows, threads = cotangents[0].shape[1] // geometry.groups, torch.get_num_threads()
    (n, groups, channels, _), *extents = layer_sizes(inputs, None, geometry)
    sizes = ((n, groups, channels, rows), *extents)
    length = math.prod(sizes[2]) if positions is None else positions.shape[2]
    given_positions = inputs.new_empty(0, dtype=torch.int32) if positions is None else dense(positions.int())
    if positions is not None:
        cotangents = [cotangent.flatten(2)[:, :, None, None] for cotangent in cotangents]
    given_factor, factor_rows = (inputs.new_empty(0), 0) if factor is None else (dense(factor), factor.shape[1])
    totals = inputs.new_empty(len(cotangents), n, groups, 2, dtype=torch.float64)
    kernel = _kernel("direct_gathered", inputs, *cotangents, given_factor)
    workspace = inputs.new_empty(
        _kernel("direct_gathered_workspace", inputs)(sizes, length, factor_rows, len(cotangents), threads)
    )
    kernel(
        sizes, span(inputs), inputs.stride(), [span(cotangent) for cotangent in cotangents],
        [cotangent.stride() for cotangent in cotangents], array(given_positions), length, array(given_factor),
        factor_rows, array(totals), array(workspace), threads,
    )  # fmt: skip
    squares, gram_weighted = totals.sum(dim=2).flatten(0, 1).unbind(1)
    return Products(squares, None if factor is None else gram_weighted, None, None, None)


def patch_gram(inputs: Tensor, geometry: Geometry) -> Tensor:
    """See :func:`.reference.patch_gram`; inputs may have any strides."""
    inputs = plain(inputs)
    sizes, threads = layer_sizes(inputs, None, geometry), torch.get_num_threads()
    a, b, c = sizes[2]
    positions = a * b * c
    out = inputs.new_empty(len(inputs), geometry.groups, positions, positions)
    workspace = inputs.new_empty(_kernel("patch_gram_workspace", inputs)(sizes, threads))
    _kernel("patch_gram", inputs)(sizes, span(inputs), inputs.stride(), array(out), array(workspace), threads)
    return out


def gram(rows: Tensor, patch_gram: Tensor) -> Tensor:
    """See :func:`.reference.gram`; rows may have any strides."""
    rows, patch_gram, threads = plain(rows), dense(patch_gram), torch.get_num_threads()
    n, groups, positions, r = rows.shape
    out = rows.new_empty(n, groups, dtype=torch.float64)
    workspace = rows.new_empty(_kernel("gram_workspace", rows)(positions, r, threads))
    _kernel("gram", rows, patch_gram)(
        span(rows), rows.stride(), n, groups, positions, r, array(patch_gram), array(out), array(workspace), threads
    )
    return out.sum(dim=1)


def small_eigenvalues(matrices: Tensor) -> Tensor:
    """See :func:`.reference.small_eigenvalues`; at most ``_C.MAX_EIGEN_SIZE`` rows."""
    given = head_arguments.small_eigenvalues(matrices)
    _kernel("small_eigenvalues", *given.tensors)(*given.arguments, torch.get_num_threads())
    return given.results


@functools.cache
def _require() -> None:
    """Raise without the compiled module; the first time, take the instruction set that the environment names."""
    if _MISSING:
        raise BackendError(_MISSING)
    name = os.environ.get("PYFLATNESS_ISA")
    try:
        if name:
            _C.select_instruction_set(name)
    except ValueError as error:
        raise BackendError(f"PYFLATNESS_ISA: {error}") from None


def _kernel(name: str, *tensors: Tensor) -> Any:
    _require()
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype or not tensor.is_cpu or dtype not in _SUFFIX:
            kinds = ", ".join(sorted({f"{t.dtype} on {t.device}" for t in tensors}))
            raise BackendError(f"{name}: wants float32 or float64 tensors of one dtype on the CPU, got {kinds}")
    return getattr(_C, name + _SUFFIX[dtype])

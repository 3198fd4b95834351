"""Call the kernels in C++ on the CPU; no other module imports ``_C``."""

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
from .geometry import Geometry
from .kernels import SUFFIX, Kernels, array, dense, dense_rows, layer_sizes, plain, span
from .precision import promoted_dtype
from .quantities import Forms
from .reference import FUSED_OUTPUTS, RowGradients, RowSum
from .routes import KernelRoutes

_FACTOR_ROWS = 4  # as kRootRows in csrc/cpu/kernels.h
_FEW_ROWS = 16  # rows of R; the kernel would pad fewer mostly with zeros
_LARGEST_FACTOR = 2**22  # bytes of R, which pass through a processor's second-level cache for each strip of positions
_NONE = 0, 0  # address and elements of an array that is not given
_MISSING = (
    "the compiled kernels are not here ({}): install pyflatness with `pip install .` (or `pip install -e .`) "
    "from its root, which needs a C++ compiler, and start Python elsewhere: in the root its sources hide what is "
    'installed; or pass backend="reference"'
)


def hidden() -> Path | None:
    """Return the folder of an installation with kernels that this package, run from a clone, hides; or None."""
    here = Path(__file__).resolve().parents[1]
    places = (Path(path, here.name) for path in sys.path)
    return next((place for place in places if place.resolve() != here and any(place.glob("_C.*"))), None)


class Compiled(Kernels):
    """Provide the operations by kernels in C++, for float32 and float64 on the CPU."""

    routes = KernelRoutes
    sums = tuple(SUFFIX)

    def __init__(self) -> None:
        super().__init__("pyflatness._C", _MISSING)
        self._ready = False
        found = hidden() if self.missing else None
        if found is not None:
            warnings.warn(
                f"Python found the sources of pyflatness in {Path(__file__).resolve().parents[2]} in front of the "
                f"package installed in {found.parent}. They have no compiled kernels, so that plain torch computes "
                "everything, slower. Start Python in another folder, or install with `pip install -e .`",
                RuntimeWarning,
                stacklevel=2,
            )

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str:
        if self.missing:
            return self.missing
        self.module()
        if device.type != "cpu":
            return f"the compiled kernels run on the CPU, the tensors are on {device}"
        if dtype not in SUFFIX:
            return f"the compiled kernels take float32 and float64, the tensors are {dtype}"
        return ""

    def module(self) -> Any:
        """Return the compiled module; the first call selects the instruction set that the environment names."""
        module = super().module()
        if not self._ready:
            name = os.environ.get("PYFLATNESS_ISA")
            try:
                if name:
                    module.select_instruction_set(name)
            except ValueError as error:
                raise BackendError(f"PYFLATNESS_ISA: {error}") from None
            self._ready = True
        return module

    def engines(self) -> list[str]:
        """Return the instruction sets of this build and processor, widest first; none without the module."""
        return [] if self.missing else list(self._module.instruction_sets())

    def instruction_set(self) -> str:
        """Return the instruction set in use."""
        return str(self.module().instruction_set())

    @contextmanager
    def forced(self, engine: str) -> Iterator[None]:
        """Use one instruction set inside a ``with`` block (for tests; users set ``PYFLATNESS_ISA``)."""
        before = self.instruction_set()
        self._module.select_instruction_set(engine)
        try:
            yield
        finally:
            self._module.select_instruction_set(before)

    @contextmanager
    def forced_direct_form(self, name: str) -> Iterator[None]:
        """Compute M by a ``DirectForm`` (csrc/cpu/kernels.h), "patches", "tiles2" or "tiles4", if the layer allows."""
        module = self.module()
        before = str(module.direct_form())
        module.select_direct_form(name)
        try:
            yield
        finally:
            module.select_direct_form(before)

    def _kernel(self, name: str, *tensors: Tensor) -> Any:
        if not self._ready:
            self.module()
        dtype = tensors[0].dtype
        for tensor in tensors:
            if tensor.dtype is not dtype or not tensor.is_cpu or dtype not in SUFFIX:
                kinds = ", ".join(sorted({f"{t.dtype} on {t.device}" for t in tensors}))
                raise BackendError(f"{name}: wants float32 or float64 tensors of one dtype on the CPU, got {kinds}")
        return getattr(self._module, name + SUFFIX[dtype])

    def _last(self) -> tuple[int, ...]:
        """Return the number of threads."""
        return (torch.get_num_threads(),)

    def fuses_gradient(self, weight: Tensor) -> bool:
        return not self.missing and weight.device.type == "cpu" and len(weight) <= FUSED_OUTPUTS

    def softmax_variance_sum(
        self,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        prepared: Tensor | None,
        labels: Tensor | None,
        ignored: int,
        values: Tensor | None,
    ) -> RowSum | None:
        features, weight = dense_rows(features), dense(weight)
        bias, labels = None if bias is None else dense(bias), None if labels is None else dense(labels)
        (n, m), d, fresh = features.shape, weight.shape[0], prepared is None
        constants = self._constants(d, m, weight) if prepared is None else prepared
        kernel = self._kernel("softmax_variance_sum", features, weight, constants, weight if bias is None else bias)
        total, counted = kernel(
            span(features), features.stride(0), array(weight), _NONE if bias is None else array(bias),
            array(constants), fresh, _NONE if labels is None else array(labels), ignored, n, m, d,
            _NONE if values is None else array(values), torch.get_num_threads(),
        )  # fmt: skip
        return None if counted < 0 else RowSum(total, counted, constants)

    def softmax_variance_gradient(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor
    ) -> RowGradients:
        """See :class:`.Backend`; at most :data:`.FUSED_OUTPUTS` outputs."""
        features, weight, shares = dense_rows(features), dense(weight), dense(shares)
        bias = None if bias is None else dense(bias)
        (n, m), d = features.shape, weight.shape[0]
        constants = self._constants(d, m, weight)  # workspace of the kernel, which must outlast the call
        found = RowGradients(0.0, weight.new_empty(d, n), weight.new_empty(d, n), weight.new_empty(2, n))
        kernel = self._kernel("softmax_variance_gradient", features, weight, weight if bias is None else bias)
        total = kernel(
            span(features), features.stride(0), array(weight), _NONE if bias is None else array(bias),
            array(constants), array(shares), n, m, d, *map(array, found[1:]),
            torch.get_num_threads(),
        )  # fmt: skip
        return found._replace(total=total)

    def _constants(self, d: int, m: int, like: Tensor) -> Tensor:
        """Return memory for constants that kernels compute from a head's weight and bias."""
        return like.new_empty(d * (self.module().packed_columns(m) + 1 + d))

    def direct(
        self, inputs: Tensor, cotangent: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None
    ) -> Forms:
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
        kernel = self._kernel("direct", inputs, cotangent, given_factor, given_weight)
        workspace = inputs.new_empty(self._kernel("direct_workspace", inputs)(sizes, factor_rows, weighted, threads))
        kernel(
            sizes, span(inputs), inputs.stride(), span(cotangent), cotangent.stride(), array(given_factor), factor_rows,
            array(given_weight), splits, array(totals), array(by_column), array(by_row),
            array(workspace), threads,
        )  # fmt: skip
        squares, gram_weighted, weighted_squares = totals.sum(dim=(1, 2)).unbind(1)
        found = Forms(squares, None if factor is None else gram_weighted)
        if not weighted:
            return found
        return found._replace(weighted=weighted_squares, by_column=by_column, by_row=by_row.sum(dim=2).flatten(1))

    def stacking_pays(self, inputs: Tensor, geometry: Geometry, rows: int, *, by_gram: bool) -> bool:
        if by_gram:
            return False
        (n, groups, channels, _), *sizes = layer_sizes(inputs, None, geometry)
        taken = inputs.new_empty(0, dtype=promoted_dtype(inputs.dtype))
        return bool(self._kernel("gathered_pays", taken)(((n, groups, channels, rows), *sizes)))

    def direct_gathered(
        self,
        inputs: Tensor,
        cotangents: Sequence[Tensor],
        geometry: Geometry,
        factor: Tensor | None,
        positions: Tensor | None = None,
    ) -> Forms:
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
        kernel = self._kernel("direct_gathered", inputs, *cotangents, given_factor)
        workspace = inputs.new_empty(
            self._kernel("direct_gathered_workspace", inputs)(sizes, length, factor_rows, len(cotangents), threads)
        )
        kernel(
            sizes, span(inputs), inputs.stride(), [span(cotangent) for cotangent in cotangents],
            [cotangent.stride() for cotangent in cotangents], array(given_positions), length, array(given_factor),
            factor_rows, array(totals), array(workspace), threads,
        )  # fmt: skip
        squares, gram_weighted = totals.sum(dim=2).flatten(0, 1).unbind(1)
        return Forms(squares, None if factor is None else gram_weighted)

    def patch_gram(self, inputs: Tensor, geometry: Geometry) -> Tensor:
        inputs = plain(inputs)
        sizes, threads = layer_sizes(inputs, None, geometry), torch.get_num_threads()
        positions = math.prod(sizes[2])
        out = inputs.new_empty(len(inputs), geometry.groups, positions, positions)
        workspace = inputs.new_empty(self._kernel("patch_gram_workspace", inputs)(sizes, threads))
        self._kernel("patch_gram", inputs)(sizes, span(inputs), inputs.stride(), array(out), array(workspace), threads)
        return out

    def small_eigenvalues(self, matrices: Tensor) -> Tensor:
        matrices = dense(matrices)
        n, size, _ = matrices.shape
        out = matrices.new_empty(n, size)
        if matrices.dtype != torch.float64:
            raise BackendError(f"small_eigenvalues: wants float64, got {matrices.dtype}")
        self._kernel("small_eigenvalues", matrices)(array(matrices), n, size, array(out), *self._last())
        return out

    def gram(self, rows: Tensor, patch_gram: Tensor) -> Tensor:
        rows, patch_gram, threads = plain(rows), dense(patch_gram), torch.get_num_threads()
        _, groups, positions, r = rows.shape
        workspace = rows.new_empty(self._kernel("gram_workspace", rows)(positions, r, threads))
        kernel, grams, working = self._kernel("gram", rows, patch_gram), array(patch_gram), array(workspace)
        out = rows.new_empty(len(rows), groups, dtype=torch.float64)
        for some, of, n in _each(rows, out, len(patch_gram)):
            kernel(some, rows.stride(), n, groups, positions, r, grams, of, working, threads)
        return out.sum(dim=1)

    def gram_weighted(self, rows: Tensor, factor: Tensor, patch_gram: Tensor, *, triangular: bool) -> Tensor:
        """See :class:`.Backend`; one kernel, which does not write R δ, and skips the zeros of a triangular R."""
        if factor.shape[1] < _FEW_ROWS or factor[0].numel() * factor.element_size() > _LARGEST_FACTOR:
            return super().gram_weighted(rows, factor, patch_gram, triangular=triangular)
        rows, patch_gram, threads = plain(rows), dense(patch_gram), torch.get_num_threads()
        short = -factor.shape[1] % _FACTOR_ROWS
        padded = dense(torch.nn.functional.pad(factor, (0, 0, 0, short)) if short else factor)
        _, groups, positions, d = rows.shape
        workspace = rows.new_empty(self._kernel("gram_rooted_workspace", rows)(positions, d, padded.shape[1], threads))
        kernel, factors = self._kernel("gram_rooted", rows, padded, patch_gram), array(padded)
        grams, working = array(patch_gram), array(workspace)
        out = rows.new_empty(len(rows), groups, dtype=torch.float64)
        for some, of, n in _each(rows, out, len(patch_gram)):
            kernel(
                some, rows.stride(), n, groups, positions, d, factors, padded.shape[1], triangular, grams, of, working,
                threads,
            )  # fmt: skip
        return out.sum(dim=1)


def _each(rows: Tensor, out: Tensor, samples: int) -> list[tuple[tuple[int, int], tuple[int, int], int]]:
    """Return for each cotangent the span of its rows, its part of ``out`` and its samples; they share Gram matrices."""
    if not samples:
        return []
    first, of = rows[:samples], out[:samples]
    (start, elements), (to, numbers) = span(first), array(of)
    step, over = samples * rows.stride(0) * rows.element_size(), of.numel() * out.element_size()
    count = range(len(rows) // samples)
    return [((start + k * step, elements), (to + k * over, numbers), samples) for k in count]

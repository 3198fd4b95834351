"""Compute wide heads by kernels in Triton's language: the first product with the exponential in its epilogue.

Operations without a kernel here are plain torch. :meth:`Triton.multiply_exponentiate` computes a tile's exponentials
without storing its logits.

A row's largest logit is not known before a tile's product is done. So exponentials are relative to z_0, the largest
logit of earlier tiles: bfloat16 has the exponents of float32, and the same precision at every size. The sums are scaled
when the tile is done. If a logit is so far above z_0 that sums might overflow, its block of rows is computed again,
relative to the tile's own maximum. The GPU decides that. It is rare if the first tile, which sets z_0 for the others,
is small. The sums are always those of the rounded exponentials as they are stored.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from . import triton_kernels as kernels
from .cuda import on_device
from .kernels import dense
from .reference import Backend, ClassSums, MeanRow

_DTYPES = (torch.bfloat16,)
_ACCESS = 8  # elements of half precision in 16 bytes; rows must begin at a multiple of it
_ALIGNED = 64  # elements; rows of exponentials begin at a multiple of it
ROWS = {"ROWS": 4, "WIDTH": 512}  # sizes that a block of threads reads at once
SETTLED = {"ROWS": 16, "AT_ONCE": 32}  # rows, and blocks of classes at once
SPREAD = {"ROWS": 4, "CLASSES": 16, "DEPTH": 64}  # sizes that a block of threads reads at once
_SPANS, _AT_ONCE = 256, 8  # blocks of threads that share the classes of a row, and the rows


class Blocks(NamedTuple):
    """Hold the sizes of the product's blocks, and how a block is computed."""

    rows: int
    classes: int
    depth: int  # features at once
    warps: int
    stages: int  # blocks of features that are in shared memory or being loaded


LARGE, SMALL = Blocks(128, 256, 64, 8, 3), Blocks(128, 128, 32, 8, 2)
_LARGE_MEMORY = 214040  # bytes of shared memory that `LARGE` takes


class Triton(Backend):
    """Provide the operations of wide heads by kernels in Triton's language."""

    name = "triton"
    in_place = True
    first_tile = 256  # small, as it is computed twice

    def fuses(self, features: Tensor, weight: Tensor) -> bool:
        aligned = all(
            t.stride(0) % _ACCESS == 0 and t.stride(1) == 1 and t.data_ptr() % 16 == 0 for t in (features, weight)
        )
        return aligned and features.dtype == weight.dtype and features.dtype in _DTYPES

    def runs(self, device: torch.device) -> bool:
        """Return whether the device is an NVIDIA GPU with bfloat16 products, and Triton finds a C compiler."""
        if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
            return False
        try:
            return driver.active.utils is not None  # this compiles a module if it is not in Triton's cache
        except Exception:
            return False

    def multiply_exponentiate(
        self, features: Tensor, weight: Tensor, bias: Tensor, norms: Tensor, first: int, sums: ClassSums
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (n, m), width, device = features.shape, len(weight), features.device
        blocks = _blocks(device)
        row_blocks, class_blocks = -(-n // blocks.rows), -(-width // blocks.classes)
        values = features.new_empty(n, -(-width // _ALIGNED) * _ALIGNED)[:, :width]
        reference, joins = sums.maximum.clone(), sums.top.new_empty(2, n)
        parts = sums.maximum.new_empty(3, class_blocks, n)  # largest logits, sums of exponentials, weighted by norms
        order = torch.arange(row_blocks, dtype=torch.int32, device=device)
        count, factor = order.new_full((1,), row_blocks), torch.empty_like(sums.rest)
        grid = (min(row_blocks * class_blocks, _programs(device)),)
        product = (
            TensorDescriptor.from_tensor(features, [blocks.rows, blocks.depth]),
            TensorDescriptor.from_tensor(weight, [blocks.classes, blocks.depth]),
            TensorDescriptor.from_tensor(values, [blocks.rows, blocks.classes]),
            *(bias, norms, reference, order, count, *parts, first, n, width, m),
        )
        sizes = {"ROWS": blocks.rows, "CLASSES": blocks.classes, "DEPTH": blocks.depth, "PAIRS": _rounds_pairs(device)}
        computed = {"num_warps": blocks.warps, "num_stages": blocks.stages}
        _launch(kernels.product, device, grid, *product, **sizes, **computed)
        count.zero_()
        _launch(
            kernels.surpassed, device, (row_blocks,), parts[0], reference, order, count, n, class_blocks,
            ROWS=blocks.rows, AT_ONCE=SETTLED["AT_ONCE"],
        )  # fmt: skip
        _launch(kernels.product, device, grid, *product, **sizes, **computed)  # once more, for the listed rows
        _launch(
            kernels.settle, device, (-(-n // SETTLED["ROWS"]),), *parts, norms, reference, values, *sums, *joins,
            factor, first, n, width, class_blocks, values.stride(0), **SETTLED, CLASSES=blocks.classes,
        )  # fmt: skip
        return values, joins[0], joins[1], factor

    def norms_about(self, weight: Tensor, centre: Tensor) -> Tensor:
        return _dots(weight, weight, centre).to(centre.dtype)

    def row_dots(self, a: Tensor, b: Tensor) -> Tensor:
        return _dots(a, b, None)

    def rejoin(self, summed: Tensor, weight: Tensor, centre: Tensor | None, top: Tensor, factor: Tensor) -> None:
        arguments = summed, dense(weight), centre, top, factor, *summed.shape
        _launch(kernels.rejoin, summed.device, _grid(len(summed)), *arguments, **ROWS)

    def mean_row(
        self, summed: Tensor, weight: Tensor, centre: Tensor, sums: ClassSums, uncentred: Tensor | None, reach: bool
    ) -> MeanRow:
        if reach:
            return super().mean_row(summed, weight, centre, sums, uncentred, reach)
        others, away = sums.rest.new_empty(2, len(summed))
        arguments = summed, dense(weight), centre, sums.top, sums.rest, uncentred, others, away, *summed.shape
        _launch(kernels.mean_row, summed.device, _grid(len(summed)), *arguments, **ROWS)
        return MeanRow(others, away, None)

    def spread(
        self,
        features: Tensor,
        maximum: Tensor,
        mean: Tensor,
        weight: Tensor,
        centre: Tensor | None,
        bias: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """See :class:`.Backend`; the host does not wait for the number of chosen rows."""
        (n, m), d = features.shape, len(weight)
        span = -(-d // _SPANS)
        order = chosen.int().argsort(descending=True)
        out = torch.zeros(_SPANS, n, dtype=torch.float64, device=features.device)
        _launch(
            kernels.spread, features.device, (_AT_ONCE, -(-d // span)), dense(features), maximum, dense(mean),
            dense(weight), centre, dense(bias), order, chosen.sum(), out, n, d, m, SPAN=span, **SPREAD,
        )  # fmt: skip
        return out.sum(dim=0)


triton = Triton()


def _dots(a: Tensor, b: Tensor, centre: Tensor | None) -> Tensor:
    a, b = dense(a), dense(b)
    out = torch.empty(len(a), dtype=torch.float64, device=a.device)
    _launch(kernels.dots, a.device, _grid(len(a)), a, b, centre, out, *a.shape, **ROWS)
    return out


def _blocks(device: torch.device) -> Blocks:
    if device.type != "cuda":
        return LARGE
    memory = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)  # AMD has none
    return LARGE if memory >= _LARGE_MEMORY else SMALL


def _rounds_pairs(device: torch.device) -> bool:
    """Return whether a device has NVIDIA's instruction that rounds two numbers at once."""
    return device.type == "cuda" and torch.version.hip is None


def _programs(device: torch.device) -> int:
    """Return how many blocks of threads a device runs at once; a few if kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _grid(rows: int) -> tuple[int]:
    return (-(-rows // ROWS["ROWS"]),)


def _launch(kernel: Any, device: torch.device, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    on_device(device, kernel[grid], *arguments, **constants)

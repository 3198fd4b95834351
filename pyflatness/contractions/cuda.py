"""Load and launch the CUDA kernels, on torch's current stream of a tensor's device; only this imports ``_cuda``."""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError
from .geometry import Geometry
from .kernels import SUFFIX, Kernels, array, dense, layer_sizes, plain, span
from .precision import product, promoted_dtype
from .quantities import Forms
from .reference import ClassSums, MeanRow, takes_pairs

HALF = {torch.bfloat16: "_bf16", torch.float16: "_f16"}
"""Dtypes that some kernels take in addition to float32 and float64, accumulating in float32."""

_CAPABILITY = (8, 0)
_MISSING = (
    "the CUDA kernels are not here ({}): install pyflatness with `pip install .` from its root where "
    'a GPU, nvcc and a torch with CUDA are, or pass backend="reference", which runs on the GPU in plain torch'
)


class Cuda(Kernels):
    """Provide the operations by CUDA kernels, with matrix products of torch's libraries."""

    device = "cuda"
    memory = 416 * 2**20  # a GPU is used well only by large operations
    in_place = True

    def __init__(self) -> None:
        super().__init__("pyflatness._cuda", _MISSING)

    def engines(self) -> list[str]:
        """Return the engine of the GPU, if there is one that the kernels can run on."""
        if not torch.cuda.is_available() or self.unavailable(torch.device("cuda"), torch.float32):
            return []
        return ["CUDA"]

    def on_gpu(self, tensor: Tensor) -> bool:
        """Return True, as emulated kernels do on the CPU what they do on a GPU."""
        return True

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str:
        if self.missing:
            return self.missing
        if device.type != self.device:
            return f"the CUDA kernels run on CUDA devices, the tensors are on {device}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
            return f"the CUDA kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
        if dtype not in SUFFIX:
            return f"the CUDA kernels take float32 and float64, the tensors are {dtype}"
        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        return _refused(self._module, torch.device(device.type, index))

    def fuses_gradient(self, weight: Tensor) -> bool:
        """Return whether the head's route is by pairs of classes, with fewer operations for the host to launch."""
        return takes_pairs(*weight.shape)

    @contextmanager
    def emulated(self, compiled: Any) -> Iterator[None]:
        """Use the kernels of a module compiled for CPU tensors inside a ``with`` block (for tests)."""
        before = self._module, self.missing, self.device
        self._module, self.missing, self.device = compiled, "", "cpu"
        try:
            yield
        finally:
            self._module, self.missing, self.device = before

    def check_kind(self, name: str, tensors: Sequence[Tensor], dtypes: Collection[torch.dtype]) -> torch.dtype:
        """Return the one dtype of the tensors."""
        self.module()
        kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
        device, dtype = tensors[0].device, tensors[0].dtype
        if len(kinds) > 1 or device.type != self.device or dtype not in dtypes:
            *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
            wanted = f"{', '.join(others)} or {last}"
            raise BackendError(f"{name}: wants {wanted} tensors of one dtype on {self.device}, got {', '.join(kinds)}")
        return dtype

    def _kernel(self, name: str, *tensors: Tensor, suffix: str = "") -> Callable[..., None]:
        dtype = self.check_kind(name, tensors, SUFFIX)
        return functools.partial(on_stream, self.module(), name + (suffix or SUFFIX[dtype]), tensors[0].device)

    def exponentiate_tile(
        self,
        logits: Tensor,
        bias: Tensor | None,
        norms: Tensor,
        first: int,
        sums: ClassSums,
        rounded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`.Backend`; each row of logits and of ``rounded`` is contiguous."""
        (n, width), out = logits.shape, logits if rounded is None else rounded
        given_bias, norms = logits.new_empty(0) if bias is None else dense(bias), dense(norms)
        joining, factor = torch.empty_like(sums.top), torch.empty_like(sums.rest)
        if rounded is not None and (logits.dtype, rounded.dtype) != (torch.float32, torch.bfloat16):
            raise BackendError(
                f"exponentiate_tile: {logits.dtype} logits become float32 or bfloat16, not {rounded.dtype}"
            )
        suffix = "" if rounded is None else "_bf16"
        self._kernel("exponentiate_tile", logits, given_bias, norms, sums.maximum, suffix=suffix)(
            span(logits), logits.stride(0), array(given_bias), array(norms), len(norms), first, n, width,
            span(out), out.stride(0), *map(array, sums), array(joining), array(factor),
        )  # fmt: skip
        return joining, factor

    def norms_about(self, weight: Tensor, centre: Tensor) -> Tensor:
        weight, centre = dense(weight), dense(centre)
        d, m = weight.shape
        out = centre.new_empty(d)
        suffix = _weight_suffix("norms_about", weight, centre)
        self._kernel("norms_about", centre, suffix=suffix)(array(weight), array(centre), d, m, array(out))
        return out

    def mean_row(
        self, summed: Tensor, weight: Tensor, centre: Tensor, sums: ClassSums, uncentred: Tensor | None, reach: bool
    ) -> MeanRow:
        weight, centre = dense(weight), dense(centre)
        given = sums.rest.new_empty(0) if uncentred is None else uncentred
        (n, m), d = summed.shape, len(weight)
        out = sums.rest.new_empty(3, n)
        self._kernel("mean_row", summed, centre, suffix=_weight_suffix("mean_row", weight, summed))(
            array(summed), array(weight), array(centre), array(sums.top), array(sums.rest), array(given), n, d, m,
            array(out),
        )  # fmt: skip
        return MeanRow(out[0], out[1], out[2] if reach else None)

    def rejoin(self, summed: Tensor, weight: Tensor, centre: Tensor | None, top: Tensor, factor: Tensor) -> None:
        weight = dense(weight)
        (n, m), d = summed.shape, len(weight)
        given_centre = summed.new_empty(0) if centre is None else dense(centre)
        self._kernel("rejoin", summed, given_centre, suffix=_weight_suffix("rejoin", weight, summed))(
            array(summed), array(weight), array(given_centre), array(top), array(factor), n, d, m
        )

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
        features, mean, weight, bias = (dense(t) for t in (features, mean, weight, bias))
        (n, m), d = features.shape, len(weight)
        given_centre = features.new_empty(0) if centre is None else dense(centre)
        out, rows = features.new_empty(n, dtype=torch.float64), features.new_empty(n + 1, dtype=torch.int64)
        partial = out.new_empty(n, self.module().spread_splits(d))
        suffix = _weight_suffix("spread", weight, features)
        self._kernel("spread", features, maximum, mean, given_centre, bias, suffix=suffix)(
            array(features), array(maximum), array(mean), array(weight), array(given_centre), array(bias),
            array(chosen), n, d, m, array(rows), array(partial), array(out),
        )  # fmt: skip
        return out

    def patches(self, inputs: Tensor, geometry: Geometry) -> Tensor:
        """See :class:`.Backend`; inputs may have any strides, and may be in half precision."""
        if (geometry.kernel, geometry.stride) == ((1, 1, 1), (1, 1, 1)):
            return geometry.patches(inputs)  # no copy, or a plain one
        inputs = plain(inputs)
        self.check_kind("patches", [inputs], {**SUFFIX, **HALF})
        sizes = layer_sizes(inputs, None, geometry)
        (n, groups, channels, _), _, places, *_ = sizes
        out = inputs.new_empty(n, groups, channels * geometry.kernel_elements, math.prod(places))
        kernel = f"patches_{inputs.itemsize}"
        on_stream(self.module(), kernel, inputs.device, sizes, span(inputs), inputs.stride(), array(out))
        return out.mT

    def products(self, gradients: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None) -> Forms:
        if weight is None:
            return super().products(gradients, geometry, factor, None)
        n, groups, d, m = gradients.shape
        gradients, weight = dense(gradients), dense(weight)
        dtype = self.check_kind("products", [gradients, weight], SUFFIX)
        splits = -(-m // self.module().WEIGHTED_COLUMNS)
        totals = gradients.new_empty(n, groups * splits, 2, dtype=torch.float64)
        by_column, by_row = totals.new_empty(n, groups, m), totals.new_empty(n, groups, splits, d)
        on_stream(
            self.module(), "weighted" + SUFFIX[dtype], gradients.device, array(gradients), array(weight), n * groups,
            groups, d, m, array(totals), array(by_column), array(by_row),
        )  # fmt: skip
        squares, weighted = totals.sum(dim=1).unbind(1)
        gram_weighted = None
        if factor is not None:
            made = product(factor, gradients).flatten(1)
            gram_weighted = self.row_dots(made, made)
        columns = by_column.unflatten(2, (-1, geometry.kernel_elements)).sum(dim=3).flatten(1)
        return Forms(squares, gram_weighted, weighted, columns, by_row.sum(dim=2).flatten(1))


@functools.cache
def _refused(kernels: Any, device: torch.device) -> str:
    """Return why a device cannot run a module's kernels, such as a driver older than the build's CUDA; or ""."""
    one = torch.ones(1, dtype=torch.float32, device=device)
    out = torch.empty(1, dtype=torch.float64, device=device)
    given = (one.data_ptr(), 1), 1, (one.data_ptr(), 1), 1, 1, 1, (out.data_ptr(), 1)
    try:
        on_stream(kernels, "row_dots_f32", device, *given)
    except RuntimeError as error:
        return (
            f"the CUDA kernels do not start on {device} ({error}): its driver must have the CUDA that they were built "
            'with; update it, rebuild pyflatness with an older CUDA, or pass backend="reference"'
        )
    return ""


def on_stream(kernels: Any, name: str, device: torch.device, *arguments: Any) -> None:
    """Launch a kernel on torch's current stream of the device."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    on_device(device, getattr(kernels, name), *arguments, stream)


def on_device(device: torch.device, function: Any, *arguments: Any, **named: Any) -> Any:
    """Call a function with the device as the current one, and return its result."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return function(*arguments, **named)


def _weight_suffix(name: str, weight: Tensor, beside: Tensor) -> str:
    """Return the suffix of a kernel whose weight may be in half precision with other tensors in float32."""
    suffixes = {**SUFFIX, **HALF}
    fits = (weight.device, promoted_dtype(weight.dtype)) == (beside.device, beside.dtype)
    if not fits or weight.dtype not in suffixes:
        kinds = f"{weight.dtype} on {weight.device}, what is beside it {beside.dtype} on {beside.device}"
        raise BackendError(f"{name}: the weight is {kinds}")
    return suffixes[weight.dtype]

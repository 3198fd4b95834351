"""Call compiled kernels, on the CPU and on CUDA alike, with tensors described as the bindings take them.

A tensor is given by its address and the number of elements that may be reached from there. The memory of a tensor that
is negated lazily (``c.conj().imag``) does not hold its numbers. Such a tensor is copied by :func:`plain`,
:func:`dense` and :func:`dense_rows`, and is refused where an address is taken.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError
from .geometry import Geometry
from .reference import Backend

SUFFIX = {torch.float32: "_f32", torch.float64: "_f64"}


class Kernels(Backend):
    """Provide the operations of heads that have kernels both on the CPU and on CUDA.

    ``missing`` says why there are no kernels; it is empty if there are.
    """

    name = "compiled"

    def __init__(self, module: str, missing: str) -> None:
        self._module: Any = None
        self.missing = ""
        try:
            # This import comes after torch's, so that both use torch's OpenMP runtime and one pool of threads.
            self._module = importlib.import_module(module)
        except ImportError as error:
            self.missing = missing.format(error)

    def module(self) -> Any:
        """Return the compiled module, or raise an error with what is missing."""
        if self.missing:
            raise BackendError(self.missing)
        return self._module

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return why the kernels do not take tensors of this device and dtype; empty if they do."""
        raise NotImplementedError

    def fuses_gradient(self, weight: Tensor) -> bool:
        """Return whether the penalty of a head with this weight, float32 or float64, is computed with its gradient."""
        raise NotImplementedError

    def _kernel(self, name: str, *tensors: Tensor) -> Callable[..., Any]:
        """Return the kernel for these tensors, of one dtype, on their device."""
        raise NotImplementedError

    def _last(self) -> tuple[int, ...]:
        """Return the last arguments of every kernel."""
        return ()

    def pair_distances(self, weight: Tensor) -> Tensor:
        weight = dense(weight)
        d, m = weight.shape
        out = weight.new_empty(d, d)
        self._kernel("pair_distances", weight)(array(weight), d, m, array(out), *self._last())
        return out

    def softmax_variance(self, features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
        features, weight, bias, distances = dense_rows(features), dense(weight), dense(bias), dense(distances)
        (n, m), d = features.shape, weight.shape[0]
        out = features.new_empty(n, dtype=torch.float64)
        self._kernel("softmax_variance", features, weight, bias, distances)(
            span(features), features.stride(0), array(weight), array(bias), array(distances), n, m, d, array(out),
            *self._last(),
        )  # fmt: skip
        return out

    def exponentiate(
        self, logits: Tensor, row_norms: Tensor | None, top_value: float, maximum: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        n, d = logits.shape
        norms = logits.new_empty(0) if row_norms is None else dense(row_norms)
        rest = logits.new_empty(n, dtype=torch.float64)
        moment = rest.new_empty(0 if row_norms is None else n)
        top = logits.new_empty(n, dtype=torch.int64)
        self._kernel("exponentiate", logits, norms, maximum)(
            array(logits), array(norms), top_value, n, d, array(maximum), array(rest), array(moment), array(top),
            *self._last(),
        )  # fmt: skip
        return rest, None if row_norms is None else moment, top

    def row_dots(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = dense_rows(a), dense_rows(b)
        n, k = a.shape
        out = a.new_empty(n, dtype=torch.float64)
        kernel = self._kernel("row_dots", a, b)
        kernel(span(a), a.stride(0), span(b), b.stride(0), n, k, array(out), *self._last())
        return out

    def sigmoid_curvature(self, logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
        logits, coefficients, row_norms = dense(logits), dense(coefficients), dense(row_norms)
        n, d = logits.shape
        out = logits.new_empty(n, dtype=torch.float64)
        kernel = self._kernel("sigmoid_curvature", logits, coefficients, row_norms)
        kernel(array(logits), array(coefficients), array(row_norms), n, d, array(out), *self._last())
        return out


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor, copied only if it is negated lazily."""
    return tensor.resolve_neg()


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor, copied only if it is not contiguous, or negated lazily."""
    return tensor.resolve_neg().contiguous()


def dense_rows(matrix: Tensor) -> Tensor:
    """Return the matrix, copied only if its rows are not contiguous, or if it is negated lazily."""
    matrix = matrix.resolve_neg()
    (n, m), (step, each) = matrix.shape, matrix.stride()
    return matrix if each == 1 and step >= m and n and m else matrix.contiguous()


def array(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a contiguous tensor and its number of elements."""
    if not tensor.is_contiguous():
        raise BackendError(f"a contiguous tensor is wanted, got strides {tensor.stride()}")
    return _address(tensor), tensor.numel()


def layer_sizes(inputs: Tensor, cotangent: Tensor | None, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of a layer as the binding takes them.

    Positions are those of the cotangent if it is given, and the binding checks that they fit the inputs.
    """
    (n, channels), size = inputs.shape[:2], tuple(inputs.shape[2:])
    groups, rows = geometry.groups, 1
    places: tuple[int, ...] = geometry.places(size)
    if cotangent is not None:
        rows, places = cotangent.shape[1] // groups, tuple(cotangent.shape[2:])
        if len(cotangent) != n:
            raise BackendError(f"inputs of {n} samples, cotangents of {len(cotangent)}")
    return (n, groups, channels // groups, rows), size, places, geometry.kernel, geometry.stride, geometry.dilation


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor of any strides, and the number of elements from its first to its last."""
    if tensor.is_contiguous():
        return _address(tensor), tensor.numel()
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return _address(tensor), last + 1 if tensor.numel() else 0


def _address(tensor: Tensor) -> int:
    if tensor.is_neg():
        raise BackendError("a tensor whose memory holds its numbers is wanted, got one that is negated lazily")
    return tensor.data_ptr()

"""Find the kind of a layer: how it is a weight matrix.

A kind is a class in a file of this folder and a row of :data:`_OF_CLASS`, which makes it from a module. A module that
stands for the use of a weight in an operation is an :class:`AnyUse`, with its own attribute ``kind``.
"""

import functools
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from ... import private
from .bilinear import Bilinear
from .convolution import Convolution
from .embedding import Embedding, EmbeddingBag
from .linear import Linear, PermutedLinear, TransposedLinear
from .scale import Scale, is_scale
from .together import Together
from .transposed_convolution import TransposedConvolution

__all__ = [
    "CLASSES",
    "LINEAR",
    "SUPPORTED",
    "TRANSPOSED_LINEAR",
    "AnyUse",
    "Convolution",
    "Embedding",
    "Linear",
    "PermutedLinear",
    "Together",
    "TransposedConvolution",
    "TransposedLinear",
    "base",
    "find",
    "is_of_torch",
    "is_packed",
    "is_plain",
    "is_scale",
    "made",
    "obstacle",
]

SUPPORTED = (
    "Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d, Embedding, EmbeddingBag (sums and means), "
    "Bilinear, and the Conv1D of transformers"
)


class AnyUse(nn.Module):
    """Represent the use of a weight, ``self.weight``, outside of the modules of a class below."""

    kind: Linear | None = None  # how it is a weight matrix; None before that is known
    called_as: Linear | None = None  # the kind of its last call, if its calls may be of several kinds


@functools.lru_cache(maxsize=4096)
def made(kind: type[Linear], *sizes: Any) -> Linear:
    """Return the kind of a class with these sizes: one object for all layers that have it."""
    return kind(*sizes)


LINEAR, TRANSPOSED_LINEAR = made(Linear), made(TransposedLinear)


def _of_convolution(module: Any) -> Linear:
    padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
    sizes = tuple(module.kernel_size), tuple(module.stride), padding, tuple(module.dilation)
    return made(Convolution, *sizes, module.groups, module.padding_mode)


def _of_transposed_convolution(module: Any) -> Linear:
    sizes = module.kernel_size, module.stride, module.padding, module.output_padding, module.dilation
    return made(TransposedConvolution, *map(tuple, sizes), module.groups)


def _max_norm(module: Any) -> str:
    return "" if module.max_norm is None else "changes its weight in its forward pass (max_norm=)"


def _bag(module: Any) -> str:
    return "takes maxima over its bags (mode='max')" if module.mode == "max" else _max_norm(module)


class _Row(NamedTuple):
    """Hold a function that makes the kind, the methods that must be the class's own, and why a module has none."""

    make: Callable[[Any], Linear]
    methods: tuple[str, ...] = ("forward",)
    obstacle: Callable[[Any], str] = lambda module: ""


_CONVOLUTION = _Row(_of_convolution, ("forward", "_conv_forward"))
_TRANSPOSED_CONVOLUTION = _Row(_of_transposed_convolution, ("forward", "_output_padding"))
_OF_CLASS: dict[type[nn.Module], _Row] = {
    nn.Linear: _Row(lambda module: LINEAR),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.ConvTranspose1d: _TRANSPOSED_CONVOLUTION,
    nn.ConvTranspose2d: _TRANSPOSED_CONVOLUTION,
    nn.ConvTranspose3d: _TRANSPOSED_CONVOLUTION,
    nn.Bilinear: _Row(lambda module: made(Bilinear, module.in1_features, module.in2_features)),
    nn.Embedding: _Row(lambda module: made(Embedding, module.padding_idx), obstacle=_max_norm),
    nn.EmbeddingBag: _Row(lambda module: made(EmbeddingBag, module.mode == "mean", module.padding_idx), obstacle=_bag),
}

CLASSES = tuple(_OF_CLASS)  # torch's classes of layers that can be measured


def base(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of the table that a module has, or is derived from; None if there is none."""
    return _base_of(type(module))  # type: ignore[arg-type]  # a class is hashable


@functools.lru_cache(maxsize=1024)
def _base_of(own: type) -> type[nn.Module] | None:
    return next((kind for kind in own.__mro__ if kind in _OF_CLASS), None)


def find(module: nn.Module) -> Linear | None:
    """Return the kind of a module, also with its own forward; None for a module without a kind."""
    found = _base_of(type(module))  # type: ignore[arg-type]
    if found is not None:
        return _OF_CLASS[found].make(module)
    if isinstance(module, AnyUse):
        return module.kind
    if is_scale(module):
        return Scale(module)
    return TRANSPOSED_LINEAR if _is_transposed(module) else None


def is_plain(module: nn.Module) -> bool:
    """Return whether a module has a kind, and computes as its class does."""
    found = _base_of(type(module))  # type: ignore[arg-type]
    if found is None:
        return isinstance(module, AnyUse) or _is_transposed(module)
    return _has_methods_of(type(module), found) and not obstacle(module)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _has_methods_of(own: type, found: type) -> bool:
    return all(getattr(own, name) is getattr(found, name) for name in _OF_CLASS[found].methods)


def is_of_torch(module: nn.Module) -> bool:
    """Return whether a linear layer or convolution is torch's own, so that its output is W φ + b of its weight.

    Its class, its methods, the function that it calls and the class of its weight are torch's, and no global hook may
    change its output.
    """
    function = _FUNCTIONS.get(type(module))
    return (
        function is not None
        and type(module._parameters.get("weight")) is nn.Parameter
        and type(module).forward.__module__.startswith("torch.nn.modules.")
        and module.__dict__.keys().isdisjoint(_OF_CLASS[type(module)].methods)
        and isinstance(getattr(functional, function), BuiltinFunctionType)
        and not private.has_forward_hooks_of_all()
    )


_FUNCTIONS = {nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d"}


def obstacle(module: nn.Module) -> str:
    """Return why a module with a kind cannot be measured; empty if it can."""
    found = _base_of(type(module))  # type: ignore[arg-type]
    if found is None:
        return ""
    weight = module._parameters.get("weight")
    if weight is not None and is_packed(weight):
        library = type(weight).__module__.partition(".")[0]
        return f"keeps its weight as a {type(weight).__name__} of {library}, which no derivative is taken in"
    if weight is not None and weight.is_complex():
        return "has complex numbers"
    return _OF_CLASS[found].obstacle(module)


def is_packed(parameter: Tensor) -> bool:
    """Return whether a parameter's class replaces torch's operations, such as that of quantised weights."""
    own = type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return own and type(parameter).__module__.partition(".")[0] not in ("torch", "pyflatness")


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a layer is GPT-2's, with weight (m, d); it is found by name, as transformers may be absent."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")

"""Find the kind of a layer: how it is a weight matrix.

A kind is a class in a file of this folder and a row of :data:`_OF_CLASS`, which makes it of a module. A module that
stands for the use of a weight in an operation is a :class:`Use`, and has a kind of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from .convolution import Convolution
from .linear import Linear, TransposedLinear
from .transposed_convolution import TransposedConvolution

__all__ = [
    "CLASSES",
    "SUPPORTED",
    "Convolution",
    "Linear",
    "TransposedConvolution",
    "TransposedLinear",
    "Use",
    "base",
    "find",
    "is_plain",
]

SUPPORTED = "Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d, and the Conv1D of transformers"


class Use(nn.Module):
    """Represent the use of a weight, ``self.weight``, that is no module's of a class below.

    Attributes:
        kind: how it is a weight matrix; None as long as that is not known.
    """

    kind: Linear | None = None


_convolution = functools.lru_cache(maxsize=1024)(Convolution)
_transposed_convolution = functools.lru_cache(maxsize=1024)(TransposedConvolution)
_LINEAR, _TRANSPOSED_LINEAR = Linear(), TransposedLinear()


def _of_convolution(module: Any) -> Linear:
    padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
    sizes = tuple(module.kernel_size), tuple(module.stride), padding, tuple(module.dilation)
    return _convolution(*sizes, module.groups, module.padding_mode)


def _of_transposed_convolution(module: Any) -> Linear:
    sizes = module.kernel_size, module.stride, module.padding, module.output_padding, module.dilation
    return _transposed_convolution(*map(tuple, sizes), module.groups)


_OF_CLASS: dict[type[nn.Module], tuple[Callable[[Any], Linear], tuple[str, ...]]] = {
    nn.Linear: (lambda module: _LINEAR, ("forward",)),
    nn.Conv1d: (_of_convolution, ("forward", "_conv_forward")),
    nn.Conv2d: (_of_convolution, ("forward", "_conv_forward")),
    nn.Conv3d: (_of_convolution, ("forward", "_conv_forward")),
    nn.ConvTranspose1d: (_of_transposed_convolution, ("forward", "_output_padding")),
    nn.ConvTranspose2d: (_of_transposed_convolution, ("forward", "_output_padding")),
    nn.ConvTranspose3d: (_of_transposed_convolution, ("forward", "_output_padding")),
}
"""For a class of torch's what makes the kind of a module, and the methods by which a module computes what it says."""

CLASSES = tuple(_OF_CLASS)
"""torch's classes of layers that can be measured."""


def base(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch's that a module is, or is derived from; None for none of the table."""
    return next((kind for kind in type(module).__mro__ if kind in _OF_CLASS), None)


def find(module: nn.Module) -> Linear | None:
    """Return the kind of a module, also of one whose forward is its own; None for one of no kind."""
    if isinstance(module, Use):
        return module.kind
    found = base(module)
    if found is not None:
        return _OF_CLASS[found][0](module)
    return _TRANSPOSED_LINEAR if _is_transposed(module) else None


def is_plain(module: nn.Module) -> bool:
    """Return whether a module is of a kind and computes what its class says."""
    found = base(module)
    if found is None:
        return isinstance(module, Use) or _is_transposed(module)
    methods = _OF_CLASS[found][1]
    return all(getattr(type(module), method) is getattr(found, method) for method in methods)


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a layer is GPT-2's: a linear layer that keeps its weight as (m, d).

    It is known by its name, since transformers may be absent.
    """
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")

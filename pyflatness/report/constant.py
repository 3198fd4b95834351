"""Warn where a measured number is added to a loss, which it gives no gradient to."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_SUMS = ("add", "add_", "__radd__", "__iadd__", "sub", "sub_", "__rsub__", "__isub__")  # names of torch's functions


class Constant(float):
    """Represent a number that is no function of the weights, also multiplied by another number.

    Torch asks it before it calculates with it, and a sum with a tensor that has a graph gives a warning.
    """

    def __mul__(self, other: Any) -> Any:
        """Return a number that warns as this one does."""
        return _marked(super().__mul__(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        """Return a number that warns as this one does."""
        return _marked(super().__truediv__(other))

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what torch calculates with a plain number in this one's place."""
        given = [one.real if isinstance(one, Constant) else one for one in args]  # float() fails in torch.compile
        named = {key: one.real if isinstance(one, Constant) else one for key, one in (kwargs or {}).items()}
        found = function(*given, **named)
        if function.__name__ in _SUMS and isinstance(found, Tensor) and found.requires_grad and torch.is_grad_enabled():
            warnings.warn(
                "a measured number is added to a tensor with a graph: it has no gradient, and does not change the "
                "training. pf.FlatnessPenalty and pf.flatness_penalty are terms of a loss; where a constant is meant, "
                "add float(estimate)",
                stacklevel=2,
            )
        return found


def _marked(found: Any) -> Any:
    return found if found is NotImplemented else Constant(found)

"""Warn where a measured number is added to a loss, which it gives no gradient to."""

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import Self

_SUMS = ("add", "add_", "__radd__", "__iadd__", "sub", "sub_", "__rsub__", "__isub__")  # names of torch's functions
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _marking(calculate: _Method) -> _Method:
    """Return a method of ``float`` whose result is a :class:`Constant`."""

    def marked(self: float, *others: Any) -> Any:
        found = calculate(self, *others)
        return found if found is NotImplemented else Constant(found)

    return cast(_Method, marked)


class Measured(float):
    """Represent a number that is no function of the weights; sums and products with numbers are :class:`Constant`.

    Torch calls :meth:`__torch_function__` before it calculates with one, which warns of a sum with a tensor that has a
    graph.
    """

    __add__ = __radd__ = _marking(float.__add__)
    __sub__, __rsub__ = _marking(float.__sub__), _marking(float.__rsub__)
    __mul__ = __rmul__ = _marking(float.__mul__)
    __truediv__, __rtruediv__ = _marking(float.__truediv__), _marking(float.__rtruediv__)
    __neg__, __abs__ = _marking(float.__neg__), _marking(float.__abs__)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what torch calculates with a plain number in this one's place."""
        given = [one.real if isinstance(one, Measured) else one for one in args]  # float() fails in torch.compile
        named = {key: one.real if isinstance(one, Measured) else one for key, one in (kwargs or {}).items()}
        found = function(*given, **named)
        if function.__name__ in _SUMS and isinstance(found, Tensor) and found.requires_grad and torch.is_grad_enabled():
            warnings.warn(
                "a measured number is added to a tensor with a graph: it has no gradient, and does not change the "
                "training. pf.FlatnessPenalty and pf.flatness_penalty are terms of a loss; where a constant is meant, "
                "add float(estimate)",
                stacklevel=2,
            )
        return found


class Constant(Measured):
    """Represent what is calculated from measured numbers; copied and pickled, it is a number without this package."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Return what any reader makes a number of.

        ``torch.save`` pickles by protocol 2, and ``torch.load(weights_only=True)`` can call what makes a tensor, but
        nothing that makes a float.
        """
        if operator.index(protocol) == 2:
            return torch.tensor(self.real, dtype=torch.float64, device="cpu").__reduce_ex__(2)
        return float, (self.real,)

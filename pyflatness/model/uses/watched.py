"""Watch the operations of a forward pass with a weight, by a tensor subclass with ``__torch_function__``.

A linear operation with a watched weight is done by its stand-in, see :mod:`.uses`, so that hooks see it. Views, copies
and casts of the weight are watched too. In every other operation a watched tensor is used as it is: it is a leaf that
requires gradients, and a path to it in the outputs' graph shows that the weight was used otherwise.
"""

import copy
import functools
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import functional as F

from ... import private
from ...errors import InputError
from . import operations
from .operations import LinearOperation, each_of

if TYPE_CHECKING:
    from .use import Source

VIEWS = {"t", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "permute", "view", "reshape", "flatten"}
VIEWS |= {"unflatten", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "select", "narrow", "unsqueeze"}
VIEWS |= {"squeeze", "expand", "expand_as", "view_as", "reshape_as", "__getitem__", "adjoint"}
TRANSPOSES = {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
COPIES = {"contiguous", "clone", "to", "type", "type_as", "float", "double", "half", "bfloat16"}


class Watched(Tensor):
    """Represent a weight, or a view or copy of it."""

    source: "Source"
    part: Tensor | None  # the same view of the parameter, detached; None if it was computed from the parameter
    version: int  # of the values at the beginning; a copy that is modified later is another weight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do an operation that has such a tensor among its arguments."""
        kwargs = kwargs or {}
        inner = _without_asking(func)
        if inner is not None:
            return inner(*args, **kwargs)
        with private.without_subclasses():
            found = operations.read(func, args, kwargs, cls)
            if isinstance(found, LinearOperation):
                result = found.weight.source.used(found)  # type: ignore[attr-defined]
                if result is not None:
                    return result
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if "leaf Variable that requires grad" in str(error):
                    raise _changed_in_place(func, args) from error
                raise
            return _followed(func, args, kwargs, result, found if isinstance(found, str) else "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy of the parameter itself, for modules that are copied in the forward pass."""
        return copy.deepcopy(self.source.parameter, memo)


def view_of(weight: Watched) -> Tensor | None:
    """Return the detached view of the parameter with the same values as a tensor; None if its values differ."""
    if weight.part is None or weight.untyped_storage()._cdata == weight.part.untyped_storage()._cdata:
        return weight.part
    return weight.part if weight._version == weight.version else None


def leaf(weight: Tensor, source: "Source") -> tuple[Watched, Node]:
    """Return a watched tensor in the memory of a weight, and its node in autograd's graph."""
    values = weight.detach()
    made: Watched = private.as_subclass(Watched, values, True)
    vars(made).update(vars(weight))  # some libraries' modules read attributes of parameters
    made._is_param = True  # for isinstance(…, nn.Parameter)
    made.source, made.part, made.version = source, values, values._version
    with private.without_subclasses():
        return made, get_gradient_edge(made).node


def _changed_in_place(func: Any, args: tuple[Any, ...]) -> InputError:
    """Return the error for an operation that modifies a weight in place, so that it has no derivative."""
    weight = next(part for several in args for part in each_of(several) if isinstance(part, Watched))
    name = weight.source.name
    why = f"the forward pass changes its weight in place, by {getattr(func, '__name__', func)}"
    return InputError(
        f"layer {name!r}: {why}, so that there is no derivative in it; write it out of place (w = w.clamp(…)), under "
        "torch.no_grad(), or change the weight before the call"
    ).about({name: why})


def _followed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, why: str) -> Any:
    """Return the result of a function, watched if it is still the weight; ``why`` it is no layer's is for notes."""
    given = [part for several in (*args, *kwargs.values()) for part in each_of(several) if isinstance(part, Watched)]
    if not given or not _has_numbers(result):
        return result
    weight, name = given[0], getattr(func, "__name__", "")
    view = view_of(weight)
    if len(given) == 1 and view is not None:
        if name in COPIES and result.shape == weight.shape:
            return _as_watched(result, weight.source, view, result._version)
        if name in VIEWS or func in TRANSPOSES:
            seen = [view if part is weight else part for part in args]
            parts = func(*seen, **kwargs)
            if isinstance(result, Tensor):
                return _as_watched(result, weight.source, parts, weight.version)
            each = zip(result, parts, strict=True)
            return type(result)(_as_watched(one, weight.source, part, weight.version) for one, part in each)
    for one in given:
        if one.source.effective and isinstance(result, Tensor) and result.numel() == one.source.parameter.numel():
            return _as_watched(result, one.source, None, 0)
        one.source.note(f"{name.strip('_')} {why}".rstrip())
    return result


def _as_watched(result: Tensor, source: "Source", part: Tensor | None, version: int) -> Watched:
    made = result.as_subclass(Watched)
    made.source, made.part, made.version = source, part, version
    return made


def _has_numbers(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return bool(result) and all(map(_has_numbers, result))
    return isinstance(result, Tensor) and result.is_floating_point()


@functools.cache
def _without_asking(func: Any) -> Any:
    """Return a copy of attention's Python function that does not ask its arguments; None for other functions."""
    if func is not F.multi_head_attention_forward:
        return None
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    return types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)

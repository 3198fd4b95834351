"""Keep a layer's call in the user's own forward pass: its input, its weight, and where its output is.

Hooks on the model say when a forward pass begins and ends, so that what activation checkpointing computes again in a
backward pass is not kept.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize

from ..errors import InputError
from ..model import data, layers
from ..model.calling import version
from ..passes.recorder import RecordedCall, with_own_history
from ..session import untraced

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def not_compiled(hook: _Hook) -> _Hook:
    """Return a hook that torch.compile does not look into."""
    return untraced(hook)  # type: ignore[no-any-return]


class LayerCalls:
    """Hook a model and one of its layers, and keep the layer's calls of the model's last forward pass with a graph.

    A copy of it, as of a model that is copied with its hooks, keeps nothing.

    Args:
        in_use: whether it keeps calls.

    Attributes:
        calls: of the layer, whose inputs have their graph.
        weight: the effective one of the last call, of the shape that the layer keeps.
        version: of the weight's contents in that call, as counted by torch.
        samples: of the batch, -1 if that is not known.
    """

    def __init__(self, *, in_use: bool = True) -> None:
        self.calls: list[RecordedCall] = []
        self.weight: Tensor | None = None
        self.version, self.samples, self._running, self._in_use = 0, -1, False, in_use
        self._handles: list[Any] = []
        self._cached = contextlib.ExitStack()

    def hook(self, model: nn.Module, layer: nn.Module) -> None:
        """Hook the user's own module, without wrappers, and a layer of it.

        A layer may be the model itself: its call is kept between the model's first hook and its last.
        """
        self._handles += [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            layer.register_forward_hook(self._keep, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        if parametrize.is_parametrized(layer):  # its weight is made anew whenever it is asked for
            self._handles.append(layer.register_forward_pre_hook(self._enter))
            self._handles.append(layer.register_forward_hook(self._leave, always_call=True))

    def __reduce__(self) -> Any:
        return _unused, ()

    def remove(self) -> None:
        """Take the hooks away and forget the calls."""
        try:
            self._take_off()
        finally:  # once more, where an interrupt cut that off
            self._take_off()

    def _take_off(self) -> None:
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        self._forget()

    def _forget(self) -> None:
        self.calls, self.weight = [], None

    @not_compiled
    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forget()
        self._running = self._in_use and torch.is_grad_enabled()
        self.samples = data.size((args, kwargs))

    @not_compiled
    def _end(self, *_: Any) -> None:
        self._running = False

    @not_compiled
    def _enter(self, *_: Any) -> None:
        self._cached.enter_context(parametrize.cached())

    @not_compiled
    def _leave(self, *_: Any) -> None:
        self._cached.close()

    @not_compiled
    def _keep(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        kind = layers.kind_of(layer)
        inputs = kind.inputs_of(args, kwargs) if self._running else None
        if inputs is None or not isinstance(output, Tensor) or not output.requires_grad:
            return None
        own = with_own_history(output)
        shape = torch.empty_like(own, device="meta", requires_grad=False)
        weight = self.weight = layer.weight
        self.version = version(weight)
        self.calls.append(RecordedCall(inputs, version(inputs), get_gradient_edge(own), None, shape, kind))
        return None if own is output else own


@contextlib.contextmanager
def graph_as_recorded() -> Iterator[None]:
    """Raise a clear error where the graph of the user's forward pass is gone, or was modified in place, inside.

    Raises:
        InputError: with what to do.
    """
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise InputError(
                "outputs: a backward pass has freed their graph; call the penalty before backward() and add it to the "
                "loss, or keep the graph by backward(retain_graph=True)"
            ) from error
        if "modified by an inplace operation" in str(error):
            raise InputError(
                "outputs: a weight or another tensor that the forward pass used was modified in place after it; call "
                f"the penalty before optimizer.step(), or make another forward pass ({error})"
            ) from error
        raise


def _unused() -> LayerCalls:
    """Return one for the hooks of a copy."""
    return LayerCalls(in_use=False)

"""Find layers whose weight the model uses outside of the layer too, as ``F.linear(x, self.embed.weight)`` does.

A layer's value has the derivative through the layer's calls. In one forward pass its weight's place holds a watched
tensor (:mod:`.watched`) whenever the layer itself is not running, and a path to that in the outputs' graph is another
use of the weight.
"""

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from . import watched
from .operations import Operation
from .use import Use

_known: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def of(layer: nn.Module) -> str:
    """Return in what else the weight of a layer was used; empty if that is nothing, as far as is known."""
    return _known.get(layer, "")


@contextlib.contextmanager
def watching(modules: Mapping[str, nn.Module]) -> Iterator[list["_Besides"]]:
    """Watch the weights of layers, other than stand-ins, for what happens to them outside of these, inside."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(_Besides(name, module).watching())
            for name, module in modules.items()
            if not isinstance(module, Use) and type(module._parameters.get("weight")) is nn.Parameter
        ]


def note(watches: Collection["_Besides"], nodes: Collection[Node]) -> None:
    """Take in which of the weights that were watched have a path to the outputs, in whose graph these nodes are."""
    for watch in watches:
        _known.pop(watch.module, None)
        if watch.leaf in nodes:
            _known[watch.module] = ", ".join(watch.functions) or "what torch does not tell of"


class _Besides:
    """Stand for the uses of a layer's weight outside of the layer; see :class:`.watched.Source`."""

    effective = False
    route: Any = None
    attached: Mapping[str, object] = {}

    def __init__(self, name: str, module: nn.Module) -> None:
        parameter = module._parameters["weight"]
        assert parameter is not None
        self.name, self.module = name, module
        self.parameter: Tensor = parameter
        self.functions: dict[str, None] = {}
        self._held: Tensor | None
        self.leaf: Node | None
        self._held, self.leaf = watched.leaf(parameter, self)

    @contextlib.contextmanager
    def watching(self) -> Iterator["_Besides"]:
        """Watch inside."""
        own = self.module.register_forward_pre_hook(lambda *_: self._replace(self._held, self.parameter), prepend=True)
        others = self.module.register_forward_hook(
            lambda *_: self._replace(self.parameter, self._held), always_call=True
        )
        self._replace(self.parameter, self._held)
        try:
            yield self
        finally:
            own.remove()
            others.remove()
            self._replace(self._held, self.parameter)
            self._held = self.leaf = None  # the graph's node has the tensor, which has this: nothing would free them

    def is_attached(self, part: Tensor) -> bool:
        """Return False: no part is watched by itself."""
        return False

    def used(self, operation: Operation) -> Tensor | None:
        """Have every operation done as it is."""
        return None

    def note(self, name: str) -> None:
        """Take in that the weight took part in a function."""
        self.functions[name] = None

    def _replace(self, weight: Tensor | None, other: Any) -> None:
        """Put another weight in the place of one; a third, which the forward pass has put there itself, stays."""
        if self.module._parameters.get("weight") is weight:
            self.module._parameters["weight"] = other

"""Note the layers whose weight the model also uses outside of the layer, as in ``F.linear(x, self.embed.weight)``.

A layer's value has the derivative through the layer's calls; :mod:`pyflatness.passes.accounting` finds the other uses.
"""

import weakref
from collections.abc import Mapping

from torch import nn

_known: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def of(layer: nn.Module) -> str:
    """Return the functions that use a layer's weight outside of the layer; empty if none is known."""
    return _known.get(layer, "")


def note(found: Mapping[nn.Module, str]) -> None:
    """Note for layers the functions that use their weight outside of the layer; empty for none."""
    for layer, functions in found.items():
        if functions:
            _known[layer] = functions
        else:
            _known.pop(layer, None)

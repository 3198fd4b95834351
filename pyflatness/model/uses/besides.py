"""Keep of which layers the model uses the weight outside of the layer too, as ``F.linear(x, self.embed.weight)`` does.

A layer's value has the derivative through the layer's calls; :mod:`pyflatness.passes.accounting` finds the other uses.
"""

import weakref
from collections.abc import Mapping

from torch import nn

_known: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def of(layer: nn.Module) -> str:
    """Return in what else the weight of a layer was used; empty if that is nothing, as far as is known."""
    return _known.get(layer, "")


def note(found: Mapping[nn.Module, str]) -> None:
    """Keep for layers in which functions their weight takes part besides; empty: in none."""
    for layer, functions in found.items():
        if functions:
            _known[layer] = functions
        else:
            _known.pop(layer, None)

"""Find layers whose input nothing else takes, so that a backward pass makes wᵀ δ there on its way.

The gradient in a layer's input is wᵀ δ, carried through the layer, and what comes by other ways. Where there are none,
|R M|² = |wᵀ M|² is had from it without another product: it is the same for any R with RᵀR = w wᵀ.
"""

import re

import torch
from torch.autograd.graph import GradientEdge

from .runner import Run

_OF_A_LAYER = re.compile(
    r"(Addmm|Mm|Linear|MkldnnLinear|\w*Convolution|View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze)Backward\d+"
)
"""Names of autograd's nodes from the output of a layer to its input."""


def edge(run: Run, name: str, dtype: torch.dtype) -> GradientEdge | None:
    """Return where wᵀ δ of a pointwise layer with weights of a dtype arrives, alone; None if it does so nowhere.

    The layer has to run once, in that dtype, and no hook may change what arrives.
    """
    calls = run.calls(name)
    if len(calls) != 1 or calls[0].input_edge is None or calls[0].inputs._backward_hooks:
        return None
    (call,), found = calls, calls[0].input_edge
    if not call.inputs.dtype == call.output.dtype == dtype:
        return None
    node, number = call.edge.node, call.edge.output_nr
    while node != found.node:
        sources = [(source, place) for source, place in node.next_functions if source is not None]
        if len(sources) != 1 or not _OF_A_LAYER.fullmatch(node.name()):
            return None
        ((node, number),) = sources
        if len(run.users.get(node, ())) != 1:
            return None
    return found if number == found.output_nr else None

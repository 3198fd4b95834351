"""Send a cotangent backward as ``torch.autograd.grad`` does, without its checks of the cotangent.

These load SymPy in the first call of a process, which takes longer than most measurements, and take longer at every
call than the call into autograd's engine.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import private


def gradients(
    outputs: Sequence[Tensor | GradientEdge],
    cotangents: Sequence[Tensor],
    edges: Sequence[GradientEdge],
    *,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return gradients at edges for cotangents of the outputs' shapes, None without a path; the graph is kept."""
    return private.run_backward(
        tuple(outputs), tuple(cotangents), True, create_graph, tuple(edges), True, accumulate_grad=False
    )

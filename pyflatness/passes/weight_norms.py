"""Have weight_norm written out where second derivatives are taken in what it is made of."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode


class WrittenOut(TorchFunctionMode):
    """Write weight_norm out, inside: the second derivative of torch's kernel in its direction is wrong (2.13).

    Torch leaves a mode out while it runs a backward pass, so that weight_norm is another function when activation
    checkpointing calls it again there, which torch notices.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch._weight_norm:
            return func(*args, **(kwargs or {}))
        direction, size, dim = (*args, *(kwargs or {}).values(), 0)[:3]
        return direction * (size / torch.norm_except_dim(direction, 2, dim))


def are_among(nodes: Iterable[Node]) -> bool:
    """Return whether torch's kernel of weight_norm is among some nodes of autograd's graph."""
    return any(node.name().startswith("WeightNorm") for node in nodes)

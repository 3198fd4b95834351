"""What the operators of this room share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def one_by_one(operator: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Any]:
    """Return the rule by which ``torch.func.vmap`` takes an operator: a call for each member of the batch."""

    def rule(info: Any, in_dims: Sequence[int | None], *given: Any) -> tuple[Any, Any]:
        def one(k: int) -> Sequence[torch.Tensor]:
            taken = zip(given, in_dims, strict=True)
            return operator(*(value if dim is None else value.select(dim, k) for value, dim in taken))

        found = [torch.stack(parts) for parts in zip(*map(one, range(info.batch_size)), strict=True)]
        return tuple(found), (0,) * len(found)

    return rule

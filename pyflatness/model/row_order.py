"""Find rows of one tensor among those of another that shares its memory."""

from typing import Any

import torch
from torch import Tensor


def order_in_memory(outputs: Tensor, output: Tensor) -> Tensor | None:
    """Return the indices of the outputs' rows among a layer's rows; None unless each is there once.

    An empty tensor says that the rows are the same, in the same order.
    """
    same = torch.empty(0, dtype=torch.int64, device="cpu")
    if _layout(outputs) == _layout(output):
        return same
    wanted, present = _places(outputs), _places(output)
    if wanted.equal(present):
        return same
    sorted_places, index = present.sort()
    found = torch.searchsorted(sorted_places, wanted).clamp_max(len(present) - 1)
    if not sorted_places[found].equal(wanted) or len(wanted.unique()) < len(wanted):
        return None
    return index[found]


def _layout(rows: Tensor) -> tuple[Any, ...]:
    return rows.storage_offset(), rows.shape[:-1], rows.stride()[:-1]


def _places(rows: Tensor) -> Tensor:
    """Return where in memory the rows (all dimensions but the last) begin, in row-major order."""
    places = torch.tensor([rows.storage_offset()], dtype=torch.int64, device="cpu")
    for count, stride in zip(rows.shape[:-1], rows.stride()[:-1], strict=True):
        places = (places.unsqueeze(1) + torch.arange(count, device="cpu") * stride).flatten()
    return places

"""Find the model's input in the graph: the tensor of a batch by which outputs are differentiated, if there is one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import calling, data, kinds, walk


class Inputs:
    """Record, as ``tensor``, a batch's first floating-point tensor that is no target, by a ``forward``.

    Where there is none, as for tokens, the graph begins at embeddings: what layers take of one is then one tensor.
    """

    def __init__(self, forward: calling.Forward, by_user: bool) -> None:
        self._forward, self._by_user = forward, by_user
        self.tensor: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """See :data:`.calling.Forward`."""
        found = first_floating(batch, self._by_user)
        if found is None:
            self.tensor = None
            for module in walk.modules(model):
                kind = kinds.find(module)
                if kind is not None and kind.tokens:
                    module.weight.requires_grad_(True)
        else:
            self.tensor = found.detach().requires_grad_()
            batch = replaced(batch, found, self.tensor.clone())  # a leaf itself could not be changed in place
        return calling.run(model, batch, self._forward)


def first_floating(batch: Any, by_user: bool) -> Tensor | None:
    """Return the first floating-point tensor among the inputs of a batch that has its samples in dimension 0."""
    samples = data.size(batch)
    if isinstance(batch, data.Whole):  # which of its tensors are inputs is not known
        return None
    if isinstance(batch, Mapping):
        parts = [part for key, part in batch.items() if key != "labels"]
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        parts = [*(batch[:-1] if by_user else batch[:1])]
    else:
        parts = [batch]
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and tensor.is_floating_point() and tensor.ndim and len(tensor) == samples:
            found.append(tensor)
        return tensor

    data.map_tensors(look, parts)
    return found[0] if found else None


def replaced(batch: Any, tensor: Tensor, other: Tensor) -> Any:
    """Return the batch with another tensor in the place of one."""
    return data.map_tensors(lambda held: other if held is tensor else held, batch)

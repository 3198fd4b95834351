"""Find the model's input in the graph: the tensor of a batch in which outputs are differentiated, if there is one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import calling, data, kinds, walk


class Inputs:
    """Call the model by ``forward``, with the batch's first floating-point input as a leaf of the graph, ``tensor``.

    If there is none, as for tokens, ``tensor`` is None, and the graph begins at the weights of embeddings.
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
            batch = replaced(batch, found, self.tensor.clone())  # since a leaf itself cannot be changed in place
        return calling.run(model, batch, self._forward)


def first_floating(batch: Any, by_user: bool) -> Tensor | None:
    """Return the first floating-point tensor among the inputs of a batch that has its samples in dimension 0."""
    samples = data.size(batch)
    if isinstance(batch, data.Whole):  # it is not known which of its tensors are inputs
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
    """Return the batch with ``tensor`` replaced by ``other``."""
    return data.map_tensors(lambda held: other if held is tensor else held, batch)

"""Find the outputs in a model's return value: one tensor, or several put into one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import private
from ..errors import InputError

_WAY_OUT = "pass forward=, a function (model, batch) -> (outputs, targets) that returns the outputs that are meant"


def single(outputs: Any) -> Tensor | None:
    """Return the logits of a model: a tensor, ``logits`` by key or attribute, or a tuple's only floating-point tensor.

    That tensor comes first; parameters and tensors of integers may follow. None if it is not clear which is meant.
    """
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if not isinstance(outputs, (tuple, list)) or not outputs or not isinstance(outputs[0], Tensor):
        return None
    others = [part for part in outputs[1:] if isinstance(part, Tensor) and not isinstance(part, nn.Parameter)]
    return None if any(part.is_floating_point() for part in others) else outputs[0]


def meant(outputs: Any, loss_is_known: bool) -> Tensor | None:
    """Return the argument of a loss, see :func:`single`; a loss of the user's may want all fields of a named tuple."""
    return single(outputs if loss_is_known or not isinstance(outputs, tuple) else tuple(outputs))


def refusal(outputs: Any, way_out: str = _WAY_OUT) -> InputError:
    """Return the error for outputs of which it is not clear which tensor is meant."""
    found = [leaf for leaf in private.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in found)
    if not found:
        return InputError(
            f"model: no tensor, tuple or object with `logits` came out, got {type(outputs).__name__}; {way_out}"
        )
    several = "several tensors" if len(found) > 1 else "a tensor by another name than `logits`"
    return InputError(
        f"model: it returns a {type(outputs).__name__} with {several}, {shapes}, and the loss takes one; {way_out}"
    )


@dataclass(frozen=True)
class SideBySide:
    """Represent several outputs of a model as one tensor (n, C), for a loss that takes them all."""

    structure: Any  # of what the model returned, as :mod:`torch.utils._pytree` has it
    shapes: tuple[torch.Size, ...]  # of each output, without the samples

    @classmethod
    def of(cls, outputs: Any) -> "tuple[SideBySide, Tensor]":
        """Return the outputs' places in one tensor, and this tensor, (n, C)."""
        leaves, structure = private.tree_flatten(outputs)
        floating = all(isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim for leaf in leaves)
        if not leaves or not floating or len({len(leaf) for leaf in leaves}) > 1:
            raise refusal(outputs)
        whole = torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves], dim=1)
        return cls(structure, tuple(leaf.shape[1:] for leaf in leaves)), whole

    def apart(self, whole: Tensor) -> Any:
        """Return the outputs in the model's own structure, from (n, C) for any number of samples."""
        parts = whole.split([shape.numel() for shape in self.shapes], dim=1)
        leaves = [part.reshape(len(part), *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return private.tree_unflatten(leaves, self.structure)

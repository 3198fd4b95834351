"""Replace a module's ``forward``, while its weights are watched, by torch functions that watched weights see."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import private
from ...errors import InputError
from .watched import Watched


class Replaced:
    """Serve as the base of replacements of a module's ``forward``, for its weights with these names."""

    def __init__(self, module: nn.Module, names: Sequence[str], what: str) -> None:
        self._module, self._names, self._what, self._is_checked = module, names, what, False

    def watched(self) -> Iterator[Watched]:
        """Yield the weights that are watched; without any, the module's own forward runs."""
        held: Iterable[object] = (self._module._parameters.get(name) for name in self._names)
        return (weight for weight in held if isinstance(weight, Watched))

    def refusal(self, why: str) -> InputError:
        """Return the error that leaves out the stand-ins of the weights, with the reason."""
        names = [name for weight in self.watched() for name in weight.source.attached]
        listed = ", ".join(map(repr, names[:2])) + (", …" if len(names) > 2 else "")
        return InputError(f"layer {listed}: {why}").about(dict.fromkeys(names, why))

    def check(self, mine: Callable[..., Any], own: Callable[..., Any], *given: Any) -> None:
        """Raise unless both compute the same for these arguments; only the first call is checked."""
        leaves = private.tree_leaves(given)
        if self._is_checked or any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return
        detached = private.tree_map_only(Tensor, Tensor.detach, given)
        with private.without_functions(), torch.no_grad():  # stand-ins and watchers do not see this
            pairs = zip(*(private.tree_leaves(compute(*detached)) for compute in (mine, own)), strict=True)
            if not all(_agree(found, expected) for found, expected in pairs):
                raise self.refusal(f"{self._what} computes something else than what is measured in its place")
        self._is_checked = True


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Return whether two results are the same up to rounding, in entries where ``expected`` is finite."""
    tolerance = max(1e-3, 8 * torch.finfo(expected.dtype).eps)
    finite = expected.isfinite()
    found, expected = found.where(finite, 0), expected.to(found.dtype).where(finite, 0)
    return torch.allclose(found, expected, tolerance, tolerance * float(expected.abs().amax()))

"""Apply backward passes to several vectors at once."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .. import interrupts, private
from ..messages import is_out_of_memory
from .guards import agree


class LinearMap:
    """Apply a linear map, a backward pass, to several vectors at once by ``torch.func.vmap``, if that is right.

    Some operations have no batching rule, and torch's has been wrong for some (the double backward of ``torch.cdist``).
    So the first results are compared with the image of a linear combination of all vectors; if they differ, vectors
    go one after the other. A ``known`` map has tested rules and is not compared.
    """

    def __init__(self, one: Callable[[Tensor], tuple[Tensor | None, ...]], *, known: bool = False) -> None:
        self._one, self._at_once, self._compared = one, True, known

    def __call__(self, vectors: Tensor) -> list[Tensor | None]:
        """Return the images (k, …) of vectors (k, …)."""
        found = self._of_all(vectors) if len(vectors) > 1 and self._at_once else None
        if found is not None and not self._compared:
            self._at_once, self._compared = self._agrees(vectors, found), True
        if found is not None and self._at_once:
            return found
        each = [self._one(vector) for vector in vectors]
        return [None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)]

    def _of_all(self, vectors: Tensor) -> list[Tensor | None] | None:
        """Return the images by ``torch.func.vmap``; None if it does not take the map."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # not every operation batches
                return private.mapped(self._one, vectors)
        except RuntimeError as error:
            interrupts.pass_on(error)
            if is_out_of_memory(error):
                raise
            self._at_once = False  # an error of the map itself comes again with one vector
            return None

    def _agrees(self, vectors: Tensor, found: list[Tensor | None]) -> bool:
        """Return whether the image of a combination of vectors is that combination of their images."""
        coefficients = torch.arange(1, len(vectors) + 1, dtype=torch.float64, device=vectors.device).cos()
        pairs = []
        for one, several in zip(self._one(_combined(coefficients, vectors)), found, strict=True):
            if one is not None and several is not None:
                pairs.append((one, _combined(coefficients, several), torch.finfo(one.dtype).eps ** 0.5))
            elif one is not several:
                return False
        # One wait for the device if all agree, as they nearly always do; NaN fails here, and is compared again.
        fine = [
            ((one - several).abs().amax() <= share * one.abs().amax()).to(vectors.device)
            for one, several, share in pairs
            if one.numel()
        ]
        return bool(torch.stack(fine).all() if fine else True) or all(agree(*pair) for pair in pairs)


def _combined(coefficients: Tensor, vectors: Tensor) -> Tensor:
    """Return Σ_k c_k v_k."""
    combined: Tensor = torch.tensordot(coefficients.to(vectors.dtype), vectors, dims=1)
    return combined

"""Signals held back until there are several, for layers that are better contracted so."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .layer import Share, Signals

_MUCH = 2**22  # bytes that come and go, from which on it matters where to
_BLOCK = 2**25 - 2**16  # bytes; just below the largest that glibc takes into account


class Stacked:
    """A contraction of several signals at a time, where one alone is little work, or zero at most places.

    Args:
        contract: of :meth:`.layer.WeightGradients.of_several`.
        count: how many signals at a time.
    """

    def __init__(self, contract: Callable[[Sequence[Tensor], Tensor | None], Share], count: int) -> None:
        self._contract, self._count = contract, count
        self._held: list[tuple[Tensor, Tensor | float | None]] = []

    def __call__(self, signal: Signals, sign: Tensor | float | None = None) -> Share | None:
        """The share of the signals held back and this one; None if this one is held back too."""
        (delta,) = signal
        if not self._held and self._count * delta.numel() * delta.element_size() > _MUCH:
            _keep_freed()
        self._held.append((delta, sign))
        return self.rest() if len(self._held) == self._count else None

    def rest(self) -> Share | None:
        """That of the signals held back; None if there are none."""
        if not self._held:
            return None
        deltas, signs = zip(*self._held, strict=True)
        self._held.clear()
        n, sign = len(deltas[0]), None
        if any(one is not None for one in signs):
            each = deltas[0].new_ones(n, dtype=torch.float64)
            sign = torch.cat([each if one is None else each * one for one in signs])
        share = self._contract(deltas, sign)
        return Share(share.values.unflatten(1, (-1, n)).sum(dim=1), share.parts)


def _keep_freed() -> None:
    """Let the process keep what is freed, up to 64 MiB: the next signals take it again, else by a fault a page.

    glibc gives what is free at the end of its heap back from twice the size of the largest block that it unmapped so
    far, and this one, of which no page is touched, is the largest that counts. Elsewhere nothing happens.
    """
    torch.empty(_BLOCK, dtype=torch.uint8, device="cpu")

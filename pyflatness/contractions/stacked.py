"""Signals held back until there are several, for layers that are better contracted so."""

from collections.abc import Callable

import torch
from torch import Tensor

from .layer import Share, Signals


class Stacked:
    """A contraction of several signals at a time, where one alone is little work, or zero at most places.

    They are copied: what backward passes give may be part of a much larger tensor, and when tensors of this size are
    kept and freed in turn, the C library gives their pages back each time, which costs more than the copies.

    Args:
        contract: of :meth:`.layer.WeightGradients.of_several`.
        buffer: of a signal, memory for all that are contracted at a time.
    """

    def __init__(self, contract: Callable[[Tensor, Tensor | None], Share], buffer: Callable[[Tensor], Tensor]) -> None:
        self._contract, self._make = contract, buffer
        self._signs: list[Tensor | float | None] = []

    def __call__(self, signal: Signals, sign: Tensor | float | None = None) -> Share | None:
        """The share of the signals held back and this one; None if this one is held back too."""
        (delta,) = signal
        if not self._signs:
            self._buffer = self._make(delta)
        self._buffer[len(self._signs)].copy_(delta)
        self._signs.append(sign)
        return self.rest() if len(self._signs) == len(self._buffer) else None

    def rest(self) -> Share | None:
        """That of the signals held back; None if there are none."""
        if not self._signs:
            return None
        signals, signs = self._buffer[: len(self._signs)], self._signs
        self._signs = []
        count, n = signals.shape[:2]
        sign = None
        if any(one is not None for one in signs):
            each = signals.new_ones(n, dtype=torch.float64)
            sign = torch.cat([each if one is None else each * one for one in signs])
        share = self._contract(signals, sign)
        return Share(share.values.unflatten(1, (count, n)).sum(dim=1), share.parts)

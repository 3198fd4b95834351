"""A model is a function of one sample: what it gives for some must not change with the others in their batch."""

import torch
from torch import Tensor

from ..errors import InputError


class Spacing:
    """Say which batches have some of their samples looked at alone, beside the first.

    These are the second batch and the last one, so that mixing is found wherever it begins, if it stays. Where the
    number of batches is not known, those that follow the second at doubling distances stand in for the last one.

    Args:
        batches: how many there are; 0 if that is not known.
    """

    def __init__(self, batches: int) -> None:
        self._last = batches - 1
        self._done = 0  # samples in front of the last batch that was looked at

    def due(self, number: int, done: int) -> bool:
        """Return whether batch ``number``, behind so many samples, is to be looked at; each batch is asked for once."""
        if done <= self._done:
            return False
        follows = self._done == 0 or (self._last < 0 and done >= 2 * self._done)
        due = follows or number == self._last
        self._done = done if due else self._done
        return due


def pair(samples: int) -> Tensor | None:
    """Return the places of two samples that have lost what was in front of them, or behind; None for fewer than 3."""
    return torch.tensor([1, samples - 1], dtype=torch.int64, device="cpu") if samples > 2 else None


def check_unchanged(before: Tensor, now: Tensor, what: str = "outputs") -> None:
    """Raise an InputError if what a model gave for the same samples, by two runs, is not the same up to rounding."""
    count = min(len(before), len(now))
    before, now = before[:count], now.detach()[:count]
    dtypes = [part.dtype for part in (before, now) if part.is_floating_point()]
    tolerance = max([1e-3, *(8 * torch.finfo(dtype).eps for dtype in dtypes)]) if dtypes else 0.0
    if before.dtype != now.dtype:  # autocast does not reach both
        before, now = before.double(), now.double()
    size = float(before.abs().amax().nan_to_num(0, 0, 0)) if before.numel() else 0.0
    if before.shape != now.shape or not torch.allclose(before, now, tolerance, tolerance * size, equal_nan=True):
        raise InputError(
            f"the model's {what} for the same samples change with the batch they are in, or from call to call: it "
            "mixes samples, draws random numbers, or its batches cannot be cut into samples (tensors of other things "
            "whose first dimension is as long as the batch)"
        )

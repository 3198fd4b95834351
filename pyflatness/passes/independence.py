"""Check that a model is a function of one sample: what it gives for some must not change with the others of a batch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import InputError
from ..model import calling, data

Result = TypeVar("Result")
Check = Callable[[Tensor], None]
"""Raise if what a model gave for a batch is not what it gave for some of its samples before."""


class Spacing:
    """Choose the batches of which some samples are run alone, beside the first one.

    These are the second batch and the last one, so that mixing is found wherever it begins, if it stays. Where the
    number of batches is not known, those that follow the second at doubling distances stand in for the last one.

    Args:
        batches: how many there are; 0 if that is not known.
    """

    def __init__(self, batches: int) -> None:
        self._last = batches - 1
        self._done = 0  # samples in front of the last batch that was looked at

    def due(self, number: int, done: int) -> bool:
        """Return whether batch ``number``, after so many samples, is to be checked; each batch is asked for once."""
        if done <= self._done:
            return False
        follows = self._done == 0 or (self._last < 0 and done >= 2 * self._done)
        due = follows or number == self._last
        self._done = done if due else self._done
        return due


def pair(samples: int) -> Tensor | None:
    """Return the places of two samples that have lost what was in front of them, or behind; None for fewer than 3."""
    return torch.tensor([1, samples - 1], dtype=torch.int64, device="cpu") if samples > 2 else None


class Decisions(TorchFunctionMode):
    """Watch whether a forward pass inside makes something else than numbers of its floating-point values.

    These are truth values, indices, whole numbers of Python. What is decided by them, ``if h.mean() > 0``, may be
    decided by the whole batch, and no derivative shows it.

    Attributes:
        seen: whether it did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.seen:
            made = result if isinstance(result, (tuple, list)) else (result,)
            left = any(isinstance(part, Tensor) and not _is_number(part) for part in made)
            if left or getattr(func, "__name__", "") in _TO_PYTHON:
                given = [*args, *(kwargs or {}).values()]
                self.seen = any(isinstance(part, Tensor) and part.is_floating_point() for part in given)
        return result


_TO_PYTHON = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__", "__dlpack__"}


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def alone(batch: Any, run: Callable[[Any], Result]) -> Result | None:
    """Return what ``run`` gives for some samples without the others of their batch; None if it fails on these few."""
    try:
        with calling.dry_run(), torch.no_grad():
            return run(batch)
    except Exception:  # not a batch that can be cut; an error of the model's own comes again with the whole batch
        return None


def two_alone(
    batch: Any,
    run: Callable[[Any], tuple[Tensor, Any]],
    read: Callable[[Tensor, Any], Tensor] = lambda outputs, targets: outputs,
    what: str = "outputs",
) -> Check:
    """Run two samples of a batch alone, and return a check of what the whole batch gives against them.

    It passes anything where a batch has fewer than three samples, or cannot be cut.

    Args:
        batch: the whole batch.
        run: gives the model's outputs and targets for a batch.
        read: finds in these what is compared, each sample's rows together in dimension 0.
        what: names that in the error.
    """
    samples = data.size(batch)
    two = pair(samples)
    found = None if two is None else alone(data.take(batch, two), run)
    if two is None or found is None:
        return unchecked
    before = read(*found)
    return lambda given: check_unchanged(before, data.rows_of(given, samples, two), what)


def check_each_alone(
    batch: Any, run: Callable[[Any], tuple[Tensor, Any]], outputs: Tensor, places: Sequence[int]
) -> None:
    """Raise an InputError if the outputs of a batch are not those of some of its samples, each by itself."""
    for place in places:
        index = torch.tensor([place], dtype=torch.int64, device="cpu")
        found = alone(data.take(batch, index), run)
        if found is not None and found[0].ndim == outputs.ndim:  # a model may drop a dimension of length one
            check_unchanged(found[0], data.rows_of(outputs, data.size(batch), index))


def unchecked(given: Tensor) -> None:
    """Accept anything: nothing is known of these samples."""


def check_unchanged(before: Tensor, now: Tensor, what: str = "outputs") -> None:
    """Raise an InputError if what a model gave for the same samples, by two runs, is not the same up to rounding."""
    count = min(len(before), len(now))
    before, now = before[:count], now.detach()[:count]
    if not agree(before, now, rounding(before.dtype, now.dtype)):
        raise InputError(
            f"the model's {what} for the same samples change with the batch they are in, or from call to call: it "
            "mixes samples, decides by all of them (if h.mean() > 0), draws random numbers, or its batches cannot be "
            "cut into samples (tensors of other things whose first dimension is as long as the batch)"
        )


def rounding(*dtypes: torch.dtype) -> float:
    """Return how far, relatively, two runs in some dtypes may lie apart; 0 if none of them is floating point."""
    floating = [8 * torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    return max(1e-3, *floating) if floating else 0.0


def agree(before: Tensor, now: Tensor, tolerance: float) -> bool:
    """Return whether tensors are the same to within ``tolerance`` of each entry and of the largest; NaN is NaN."""
    if before.shape != now.shape:
        return False
    if before.dtype != now.dtype:  # autocast does not reach both
        before, now = before.double(), now.double()
    size = float(before.abs().nan_to_num(0, 0, 0).amax()) if before.numel() else 0.0
    if size and before.is_floating_point() and bool((now - before).abs_().amax() <= tolerance * size):
        return True  # which takes fewer passes over large outputs, and is false with NaN
    return torch.allclose(before, now, tolerance, tolerance * size, equal_nan=True)

"""Read the loader of a training once more, without an effect on the training."""

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from .. import interrupts
from ..model.state import put_back


@contextlib.contextmanager
def as_found(loader: Any) -> Iterator[None]:
    """Put a loader, its samplers, its dataset and their generators back as they were when the context ends.

    These are their attributes (a sampler's epoch, a loader's iterator) and the states of generators that are held as
    attributes. A read inside starts new workers: those that a loader keeps between its epochs go on with the epochs of
    the training, and draw random numbers of their own.
    """
    parts = _parts(loader)
    with interrupts.undone():
        for part in parts:
            interrupts.later(_snapshot(part))
        for part in parts:
            if isinstance(part, DataLoader) and "_iterator" in vars(part):
                part._iterator = None
        yield


def _parts(loader: Any) -> list[Any]:
    """Return a loader with its samplers, datasets and generators, and all those that these hold."""
    found: list[Any] = []
    pending = [loader]
    while pending:
        part = pending.pop()
        if any(part is other for other in found):
            continue
        found.append(part)
        for name, held in getattr(part, "__dict__", {}).items():
            if isinstance(held, _READ_BY) or (name in ("sampler", "batch_sampler") and hasattr(held, "__dict__")):
                pending.append(held)
    return found


def _snapshot(part: Any) -> Callable[[], Any]:
    """Return a function that puts a part back as it is now."""
    if isinstance(part, torch.Generator):
        return partial(part.set_state, part.get_state())
    if isinstance(part, np.random.RandomState):
        return partial(part.set_state, part.get_state(legacy=False))
    if isinstance(part, random.Random):
        return partial(part.setstate, part.getstate())
    if isinstance(part, np.random.Generator):
        return partial(setattr, part.bit_generator, "state", part.bit_generator.state)
    held = getattr(part, "__dict__", {})
    return partial(put_back, [(held, {**held})])


_READ_BY = (DataLoader, Dataset, Sampler, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

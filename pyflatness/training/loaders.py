"""Read a training's loader once more, so that the training does not notice."""

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
    """Let a loader be read inside; afterwards it, its samplers, its dataset and their generators are as they were.

    What is put back are attributes (a sampler's epoch, a loader's iterator) and the states of generators that are held
    as attributes. Workers that a loader keeps between its epochs are not used: they go on with the training's epochs,
    and draw random numbers of their own. New ones are started for a read.
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
    """Return what a loader reads by: itself, samplers, datasets and generators, and those that they hold."""
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
    """Return what puts back how a part is now."""
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

"""Find out whether a call drew from the generators of torch, Python and NumPy, and restore those that it drew from."""

import contextlib
import pickle
import random
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import private


class Randomness:
    """Hold the states of all generators that a model, its loss and its data may draw from, to restore them.

    While no other thread runs, a state that changed shows that the call drew from it. Otherwise a dispatch mode sees
    draws of torch in the user's code, and the states of Python's and NumPy's generators before and after that code are
    compared. (A profiler's hook would see Python's draws too, but an interrupt that is raised in one led to memory
    errors in Python 3.11.)
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        parameters = [parameter for module in modules for parameter in module._parameters.values()]
        devices = {parameter.device.index for parameter in parameters if parameter is not None and parameter.is_cuda}
        held = [vars(module).values() for module in modules]  # modules are many, and hardly any has a generator
        own = [one for values in held if torch.Generator in map(type, values) for one in values]
        self._own = [generator for generator in own if isinstance(generator, torch.Generator)]
        self._shared = [torch.default_generator, *(torch.cuda.default_generators[index] for index in sorted(devices))]
        self._alone = threading.active_count() == 1
        self._before = [generator.get_state() for generator in (*self._shared, *self._own)]
        self._outside = outside()
        self._drew, self._drew_outside = False, [False, False]

    def states(self) -> list[bytes]:
        """Return the current states of torch's generators and the model's own, which are equal if none was drawn from.

        They are bytes, as torch.equal takes twice as long for a few thousand of them.
        """
        return [generator.get_state().numpy().tobytes() for generator in (*self._shared, *self._own)]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note draws of the user's code inside the context, if other threads run."""
        if self._alone and threading.active_count() == 1:
            yield
            return
        self._alone, draws, before = False, _Draws(), outside()
        try:
            with draws:
                yield
        finally:
            self._drew |= draws.drew
            for place, (old, new) in enumerate(zip(before, outside(), strict=True)):
                self._drew_outside[place] |= old != new

    def put_back(self) -> None:
        """Restore the generators that the call drew from to their states when this object was made."""
        alone = self._alone and threading.active_count() == 1
        for place, (generator, state) in enumerate(zip((*self._shared, *self._own), self._before, strict=True)):
            if alone or self._drew or place >= len(self._shared):
                generator.set_state(state)
        setters: tuple[Callable[[Any], None], ...] = (random.setstate, _set_state_of_numpy)
        for drew, now, before, set_state in zip(self._drew_outside, outside(), self._outside, setters, strict=True):
            if (alone or drew) and now != before:
                set_state(before)
        if self in _here.held:
            _here.held.remove(self)


class _Noted(threading.local):
    def __init__(self) -> None:
        self.held: list[Randomness] = []


_here = _Noted()


def hold(modules: Collection[nn.Module]) -> Randomness:
    """Return the generators' states at the beginning of a call, which :func:`watched` uses until they are restored."""
    _here.held.append(Randomness(modules))
    return _here.held[-1]


def watched() -> contextlib.AbstractContextManager[None]:
    """Return a context for the user's code in this thread's call, see :class:`Randomness`."""
    return _here.held[-1].watched() if _here.held else contextlib.nullcontext()


class _Draws(private.TorchDispatchMode):
    """Note operations of this thread that draw from torch's own generators."""

    drew = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.drew |= torch.Tag.nondeterministic_seeded in function.tags and kwargs.get("generator") is None
        return function(*args, **kwargs)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Let what is drawn on the CPU be the same in every process, and leave the generators as they were."""
    states = outside()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002, the user's
        try:
            yield
        finally:
            random.setstate(states[0])
            _set_state_of_numpy(states[1])


def outside() -> tuple[Any, bytes]:
    """Return the states of Python's ``random`` and of NumPy's global generator, as bytes to be compared."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002, the user's


def _set_state_of_numpy(state: bytes) -> None:
    np.random.set_state(pickle.loads(state))  # noqa: NPY002, the user's, and made above

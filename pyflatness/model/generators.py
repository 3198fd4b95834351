"""Read and put back the generators that a model's forward pass can draw random numbers from."""

import ctypes
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MT19937 = 624 * 4 + 4  # bytes of the state of NumPy's Mersenne Twister: 624 words, and the place in them


class Generators:
    """Hold torch's generators of the CPU and of a model's devices, and those that its modules hold as attributes.

    Args:
        modules: all of a model's.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        parameters = [parameter for module in modules for parameter in module._parameters.values()]
        devices = sorted(
            {parameter.device.index for parameter in parameters if parameter is not None and parameter.is_cuda}
        )
        self._held = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
        for module in modules:
            held = vars(module).values()
            if torch.Generator in map(type, held):  # there is hardly ever one, and modules are many
                self._held += [generator for generator in held if isinstance(generator, torch.Generator)]

    def states(self) -> list[Tensor]:
        """Return the state of each, as it is now."""
        return [generator.get_state() for generator in self._held]

    def put_back(self, states: list[Tensor]) -> None:
        """Set the state of each to what :meth:`states` returned."""
        for generator, state in zip(self._held, states, strict=True):
            generator.set_state(state)

    def moved(self, before: list[Tensor]) -> bool:
        """Return whether numbers were drawn from any of them since :meth:`states` returned ``before``."""
        # As bytes: torch.equal takes twice as long for a few thousand of them.
        return any(
            old.numpy().tobytes() != new.numpy().tobytes() for old, new in zip(before, self.states(), strict=True)
        )


class OutsideTorch:
    """Hold the state of Python's ``random`` and of NumPy's global generator, as they are when this is made.

    Reading them takes a hundred times as long as reading one of torch's, nearly all of it NumPy's. So its bits are held
    against what they were where they lie, and read only where that does not tell.
    """

    def __init__(self) -> None:
        self._python: tuple[Any, ...] = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002, the user's
        self._bits = _bits()

    def put_back(self) -> None:
        """Set both generators to these states."""
        random.setstate(self._python)
        if not self._numpy_is_still():
            np.random.set_state(self._numpy)  # noqa: NPY002

    def moved(self) -> bool:
        """Return whether numbers were drawn from either since."""
        if self._python != random.getstate():
            return True
        return not (self._numpy_is_still() or _equal(self._numpy, np.random.get_state(legacy=False)))  # noqa: NPY002

    def _numpy_is_still(self) -> bool:
        """Return whether NumPy's bits prove that nothing was drawn.

        A normal number can be drawn without them where it was kept from before; one is kept only by drawing bits.
        """
        return self._bits is not None and not self._numpy["has_gauss"] and self._bits == _bits()


@dataclass(frozen=True)
class Randomness:
    """Hold all that a model may draw random numbers from.

    Attributes:
        of_torch: torch's generators and the model's own.
        outside: the state of the others when the model was taken in hand.
    """

    of_torch: Generators
    outside: OutsideTorch


def _bits() -> bytes | None:
    """Return the memory of NumPy's global generator; None where it is not the usual one, whose layout is known."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # in no list of its module
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states of NumPy's, of whatever kind the user has set, are the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return np.array_equal(one, other)

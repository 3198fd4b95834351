"""The generators that a model's forward pass can draw random numbers from."""

from collections.abc import Collection

import torch
from torch import Tensor, nn


class Generators:
    """torch's generators of the CPU and of a model's devices, and those that its modules hold as attributes.

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

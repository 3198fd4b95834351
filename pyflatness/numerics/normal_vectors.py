"""Draw standard normal vectors for checks, from the library's own generators.

Torch's global generator belongs to the user: another thread may draw from it while a call runs, and would get other
numbers if the call drew from it too.
"""

import torch
from torch import Tensor


class NormalVectors:
    """Draw standard normal tensors, the same sequence in every call, by one generator for each device."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Return standard normal numbers of the tensor's shape, dtype and device, without a graph."""
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(0)
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)

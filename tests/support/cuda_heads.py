"""What the tests of heads on CUDA share."""

import math

import torch

from pyflatness.contractions.reference import ClassSums


def draw(device, *shape, dtype=torch.float32, seed=0):
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def relative(values, expected):
    """The largest relative error."""
    values, expected = values.double().cpu(), expected.double().cpu()
    assert values.shape == expected.shape
    return float(((values - expected).abs() / expected).max())


def class_sums(device, n, dtype):
    """Sums before the first class."""
    rest, moment = torch.zeros(2, n, dtype=torch.float64, device=device)
    maximum = torch.full((n,), -math.inf, dtype=dtype, device=device)
    return ClassSums(maximum, torch.full((n,), -1, device=device), rest, moment)

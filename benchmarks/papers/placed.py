"""Make a network on a device. Nothing else is in this file, so that stored values stay valid if experiments change."""

import functools
from collections.abc import Callable

import torch
from torch import nn


def placed(network: Callable[[], nn.Module], device: torch.device) -> Callable[[], nn.Module]:
    """Return what makes the network on a device; on the CPU, where it is made anyway, that is what was given."""
    return network if device.type == "cpu" else functools.partial(_made, network, device)


def _made(network: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    return network().to(device)

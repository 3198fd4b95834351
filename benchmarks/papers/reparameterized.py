"""Make other weights of the same function, layer by layer, as both papers of Petzka et al. do."""

import numpy as np
from torch import Tensor, nn

from pyflatness.model import selectors
from pyflatness.reparameterization.reparameterize import reparameterize

from .zoo import Change

FACTORS = 5.0, 25.0


def _by_layers(network: nn.Module, inputs: Tensor, number: int) -> nn.Module:
    """Return the network with every layer but the last multiplied by a factor of its own, uniform in [5, 25]."""
    *hidden, _ = selectors.select(network, None).modules
    drawn = np.random.default_rng(number).uniform(*FACTORS, len(hidden))
    return reparameterize(network, dict(zip(hidden, drawn.tolist(), strict=True)), inputs)


BY_LAYERS = Change("layers-by-5-to-25", _by_layers)

"""Sample quantities of several layers by Hessian products that they share.

For a change v_l of the outputs of every layer l of a group, as random as :meth:`.BlockTraces.probes` draws it, one
product with the Hessian in the outputs of all of them has

    E⟨v_l, (H v)_l⟩ = E⟨v_l, H_ll v_l⟩ + Σ_(m ≠ l) E⟨v_l, H_lm v_m⟩ = the layer's quantity

since the signs of two layers are independent: what the others add has the mean 0 and the variance Σ_m ‖H_lm‖_F², each
block weighted as the directions are. Bekas, Kokiopoulou and Saad 2007 ("An estimator for the diagonal of a matrix")
have it for blocks of one entry. A layer alone is a group of one.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..numerics.signs import Signs
from .block_traces import BlockTraces, derivatives
from .entries import batch_of

_LAYERS_TO_GROUPS = 3  # √L over the number of groups


def sampled(layers: Sequence[BlockTraces], streams: Sequence[int], quantities: Sequence[str], signs: Signs) -> Tensor:
    """Return values of a group of layers in each draw, (draws, layers, quantities, n) float64, unbiased.

    Args:
        layers: of one run and value.
        streams: of their signs.
        quantities: of each layer, in the order of the values.
        signs: of the draws.
    """
    parts = []
    with contextlib.ExitStack() as stack:
        group = [stack.enter_context(layer.directions(sampled=True)) for layer in layers]
        with torch.enable_grad():
            joined = torch.cat([each.gradient.flatten() for each in group])
        second = derivatives(joined, [entered for each in group for entered in each.inputs])
        batch = batch_of(joined.numel() * joined.element_size())
        for start in range(0, len(signs.draws), batch):
            some = Signs(signs.seed, signs.draws[start : start + batch])
            shape = len(some.draws), len(layers), len(quantities), group[0].gradient.shape[0]
            values = joined.new_empty(shape, dtype=torch.float64)
            probes = [
                layer.probes(each, some, stream) for layer, each, stream in zip(layers, group, streams, strict=True)
            ]
            for several in zip(*probes, strict=True):  # a product each
                found = iter(second(torch.cat([change.flatten(1) for change, _ in several], dim=1)))
                for place, (each, (change, read)) in enumerate(zip(group, several, strict=True)):
                    products = each.rows([next(found) for _ in each.inputs], len(change))
                    for name, left in read.items():
                        value = (left * products).sum(dim=(2, 3, 4), dtype=torch.float64)
                        values[:, place, quantities.index(name)] = value
            parts.append(values)
    return torch.cat(parts)


def groups(layers: Mapping[str, BlockTraces], places: Mapping[str, int]) -> list[list[str]]:
    """Return the names of a run's layers in groups that share their products, neighbours apart from each other.

    With g groups of L layers a probe takes g products beside the GGN's cotangent, and has the variance a + b L / g, of
    the GGN and the layer's own residual, and of the others in its group. So g ~ √L costs least for an error. Of 36
    layers of a language model b L was 17 a, and a product took two to three cotangents' time: √L / 3.

    A layer whose second derivatives are taken in its weight has a run of its own, and nothing to share.

    Args:
        layers: of the run.
        places: of all layers, which say what group each is in: who else ran must not.
    """
    count = max(1, round(math.sqrt(len(places)) / _LAYERS_TO_GROUPS))
    shared = [[name for name in layers if places[name] % count == number] for number in range(count)]
    shared = [[name for name in group if not layers[name].in_weight] for group in shared]
    return [group for group in (*shared, *([name] for name in layers if layers[name].in_weight)) if group]

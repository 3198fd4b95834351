"""Layers for the CUDA kernels, on a device and in every dtype."""

import pytest
import torch

from support import layer_cases as layers
from support.layer_cases import ONE

KINDS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Emulated, a thread costs a microsecond at every barrier.
SMALLER = {
    "first convolution": (1, 1, 3, 6, (1, 16, 16), (1, 5, 5), ONE, ONE),
    "second convolution": (1, 1, 6, 16, (1, 14, 14), (1, 5, 5), ONE, ONE),
    "residual block": (1, 1, 64, 64, (1, 12, 12), (1, 3, 3), ONE, ONE),
    "depthwise": (2, 5, 1, 1, (1, 9, 9), (1, 3, 3), ONE, ONE),
    "depth multiplier": (2, 4, 1, 3, (1, 9, 9), (1, 3, 3), (1, 2, 2), ONE),
}
CASES = {
    **layers.CASES,
    **SMALLER,
    "more rows than a tile": (2, 1, 20, 200, (1, 7, 6), (1, 3, 3), ONE, ONE),
    "tile for tile": (1, 1, 64, 128, (1, 8, 8), ONE, ONE, ONE),
    "wide sequence": (1, 2, 48, 64, (40, 1, 1), ONE, ONE, ONE),
}

in_one_order = pytest.mark.parametrize("cuda_device", ["cuda", "emulated"], indirect=True)


def moved(tensor, device):
    """The tensor on a device, with the strides that it has."""
    if device.type == "cpu":
        return tensor
    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def layer(case, kind, device, layout="contiguous", roots=9, seed=0):
    """Arguments of ``direct``; the root and the weight of half precision as float32."""
    inputs, signal, geometry, *others = layers.layer(case, KINDS[kind], layout, roots, seed)
    if kind in ("bfloat16", "float16"):
        others = [None if t is None else t.float() for t in others]
    inputs, signal, *others = (None if t is None else moved(t, device) for t in (inputs, signal, *others))
    return inputs, signal, geometry, *others

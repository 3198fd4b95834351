"""Layers for the kernels: shapes with every geometry, strides, and the arguments of ``direct``."""

import torch
from hypothesis import strategies as st

from pyflatness.contractions.geometry import Geometry

DTYPES = [torch.float32, torch.float64]
ONE = (1, 1, 1)

# samples, groups, channels and rows of a group, padded pixels, kernel, stride, dilation
CASES = {
    "one position": (2, 1, 30, 20, ONE, ONE, ONE, ONE),
    "one of everything": (1, 1, 1, 1, ONE, ONE, ONE, ONE),
    "sequence": (2, 1, 33, 40, (19, 1, 1), ONE, ONE, ONE),
    "1-D": (2, 1, 3, 5, (1, 1, 41), (1, 1, 4), ONE, (1, 1, 3)),
    "first convolution": (2, 1, 3, 6, (1, 32, 32), (1, 5, 5), ONE, ONE),
    "second convolution": (3, 1, 6, 16, (1, 14, 14), (1, 5, 5), ONE, ONE),
    "residual block": (2, 1, 64, 64, (1, 18, 18), (1, 3, 3), ONE, ONE),
    "late block": (2, 1, 70, 130, (1, 6, 6), (1, 3, 3), ONE, ONE),
    "downsampling": (2, 1, 20, 40, (1, 19, 18), (1, 3, 3), (1, 2, 2), ONE),
    "stride three": (2, 1, 20, 9, (1, 19, 18), (1, 2, 3), (1, 3, 3), ONE),
    "patches": (2, 1, 3, 24, (1, 16, 24), (1, 8, 8), (1, 8, 8), ONE),
    "depthwise": (2, 40, 1, 1, (1, 9, 9), (1, 3, 3), ONE, ONE),
    "depth multiplier": (2, 10, 1, 3, (1, 9, 9), (1, 3, 3), (1, 2, 2), ONE),
    "groups": (2, 3, 5, 11, (1, 9, 7), (1, 3, 2), ONE, (1, 2, 1)),
    "3-D": (2, 2, 5, 7, (4, 9, 8), (2, 3, 3), (1, 2, 2), (2, 1, 2)),
    "more taps than a tile has columns": (2, 1, 2, 17, (1, 20, 22), (1, 18, 19), ONE, ONE),
    "taps further than the places": (2, 1, 4, 5, (1, 8, 8), (1, 2, 2), ONE, (1, 6, 6)),
    "many rows": (1, 1, 5, 600, (1, 4, 5), (1, 2, 2), ONE, ONE),
}


def layout(tensor, kind, seed=0):
    """The tensor with other strides: as it is, channels last, places last to first, every second element, or padded."""
    if kind == "channels last":
        return tensor.contiguous(memory_format=torch.channels_last_3d)
    if kind == "transposed":
        return tensor.permute(4, 3, 2, 0, 1).contiguous().permute(3, 4, 2, 1, 0)
    if kind == "scattered":
        return tensor.repeat_interleave(2, dim=4)[..., ::2]
    if kind == "sliced":
        return torch.cat([tensor, torch.full_like(tensor, torch.nan)], dim=1)[:, : tensor.shape[1]]
    return tensor


LAYOUTS = ["contiguous", "channels last", "transposed", "scattered", "sliced"]


@st.composite
def any_case(draw):
    """Return a case like those of ``CASES``, with inputs of any size that has at least one place."""
    extra, kernel, stride, dilation = (draw(st.tuples(*[st.integers(1, most)] * 3)) for most in (7, 3, 3, 2))
    size = tuple(e + d * (k - 1) for e, d, k in zip(extra, dilation, kernel, strict=True))
    return *(draw(st.integers(1, most)) for most in (3, 3, 20, 40)), size, kernel, stride, dilation


def layer(case, dtype, kind="contiguous", roots=9, seed=0):
    """Arguments of ``direct``."""
    n, groups, channels, rows, size, kernel, stride, dilation = case
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    geometry = Geometry(groups, kernel, stride, dilation)
    inputs = layout(normal(n, groups * channels, *size), kind)
    signal = layout(normal(n, groups * rows, *geometry.places(size)), kind)
    root = normal(groups, roots, rows) if roots else None
    return inputs, signal, geometry, root, normal(groups, rows, channels * geometry.kernel_elements)


def double(*arguments):
    return [a.double() if isinstance(a, torch.Tensor) else a for a in arguments]


def limit(dtype):
    return 1e-5 if dtype == torch.float32 else 1e-12


def check_values(values, expected, dtype, slack=1):
    """Hold what a kernel made of a layer against the reference, relative to the size of the terms of a sum."""
    for name, value, truth in zip(values._fields, values, expected, strict=True):
        if truth is None:
            assert value is None
            continue
        assert value.dtype == torch.float64
        assert value.shape == truth.shape
        size = truth if name in ("squares", "gram_weighted", "weighted") else expected.weighted.sqrt().unsqueeze(1)
        assert float(((value - truth).abs() / size).max()) < slack * limit(dtype), name


def of_kernels(forms):
    """Return all forms that the kernels make of M: |w Mᵀ|² comes by |M|² of other inputs."""
    *made, columns = forms
    assert columns is None
    return made

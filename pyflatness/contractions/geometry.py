"""Describe how a layer's input becomes the patches that its weight matrix multiplies.

Linear layers and convolutions have one common form, so that one set of contractions serves both. Axes: ``n`` samples,
``G`` groups, ``c`` input channels of a group, ``d`` rows (outputs) of a group, ``P`` positions, ``m`` columns:
c times the elements of the kernel.

    inputs (n, G c, s0, s1, s2), padded        cotangent (n, G d, p0, p1, p2)        weight (G, d, m)

A linear layer on (n, P, m) is a convolution with a kernel of one element, m channels and P pixels; convolutions in one
or two dimensions have leading dimensions of one pixel. Tensors may have any strides.
"""

import functools
from dataclasses import dataclass

from torch import Tensor

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Geometry:
    """Describe which pixels of the padded input are in the patch of a position."""

    groups: int = 1
    kernel: Triple = (1, 1, 1)
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)

    @property
    def kernel_elements(self) -> int:
        """Return the number of pixels in a patch."""
        a, b, c = self.kernel
        return a * b * c

    def places(self, size: tuple[int, ...]) -> Triple:
        """Return the number of positions along each dimension, for padded inputs of ``size``."""
        return _places(tuple(size), self.kernel, self.stride, self.dilation)

    def patches(self, inputs: Tensor) -> Tensor:
        """Return patches (n, G, P, m), with columns in the weight's order: channel, then kernel element."""
        n, channels = inputs.shape[:2]
        view = inputs
        for dim, (kernel, stride, dilation) in enumerate(
            zip(self.kernel, self.stride, self.dilation, strict=True), start=2
        ):
            if kernel == stride == 1:  # equal to unfold, with a derivative that vmap supports
                view = view.unsqueeze(-1)
            else:
                view = view.unfold(dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        view = view.unflatten(1, (self.groups, channels // self.groups))  # n, G, c, p0, p1, p2, k0, k1, k2
        positions = view.shape[3] * view.shape[4] * view.shape[5]
        patches: Tensor = view.permute(0, 1, 3, 4, 5, 2, 6, 7, 8).reshape(n, self.groups, positions, -1)
        return patches

    def rows(self, cotangent: Tensor) -> Tensor:
        """Return the rows (n, G, P, d) of a cotangent (n, G d, p0, p1, p2)."""
        rows: Tensor = cotangent.unflatten(1, (self.groups, -1)).flatten(3).transpose(2, 3)
        return rows


@functools.lru_cache(maxsize=1024)
def _places(size: tuple[int, ...], kernels: Triple, strides: Triple, dilations: Triple) -> Triple:
    a, b, c = (
        (s - dilation * (kernel - 1) - 1) // stride + 1
        for s, kernel, stride, dilation in zip(size, kernels, strides, dilations, strict=True)
    )
    return a, b, c

"""Treat a convolution as a matrix with filters as rows, which multiplies patches of the input."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...contractions import Geometry
from .linear import Linear

_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class Convolution(Linear):
    """Treat a convolution, with sizes as in torch's layers, as a matrix; see :class:`.Linear`."""

    class_dim = 1

    def __init__(
        self,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int] | str,
        dilation: Sequence[int],
        groups: int,
        padding_mode: str,
    ) -> None:
        self.space, self.groups, self.least_dims = len(kernel), groups, len(kernel) + 2
        self.geometry = Geometry(groups, *map(_triple, (kernel, stride, dilation)))
        self.repeats_inputs = padding_mode != "zeros"
        self.pointwise = (
            self.geometry.kernel == self.geometry.stride == (1, 1, 1)
            and groups == 1
            and (isinstance(padding, str) or not any(padding))
        )
        self._stride, self._padding, self._dilation = stride, padding, dilation
        self._kernel, self._mode = kernel, "constant" if padding_mode == "zeros" else padding_mode
        self._function = _FUNCTIONS[self.space]
        self._margins = _margins(kernel, padding, dilation)

    def as_matrix(self, weight: Tensor) -> Tensor:
        return weight.flatten(1)

    def as_weight(self, matrix: Tensor) -> Tensor:
        weight: Tensor = matrix.unflatten(1, (-1, *self._kernel))
        return weight

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        padding: Sequence[int] | str | int = self._padding
        if self.repeats_inputs:
            inputs, padding = self._padded(inputs), 0
        outputs: Tensor = self._function(inputs, weight, bias, self._stride, padding, self._dilation, self.groups)
        return outputs

    def pad(self, inputs: Tensor, output: Tensor) -> Tensor:
        return self._padded(inputs)

    def carried(self, delta: Tensor, size: tuple[int, ...], weight: Tensor) -> Tensor:
        inputs = torch.zeros(len(delta), *size, dtype=weight.dtype, device=weight.device, requires_grad=True)
        with torch.enable_grad():
            (gamma,) = torch.autograd.grad(self.affine(inputs, weight, None, delta), inputs, delta.to(weight.dtype))
        return gamma

    def at_ends(
        self, inputs: Tensor, output: Tensor, weight: Tensor, coefficients: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return both at the first positions in dimension 2 of the first image, and at the last of the last image."""
        seen = self._dilation[0] * (self._kernel[0] - 1) + 1
        start = self._stride[0] * (output.shape[2] - 1)
        first, last = (self._padded(inputs[[place]]) for place in (0, -1))
        edges = torch.cat([first[:, :, :seen], last[:, :, start : start + seen]])
        return self._inside(edges.to(weight.dtype), weight), torch.cat([output[:1, :, :1], output[-1:, :, -1:]])

    def in_common_form(self, tensor: Tensor) -> list[Tensor]:
        if self.space == 3:
            return list(tensor.unbind(1))
        images = tensor.transpose(1, 2)  # the q images are the first dimension of space, in which kernels have size 1
        return [images if images.ndim == 5 else images.unsqueeze(3)]

    def _inside(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return W φ for padded inputs."""
        outputs: Tensor = self._function(inputs, weight, None, self._stride, 0, self._dilation, self.groups)
        return outputs

    def _padded(self, inputs: Tensor) -> Tensor:
        return F.pad(inputs, self._margins, mode=self._mode) if any(self._margins) else inputs


def _margins(kernel: Sequence[int], padding: Sequence[int] | str, dilation: Sequence[int]) -> list[int]:
    """Return the pixels of padding before and after each dimension of space, the last one first, for F.pad."""
    if not isinstance(padding, str):
        return [pixels for pixels in reversed(padding) for _ in range(2)]
    if padding == "valid":
        return [0, 0] * len(kernel)
    missing = [(k - 1) * step for k, step in zip(kernel, dilation, strict=True)]
    return [pixels for total in reversed(missing) for pixels in (total // 2, total - total // 2)]


def _triple(sizes: Sequence[int]) -> tuple[int, int, int]:
    a, b, c = (*(1,) * (3 - len(sizes)), *sizes)
    return a, b, c

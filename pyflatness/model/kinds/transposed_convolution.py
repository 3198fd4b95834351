"""Treat a transposed convolution as a matrix: that of a convolution over its input with zeros between the pixels.

    output = W' ∗ x̃,    x̃ the input with stride - 1 zeros behind every pixel and dilation (kernel - 1) - padding around,
                        W' the weight with output channels first and every filter flipped

A negative margin crops. If the output is larger than its smallest size, as many zeros follow the last pixel.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .convolution import Convolution

_FUNCTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class TransposedConvolution(Convolution):
    """Treat a transposed convolution as a matrix with a row for each output channel; see :class:`.Linear`."""

    def __init__(
        self,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        output_padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        ones = (1,) * len(kernel)
        super().__init__(kernel, ones, (0,) * len(kernel), dilation, groups, "zeros")
        self.pointwise = self.pointwise and tuple(stride) == ones and not any((*padding, *output_padding))
        self._strides, self._paddings, self._output_padding = stride, padding, output_padding
        self._space = tuple(range(2, 2 + self.space))

    def as_matrix(self, weight: Tensor) -> Tensor:
        rows_first: Tensor = weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return rows_first.flip(self._space).flatten(1)

    def as_weight(self, matrix: Tensor) -> Tensor:
        rows_first = super().as_weight(matrix).flip(self._space)
        weight: Tensor = rows_first.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return weight

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], weight: Tensor, bias: Tensor | None) -> Tensor:
        inputs, size = self.inputs_of(args, kwargs), args[1] if len(args) > 1 else kwargs.get("output_size")
        assert inputs is not None
        more = self._output_padding if size is None else self._missing(inputs, size)
        return self._applied(inputs, weight, bias, more)

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        more = self._output_padding if like is None else self._missing(inputs, like.shape)
        return self._applied(inputs, weight, bias, more)

    def pad(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Return x̃ for an input (n, channels, …)."""
        margins: list[int] = []
        more = self._missing(inputs, output.shape)
        each = zip(self._space, self._kernel, self._strides, self._paddings, self._dilation, more, strict=True)
        for dim, kernel, stride, padding, dilation, behind in each:
            if stride > 1:
                empty = [0, 0] * (inputs.ndim - dim - 1)
                inputs = F.pad(inputs.unsqueeze(dim + 1), (*empty, 0, stride - 1)).flatten(dim, dim + 1)
            margin = dilation * (kernel - 1) - padding
            margins = [margin, margin + behind - (stride - 1), *margins]
        return F.pad(inputs, margins)

    def at_ends(
        self, inputs: Tensor, output: Tensor, weight: Tensor, coefficients: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        padded = self.pad(inputs[[0, -1]], output).to(weight.dtype)
        return self._inside(padded, super().as_weight(self.as_matrix(weight))), output[[0, -1]]

    def _applied(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, output_padding: Sequence[int]) -> Tensor:
        function, sizes = _FUNCTIONS[self.space], (self._strides, self._paddings, output_padding)
        outputs: Tensor = function(inputs, weight, bias, *sizes, self.groups, self._dilation)
        return outputs

    def _missing(self, inputs: Tensor, size: Sequence[int]) -> list[int]:
        """Return along each dimension by how many pixels an output of this size exceeds the smallest one."""
        each = zip(
            inputs.shape[2:], size[-self.space :], self._kernel, self._strides, self._paddings, self._dilation,
            strict=True,
        )  # fmt: skip
        return [
            out - ((pixels - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
            for pixels, out, kernel, stride, padding, dilation in each
        ]

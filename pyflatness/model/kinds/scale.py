"""Treat the weight of a normalisation layer as a diagonal matrix that multiplies normalised features.

    y = γ ∘ x̂ + β = diag(γ) x̂ + β

Only the diagonal is free, so that the weight is m matrices of one entry, a group for each feature, like the filters of
a 1 × 1 depthwise convolution. For any normalisation, x̂ is the layer's own output for β = 0 and γ = r, divided by r. The
entries of r are 2 and 1/2 in turn. They give the same bits as 1, and reveal an output that is not linear in γ, such as
γ² ∘ x̂, also if γ still has its initial values 1.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import private
from ...contractions import Geometry
from ...errors import InputError
from .linear import Linear

_CHANNELS_FIRST = (private.BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)
_OF_TORCH = (*_CHANNELS_FIRST, nn.LayerNorm, nn.RMSNorm)


def is_scale(module: nn.Module) -> bool:
    """Return whether a module is a normalisation with a weight: torch's, or one with "norm" in its class's name."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or nn.parameter.is_lazy(weight):
        return False
    if isinstance(module, _OF_TORCH):
        return True
    others = [parameter for parameter in module.parameters() if parameter is not weight and parameter is not bias]
    same = bias is None or bias.shape == weight.shape
    return "norm" in type(module).__name__.lower() and weight.ndim == 1 and same and not others


class Scale(Linear):
    """Treat the weight of a normalisation as a diagonal matrix; see :class:`.Linear`.

    φ is x̂, (…, m) if the layer normalises over the last dimensions, and (n, m, …) if features are channels.
    """

    has_input = False
    pointwise = False
    keeps_graph = False
    computes = "γ ∘ x̂ + β of its weight γ, for an x̂ that is the same for any γ"

    def __init__(self, module: Any) -> None:
        self._module, self._shape = module, tuple(module.weight.shape)
        self.groups = module.weight.numel()
        self.geometry = Geometry(self.groups)
        first = isinstance(module, _CHANNELS_FIRST) or (
            getattr(module, "data_format", "") == "channels_first" or type(module).__name__.endswith("2d")
        )
        self.class_dim = 1 if first else -1
        self.row_dims = len(self._shape)

    def as_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(-1, 1)

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self._shape)

    def inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return x̂ for the arguments of a call."""
        plain, weight = copy.copy(self._module), self._module.weight.detach()
        powers = torch.full_like(weight, 2.0).view(-1)
        powers[1::2] = 0.5
        values = {"weight": powers.view(self._shape), "bias": torch.zeros_like(weight)}
        plain._parameters = {
            name: None if parameter is None else values[name] for name, parameter in self._module._parameters.items()
        }
        outputs = type(plain).forward(plain, *args, **kwargs)
        if not isinstance(outputs, Tensor):
            return None
        there = outputs.shape[1:2] if self.class_dim == 1 else outputs.shape[-self.row_dims :]
        if there != self._shape:
            where = "dimension 1" if self.class_dim == 1 else "the last dimensions"
            raise InputError(
                f"a {type(self._module).__name__} has a weight of {self._shape} and gives {tuple(outputs.shape)}, "
                f"whose {where} do not match it: its weight is not measured; choose other layers"
            )
        inputs = outputs if self.class_dim == 1 else outputs.flatten(-self.row_dims)
        return inputs / self._along(powers.to(inputs.dtype), inputs)

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        outputs = inputs * self._along(weight, inputs)
        outputs = outputs if bias is None else outputs + self._along(bias, inputs)
        shape = (*outputs.shape[:-1], *self._shape) if self.class_dim == -1 else outputs.shape
        return outputs.reshape(shape)

    def at_ends(
        self, inputs: Tensor, output: Tensor, weight: Tensor, coefficients: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.class_dim == -1:
            inputs, output = (part.reshape(-1, self.groups) for part in (inputs, output))
        rows = [0, -1][: len(inputs)]
        found = self.affine(inputs[rows].to(weight.dtype), weight, None)
        return found.reshape(output[rows].shape), output[rows]

    def in_common_form(self, tensor: Tensor) -> list[Tensor]:
        rows = tensor if self.class_dim == -1 else tensor.movedim(2, -1)
        return [rows.reshape(len(rows), -1, self.groups).transpose(1, 2)[..., None, None]]

    def _along(self, values: Tensor, inputs: Tensor) -> Tensor:
        """Return values of the features, (m,) or γ's shape, in a shape that broadcasts over x̂."""
        return values.reshape((-1, *(1,) * (inputs.ndim - 2)) if self.class_dim == 1 else (-1,))

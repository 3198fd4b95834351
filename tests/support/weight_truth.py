"""Truth for every weight of a network: the dense Hessian of its loss in the very parameter, and κ and trace of that.

A weight is named as its parameter is (``encoder.0.attn.in_proj_weight``), at the module that holds it: of one that
several modules hold, the derivative is through the named one alone. Part of a weight is named with a slice or index
behind it (``experts.gate_up_proj[3]``).
"""

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from support import truth

Risk = Callable[[nn.Module], Tensor]


class _Of(nn.Module):
    """A network whose output is its risk, so that functional_call may put parameters in their places."""

    def __init__(self, model: nn.Module, risk: Risk) -> None:
        super().__init__()
        self.model, self.risk = model, risk

    def forward(self) -> Tensor:
        return self.risk(self.model)


def hessian(model: nn.Module, risk: Risk, name: str) -> Tensor:
    """Return the dense Hessian (N, N) of the risk in the N entries of a parameter at the module that holds it."""
    weight = _parameter(model, name)
    with sdpa_kernel(SDPBackend.MATH):
        return truth.hessian(
            lambda weight: torch.func.functional_call(
                _Of(model, risk), {f"model.{name}": weight}, (), tie_weights=False
            ),
            weight,
        ).reshape(weight.numel(), -1)


def relative_flatness_and_trace(model: nn.Module, risk: Risk, layer: str) -> tuple[float, float]:
    """Return κ = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(H_ss') over the rows of each group, and Tr(H), of a layer by its name."""
    name, part = parameter_of(model, layer)
    matrix, weight = hessian(model, risk, name), _parameter(model, name).detach()
    places = rows_of(_holder(model, name), torch.arange(weight.numel()).view(weight.shape)[part])
    kappa = 0.0
    for rows in places:  # (d, m) of a group
        traces = sum(matrix[column][:, column] for column in rows.t())
        values = weight.flatten()[rows]
        kappa += float((values @ values.t() * traces).sum())
    return kappa, float(matrix.diagonal()[places.flatten()].sum())


def rows_of(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a weight as (groups, d, m): what a row makes is an output, what a column is multiplied by an input."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return weight.flatten(1).unflatten(0, (module.groups, -1))
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):  # (inputs, outputs, …)
        return weight.unflatten(0, (module.groups, -1)).transpose(1, 2).flatten(2)
    if getattr(module, "is_transposed", False):  # experts of transformers, y = x W
        return weight.t()[None]
    if type(module).__name__ == "Conv1D" or isinstance(module, nn.Embedding):  # y = x W, x one-hot rows
        return weight.t()[None]
    if "Norm" in type(module).__name__:  # y = γ ∘ x̂, a matrix of one entry for each feature
        return weight.reshape(-1, 1, 1)
    assert weight.ndim == 2, f"{type(module).__name__}: its rows are not said here"
    return weight[None]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all that counts as a weight: matrices, kernels, tables, scales of layers; no biases or norms."""
    found = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            is_one = parameter is not None and not name.startswith("bias")
            is_one = is_one and (parameter.ndim >= 2 or name == "layer_scale_parameter")
            if is_one and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                found[f"{prefix}.{name}" if prefix else name] = parameter
    return found


def parameter_of(model: nn.Module, layer: str) -> tuple[str, slice | int]:
    """Return the name of a layer's weight, and which part of it the layer is."""
    name, _, part = layer.partition("[")
    if name in dict(model.named_modules()):
        return f"{name}.weight", slice(None)
    part = part.rstrip("]")
    if part and part in "qkv":  # of attention's packed projections
        size = len(_parameter(model, name)) // 3
        return name, slice("qkv".index(part) * size, ("qkv".index(part) + 1) * size)
    return name, int(part) if part else slice(None)


def with_effective_weights(model: nn.Module) -> nn.Module:
    """Return the model, or a copy in which convolutions that standardise their weight have what that gives instead."""
    own = [name for name, module in model.named_modules() if type(module).__name__ == "WeightStandardizedConv2d"]
    model = copy.deepcopy(model) if own else model
    for name in own:
        module = model.get_submodule(name)
        rows = module.weight.detach().reshape(1, module.out_channels, -1)
        rows = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=module.eps)
        module.weight.data = rows.reshape_as(module.weight)
        module.forward = functools.partial(_convolution, module)
    return model


def _convolution(module: nn.Module, x: Tensor) -> Tensor:
    x = x if module.pad is None else module.pad(x)
    return F.conv2d(x, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups)


def _holder(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _parameter(model: nn.Module, name: str) -> Tensor:
    return getattr(_holder(model, name), name.rpartition(".")[2])

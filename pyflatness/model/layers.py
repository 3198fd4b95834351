"""Treat layers as weight matrices: which are supported, their (d, m) matrix, inputs and cotangents in one form."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..contractions import Geometry, full_precision, promoted
from ..errors import InputError, NonFiniteError

SUPPORTED = "Linear, Conv1d, Conv2d, Conv3d, and the Conv1D of transformers"

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *_CONVOLUTIONS)
"""torch's classes of layers that can be measured."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside ``DataParallel``, ``DistributedDataParallel`` or ``torch.compile``."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def is_supported(module: nn.Module) -> bool:
    """Return whether a module is a linear layer or convolution that computes what its class says."""
    for kind in _CONVOLUTIONS:
        if isinstance(module, kind):
            return type(module).forward is kind.forward and type(module)._conv_forward is kind._conv_forward
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return _is_transposed(module)


def why_not_supported(module: nn.Module) -> str:
    """Return why a module is not a layer that can be measured, with its class."""
    kind = type(module).__name__
    base = next((base for base in LAYERS if isinstance(module, base)), None)
    if base is None:
        return f"is a {kind}; what can be measured is {SUPPORTED}"
    return (
        f"is a {kind}, a subclass of {base.__name__} whose forward is its own, so that its output need not be W φ + "
        "b of its weight: measure another layer (an adapter's base layer, say), or, where it is that all the same, put "
        f"a plain {base.__name__} with this weight and bias in its place"
    )


def did_not_run(model: nn.Module, names: Iterable[str]) -> InputError:
    """Return the error for layers that were asked for and that the model's forward pass does not call."""
    listed = [*names]
    attention = [
        name for name in listed if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)
    ]
    why = ""
    if attention:
        why = (
            f": nn.MultiheadAttention uses the weight of {', '.join(map(repr, attention))} without calling the layer, "
            "so that there is no input of it to see; choose other layers"
        )
    return InputError(f"layer: {', '.join(map(repr, listed))} did not run in the model's forward pass{why}")


def is_convolution(module: nn.Module) -> bool:
    """Return whether a layer is a Conv1d, Conv2d or Conv3d: its outputs are channels-first."""
    return isinstance(module, _CONVOLUTIONS)


def is_pointwise(module: nn.Module) -> bool:
    """Return whether it multiplies every position by the same matrix, once: linear, or a 1 × 1 convolution."""
    if not isinstance(module, _CONVOLUTIONS):
        return is_supported(module)
    return (
        is_supported(module)
        and all(k == 1 for k in module.kernel_size)
        and all(s == 1 for s in module.stride)
        and module.groups == 1
        and (isinstance(module.padding, str) or not any(module.padding))
    )


def matrix(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the effective weight (d, m), a filter to a row, and the bias (d,) of a supported layer, detached."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    return as_matrix(module, weight.detach()), bias.detach() if isinstance(bias, Tensor) else None


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a tensor of the shape of the layer's weight as (d, m)."""
    return weight.t() if _is_transposed(module) else weight.flatten(1)


def as_weight(module: nn.Module, matrix: Tensor) -> Tensor:
    """Return a (d, m) matrix as a tensor of the shape of the layer's weight; undoes :func:`as_matrix`."""
    assert isinstance(module.weight, Tensor)
    return matrix.t() if _is_transposed(module) else matrix.reshape(module.weight.shape)


def row_dim(module: nn.Module) -> int:
    """Return the dimension of the layer's weight that counts its rows."""
    return 1 if _is_transposed(module) else 0


def groups(module: nn.Module) -> int:
    """Return how many separate weight matrices the layer is made of."""
    return module.groups if isinstance(module, _CONVOLUTIONS) else 1


def geometry(module: nn.Module) -> Geometry:
    """Return which (padded) inputs a position of the layer sees."""
    if not isinstance(module, _CONVOLUTIONS):
        return Geometry()
    return Geometry(module.groups, *map(_triple, (module.kernel_size, module.stride, module.dilation)))


def class_dim(module: nn.Module) -> int:
    """Return the dimension of the layer's output that holds its d rows: last for linear layers, 1 for convolutions."""
    return 1 if isinstance(module, _CONVOLUTIONS) else -1


def input_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the layer's unpadded input as (positions or pixels of all samples, channels), channels moved last."""
    inputs = inputs.detach().movedim(class_dim(module), -1)
    return inputs.reshape(-1, inputs.shape[-1])


def pad(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return a convolution's input (N, C, …), padded as the layer does it."""
    if not isinstance(module, _CONVOLUTIONS) or not any(module._reversed_padding_repeated_twice):
        return inputs
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)


def repeats_inputs(module: nn.Module) -> bool:
    """Return whether a layer is a convolution whose padding repeats pixels of its input."""
    return isinstance(module, _CONVOLUTIONS) and module.padding_mode != "zeros"


def apply(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return W φ, the layer's linear part on an input, without bias or hooks."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return affine(module, inputs, weight.detach(), None)


def affine(module: nn.Module, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return W φ + b as the layer computes it, with a given bias and weight (of the shape of the layer's)."""
    if isinstance(module, _CONVOLUTIONS):
        outputs: Tensor = module._conv_forward(inputs, weight, bias)
        return outputs
    if _is_transposed(module):
        return inputs @ weight if bias is None else inputs @ weight + bias
    return F.linear(inputs, weight, bias)


def carried(module: nn.Module, delta: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return Wᵀ δ: a gradient in the layer's output carried to its unpadded input through this layer alone.

    Args:
        module: a supported layer.
        delta: of the shape of the layer's output.
        size: of an input, without its dimension 0.
    """
    weight = matrix(module)[0]
    if not isinstance(module, _CONVOLUTIONS):
        return delta.to(weight.dtype) @ weight
    inputs = torch.zeros(len(delta), *size, dtype=weight.dtype, device=weight.device, requires_grad=True)
    with torch.enable_grad():
        (gamma,) = torch.autograd.grad(apply(module, inputs), inputs, delta.to(weight.dtype))
    return gamma


def computes(module: nn.Module, inputs: Tensor, output: Tensor) -> bool:
    """Return whether an output is W φ + b of its input, looked at in its first and last row.

    Of a convolution these are the positions along the edges of the first and the last image.
    """
    if output.is_meta or output.numel() == 0:
        return True
    weight, bias = matrix(module)
    if isinstance(module, _CONVOLUTIONS):
        inputs, output = _edges(module, inputs.detach(), output.detach())
    else:
        inputs, output = (part.detach().reshape(-1, part.shape[-1])[[0, -1]] for part in (inputs, output))
    inputs = inputs.to(weight.dtype)
    with full_precision(inputs):
        expected = _apply_inside(module, inputs).movedim(class_dim(module), -1)
        expected = promoted(expected) + (0 if bias is None else promoted(bias))
    tolerance = max(1e-3, 8 * torch.finfo(output.dtype).eps)
    size = float(expected.nan_to_num(0, 0, 0).abs().amax())
    output = output.movedim(class_dim(module), -1).to(expected.dtype)
    off = (output - expected).abs()
    return bool(((off <= tolerance * (expected.abs() + size)) | ~expected.isfinite()).all())


def _edges(module: nn.Module, inputs: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return, of a convolution, the first positions of the first image and the last ones of the last, and their inputs.

    They are first and last along the first dimension of space; the inputs are padded.
    """
    assert isinstance(module, _CONVOLUTIONS)
    seen = module.dilation[0] * (module.kernel_size[0] - 1) + 1
    start = module.stride[0] * (output.shape[2] - 1)
    first, last = (pad(module, inputs[[place]]) for place in (0, -1))
    edges = torch.cat([first[:, :, :seen], last[:, :, start : start + seen]])
    return edges, torch.cat([output[:1, :, :1], output[-1:, :, -1:]])


def _apply_inside(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return W φ like :func:`apply`, of inputs that are padded already."""
    if not isinstance(module, _CONVOLUTIONS):
        return apply(module, inputs)
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(module.kernel_size)]
    outputs: Tensor = function(inputs, module.weight.detach(), None, module.stride, 0, module.dilation, module.groups)
    return outputs


def in_common_form(module: nn.Module, tensor: Tensor) -> list[Tensor]:
    """Return inputs (padded) or cotangents of one call in the five dimensions of :class:`.Geometry`, samples first.

    Args:
        module: a supported layer.
        tensor: (n, …, features) for a linear layer, (n, q, channels, …) for a convolution on q images a sample.

    Returns:
        One tensor, or q of them where three-dimensional images leave no dimension for q.
    """
    if not isinstance(module, _CONVOLUTIONS):
        return [tensor.reshape(len(tensor), -1, tensor.shape[-1]).transpose(1, 2)[..., None, None]]
    if isinstance(module, nn.Conv3d):
        return list(tensor.unbind(1))
    images = tensor.transpose(
        1, 2
    )  # the q images lie along the first spatial dimension, where kernels have one element
    return [images if images.ndim == 5 else images.unsqueeze(3)]


def joined(module: nn.Module, parts: list[Tensor]) -> list[Tensor]:
    """Return tensors of several calls as one, along a free spatial dimension, if there is one and sizes allow it."""
    if (
        len(parts) == 1
        or isinstance(module, nn.Conv3d)
        or len({(*part.shape[:2], *part.shape[3:]) for part in parts}) > 1
    ):
        return parts
    return [torch.cat(parts, dim=2)]


def check_measurable(name: str, module: nn.Module) -> None:
    """Raise unless the layer's weights are numbers that the contractions can take."""
    weight, bias = matrix(module)
    if weight.is_meta:
        raise InputError(f"layer {name!r}: its weights are on the meta device; load the model first")
    check_dtype(f"layer {name!r}: weight", weight.dtype)
    if bias is not None and bias.dtype != weight.dtype:
        raise InputError(f"layer {name!r}: weight is {weight.dtype}, bias {bias.dtype}; they must be of one dtype")


def check_finite(modules: Mapping[str, nn.Module]) -> None:
    """Raise if a layer's weight or bias has NaN or infinity in it."""
    for name, module in modules.items():
        check_finite_entries(f"layer {name!r}", *matrix(module))


def check_finite_entries(where: str, weight: Tensor, bias: Tensor | None) -> None:
    """Raise if the weight or bias of what is called ``where`` has NaN or infinity in it."""
    for what, values in (("weight", weight), ("bias", bias)):
        if values is not None and not bool(values.isfinite().all()):
            count = int((~values.isfinite()).sum())
            raise NonFiniteError(f"{where}: its {what} has {count} entries of NaN or infinity")


def check_dtype(what: str, dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` is one that the contractions can take."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(f"{what} is {dtype}; float16, bfloat16, float32 or float64 is wanted")


def ties(model: nn.Module, layer: nn.Module) -> list[str]:
    """Return the names of other modules that own the layer's very weight parameter."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return []
    return [
        name
        for name, module in model.named_modules()
        if module is not layer and any(p is weight for p in module._parameters.values())
    ]


def tie_notes(model: nn.Module, layer: nn.Module) -> tuple[str, ...]:
    """Return what a reader of a layer's value should know if its weight is tied."""
    others = ties(model, layer)
    return (f"weight tied with {', '.join(others)}: derivative through this use only",) if others else ()


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a layer is GPT-2's: a linear layer that keeps its weight as (m, d).

    It is known by its name, since transformers may be absent.
    """
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _triple(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    a, b, c = (*(1,) * (3 - len(sizes)), *sizes)
    return a, b, c

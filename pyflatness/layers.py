"""Layers as weight matrices: which are supported, their (d, m) matrix, their input as rows, and how to name them."""

import difflib
import fnmatch
import re

import torch
from torch import Tensor, nn

from .errors import InputError, NotYetError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside ``DataParallel``, ``DistributedDataParallel`` or ``torch.compile``'s wrapper."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def is_supported(module: nn.Module) -> bool:
    """A linear layer, or a convolution with a 1×1 kernel that touches every pixel once: one matrix per position."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return (
        isinstance(module, _CONVOLUTIONS)
        and all(k == 1 for k in module.kernel_size)
        and all(s == 1 for s in module.stride)
        and module.groups == 1
        and (isinstance(module.padding, str) or not any(module.padding))
    )


def matrix(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The effective weight (d, m) and the bias (d,) of a supported layer, detached."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    return weight.detach().flatten(1), bias.detach() if isinstance(bias, Tensor) else None


def class_dim(module: nn.Module) -> int:
    """The dimension of the layer's output that holds its d rows: last for linear layers, 1 for convolutions."""
    return -1 if isinstance(module, nn.Linear) else 1


def input_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """The layer's input as (positions of all samples, m), in the order of the output without its class dimension."""
    inputs = inputs.detach().movedim(class_dim(module), -1)
    return inputs.reshape(-1, inputs.shape[-1])


def select(model: nn.Module, selector: str | nn.Module) -> tuple[str, nn.Module]:
    """The one layer that a selector means: a qualified name, a glob, ``re:…``, ``type:…`` or the module itself.

    Raises:
        InputError: nothing or several layers match; near names or the matches are listed.
        NotYetError: the layer is of a kind that this version cannot measure.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    if isinstance(selector, nn.Module):
        matches = [name for name, module in named.items() if module is selector][:1]
        if not matches:
            raise InputError(f"layer: this {type(selector).__name__} is not a part of the model")
    elif isinstance(selector, str):
        matches = [selector] if selector in named else _matching(model, selector)
    else:
        raise InputError(f"layer: a name, glob, 're:…', 'type:…' or module is wanted, got {type(selector).__name__}")
    if not matches:
        layers = [name for name, module in named.items() if is_supported(module)]
        near = difflib.get_close_matches(selector, [name for name in named if name]) or layers
        raise InputError(f"layer: nothing in the model matches {selector!r}; did you mean {', '.join(near[:5])}?")
    if len(matches) > 1:
        raise InputError(f"layer: {selector!r} matches {len(matches)} layers, one is wanted: {', '.join(matches[:8])}")
    module = named[matches[0]]
    if not is_supported(module):
        raise NotYetError(
            f"layer {matches[0]!r} is a {type(module).__name__}; this version measures Linear layers and 1×1 "
            "convolutions (stride 1, no padding, one group) that are the model's head"
        )
    return matches[0], module


def check_measurable(name: str, module: nn.Module) -> None:
    """Raise unless the layer's weights are numbers that the contractions can take."""
    weight, bias = matrix(module)
    if weight.is_meta:
        raise InputError(f"layer {name!r}: its weights are on the meta device; load the model first")
    check_dtype(f"layer {name!r}: weight", weight.dtype)
    if bias is not None and bias.dtype != weight.dtype:
        raise InputError(f"layer {name!r}: weight is {weight.dtype}, bias {bias.dtype}; they must be of one dtype")


def check_dtype(what: str, dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` is one that the contractions can take."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(f"{what} is {dtype}; float16, bfloat16, float32 or float64 is wanted")


def ties(model: nn.Module, layer: nn.Module) -> list[str]:
    """Names of other modules that own the layer's very weight parameter."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return []
    return [
        name
        for name, module in model.named_modules()
        if module is not layer and any(p is weight for p in module._parameters.values())
    ]


def _matching(model: nn.Module, pattern: str) -> list[str]:
    kind, _, rest = pattern.partition(":")
    layers = {name: module for name, module in model.named_modules() if name}
    if kind == "type" and rest:
        return [name for name, module in layers.items() if type(module).__name__ == rest]
    if kind == "re" and rest:
        try:
            expression = re.compile(rest)
        except re.error as error:
            raise InputError(f"layer: {pattern!r} is not a regular expression ({error})") from None
        return [name for name in layers if expression.fullmatch(name)]
    return [name for name, module in layers.items() if is_supported(module) and fnmatch.fnmatchcase(name, pattern)]

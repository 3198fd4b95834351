"""Run a model at other parameters than its own, which are restored also after an error."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from . import state, walk

Parameters = dict[str, Tensor]


def every(model: nn.Module) -> Parameters:
    """Return the model's parameters by name, detached; a parameter with several names comes once."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, values in found.items():
        if values.is_meta or not values.is_floating_point():
            where = "on the meta device" if values.is_meta else f"{values.dtype}"
            raise InputError(f"model: its parameter {name!r} is {where}; floating-point values are wanted")
    return found


def trainable(model: nn.Module) -> Parameters:
    """Return the parameters that require gradients, by name, detached."""
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not wanted:
        raise InputError(
            "model: none of its parameters requires gradients, and the measure is over those that do; call "
            "model.requires_grad_(True) first"
        )
    return {name: values for name, values in every(model).items() if name in wanted}


def noise(values: Mapping[str, Tensor], generator: torch.Generator) -> Parameters:
    """Return standard normal numbers in the shape and dtype of each tensor, at least float32."""

    def of(tensor: Tensor) -> Tensor:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        return torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=dtype)

    return {name: of(tensor) for name, tensor in values.items()}


def displaced(values: Mapping[str, Tensor], noise: Mapping[str, Tensor], spread: Callable[[Tensor], Any]) -> Parameters:
    """Return θ + spread(θ) · noise, in the dtype of each tensor."""
    return {name: (w + spread(w) * noise[name]).to(w.dtype) for name, w in values.items()}


@contextlib.contextmanager
def requiring(tensors: Iterable[Tensor], *, flag: bool) -> Iterator[list[Tensor]]:
    """Set ``requires_grad`` of tensors that can be leaves of a graph, inside the context; yield these tensors."""
    leaves = [t for t in tensors if t.is_leaf and (t.is_floating_point() or t.is_complex()) and not t.is_inference()]
    before = [leaf.requires_grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.requires_grad_(flag)
        yield leaves
    finally:
        for leaf, own in zip(leaves, before, strict=True):
            leaf.requires_grad_(own)


@contextlib.contextmanager
def inside(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Put ``values`` in place of parameters, or buffers, inside the context, where backward passes have to be too."""
    own: dict[str, Tensor] = dict(model.named_parameters())
    if not values.keys() <= own.keys():
        own |= dict(model.named_buffers())
    by_tensor = {id(own[name]): tensor for name, tensor in values.items()}
    modules = walk.modules(model)
    with state.made_anew(model), contextlib.ExitStack() as stack:
        stack.callback(state.put_back, state.attributes(modules))
        for module in modules:
            for places in (module._parameters, module._buffers):
                for key, held in places.items():
                    if held is not None and id(held) in by_tensor:
                        places[key] = value = by_tensor[id(held)]  # type: ignore[assignment]
                        vars(value).update(vars(held))  # some libraries' modules read attributes of parameters
        yield

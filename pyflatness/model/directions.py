"""Make directions in the space of a network's parameters, along which its loss is evaluated.

A direction is a mapping from names of parameters to changes of their shapes. Parameters that it does not name stay, and
a parameter that several modules share has one name. Random directions are filter-normalised (Li et al. 2018,
"Visualizing the Loss Landscape of Neural Nets", https://arxiv.org/abs/1712.09913, section 4): for each row w_r of a
weight's matrix, the weights of an output,

    d_r ← |w_r| d_r / |d_r|

so that a step along them means the same whatever scale the layers have. As there, they are zero in biases, in scales of
normalisations and in all other vectors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..messages import check_tensor, shown
from . import layers, parameters, selectors
from .kinds import AnyUse, is_plain, is_scale
from .parameters import Parameters
from .selectors import Selector

NORMALIZATIONS = ("auto", "filter", "layer", None)


@dataclass(frozen=True)
class Direction:
    """Hold a direction."""

    label: str  # of an axis of a figure
    values: Parameters  # by name of a parameter, or of a buffer that goes along


def moved(theta: Mapping[str, Tensor], directions: Sequence[Direction], coefficients: Sequence[float]) -> Parameters:
    """Return θ + Σ_k c_k d_k of all that the directions change, summed in float64, in the dtype of each tensor."""
    found = {}
    for name, own in theta.items():
        total = own.double()
        for direction, coefficient in zip(directions, coefficients, strict=True):
            if name in direction.values:
                total = total + coefficient * direction.values[name]
        found[name] = total.to(own.dtype)
    return found


def origin(model: nn.Module, directions: Sequence[Direction]) -> Parameters:
    """Return the parameters and buffers of a model that directions change, in the model's order."""
    named = {name for direction in directions for name in direction.values}
    return {name: values for name, values in (parameters.every(model) | _statistics(model)).items() if name in named}


def chosen(model: nn.Module, selected: Selector | Sequence[Selector] | None) -> frozenset[str]:
    """Return the names of the parameters of some layers, biases too; None: of all parameters."""
    if selected is None:
        return frozenset(parameters.every(model))
    wanted: set[int] = set()
    for module in selectors.select(model, selected).modules.values():
        own = [module.source.parameter] if isinstance(module, AnyUse) else [*module.parameters()]  # type: ignore[union-attr]
        wanted |= {id(parameter) for parameter in own}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in wanted)


def random(
    model: nn.Module, names: frozenset[str], generator: torch.Generator, normalization: str | None, label: str
) -> Direction:
    """Return a Gaussian direction in the weights among some parameters; see :func:`normalized`."""
    found = {}
    scales = {id(p) for module in model.modules() if is_scale(module) for p in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if name in names and parameter.ndim > 1 and id(parameter) not in scales:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            noise = torch.randn(parameter.shape, generator=generator, dtype=dtype, device="cpu")
            found[name] = noise.to(parameter.device)
    if not found:
        raise InputError(
            "directions='random': they are zero in biases and normalisations, and the chosen parameters have no "
            "others; pass directions of your own, mappings from names of parameters to tensors"
        )
    return normalized(model, Direction(label, found), normalization)


def normalized(model: nn.Module, direction: Direction, normalization: str | None) -> Direction:
    """Return a direction whose filters, or whole tensors (``"layer"``), are scaled to the norms of the model's.

    Filters are the rows of a layer's matrix. Those of a parameter that is no layer's weight are its entries [r].
    """
    if normalization is None:
        return direction
    modules = {id(m._parameters.get("weight")): m for m in model.modules() if is_plain(m)}
    found = {}
    for name, parameter in model.named_parameters():
        if name not in direction.values:
            continue
        change, weight = direction.values[name], parameter.detach()
        module = modules.get(id(parameter))
        if normalization == "layer" or weight.ndim < 2:
            found[name] = _scaled(change.reshape(1, -1), weight.reshape(1, -1)).view_as(weight)
        elif module is None:
            found[name] = _scaled(change.flatten(1), weight.flatten(1)).view_as(weight)
        else:
            rows = _scaled(layers.as_matrix(module, change), layers.as_matrix(module, weight))
            found[name] = layers.as_weight(module, rows)
    return Direction(direction.label, found)


def _scaled(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows (r, c) scaled to the norms of the rows of ``like``; a row of zeros stays."""
    norm, wanted = (torch.linalg.vector_norm(each, dim=1, keepdim=True, dtype=torch.float64) for each in (rows, like))
    scaled: Tensor = rows * torch.where(norm > 0, wanted / norm, 0.0).to(rows.dtype)
    return scaled


def given(model: nn.Module, changes: Mapping[str, Any], option: str, label: str) -> Direction:
    """Return a direction that the user passed, by names of parameters, or of layers whose weight is meant."""
    theta, first = parameters.every(model), _first_names(model)
    found: Parameters = {}
    for key, change in changes.items():
        own = layers.without_compile(str(key))
        name = first.get(own) or first.get(f"{own}.weight" if own else "weight")
        if name is None:
            raise InputError(
                f"{option}: the model has no parameter {key!r}, and no layer with a weight of this name; it has "
                f"{', '.join([*theta][:6])}"
            )
        shape = tuple(theta[name].shape)
        if not isinstance(change, Tensor) or change.shape != shape or not bool(change.isfinite().all()):
            got = tuple(change.shape) if isinstance(change, Tensor) else shown(change)
            raise InputError(f"{option}: for {key!r} finite numbers of shape {shape} are wanted, got {got}")
        change = change.detach().to(theta[name].device)
        if name in found and not torch.equal(found[name], change):
            raise InputError(f"{option}: {key!r} is {name!r}, one parameter of two names, and has two changes")
        found[name] = change
    if not any(bool(change.any()) for change in found.values()):
        raise InputError(f"{option}: {label} is zero, or empty")
    return Direction(label, found)


def to(model: nn.Module, other: Any, names: frozenset[str] | None, option: str, label: str) -> Direction:
    """Return the direction θ' - θ to another checkpoint, with its buffers; with ``names`` these parameters alone."""
    if isinstance(other, nn.Module):
        module = layers.unwrap(other)
        state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    elif isinstance(other, Mapping):
        state = dict(other)
    else:
        raise InputError(f"{option}={shown(other)}: a module or a state dict is wanted")
    state = {layers.without_compile(str(name)): value for name, value in state.items()}
    theta, buffers = parameters.every(model), _statistics(model)
    missing = [name for name in theta if name not in state]
    unknown = (
        state.keys() - _first_names(model).keys() - {name for name, _ in model.named_buffers(remove_duplicate=False)}
    )
    if missing or unknown:
        what = f"it has no {missing[0]!r}" if missing else f"the model has no {min(unknown)!r}"
        raise InputError(f"{option}: a checkpoint of this model is wanted, and {what}")
    own = theta | {name: values for name, values in buffers.items() if name in state}
    found = {}
    for name, values in own.items():
        if names is not None and name not in names:
            continue
        value = check_tensor(f"{option}: {name!r}", state[name])
        if value.shape != values.shape:
            raise InputError(
                f"{option}: a tensor {name!r} of shape {tuple(values.shape)} is wanted, got one of shape "
                f"{tuple(value.shape)}"
            )
        change = value.detach().to(values.device).double() - values.double()
        if bool(change.any()):  # NaN too
            found[name] = change
    if not found:
        raise InputError(f"{option}: it has the model's own weights, and there is no line between the two")
    return Direction(label, found)


def moves_buffers(model: nn.Module, directions: Sequence[Direction]) -> bool:
    """Return whether directions change buffers, too."""
    own = parameters.every(model).keys()
    return any(not direction.values.keys() <= own for direction in directions)


def _statistics(model: nn.Module) -> Parameters:
    """Return the buffers of floating-point numbers by name, such as the running statistics of BatchNorm."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return for each name of a parameter its first one, by which directions have it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}

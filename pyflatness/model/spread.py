"""Hold which parameters of the measured model are spread over ranks, and how to gather them.

:mod:`.fsdp` and :func:`held_in_parallel` register them for the rest of the package.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import InputError, NotYetError
from ..numerics.ranks import ALONE, Ranks
from . import walk

WHOLE = (
    "load the full weights into a model that is not (torch.distributed.checkpoint.state_dict.get_model_state_dict with "
    "full_state_dict=True) and measure that"
)


@dataclass(frozen=True)
class Part:
    """Hold a parameter that is spread over ranks: a DTensor, with which modules compute in tensor parallelism."""

    spread: Any

    def whole(self) -> Tensor:
        """Return all of its entries."""
        return full(self.spread.detach())

    def used(self) -> Tensor | None:
        """Return the tensor with which modules compute; None before the first run."""
        found: Tensor = self.spread
        return found


# These are for the model inside held(); calls of several threads take turns.
_held: dict[int, Part] = {}  # by the identity of parameters
_layers: set[int] = set()  # modules with such a weight
_parallel = [ALONE]


@contextlib.contextmanager
def held(model: nn.Module, parts: Mapping[int, Part], parallel: Ranks = ALONE) -> Iterator[None]:
    """Register parameters of a model, by their identity, as spread over ranks, inside the context."""
    _held.update(parts)
    _layers.update(id(module) for module in walk.modules(model) if id(module._parameters.get("weight")) in parts)
    _parallel.append(parallel)
    try:
        yield
    finally:
        _parallel.pop()
        _layers.clear()
        _held.clear()


def is_spread(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, spread over processes."""
    return type(tensor).__name__ == "DTensor"  # by name: importing its module takes as long as importing this one


def is_held() -> bool:
    """Return whether the measured model has parameters that are spread over ranks."""
    return bool(_held)


def parallel() -> Ranks:
    """Return the ranks of tensor parallelism, which compute parts of each layer for the same samples; or ALONE."""
    return _parallel[-1]


def parameters() -> list[Tensor]:
    """Return the parameters that are spread over ranks; gathered tensors have their ``requires_grad``."""
    return [part.spread for part in _held.values()]


def has_weight_of(module: nn.Module) -> bool:
    """Return whether a layer's weight is spread over ranks."""
    return id(module) in _layers


def owners() -> dict[int, Tensor]:
    """Return the parameters that are spread over ranks, by the identity of the tensor in which each is gathered."""
    return {id(part.used()): part.spread for part in _held.values()}


def used(parameter: Tensor) -> Tensor | None:
    """Return the tensor with which modules compute for a parameter: the gathered one, or the parameter itself."""
    return _held[id(parameter)].used() if id(parameter) in _held else parameter


def refuse(what: str, instead: str = "") -> None:
    """Raise if the measured model has parameters spread over ranks, for which ``what`` is not available."""
    if _held:
        raise NotYetError(
            f"{what} cannot be had yet of a model whose parameters are spread over ranks: {instead}{WHOLE}"
        )


def check_processes(name: str, spread: Any, ranks: Ranks, data: str) -> None:
    """Raise unless the ranks that make the call, each with its ``data``, are those over which a DTensor is spread."""
    processes = spread.device_mesh.mesh.tolist()
    if len(processes) != ranks.size or not (ranks.alone or processes == ranks.processes):
        here = "process_group=False" if ranks.alone else f"the processes {ranks.processes}"
        raise InputError(
            f"model: its parameter {name!r} is spread over the processes {processes}, which have to make the call "
            f"together, each with {data}, and this call is one of {here}; {WHOLE}"
        )


def whole(weight: Tensor) -> Tensor:
    """Return a weight with all of its entries, including those on other ranks."""
    if not is_spread(weight):
        return weight
    if id(weight) not in _held:
        raise NotYetError(
            f"model: a layer's weight, {tuple(weight.shape)}, is computed of parameters that are spread over ranks; "
            f"{WHOLE}"
        )
    return _held[id(weight)].whole()


def full(tensor: Tensor) -> Tensor:
    """Return a tensor of a tensor-parallel forward or backward pass with all of its entries and its graph."""
    if not is_spread(tensor):
        return tensor
    found: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return found


def own_rows(module: nn.Module) -> tuple[Tensor, Tensor | None, int] | None:
    """Return this rank's rows of weight and bias, and the number of the first one.

    It is None for a layer that is not spread by rows.
    """
    weight: Any = module.weight
    ranks = parallel()
    if ranks.alone or not is_spread(weight) or not weight.placements[0].is_shard(0):
        return None
    rows: Tensor = weight.detach().to_local()
    bias = getattr(module, "bias", None)
    start = min(len(weight), -(-len(weight) // ranks.size) * ranks.rank)
    if isinstance(bias, Tensor):
        bias = full(bias.detach())[start : start + len(rows)]
    return rows, bias, start


@contextlib.contextmanager
def held_in_parallel(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Register a model's parameters that tensor parallelism spreads over ranks, inside the context."""
    parts = {}
    has_spread = any(map(is_spread, walk.parameters(model)))
    for name, parameter in model.named_parameters() if has_spread else ():
        given: Any = parameter
        if not is_spread(parameter):
            continue
        if len(given.placements) != 1:
            raise NotYetError(
                f"model: its parameter {name!r} is spread over {given.device_mesh}, of several dimensions; {WHOLE}"
            )
        check_processes(name, given, ranks, "the same data")
        parts[id(parameter)] = Part(parameter)
    if not parts:
        yield
        return
    with held(model, parts, ranks):
        yield

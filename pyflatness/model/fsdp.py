"""Hold a model whose parameters FSDP2 (``fully_shard``) has spread over ranks so that these can measure it together.

FSDP gathers the parameters of a module when its forward or backward pass begins, and all ranks have to come there. Here
they come at different times, and some not at all: their batches differ in number and size, and so does what they find
out. So FSDP's messages go by way of :meth:`.Ranks.whole` meanwhile: a rank gets a module's parameters when it needs
them, and the others hand over their parts wherever they wait. A layer's weight comes in the same way where it is
contracted.

What is taken of FSDP besides its public names is in this module: the parameter groups of its states.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, NotYetError
from ..numerics.ranks import Ranks
from . import spread
from .spread import WHOLE, Part

Group = Any  # FSDP's parameters of one module, which are gathered together: an FSDPParamGroup


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has spread parameters of a model over ranks."""
    return bool(_states(model))


@dataclass(frozen=True)
class _Weight:
    """Hold a parameter that is spread over ranks."""

    name: str
    spread: Any
    dtype: torch.dtype  # that it has in the forward pass
    ranks: Ranks

    def whole(self) -> Tensor:
        """Return all of it."""
        shape, dim, most = [*self.spread.shape], *self._split()
        parts = []
        found = self.part().unsqueeze(0) if self.ranks.alone else self.ranks.whole(self.name)
        for rank, flat in enumerate(found):
            shape[dim] = max(0, min(most, self.spread.shape[dim] - rank * most))
            parts.append(flat[: math.prod(shape)].view(shape))
        return torch.cat(parts, dim=dim).to(self.dtype)

    def part(self) -> Tensor:
        """Return what is on this rank, and zeros up to the size of the first rank's, which has most."""
        shape, dim, most = [*self.spread.shape], *self._split()
        shape[dim] = most
        local: Tensor = self.spread.detach().to_local().flatten()
        return torch.cat([local, local.new_zeros(math.prod(shape) - local.numel())])

    def _split(self) -> tuple[int, int]:
        """Return the dimension that is split, and how many of its entries the first rank has."""
        (placement,) = self.spread.placements
        return placement.dim, -(-self.spread.shape[placement.dim] // self.ranks.size)


@contextlib.contextmanager
def held(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Let ranks ask each other for the parameters of a model inside; afterwards FSDP gathers them as it did before.

    At first no module has its parameters gathered. Afterwards those have that had before; after an error none.
    """
    states = _states(model)
    for state in states:
        if state._is_root is None:
            state._lazy_init()  # which the first forward pass would do when nothing requires a gradient
    roots = [state for state in states if state._is_root]
    if not roots:
        raise InputError("model: it is a part of a module under FSDP2, which runs forward as a whole; pass that")
    groups = [group for state in states for group in state._fsdp_param_groups]
    gathered = [group for group in groups if group.is_unsharded]
    _shard(roots)
    with contextlib.ExitStack() as stack:
        weights = _weights(model, groups, ranks)
        stack.enter_context(spread.held(model, {key: Part(held.spread, held.whole) for key, held in weights.items()}))
        # A pass that ended by an error leaves FSDP in the middle of it.
        stack.callback(model.register_forward_pre_hook(lambda *_: _shard(roots), prepend=True).remove)
        parts: dict[str, Callable[[], Tensor]] = {weight.name: weight.part for weight in weights.values()}
        for number, group in enumerate(groups) if not ranks.alone else ():
            name = f"group {number}"
            parts[name] = partial(_part, group)
            stack.callback(vars(group).update, _all_gather_comm=group._all_gather_comm, reduce_grads=group.reduce_grads)
            group._all_gather_comm, group.reduce_grads = _AllGather(ranks, name), False
        ranks.hand_over(parts)
        try:
            yield
        finally:
            _shard(roots)
        for group in gathered:
            group.unshard()
            group.wait_for_unshard()


def _states(model: nn.Module) -> list[Any]:
    """Return FSDP's states of a model's modules, in its order."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    return [*{id(state): state for state in states}.values()]


def _shard(roots: Sequence[Any]) -> None:
    """Let no module have its parameters gathered, and FSDP be in the middle of no pass."""
    for root in roots:
        root._reset_iter_state()


def _part(group: Group) -> Tensor:
    """Return what is on this rank of the parameters that are gathered together, as FSDP lays it out."""
    flat = [each._sharded_param_data.to(each.param_dtype or each.orig_dtype) for each in group.fsdp_params]
    if len({part.dtype for part in flat}) > 1:
        flat = [part.view(torch.uint8) for part in flat]
    return torch.cat(flat)


class _AllGather:
    """Gather parameters when this rank needs them, whatever the others do; the form is FSDP's ``AllGather``."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks, self._name = ranks, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Fill the memory."""
        self._ranks.whole(self._name, output_tensor)


def _weights(model: nn.Module, groups: Sequence[Group], ranks: Ranks) -> dict[int, _Weight]:
    """Return the parameters that are spread, by their identity."""
    found, of_fsdp = {}, {id(each.sharded_param): (group, each) for group in groups for each in group.fsdp_params}
    for name, parameter in model.named_parameters():
        if not spread.is_spread(parameter):
            continue
        held: Any = parameter
        if id(parameter) not in of_fsdp or not _is_plain(*of_fsdp[id(parameter)]):
            raise NotYetError(
                f"model: its parameter {name!r} is spread over {held.device_mesh} as {held.placements}; parameters "
                "can be measured that fully_shard spreads over one dimension of all ranks, without "
                f"reshard_after_forward=k, offloading or tensor parallelism; {WHOLE}"
            )
        spread.check_processes(name, parameter, ranks, "its part of the data")
        dtype = of_fsdp[id(parameter)][1].param_dtype or parameter.dtype
        found[id(parameter)] = _Weight(f"parameter {name}", held, dtype, ranks)
    return found


def _is_plain(group: Group, parameter: Any) -> bool:
    """Return whether FSDP has a parameter in one dimension of its mesh, and gathers it as it is."""
    placements = parameter.sharded_param.placements
    in_one_dimension = len(placements) == 1 and placements[0].is_shard()
    partly = group.post_forward_mesh_info not in (None, group.mesh_info)
    extended = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
    return in_one_dimension and not partly and not parameter.offload_to_cpu and not extended

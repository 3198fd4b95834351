"""Let ranks measure a model together whose parameters FSDP2 (``fully_shard``) has spread over them.

FSDP gathers the parameters of a module when its forward or backward pass begins, which all ranks have to do together.
Here ranks differ in the number and size of their batches, and in the passes that they make. So :meth:`.Ranks.whole`
replaces FSDP's messages: a rank gets a module's parameters when it needs them, and the others send their parts wherever
they wait. A layer's weight is gathered in the same way when it is contracted.

A penalty is computed in training, where all ranks make the same passes and FSDP's own messages are used; see
:func:`passes`.

Only this module uses private attributes of FSDP: its states, and their parameter groups.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, NotYetError
from ..numerics.ranks import Ranks
from . import spread
from .spread import WHOLE, Part

_A_PART = "model: it is a part of a module under FSDP2, which runs forward as a whole; pass that"

Group = Any  # FSDP's parameters of one module, which are gathered together: an FSDPParamGroup


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has spread parameters of a model over ranks."""
    return bool(_states(model))


@dataclass(frozen=True)
class _Weight(Part):
    """Hold a parameter that FSDP spreads over ranks."""

    name: str
    ranks: Ranks
    of_fsdp: Any

    def used(self) -> Tensor | None:
        """Return the tensor in which FSDP gathers the parameter, which FSDP allocates once."""
        found: Tensor | None = getattr(self.of_fsdp, "_unsharded_param", None)
        return found

    def whole(self) -> Tensor:
        """Return the whole parameter."""
        shape, dim, most = [*self.spread.shape], *self._split()
        parts = []
        found = self.part().unsqueeze(0) if self.ranks.alone else self.ranks.whole(self.name)
        for rank, flat in enumerate(found):
            shape[dim] = max(0, min(most, self.spread.shape[dim] - rank * most))
            parts.append(flat[: math.prod(shape)].view(shape))
        return torch.cat(parts, dim=dim).to(self.of_fsdp.param_dtype or self.spread.dtype)

    def part(self) -> Tensor:
        """Return this rank's part as a vector, padded with zeros to the size of the first rank's, the largest."""
        shape, dim, most = [*self.spread.shape], *self._split()
        shape[dim] = most
        local: Tensor = self.spread.detach().to_local().flatten()
        return torch.cat([local, local.new_zeros(math.prod(shape) - local.numel())])

    def _split(self) -> tuple[int, int]:
        """Return the dimension that is split, and the number of its entries on the first rank."""
        (placement,) = self.spread.placements
        return placement.dim, -(-self.spread.shape[placement.dim] // self.ranks.size)


@contextlib.contextmanager
def held(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Let ranks ask each other for the parameters of a model inside the context, in place of FSDP's messages.

    Inside, no module has its parameters gathered at first. Afterwards those modules have that had before, or none after
    an error.
    """
    states = _states(model)
    for state in states:
        if state._is_root is None:
            state._lazy_init()  # otherwise the first forward pass would do it while nothing requires a gradient
    roots = [state for state in states if state._is_root]
    if not roots:
        raise InputError(_A_PART)
    groups = _groups(states)
    gathered = [group for group in groups if group.is_unsharded]
    _shard(roots)
    with contextlib.ExitStack() as stack:
        weights = _weights(model, groups, ranks)
        stack.enter_context(spread.held(model, weights))
        # After an error in a pass, FSDP would still be in the middle of it.
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
        _gather(gathered)


def check_trained(model: nn.Module) -> None:
    """Raise unless :func:`passes` can gather all parameters of a model that are spread over ranks."""
    of_fsdp = _of_fsdp(_groups(_all_states(model)))
    found = {id(held): (name, held) for name, held in model.named_parameters() if spread.is_spread(held)}
    for key, (_, each) in of_fsdp.items():  # gathered parameters of the model are no DTensors
        found.setdefault(key, (each._param_fqn, each.sharded_param))
    for key, (name, held) in found.items():
        if key not in of_fsdp or not _is_plain(*of_fsdp[key]):
            which = "FlatnessPenalty takes those that fully_shard spreads over one dimension of processes"
            raise _not_plain(name, held, which, "leave that out, or train with DistributedDataParallel")


@contextlib.contextmanager
def passes(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[Callable[[Tensor, Callable[[], None]], None]]:
    """Let backward passes inside the context use the graph of the user's forward pass, apart from training.

    Gradients are not reduced, and parameters that are gathered for a pass, or of ``layers``, stay gathered until the
    end, so that all ranks gather the same for any number of passes. Yield a function of a tensor computed inside and a
    check: when the tensor is differentiated later, the parameters of its graph are gathered again, and then checked.
    """
    states = _all_states(model)
    if states:
        check_trained(model)
    elif any(spread.is_spread(parameter) for layer in layers for parameter in layer.parameters()):
        raise InputError(_A_PART)
    groups, roots = _groups(states), [state for state in states if state._is_root]
    sharded = [group for group in groups if not group.is_unsharded]
    own = {id(parameter) for layer in layers for parameter in layer.parameters()}
    try:
        with contextlib.ExitStack() as stack:
            for root in roots:  # so that FSDP keeps what it will prefetch in the user's backward pass
                _set(stack, root._state_ctx, is_last_backward=False)
            for group in groups:
                _set(stack, group, reduce_grads=False, reshard_after_backward=False, _post_forward_indices=[])
            _gather(group for group in sharded if any(id(each.sharded_param) in own for each in group.fsdp_params))
            yield lambda value, check: _gather_before(value, groups, roots, check)
            for group in sharded:
                group.wait_for_unshard()
                group.reshard()
    except BaseException:  # after an error in a pass, FSDP would still be in the middle of it
        _shard(roots)
        raise


def _gather_before(value: Tensor, groups: Sequence[Group], roots: Sequence[Any], check: Callable[[], None]) -> None:
    """Gather the parameters that are gathered now again when a tensor is differentiated, and call ``check``."""
    used = [group for group in groups if group.is_unsharded]

    def before(gradient: Tensor) -> Tensor:
        _gather(used)
        check()
        for root in roots:  # FSDP itself does this only for passes that begin at the model's outputs
            root._register_root_post_backward_final_callback()
        return gradient

    if groups:
        value.register_hook(before)


def _gather(groups: Iterable[Group]) -> None:
    for group in groups:
        group.unshard()
        group.wait_for_unshard()


def _set(stack: contextlib.ExitStack, held: Any, **values: Any) -> None:
    """Set attributes of an object until the stack is closed."""
    stack.callback(vars(held).update, {name: getattr(held, name) for name in values})
    vars(held).update(values)


def _groups(states: Sequence[Any]) -> list[Group]:
    if any(not hasattr(state, "_fsdp_param_groups") for state in states):
        raise NotYetError(
            f"model: it is under FSDP2 of torch {torch.__version__}, which keeps parameters in another way than torch "
            "2.13, and that one is known here; install torch 2.13 or later"
        )
    return [group for state in states for group in state._fsdp_param_groups]


def _of_fsdp(groups: Sequence[Group]) -> dict[int, tuple[Group, Any]]:
    """Return each parameter's group and FSDP's record of it, by the identity of the spread parameter."""
    return {id(each.sharded_param): (group, each) for group in groups for each in group.fsdp_params}


def _all_states(model: nn.Module) -> list[Any]:
    """Return FSDP's states of a model, and of the model that it is a part of, which makes the passes."""
    states = [each for state in _states(model) for each in state._state_ctx.all_states or [state]]
    return [*{id(state): state for state in states}.values()]


def _states(model: nn.Module) -> list[Any]:
    """Return FSDP's states of a model's modules, in its order."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not torch.distributed.is_initialized():
        return []
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    return [*{id(state): state for state in states}.values()]


def _shard(roots: Sequence[Any]) -> None:
    """Free all gathered parameters, and end FSDP's current pass."""
    for root in roots:
        root._reset_iter_state()


def _part(group: Group) -> Tensor:
    """Return this rank's part of the parameters that are gathered together, in FSDP's layout."""
    flat = [each._sharded_param_data.to(each.param_dtype or each.orig_dtype) for each in group.fsdp_params]
    if len({part.dtype for part in flat}) > 1:
        flat = [part.view(torch.uint8) for part in flat]
    return torch.cat(flat)


class _AllGather:
    """Gather parameters when this rank needs them, independently of the others; it replaces FSDP's ``AllGather``."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks, self._name = ranks, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Fill the memory with the parameters."""
        self._ranks.whole(self._name, output_tensor)


def _weights(model: nn.Module, groups: Sequence[Group], ranks: Ranks) -> dict[int, _Weight]:
    """Return the spread parameters, by their identity."""
    found, of_fsdp = {}, _of_fsdp(groups)
    for name, parameter in model.named_parameters():
        if not spread.is_spread(parameter):
            continue
        held: Any = parameter
        if id(parameter) not in of_fsdp or not _is_plain(*of_fsdp[id(parameter)]):
            which = "parameters can be measured that fully_shard spreads over one dimension of all ranks"
            raise _not_plain(name, held, which, WHOLE)
        spread.check_processes(name, parameter, ranks, "its part of the data")
        found[id(parameter)] = _Weight(held, f"parameter {name}", ranks, of_fsdp[id(parameter)][1])
    return found


def _not_plain(name: str, held: Any, which: str, instead: str) -> NotYetError:
    """Return the error for a parameter in another layout of FSDP's; it says ``which`` parameters are supported."""
    return NotYetError(
        f"model: its parameter {name!r} is spread over {held.device_mesh} as {held.placements}; {which}, without "
        f"reshard_after_forward=k, offloading or tensor parallelism; {instead}"
    )


def _is_plain(group: Group, parameter: Any) -> bool:
    """Return whether FSDP shards a parameter over one dimension of its mesh, and gathers it unchanged."""
    placements = parameter.sharded_param.placements
    in_one_dimension = len(placements) == 1 and placements[0].is_shard()
    partly = group.post_forward_mesh_info not in (None, group.mesh_info)
    extended = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
    return in_one_dimension and not partly and not parameter.offload_to_cpu and not extended

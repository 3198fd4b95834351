"""Hold every private name of torch that the package uses: what another version of torch may break stands here.

Torch has no public name for these. Most stand as they are, since they are asked for every operation of a forward pass.
"""

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "BatchNorm",
    "TorchDispatchMode",
    "function_modes",
    "run_backward",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

P = ParamSpec("P")
R = TypeVar("R")
Guard = Callable[[], AbstractContextManager[None]]

# Modes and subclasses, which see the operations of a thread. A function mode does not count while it is asked.
count_function_modes: Callable[[], int] = _C._len_torch_function_stack
count_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
without_subclasses: Guard = _C.DisableTorchFunctionSubclass  # operations inside ask no tensor of a subclass
without_functions: Guard = _C.DisableTorchFunction  # nor a function mode, to which they would be the model's
functions: Callable[[], Any] = getattr(_C, "_get_torch_function_state")  # noqa: B009, which torch's stubs lack
set_functions: Callable[[Any], None] = getattr(_C, "_set_torch_function_state")  # noqa: B009
as_subclass: Callable[..., Any] = Tensor._make_subclass  # (class, tensor, requires_grad): a leaf of the same memory

# Transforms of torch.func, and forward-mode AD.
transforms: Callable[[], int] = _C._functorch.get_dynamic_layer_stack_depth  # how many are under way
end_transforms: Callable[[int], object] = _C._functorch.pop_dynamic_layer_stack_and_undo_to_depth
are_transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active
is_wrapped: Callable[[Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor  # whether it is one of a transform's
unwrapped: Callable[[Tensor], Tensor] = _C._functorch.get_unwrapped
# The level, −1 outside of forward-mode AD; it is that of the process, so that another thread's counts too.
forward_ad_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")
set_forward_ad_level: Callable[[int], None] = functools.partial(setattr, forward_ad, "_current_level")

_load_batching_rules: Callable[[], None] = getattr(  # noqa: B009, written in Python; once in a process
    torch._functorch.vmap, "lazy_load_decompositions"
)


def mapped(function: Callable[[Tensor], Sequence[Tensor | None]], vectors: Tensor) -> list[Tensor | None]:
    """Return a function's results (k, …) for vectors (k, …) by one call of it, as ``torch.func.vmap`` makes it.

    A result may be None. Torch's own takes 180 Python calls for two results, and 20 for each further one.
    """
    transform, count = _C._functorch, len(vectors)
    _load_batching_rules()
    level = transform._vmap_increment_nesting(count, "error")
    try:
        found = function(transform._add_batch_dim(vectors, 0, level))
        return [None if one is None else transform._remove_batch_dim(one, level, count, 0) for one in found]
    finally:
        transform._vmap_decrement_nesting()


# Autograd.
set_grad_enabled: Callable[[bool], object] = _C._set_grad_enabled  # which asks no function mode
pop_saved_tensors_hooks: Callable[[], object] = _C._autograd._pop_saved_tensors_default_hooks
top_saved_tensors_hooks: Callable[[bool], object] = getattr(  # the innermost ones; since torch 2.7
    _C._autograd, "_top_saved_tensors_default_hooks", lambda of_tracing: None
)
results_of: Callable[[Node], Any] = operator.attrgetter("_input_metadata")  # shapes and dtypes of a node's results
alias: Callable[[Tensor, Sequence[int]], Tensor] = torch.ops.aten._unsafe_view  # with a history of its own
weight_norm: Any = torch._weight_norm

# TorchScript.
last_script: Callable[[], Any] = _C._last_executed_optimized_graph  # what was noted as its last run in this thread


@functools.cache
def empty_script() -> Any:
    """Return a script that returns the number that it is given."""
    return _C._create_function_from_graph("nothing", _C.parse_ir("graph(%x : int):\n  return (%x)"))


def put_back_modes(functions: Sequence[Any], dispatches: int) -> None:
    """Restore the stack of function modes, and pop dispatch modes until at most ``dispatches`` are left."""
    if count_function_modes() != len(functions):
        while count_function_modes():
            _C._pop_torch_function_stack()
        for mode in functions:
            _C._push_on_torch_function_stack(mode)
    while count_dispatch_modes() > dispatches:
        _C._pop_torch_dispatch_stack(None)


def cached_parametrizations() -> tuple[Any, Any]:
    """Return how many contexts are in which torch keeps parametrised weights, and those that it keeps."""
    return parametrize._cache_enabled, parametrize._cache


def set_cached_parametrizations(contexts: Any, kept: Any) -> None:
    """Set what :func:`cached_parametrizations` returns."""
    parametrize._cache_enabled, parametrize._cache = contexts, kept


def has_forward_hooks_of_all() -> bool:
    """Return whether a hook is registered for the forward passes of all modules."""
    return bool(modules._global_forward_hooks)


def store_of(group: Any) -> Any:
    """Return the key-value store of a process group, which builds of torch without groups do not have."""
    return dist.distributed_c10d._get_process_group_store(group)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that ``torch.compile`` does not trace.

    Torch's own decorator loads the compiler, which takes longer than most calls. Where nothing has loaded it yet
    nothing is compiled, and there is nothing to keep from tracing.
    """
    disabled: Callable[P, R] = getattr(torch, "_disable_dynamo")(function)  # noqa: B009, torch's stubs lack it

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    _skip(getattr(called, "__code__"))  # noqa: B009, else it would be compiled by itself
    return called


def _skip(code: CodeType) -> None:
    """Keep ``torch.compile`` from compiling a function, but not what it calls."""
    frames = _C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # torch 2.6
        frames.skip_code(code)
    else:
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))

"""Prepare the user's model for runs, and restore it afterwards.

After a call, an exception or a signal (:mod:`.interrupts`), these are as before: hooks, modes, ``requires_grad``,
``.grad``, buffers, the random state, and the process's settings that a call changes. Because of the latter, calls of
several threads take turns. The model has to be a function of one sample: a BatchNorm or Dropout in training mode is
refused, or put in eval mode for the call if the user asks for it.
"""

import contextlib
import functools
import itertools
import operator
import os
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.backends import cuda
from torch.nn.utils import parametrize

from .. import interrupts, private
from ..errors import InputError
from ..messages import check_module, received
from ..numerics.ranks import Ranks
from . import calling, fsdp, generators, layers, memory_formats, spread, uses, walk
from .calling import replaced_forward
from .checks import check_modules
from .generators import Randomness

_turn = threading.RLock()


@contextlib.contextmanager
def observing(
    model: nn.Module, ranks: Ranks | None = None, *, in_eval: bool = False
) -> Iterator[tuple[nn.Module, Randomness]]:
    """Prepare the user's own module for runs without gradients, inside the context; afterwards everything is restored.

    Yield the module without its wrappers, and its sources of randomness. Its parameters may be spread over ``ranks``.
    Only one thread at a time is inside, since some settings belong to the process; contexts may be nested.
    """
    check_module("model", model)
    with interrupts.undone():
        if not is_measuring():
            interrupts.later(_end_turn)
            _turn.acquire()
        if in_eval:
            _to_eval_mode(model)
        yield _prepared(model, ranks)


def is_measuring() -> bool:
    """Return whether this thread is inside of :func:`observing`."""
    return bool(_turn._is_owned())  # type: ignore[attr-defined]


def _end_turn() -> None:
    if is_measuring():
        _turn.release()


def _prepared(model: nn.Module, ranks: Ranks | None) -> tuple[nn.Module, Randomness]:
    """Prepare a model for :func:`observing`, and register how to undo that."""
    model = layers.unwrap(model)
    stack = contextlib.ExitStack()
    interrupts.later(stack.close)
    stack.enter_context(layers.parts_not_compiled(model))
    named = walk.named_modules(model)
    modules = [module for _, module in named]
    check_modules(named, spread=ranks is not None)
    for module, key in itertools.product(modules, _OF_GRADIENTS):
        if vars(module).get(key, getattr(type(module), key, False)) is True:
            interrupts.later(functools.partial(setattr, module, key, True))
            setattr(module, key, False)
    interrupts.later(Found(named).put_back)
    stack = contextlib.ExitStack()
    interrupts.later(stack.close)
    if ranks is not None:
        stack.enter_context((fsdp.held if fsdp.is_sharded(model) else spread.held_in_parallel)(model, ranks))
    random = generators.hold(modules)  # the user's model and data may draw random numbers
    interrupts.later(random.put_back)
    interrupts.later(functools.partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()))
    torch.set_autocast_cache_enabled(False)  # in a block of the user's it has copies of weights before their last step
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and loading it takes longer than most calls
        # Compiled code ignores hooks that are added later, and is no graph that can be read.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    stack.enter_context(memory_formats.safe())
    stack.enter_context(uses.held(model))
    if spread.is_held():
        uses.of(model)  # while no module has its parameters gathered
    for module in modules:  # the user's backward hooks would run in our backward passes, and may change gradients
        if module._backward_hooks or module._backward_pre_hooks:
            vars(module).update(_backward_hooks=OrderedDict(), _backward_pre_hooks=OrderedDict())
    # Without the fast path, transformer layers call their linear layers, in place of one kernel that no hook sees.
    torch.backends.mha.set_fastpath_enabled(False)
    for module in modules:
        if isinstance(module, parametrize.ParametrizationList):
            stack.enter_context(replaced_forward(module, _Once(module)))
    return model, random


class Found:
    """Hold the state of modules and of torch before a call, in so far as the call may change it."""

    def __init__(self, named: Collection[tuple[str, nn.Module]]) -> None:
        modules = [module for _, module in named]
        self._names, self._pairs, tensors = _held(named)
        parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters]
        self._values = [(name, tensor, tensor._version, tensor.clone()) for name, tensor in tensors.items()]
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        compiler: Any = sys.modules.get("torch._dynamo")
        self._compiler = compiler and compiler.eval_frame
        self._stance = self._compiler and self._compiler._stance
        self._attention = [enabled() for enabled, _ in _ATTENTION]
        self._level = private.forward_ad_level()
        self._thread = threading.get_ident(), torch.is_grad_enabled(), private.transforms(), {**vars(calling.now)}
        _inside.append(self)

    def kept(self) -> list[str]:
        """Return the names of values that forward passes have since stored in modules: tensors, numbers, entries."""
        names = [name for name, tensor, version, _ in self._values if tensor._version != version]
        for place in _changed(self._pairs):
            name, (held, before) = self._names[place], self._pairs[place]
            if name is None:
                continue
            if isinstance(held, dict) and isinstance(before, dict):
                keys = [key for key, value in held.items() if not callable(value) and before.get(key) is not value]
                names += [_joined(name, key) for key in keys if name[-1:] not in ("", ".") or key not in _OF_TORCH]
            else:
                names.append(name)
        return [*dict.fromkeys(names)]

    def put_back(self) -> None:
        """Restore whatever was changed."""
        thread, grad, depth, flags = self._thread
        if thread == threading.get_ident():  # another thread may live on in a forked process
            calling.end_transforms(depth)
            private.set_grad_enabled(grad)
        for level in range(private.forward_ad_level(), self._level, -1):
            with contextlib.suppress(RuntimeError):  # torch has left the level without a note of that
                forward_ad.exit_dual_level(level=level)
            private.set_forward_ad_level(level - 1)
        vars(calling.now).update(flags)
        torch.backends.mha.set_fastpath_enabled(self._fastpath)
        if self._compiler:
            self._compiler._set_stance(self._stance)
        for (_, enable), enabled in zip(_ATTENTION, self._attention, strict=True):
            enable(enabled)
        put_back(self._pairs)
        for parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        cut_off = interrupts.cuts_off() is not None
        with torch.no_grad():
            for _, tensor, version, value in self._values:
                if tensor._version != version or (cut_off and _has_changed(tensor, value)):
                    tensor.copy_(value)
        if self in _inside:
            _inside.remove(self)


def _has_changed(tensor: Tensor, value: Tensor) -> bool:
    """Return whether an operation that was interrupted in a dispatch mode changed a tensor, but not its version."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and not tensor.is_complex() and not torch.allclose(tensor, value, 0, 0, equal_nan=True)


def kept() -> list[str]:
    """Return the names of values that forward passes of the current call have stored, see :meth:`Found.kept`."""
    with private.without_functions():
        return _inside[-1].kept() if _inside else []


_OF_GRADIENTS = ("sparse", "scale_grad_by_freq")  # attributes of embeddings that give other gradients
_ATTENTION: list[tuple[Callable[[], bool], Callable[[bool], None]]] = [  # torch's kernels for attention
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
]
_inside: list[Found] = []  # of the thread whose turn it is


def _in_child() -> None:
    """Prepare a forked process: restore models if it was another thread's turn, and free the lock."""
    if not is_measuring():
        for found in reversed([*_inside]):
            found.put_back()
    _turn._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode inside the context.

    Modes are set on each module, since the user's ``eval()`` may do more, such as merge adapters.
    """
    with interrupts.undone():
        _to_eval_mode(model)
        yield


def _to_eval_mode(model: nn.Module) -> None:
    """Put a model in eval mode for :func:`in_eval_mode`, and register how to undo that."""
    modes = [(module, module.training) for module in walk.modules(model)]

    def put_back() -> None:
        for module, mode in modes:
            module.training = mode

    interrupts.later(put_back)
    for module, _ in modes:
        module.training = False


class _Once:
    """Serve as ``forward`` of a parametrised weight, and compute it once; torch's own cache is for all models."""

    def __init__(self, made: parametrize.ParametrizationList) -> None:
        before = made.__dict__.get("forward")
        # In a nested context, the forward before is the outer one's.
        self.before: Callable[[], Tensor] | None = before.before if isinstance(before, _Once) else before
        self._forward = self.before or functools.partial(type(made).forward, made)
        self._made: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._made is None:
            self._made = self._forward()
        return self._made


@contextlib.contextmanager
def made_anew(model: nn.Module) -> Iterator[None]:
    """Let a model inside :func:`observing` compute parametrised weights at every access, without torch's cache.

    This is for runs at other parameters, for weights with their graph, and for copies.
    """
    found = [(vars(module), module.__dict__.get("forward")) for module in walk.modules(model)]
    replaced = [(attributes, once) for attributes, once in found if isinstance(once, _Once)]
    for attributes, once in replaced:
        del attributes["forward"]
        if once.before is not None:
            attributes["forward"] = once.before
    cached = private.cached_parametrizations()
    if cached[0]:
        private.set_cached_parametrizations(0, {})
    try:
        yield
    finally:
        if cached[0]:
            private.set_cached_parametrizations(*cached)
        for attributes, once in replaced:
            attributes["forward"] = once


def device(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters, to which its batches are moved."""
    parameter = next((p for p in walk.parameters(model) if not p.is_meta), None)
    if parameter is None:
        raise InputError(f"model: one with parameters is wanted, {received('model', model)}")
    return parameter.device


@contextlib.contextmanager
def without_product(module: nn.Module, outputs: int) -> Iterator[None]:
    """Make a linear layer return outputs on the meta device, without memory, inside the context."""

    def shape_only(input: Tensor) -> Tensor:  # noqa: A002, since callers of a Linear may use this name
        return torch.empty(*input.shape[:-1], outputs, dtype=input.dtype, device="meta")

    with replaced_forward(module, shape_only):
        yield


Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}  # subclasses may do more than store
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module


def _held(
    named: Iterable[tuple[str, nn.Module]],
) -> tuple[list[str | None], list[tuple[Container, Container]], dict[str, Tensor]]:
    """Return the names of all containers in modules and parameters, also nested ones; these, with copies; and tensors.

    A container that is no state of a module has no name; a name that is empty or ends in a dot is that of a module or
    of its buffers. The tensors are buffers, and tensors in containers that are no parameters and have no graph. This is
    one loop for speed, as each module has some fifteen containers.
    """
    names: list[str | None] = []
    pairs: list[tuple[Container, Container]] = []
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for module_name, module in named:
        prefix, held, buffers = module_name and f"{module_name}.", vars(module), module._buffers
        names += (prefix, prefix)
        pairs += ((held, {**held}), (buffers, {**buffers}))
        seen.update((id(held), id(buffers)))
        for key, buffer in buffers.items():
            if buffer is not None and id(buffer) not in seen and not buffer.is_inference():
                seen.add(id(buffer))
                tensors[prefix + key] = buffer
        waiting: list[tuple[str | None, Any]] = []
        for parameter in module._parameters.values():
            if parameter is not None and vars(parameter):
                waiting.append((None, vars(parameter)))
        for key, value in reversed(held.items()):
            if type(value) in _CONTAINERS or type(value) is Tensor:
                waiting.append((None if key in _OF_TORCH else prefix + key, value))
        while waiting:
            name, value = waiting.pop()
            if id(value) in seen:
                continue
            if type(value) in _CONTAINERS:
                seen.add(id(value))
                names.append(name)
                pairs.append((value, value.copy()))
                for key, inner in reversed([*(value.items() if isinstance(value, dict) else enumerate(value))]):
                    waiting.append((None if name is None else _joined(name, key), inner))
            elif name is not None and type(value) is Tensor and not (value.requires_grad or value.is_inference()):
                seen.add(id(value))  # inference tensors cannot change here
                tensors[name] = value
    return names, pairs, tensors


def _joined(name: str, key: Any) -> str:
    return f"{name}{key}" if name[-1:] in ("", ".") else f"{name}[{key!r}]"


def _changed(pairs: Iterable[tuple[Container, Container]]) -> list[int]:
    """Return the places of the containers that no longer hold the same objects as before."""
    found = []
    for place, (held, before) in enumerate(pairs):
        if not (held or before):  # most containers of a module are empty
            continue
        if isinstance(held, set) or isinstance(before, set):
            same = held == before
        else:
            same = len(held) == len(before) and all(map(operator.is_, held, before))
            if same and isinstance(held, dict) and isinstance(before, dict):
                same = all(map(operator.is_, held.values(), before.values()))
        if not same:
            found.append(place)
    return found


def attributes(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the dictionaries of modules' attributes, parameters and buffers, with copies, for :func:`put_back`."""
    return [(held, {**held}) for m in modules for held in (vars(m), m._parameters, m._buffers)]


def put_back(pairs: Sequence[tuple[Container, Container]]) -> None:
    """Restore the containers of modules, each as a whole, such as a table together with its length."""
    for place in _changed(pairs):
        held, before = pairs[place]
        if isinstance(held, dict) and isinstance(before, dict):
            for name in held.keys() - before.keys():
                del held[name]
            held.update(before)
            if not _changed([(held, before)]):
                continue
        held.clear()
        (held.extend if isinstance(held, list | deque) else held.update)(before)

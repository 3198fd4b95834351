"""Hold the user's model so that it can be run, and so that nothing of it is changed afterwards.

What is left as found, also after an exception or Ctrl-C (:mod:`.interrupts`): hooks, modes, ``requires_grad``,
``.grad``, buffers, the random state, and the switches of the process that a call turns. These are also why calls of
several threads take turns. The model is a function of one sample: a BatchNorm or Dropout in training mode is refused,
not switched.
"""

import contextlib
import functools
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import interrupts
from ..errors import InputError
from ..messages import check_module
from ..numerics.ranks import Ranks
from . import fsdp, layers, spread, tensor_parallel, uses
from .calling import replaced_forward
from .checks import check_modules
from .generators import Generators, OutsideTorch, Randomness

_turn = threading.RLock()
_PATIENCE = 0.1  # seconds between looks for an interrupt while another thread has its turn


@contextlib.contextmanager
def observing(model: nn.Module, ranks: Ranks | None = None) -> Iterator[tuple[nn.Module, Randomness]]:
    """Hold the user's own module ready to be run without gradients; afterwards everything is as it was.

    Args:
        model: the user's.
        ranks: which make the call, if its parameters may be spread over them; see :mod:`.spread`.

    Inside are the module without its wrappers, and what it may draw random numbers from.

    One thread at a time is inside: hooks and flags belong to a model, and the attention kernel, the stance of
    ``torch.compile`` and the random state to the process. A call inside of a call of the same thread is fine.

    Raises:
        InputError: not a module, or in a mode in which samples are not independent.
    """
    check_module("model", model)
    with interrupts.held():
        while not _turn.acquire(timeout=_PATIENCE):
            interrupts.check()
        try:
            with contextlib.ExitStack() as stack:
                yield _prepared(model, stack, ranks)
        finally:
            _turn.release()


def _prepared(model: nn.Module, stack: contextlib.ExitStack, ranks: Ranks | None) -> tuple[nn.Module, Randomness]:
    """Make a model ready for :func:`observing`; the stack undoes what is done."""
    model = layers.unwrap(model)
    named = [*model.named_modules()]  # a walk takes long for what it is
    modules = [module for _, module in named]
    check_modules(named, spread=ranks is not None)
    if ranks is not None:
        stack.enter_context((fsdp if fsdp.is_sharded(model) else tensor_parallel).held(model, ranks))
    random = Randomness(Generators(modules), OutsideTorch())  # the user's model and data may draw; we do not
    stack.callback(random.of_torch.put_back, random.of_torch.states())
    stack.callback(random.outside.put_back)
    # Compiled code ignores hooks that are added later, and is no graph that can be read.
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    stack.callback(_put_back_values, [(buffer, buffer._version, buffer.clone()) for buffer in buffers])
    stack.callback(put_back, attributes(modules))
    stack.enter_context(uses.held(model))
    if spread.is_held():
        uses.of(model)  # while no module has its parameters gathered
    for module in modules:  # those of the user's would be called in our backward passes, and may change gradients
        if module._backward_hooks or module._backward_pre_hooks:
            vars(module).update(_backward_hooks=OrderedDict(), _backward_pre_hooks=OrderedDict())
    # Transformer layers call their linear layers, instead of one kernel that no hook sees.
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    for module in modules:
        if isinstance(module, parametrize.ParametrizationList):
            stack.enter_context(replaced_forward(module, _Once(module)))
    return model, random


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Hold a model in eval mode inside; afterwards every module is in the mode that it was in.

    Modes are set on each module, past ``eval()`` and ``train()`` of the user's. These may do more, such as merge
    adapters into weights, which could not be undone bit by bit in the middle of a training.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class _Once:
    """Compute a parametrised weight once, as its ``forward``.

    It does so in this model alone: torch's own cache is the process's, and weights that are trained in another thread
    would be taken from it.
    """

    def __init__(self, made: parametrize.ParametrizationList) -> None:
        before = made.__dict__.get("forward")
        # In a call inside of another it is that one's.
        self.before: Callable[[], Tensor] | None = before.before if isinstance(before, _Once) else before
        self._forward = self.before or functools.partial(type(made).forward, made)
        self._made: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._made is None:
            self._made = self._forward()
        return self._made


@contextlib.contextmanager
def made_anew(model: nn.Module) -> Iterator[None]:
    """Let a model inside of :func:`observing` compute parametrised weights at every access, inside.

    This is for runs at other parameters, for weights with their graph, and for copies, which are then of the user's
    model. Torch's cache is not used either, where the user's call is inside of ``parametrize.cached()``.
    """
    found = [(vars(module), module.__dict__.get("forward")) for module in model.modules()]
    replaced = [(attributes, once) for attributes, once in found if isinstance(once, _Once)]
    for attributes, once in replaced:
        del attributes["forward"]
        if once.before is not None:
            attributes["forward"] = once.before
    cached = parametrize._cache_enabled, parametrize._cache
    if cached[0]:
        parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        if cached[0]:
            parametrize._cache_enabled, parametrize._cache = cached
        for attributes, once in replaced:
            attributes["forward"] = once


def device(model: nn.Module) -> torch.device:
    """Return the device where the model's parameters are, and its batches go."""
    parameter = next((p for p in model.parameters() if not p.is_meta), None)
    if parameter is None:
        raise InputError(f"model: this {type(model).__name__} has no parameters")
    return parameter.device


@contextlib.contextmanager
def without_product(module: nn.Module, outputs: int) -> Iterator[None]:
    """Let a linear layer give outputs of the right shape and layout, and of no memory (on the meta device), inside."""

    def shape_only(input: Tensor) -> Tensor:  # noqa: A002, the name that callers of a Linear may use
        return torch.empty(*input.shape[:-1], outputs, dtype=input.dtype, device="meta")

    with replaced_forward(module, shape_only):
        yield


def _put_back_values(values: Iterable[tuple[Tensor, int, Tensor]]) -> None:
    for tensor, version, value in values:
        if tensor._version != version:
            tensor.copy_(value)


def attributes(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return what :func:`put_back` takes: where modules hold their attributes, and these."""
    return [(held, {**held}) for m in modules for held in (vars(m), m._parameters, m._buffers)]


def put_back(kept: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Put back what modules set in themselves: a count of calls, a table that grows, the weight that pruning makes.

    It puts back all of it or nothing: two attributes may belong together, as a table and its length do.
    """
    for held, before in kept:
        if len(held) != len(before) or not all(map(operator.is_, held.values(), before.values())):
            for name in held.keys() - before.keys():
                del held[name]
            held.update(before)

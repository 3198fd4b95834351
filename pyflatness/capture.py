"""Running the user's model so that nothing of it changes, and seeing what goes through its layers.

What is left as found, also after an exception or Ctrl-C (:mod:`.interrupts`): hooks, modes, ``requires_grad``,
``.grad``, buffers, the random state, and the switches of the process that a call turns. These are also why calls of
several threads take turns. The model is a function of one sample: a BatchNorm or Dropout in training mode is refused,
not switched.
"""

import contextlib
import difflib
import functools
import inspect
import itertools
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from . import interrupts, layers
from .errors import InputError, NoGraphError
from .generators import Generators, OutsideTorch
from .outputs import refusal, single
from .received import shown

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""(model, batch) -> (outputs, targets)."""


P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` from tracing a public function, and say how it is called where it is called otherwise.

    Its types stay visible.
    """
    parameters = inspect.signature(function).parameters
    names = [*parameters]
    positional = [name for name in names if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(positional):
            others = zip(names[len(positional) :], args[len(positional) :], strict=False)
            by_name = ", ".join(f"{name}={shown(value)}" for name, value in others)
            raise TypeError(
                f"{function.__name__}({', '.join(positional)}, *, …) takes {len(positional)} positional arguments, got "
                f"{len(args)}; the others are passed by name, as in {by_name}"
            )
        for name in kwargs:
            if name not in parameters:
                near = ", ".join(difflib.get_close_matches(name, names)) or ", ".join(names)
                raise TypeError(f"{function.__name__}() has no argument {name!r}; did you mean {near}?")
        return function(*args, **kwargs)

    return cast(Callable[P, R], torch.compiler.disable(called))


_turn = threading.RLock()
_PATIENCE = 0.1  # seconds between looks for an interrupt while another thread has its turn


@contextlib.contextmanager
def observing(model: nn.Module) -> Iterator[nn.Module]:
    """Hold the user's own module ready to be run without gradients; afterwards everything is as it was.

    One thread at a time is inside: hooks and flags belong to a model, and the attention kernel, the stance of
    ``torch.compile`` and the random state to the process. A call inside of a call of the same thread is fine.

    Raises:
        InputError: not a module, or in a mode in which samples are not independent.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: a torch.nn.Module is wanted, got {type(model).__name__}")
    with interrupts.held():
        while not _turn.acquire(timeout=_PATIENCE):
            interrupts.check()
        try:
            with contextlib.ExitStack() as stack:
                yield _prepared(model, stack)
        finally:
            _turn.release()


def _prepared(model: nn.Module, stack: contextlib.ExitStack) -> nn.Module:
    """See :func:`observing`; the stack undoes what is done."""
    model = layers.unwrap(model)
    named = [*model.named_modules()]  # a walk takes long for what it is
    modules = [module for _, module in named]
    for check in (_check_kind, _check_mode, _check_values):
        for name, module in named:
            check(name, module)
    generators = Generators(modules)  # from which the user's model and data may draw; we do not
    stack.callback(generators.put_back, generators.states())
    stack.callback(OutsideTorch().put_back)
    # Compiled code ignores hooks that are added later, and is no graph that can be read.
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    stack.callback(_put_back_values, [(buffer, buffer._version, buffer.clone()) for buffer in buffers])
    stack.callback(put_back, attributes(modules))
    for module in modules:  # those of the user's would be called in our backward passes, and may change gradients
        if module._backward_hooks or module._backward_pre_hooks:
            vars(module).update(_backward_hooks=OrderedDict(), _backward_pre_hooks=OrderedDict())
    # Transformer layers call their linear layers, instead of one kernel that no hook sees.
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    for module in modules:
        if isinstance(module, parametrize.ParametrizationList):
            stack.enter_context(replaced_forward(module, _Once(module)))
    return model


class _Once:
    """The ``forward`` of a parametrised weight that computes it once.

    In this model alone: torch's own cache is the process's, and weights that are trained in another thread would be
    taken from it.
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
    """Inside, a model that is inside of :func:`observing` computes parametrised weights at every access.

    For other parameters than its own, for weights with their graph, and for copies, which are then of the user's model.
    Torch's cache is not used either, where the user's call is inside of ``parametrize.cached()``.
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
    """Where the model's parameters are, and its batches go."""
    parameter = next((p for p in model.parameters() if not p.is_meta), None)
    if parameter is None:
        raise InputError(f"model: this {type(model).__name__} has no parameters")
    return parameter.device


@dataclass(frozen=True)
class Call:
    """One call of a layer; the tensors as they went in and came out, and their versions at that time."""

    inputs: Tensor
    output: Tensor
    versions: tuple[int, int]

    def changed(self) -> bool:
        """Whether either tensor was modified in place since."""
        return (version(self.inputs), version(self.output)) != self.versions


def version(tensor: Tensor) -> int:
    """Counts in-place changes; an inference tensor has no count and cannot be changed outside inference mode."""
    return 0 if tensor.is_inference() else tensor._version


class Calls:
    """Forward hooks on some layers that keep each layer's last call, and how many there were."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._handles: list[Any] = []
        self.clear()

    def clear(self) -> None:
        """Forget all calls and the tensors they hold."""
        self.last: dict[str, Call] = {}  # in the order of the layers' last calls
        self.count: dict[str, int] = {}

    def __enter__(self) -> "Calls":
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self.clear()

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs = args[0] if args else kwargs.get("input")
            if isinstance(inputs, Tensor) and isinstance(output, Tensor) and not _aside:
                self.last.pop(name, None)
                self.last[name] = Call(inputs, output, (version(inputs), version(output)))
                self.count[name] = self.count.get(name, 0) + 1

        return keep


@contextlib.contextmanager
def without_product(module: nn.Module, outputs: int) -> Iterator[None]:
    """Inside, a linear layer gives outputs of the right shape and layout, and of no memory (on the meta device)."""

    def shape_only(input: Tensor) -> Tensor:  # noqa: A002, the name that callers of a Linear may use
        return torch.empty(*input.shape[:-1], outputs, dtype=input.dtype, device="meta")

    with replaced_forward(module, shape_only):
        yield


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, the module computes ``forward``; its hooks run as ever."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Inside, batches go through the model to find something out, or through one at other parameters.

    They come again, or came already, to be measured.
    """
    global _trial
    before, _trial = _trial, True
    try:
        yield
    finally:
        _trial = before


_trial = False


def is_trial() -> bool:
    """Whether a ``forward`` is called inside :func:`trial`."""
    return _trial


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Inside, a batch goes through the model once more, and what is recorded of the layers' calls stays as it is."""
    global _aside
    before, _aside = _aside, True
    try:
        with trial():
            yield
    finally:
        _aside = before


_aside = False


def is_aside() -> bool:
    """Return whether a layer is called inside :func:`aside`."""
    return _aside


def one_tensor(returned: Any) -> Tensor:
    """Return the logits in what a model returned.

    Raises:
        InputError: see :func:`.outputs.single`.
    """
    tensor = single(returned)
    if tensor is None:
        raise refusal(returned)
    return tensor


def run(
    model: nn.Module, batch: Any, forward: Forward | None, tensor: Callable[[Any], Tensor] = one_tensor
) -> tuple[Tensor, Any]:
    """Outputs and targets of a batch: by ``forward``, ``model(inputs)`` of (inputs, targets), or :func:`by_keywords`.

    Args:
        model: the user's.
        batch: as the data have it.
        forward: the user's, or None.
        tensor: what the model returned -> outputs.

    Raises:
        InputError: a batch that is no pair, or outputs that are not one tensor.
    """
    with interrupts.at_second():
        return _run(model, batch, forward, tensor)


def _run(model: nn.Module, batch: Any, forward: Forward | None, tensor: Callable[[Any], Tensor]) -> tuple[Tensor, Any]:
    if forward is not None:
        result = forward(model, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(f"forward: a pair (outputs, targets) is wanted, got {type(result).__name__}")
        returned, targets = result
    else:
        if isinstance(batch, Mapping) and "labels" in batch:
            _check_not_causal(model, batch["labels"])
            return by_keywords(model, batch, tensor)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            kind = (
                f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
            )
            several = " (a list of tensors is a list of batches, a tuple of tensors is cut into batches)"
            raise InputError(
                "data: batches are (inputs, targets) pairs, or mappings with `labels`, got a "
                f"{kind}{several if isinstance(batch, Tensor) else ''}; pass forward=, a function (model, batch) -> "
                "(outputs, targets)"
            )
        inputs, targets = batch
        if isinstance(inputs, int):
            raise InputError(
                f"data: a batch is a pair of the number {inputs} and a {type(targets).__name__}, as enumerate gives "
                "them; pass the loader itself"
            )
        returned = model(inputs)
    return tensor(returned), targets


@contextlib.contextmanager
def differentiated() -> Iterator[None]:
    """Inside, where backward passes are, what a model keeps torch from is an error that says what to do.

    Raises:
        NoGraphError: reentrant activation checkpointing, which torch does not differentiate in chosen tensors.
        InputError: a tensor of the graph was modified in place.
    """
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise InputError(
                "model: a tensor that its backward pass needs is modified in place later, as h += layer(h) does with "
                "the layer's input, so that torch cannot differentiate the model in all weights that this needs; write "
                f"h = h + layer(h) ({error})"
            ) from error
        if "use_reentrant=True" not in str(error):
            raise
        raise NoGraphError(
            "model: a part of it runs in reentrant activation checkpointing, which torch does not differentiate in "
            "chosen tensors; pass use_reentrant=False to torch.utils.checkpoint"
        ) from error


def by_keywords(
    model: nn.Module, batch: Mapping[str, Any], tensor: Callable[[Any], Tensor] = one_tensor
) -> tuple[Tensor, Any]:
    """A ``forward`` for mappings: ``labels`` are the targets, the rest the model's keyword arguments.

    Outputs (n, T, C) for labels (n, T), as models of tokens give them, come as (n, C, T), as cross-entropy wants them.
    """
    targets = batch["labels"]
    logits = tensor(model(**{key: value for key, value in batch.items() if key != "labels"}))
    if isinstance(targets, Tensor) and not targets.is_floating_point() and 2 <= targets.ndim == logits.ndim - 1:
        return logits.movedim(-1, 1), targets
    return logits, targets


def causal_lm(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """A ``forward`` for causal language models: every position is to predict the next one's label."""
    logits, targets = by_keywords(model, batch)
    return logits[:, :, :-1], targets[:, 1:]


def _check_not_causal(model: nn.Module, labels: Any) -> None:
    """Raise for a model whose outputs at a position are about the next one, by the names of its classes."""
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.partition(".")[0] in _LANGUAGE_MODELS]
    causal = any(kind.__name__.endswith(_CAUSAL) and not kind.__name__.startswith(_MASKED) for kind in kinds)
    if causal and isinstance(labels, Tensor) and labels.ndim == 2:
        raise InputError(
            f"model: {type(model).__name__} predicts the token after each position, and transformers shifts the labels "
            "for that: pass forward=pf.causal_lm, which does the same. Where these labels are shifted already, pass "
            "forward=lambda model, batch: (model(batch['input_ids']).logits.movedim(-1, 1), batch['labels'])"
        )


_LANGUAGE_MODELS = ("transformers", "transformers_modules", "peft")  # packages
_CAUSAL, _MASKED = ("ForCausalLM", "LMHeadModel"), ("XLMWith", "FlaubertWith")  # ends and beginnings of names


def _check_kind(name: str, module: nn.Module) -> None:
    """Raise for a module that takes no hooks, and for parameters that are not all there."""
    if isinstance(module, torch.jit.ScriptModule):
        what = f"{name!r} is" if name else "it is"
        raise InputError(
            f"model: {what} compiled by torch.jit ({type(module).__name__}), which calls its layers past all hooks; "
            "pass the nn.Module that it was made from, with the same weights (load_state_dict)"
        )
    for own, parameter in module._parameters.items():
        if type(parameter).__name__ == "DTensor":  # by name: importing its module takes as long as importing this one
            raise InputError(
                f"model: its parameter {_joined(name, own)!r} is a DTensor, spread over processes (FSDP2 or tensor "
                "parallelism); load the full weights into a model that is not (torch.distributed.checkpoint.state_dict."
                "get_model_state_dict with full_state_dict=True) and measure that"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InputError("model: it has lazy layers whose weights are not initialised; run it once on a batch")


def _check_mode(name: str, module: nn.Module) -> None:
    """Raise for a module in a mode in which samples are not independent, or dropped out at random."""
    if isinstance(module, _NormBase) and (module.training or module.running_mean is None):
        if isinstance(module, nn.modules.instancenorm._InstanceNorm):
            return  # normalises each sample by itself
        if module.training:
            raise InputError(f"{name!r} ({type(module).__name__}) is in training mode: call model.eval() first")
        raise InputError(
            f"{name!r} ({type(module).__name__}) has no running statistics, so its output for a sample depends on the "
            "batch; a value over the data set does not exist"
        )
    if isinstance(module, _DropoutNd) and module.training and module.p > 0:
        raise InputError(f"{name!r} ({type(module).__name__}) is in training mode: call model.eval() first")


def _check_values(name: str, module: nn.Module) -> None:
    """Raise for a module whose parameters or buffers have no values."""
    if "_hf_hook" in vars(module):  # accelerate keeps its weights elsewhere until it is called
        return
    for own, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None and tensor.is_meta:
            raise InputError(
                f"model: {_joined(name, own)!r}, {tuple(tensor.shape)}, is on the meta device and has no values; load "
                "the model first"
            )


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _put_back_values(values: Iterable[tuple[Tensor, int, Tensor]]) -> None:
    for tensor, version, value in values:
        if tensor._version != version:
            tensor.copy_(value)


def attributes(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return what :func:`put_back` takes: where modules hold their attributes, and these."""
    return [(held, {**held}) for m in modules for held in (vars(m), m._parameters, m._buffers)]


def put_back(kept: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Put back what modules set in themselves: a count of calls, a table that grows, the weight that pruning makes.

    All of it or nothing: of two attributes that belong together, as a table and its length, none is left alone.
    """
    for held, before in kept:
        if len(held) != len(before) or not all(map(operator.is_, held.values(), before.values())):
            for name in held.keys() - before.keys():
                del held[name]
            held.update(before)

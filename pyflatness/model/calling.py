"""Call the user's model on a batch, and watch the calls of its layers."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError
from typing_extensions import Self

from .. import interrupts, private
from ..errors import FlatnessError, InputError, NoGraphError, NotYetError
from ..messages import lacks_a_second_derivative
from . import data, hugging_face, spread
from .outputs import refusal, single

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]  # (model, batch) -> (outputs, targets)


@dataclass(frozen=True)
class Call:
    """Hold one call of a layer: its input and output tensors, and their versions at that time."""

    inputs: Tensor
    output: Tensor
    versions: tuple[int, int]

    def changed(self) -> bool:
        """Return whether either tensor was modified in place since then."""
        return (version(self.inputs), version(self.output)) != self.versions


class Mode(TorchFunctionMode):
    """Serve as the base of function modes; torch removes a mode while it handles a call, and Ctrl-C may come then."""

    def __enter__(self) -> Self:
        self._below = private.count_function_modes()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if private.count_function_modes() > self._below:
            super().__exit__(*exception)


class Watcher:
    """Serve as the base of watchers for :func:`watched_by`, which see the operations of forward passes."""

    def before(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments for an operation that is named in ``_BEFORE``, before it is done."""
        return args

    def see(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation, after it was done."""
        raise NotImplementedError


OUT_OF_TORCH = {"item", "__float__", "tolist", "numpy", "__array__", "__dlpack__"}  # make numbers or arrays of tensors
_BEFORE = {"detach_", "register_hook", *OUT_OF_TORCH}


class _Watch(Mode):
    """Show operations to all watchers by one mode; with several, outer ones would see the operations of inner ones."""

    def __init__(self) -> None:
        super().__init__()
        self.watchers: list[Watcher] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _BEFORE:
            for watcher in self.watchers:
                args = watcher.before(name, args)
        result = func(*args, **kwargs)
        for watcher in self.watchers:
            watcher.see(func, name, args, kwargs, result)
        return result


@contextlib.contextmanager
def watched_by(*watchers: Watcher) -> Iterator[None]:
    """Show watchers the operations inside the context."""
    modes = private.function_modes()
    watch = modes[-1] if modes and isinstance(modes[-1], _Watch) else None
    with contextlib.nullcontext(watch) if watch is not None else _Watch() as watch:
        watch.watchers += watchers
        try:
            yield
        finally:
            for watcher in watchers:
                watch.watchers.remove(watcher)


def only_ours() -> bool:
    """Return whether only this library's modes are active, so that operations are torch's own."""
    ours = all(isinstance(mode, Mode) for mode in private.function_modes())
    return ours and not private.count_dispatch_modes()


def is_transformed(given: Iterable[Any] = ()) -> bool:
    """Return whether a transform of ``torch.func`` (``vmap``, ``grad``, ``jvp``) is active.

    It is also True in forward-mode AD if a tensor that is ``given``, an argument or output of a layer, has a tangent.
    """
    if private.transforms() > 0 or private.forward_ad_level() < 0:
        return private.transforms() > 0
    tensors = (part for part in given if isinstance(part, Tensor))
    return any(forward_ad.unpack_dual(part).tangent is not None for part in tensors)


def end_transforms(depth: int) -> None:
    """End transforms beyond ``depth`` of them, which torch left active because of an exception of another thread."""
    if private.transforms() > depth:
        interrupts.end_generators()  # torch's generators, each of which ends a transform
    if private.transforms() > depth:
        private.end_transforms(depth)


def version(tensor: Tensor) -> int:
    """Return the count of in-place changes; 0 for an inference tensor, which cannot change outside inference mode."""
    return 0 if tensor.is_inference() else tensor._version


class Calls:
    """Keep each layer's last call, and the number of its calls, by hooks; ``empty`` has calls on empty tensors."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._handles: list[Any] = []
        self.clear()

    def clear(self) -> None:
        """Forget all calls and the tensors they hold."""
        self.last: dict[str, Call] = {}  # in the order of the layers' last calls
        self.count: dict[str, int] = {}
        self.empty: dict[str, Call] = {}

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
            if isinstance(inputs, Tensor):
                inputs = spread.full(inputs)
            if now.aside or is_transformed() or not isinstance(output, Tensor) or not isinstance(inputs, Tensor):
                return
            call = Call(inputs, output, (version(inputs), version(output)))
            if output.numel() == 0:
                self.empty[name] = call
                return
            self.last.pop(name, None)
            self.last[name] = call
            self.count[name] = self.count.get(name, 0) + 1

        return keep


@dataclass
class Now:
    """Hold how batches go through models in this process, in which calls of several threads take turns."""

    dry: bool = False  # inside of :func:`dry_run`, :func:`aside` or :func:`accounting`
    aside: bool = False  # inside of :func:`aside`
    accounting: bool = False  # inside of :func:`accounting`
    samples: int = -1  # of the batch in the model now, or of the last one; -1 if that is not known
    runs: int = 0  # how many are under way, one inside of another


now = Now()


class _Let:
    """Set what :data:`now` holds inside the context."""

    def __init__(self, **how: int) -> None:
        self._how = how

    def __enter__(self) -> None:
        self._before = {key: vars(now)[key] for key in self._how}
        vars(now).update(self._how)

    def __exit__(self, *exception: object) -> None:
        vars(now).update(self._before)


def dry_run() -> contextlib.AbstractContextManager[None]:
    """Declare that runs of the model inside the context are checks, or are at other parameters."""
    return _Let(dry=True)


def aside() -> contextlib.AbstractContextManager[None]:
    """Declare that a run inside the context is an additional one, which does not change the recorded calls."""
    return _Let(dry=True, aside=True)


def accounting() -> contextlib.AbstractContextManager[None]:
    """Declare that uses of weights are counted inside the context, so that they stay in autograd's graph."""
    return _Let(dry=True, accounting=True)


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Let a module compute ``forward`` inside the context; its hooks run as usual."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if module.__dict__.get("forward") is forward:  # :class:`.state.Found` may have put it back already
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before


def one_tensor(returned: Any) -> Tensor:
    """Return the logits in a model's return value, or raise if it is not clear which they are."""
    tensor = single(returned)
    if tensor is None:
        raise refusal(returned)
    return tensor


def run(
    model: nn.Module, batch: Any, forward: Forward | None, tensor: Callable[[Any], Tensor] = one_tensor
) -> tuple[Tensor, Any]:
    """Return outputs and targets of a batch: by ``forward``, ``model(inputs)`` of a pair, or by a mapping's keywords.

    ``tensor`` finds the outputs in the model's return value; a mapping's ``labels`` are the targets.
    """
    with private.without_functions():  # these are not the model's operations
        count = batch.counted or -1 if isinstance(batch, data.Whole) else data.size(batch)
    with interrupts.users_code(), _Let(samples=count, runs=now.runs + 1):
        result = _run(model, batch, forward, tensor)
    if not now.runs:
        now.samples = count  # activation checkpointing may run parts of the model on it again
    return result


def of_user(forward: Forward | None) -> Forward | None:
    """Return the user's ``forward`` for our batches: it gets the user's own object for a batch that is not cut."""
    if forward is None:
        return None
    return lambda model, batch: forward(model, batch.batch if isinstance(batch, data.Whole) else batch)


def _run(model: nn.Module, batch: Any, forward: Forward | None, tensor: Callable[[Any], Tensor]) -> tuple[Tensor, Any]:
    if forward is not None:
        result = forward(model, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(f"forward: a pair (outputs, targets) is wanted, got {type(result).__name__}")
        return tensor(result[0]), result[1]
    batch = batch.batch if isinstance(batch, data.Whole) else batch
    if isinstance(batch, Mapping) and ("labels" in batch or hugging_face.inner(model) is not None):
        prepared = hugging_face.prepared(model, batch)
        return arranged(model(**prepared.inputs), prepared, tensor)
    inputs, targets = _pair(model, batch)
    return tensor(model(inputs)), targets


def _pair(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return the first two items of a batch, inputs and targets; further ones, such as sample numbers, are ignored."""
    advice = "pass forward=, a function (model, batch) -> (outputs, targets)"
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        several = " (a list of tensors is a list of batches, a tuple of tensors is cut into batches)"
        raise InputError(
            "data: batches are (inputs, targets), or mappings with `labels`, got a "
            f"{kind}{several if isinstance(batch, Tensor) else ''}; {advice}"
        )
    if len(batch) > 2 and (hugging_face.inner(model) is not None or _may_take_several(model)):
        raise InputError(
            f"data: a batch has {len(batch)} items, of which the first two would be (inputs, targets), but the forward "
            f"of {type(model).__name__} takes more than one input, so that the second may be one of them; {advice}"
        )
    if isinstance(batch[0], int):
        raise InputError(
            f"data: a batch is a pair of the number {batch[0]} and a {type(batch[1]).__name__}, as enumerate gives "
            "them; pass the loader itself"
        )
    return batch[0], batch[1]


def _may_take_several(model: nn.Module) -> bool:
    """Return whether a model's ``forward`` may take a second tensor, required or with None as default."""
    try:
        taken = [*inspect.signature(model.forward).parameters.values()]
    except ValueError:  # a function that was not written in Python has no signature
        return True
    places = [one for one in taken if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    any_number = any(one.kind is one.VAR_POSITIONAL for one in taken)
    return any_number or any(one.default is one.empty or one.default is None for one in places[1:])


@contextlib.contextmanager
def differentiated() -> Iterator[None]:
    """Turn errors of backward passes that a model causes, inside the context, into ones that say what to do."""
    try:
        yield
    except RuntimeError as error:
        explained = _explained(error)
        if explained is None:
            raise
        raise explained from error


def _explained(error: RuntimeError) -> FlatnessError | None:
    """Return the error that says what to do about one of torch's, of a backward pass; None if it is another one."""
    text = str(error)
    if isinstance(error, CheckpointError):
        return NotYetError(
            f"model: its activation checkpointing does not go with this ({text[:120]}…): second derivatives of some "
            "operations in place, weight_norm under measures over all parameters, or parts that compute other things "
            "when they are called again; switch checkpointing off to measure"
        )
    if "modified by an inplace operation" in text:
        return InputError(
            "model: a tensor that its backward pass needs is modified in place later, as h += layer(h) does with the "
            "layer's input, so that torch cannot differentiate the model in all weights that this needs; write "
            f"h = h + layer(h) ({error})"
        )
    if "does not require grad and does not have a grad_fn" in text:
        return without_graph()
    if "differentiated Tensors does not require grad" in text:
        return InputError(
            "model: its forward pass takes a derivative in a tensor that requires none: in its own weights, say, as "
            "for a step of gradient descent inside of it; weights require no gradient while they are measured. Take "
            "such a step before, and measure the model at the weights that it gives"
        )
    if lacks_a_second_derivative(error):
        return InputError(
            "model: its forward pass takes a derivative through an operation that torch differentiates once only "
            f"({error}); run attention inside of torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    if "saved tensor hooks" in text:
        return InputError(
            "model: it takes a derivative by torch.func (grad, vjp, jacrev, hessian) in its forward pass, inside of "
            "which layers cannot be observed; take it by torch.autograd.grad(…, create_graph=True)"
        )
    return reentrant() if "use_reentrant=True" in text else None


@contextlib.contextmanager
def differentiated_in_all_parameters() -> Iterator[None]:
    """Raise, inside the context, if reentrant checkpointing gets inputs without a graph; torch only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", _WITHOUT_GRAPH, UserWarning)
        try:
            yield
        except UserWarning as warning:
            if not str(warning).startswith(_WITHOUT_GRAPH):
                raise
            raise reentrant() from warning


_WITHOUT_GRAPH = "None of the inputs have requires_grad=True"  # torch.utils.checkpoint


def without_graph() -> NoGraphError:
    """Return the error for outputs without a graph."""
    return NoGraphError(
        "model: autograd has no path from its outputs back to its weights (detach, .data, numpy or torch.no_grad() is "
        "on the way), so that derivatives in them would be zero; have the model return outputs with their graph"
    )


def reentrant() -> NoGraphError:
    """Return the error for reentrant activation checkpointing."""
    return NoGraphError(
        "model: a part of it runs in reentrant activation checkpointing, which torch does not differentiate in "
        "chosen tensors; pass use_reentrant=False to torch.utils.checkpoint, or switch checkpointing off"
    )


def arranged(
    returned: Any, batch: hugging_face.Prepared, tensor: Callable[[Any], Tensor] = one_tensor
) -> tuple[Tensor, Any]:
    """Return outputs and targets from a model's return value.

    Outputs (n, T, C) for labels (n, T) become (n, C, T), for cross-entropy. The beginning and the end of an answer are
    choices among T tokens, (n, T, 2).
    """
    if batch.spans:
        return hugging_face.span_logits(returned, batch.targets)
    logits, targets = tensor(returned), batch.targets
    if isinstance(targets, Tensor) and not targets.is_floating_point() and 2 <= targets.ndim == logits.ndim - 1:
        if batch.shifted:  # before the classes move, so that a cotangent keeps the order of the logits in memory
            logits, targets = logits[:, :-1], targets[:, 1:]
        return logits.movedim(-1, 1), targets
    return logits, targets


def causal_lm(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """Serve as ``forward`` for causal language models, in which every position predicts the next one's label.

    Models of transformers do not need it; their labels are shifted as they do it themselves. Without ``labels``, the
    batch's ``input_ids`` are the labels, except those that ``attention_mask`` excludes.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            f"forward: causal_lm takes batches that are mappings with `input_ids`, got a {type(batch).__name__}; pass "
            'such batches, as {"input_ids": tokens}, or a forward= of your own'
        )
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    prepared = hugging_face.Prepared(inputs, hugging_face.causal_labels(batch), shifted=True)
    return arranged(model(**inputs), prepared)

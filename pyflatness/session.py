"""Open every public call: check its arguments, and take hold of the user's model, loss and data once."""

import contextlib
import functools
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from . import interrupts, losses, private
from .errors import InputError
from .losses import auto, log_softmax
from .messages import shown, unknown_argument
from .model import calling, fingerprint, shards, spread, state
from .model.data import Batches, Whole, copied, first, leaves
from .numerics.process_groups import joined
from .numerics.ranks import ALONE, Ranks
from .options import EVERY, How, MeasureHow, Options, check_flag, check_function, check_progress
from .passes.guards import Checked, explained
from .passes.task import Task

P = ParamSpec("P")
R = TypeVar("R")
_NETWORK = """
    model: an ``nn.Module`` in eval mode (or with ``eval=True``), called as ``model(inputs)``; left as it was found.
    loss: the loss that the model was trained with: an ``nn`` module, an ``F`` function, a name, or a callable
        (outputs, targets) -> scalar. Its options (class weights, reduction, …) count. ``"auto"``: the loss that a
        model of Hugging Face's transformers computes itself.
    data: a tuple of tensors (inputs, targets), or an iterable of batches, such as a DataLoader: pairs, or a mapping
        with ``labels``. How data are cut into batches does not change values.
"""
_AS_IT_IS: Mapping[str, Any] = MappingProxyType({})


def public(*taken: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a public function, which completes its signature and docstring by options that calls share.

    It keeps ``torch.compile`` from tracing the function, and says how it is called where it is called otherwise. Types
    stay visible. An argument whose default is ``...`` has to be given: those in front of it need not be.
    The entries of model, loss and data are written once, above; one that begins with an ellipsis continues that text.

    Args:
        taken: the options that the function takes as ``**how``, of :class:`.options.MeasureHow`.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        _complete(function, taken)
        parameters = inspect.signature(function).parameters
        names = [*parameters]
        needed = [name for name in names if parameters[name].default is _NEEDED]  # behind a loss that need not be given
        positional = [name for name in names if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY]
        in_front = [*itertools.takewhile(lambda name: name != "data", positional)]

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            given = args[len(in_front) : len(in_front) + 2]
            if "data" in positional and len(given) == 2 and all(isinstance(part, Tensor) for part in given):
                pair = ", ".join((*in_front, "(inputs, targets)"))
                raise InputError(f"data: inputs and targets are one argument, a pair: {function.__name__}({pair})")
            if len(args) > len(positional):
                others = zip(names[len(positional) :], args[len(positional) :], strict=False)
                by_name = ", ".join(f"{name}={shown(value)}" for name, value in others)
                raise TypeError(
                    f"{function.__name__}({', '.join(positional)}, *, …) takes {len(positional)} positional arguments, "
                    f"got {len(args)}; the others are passed by name, as in {by_name}"
                )
            missing = next((name for name in needed if name not in kwargs and names.index(name) >= len(args)), None)
            if missing is not None:
                raise TypeError(
                    f"{function.__name__}() missing 1 required positional argument: {missing!r}; it follows the loss, "
                    f"or is passed by name, {missing}=…, where the loss is the model's own"
                )
            for name in kwargs:
                if name not in parameters:
                    raise unknown_argument(function.__name__, name, names)
            if calling.is_transformed():
                raise InputError(
                    f"{function.__name__} is called inside of a transform of torch.func (vmap, grad, jvp), where "
                    "tensors have no values to measure: call it outside of that; what can be differentiated and mapped "
                    "is pyflatness.flatness_penalty"
                )
            thread_state, done = _ThreadState(), False
            try:
                try:
                    return function(*args, **kwargs)
                finally:
                    thread_state.put_back()
                    done = True
            finally:  # once more, where an exception from outside cut that off
                if not done:
                    thread_state.put_back()

        return cast(Callable[P, R], private.untraced(called))

    return decorated


class _ThreadState:
    """Hold the state of this thread that a call may change, as it is now; :class:`.state.Found` has the process's."""

    def __init__(self) -> None:
        self._depth, self._grad, self._filters = interrupts.depth(), torch.is_grad_enabled(), warnings.filters
        self._modes, self._dispatches = private.function_modes(), private.count_dispatch_modes()
        self._functions, self._hooks = private.functions(), private.top_saved_tensors_hooks(True)

    def put_back(self) -> None:
        """Undo what a call changed, and what was not put back where an exception came while it was."""
        interrupts.undo(self._depth)
        calling.end_transforms(0)
        private.set_functions(self._functions)  # a guard that an exception cuts off at its end leaves them off
        private.put_back_modes(self._modes, self._dispatches)  # a function mode is off while it is asked
        while private.top_saved_tensors_hooks(True) not in (self._hooks, None):
            private.pop_saved_tensors_hooks()
        if torch.is_grad_enabled() != self._grad:
            private.set_grad_enabled(self._grad)
        if warnings.filters is not self._filters and threading.active_count() == 1:  # else another thread's, maybe
            warnings.filters = self._filters


class _Needed:
    """Stand in a signature for an argument that has to be given behind one that need not be."""

    def __repr__(self) -> str:
        return "<needed>"


_NEEDED = _Needed()


def _complete(function: Callable[..., Any], taken: Sequence[str]) -> None:
    """Give a function the signature with the options that it takes, and a docstring with all of its arguments."""
    signature, defaults = inspect.signature(function), {**asdict(Options()), "eval": False}
    given = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    own = [p.replace(default=_NEEDED) if p.default is ... else p for p in given]
    kinds = MeasureHow.__annotations__
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kinds[name])
        for name in EVERY
        if name in taken
    ]
    complete = signature.replace(parameters=[*own, *shared])
    function.__signature__ = complete  # type: ignore[attr-defined]
    if function.__doc__:  # Python may have been started without them
        before, title, after = inspect.cleandoc(function.__doc__).partition("\nArgs:\n")
        if title:
            said, rest = _entries(after)
            others = _shared_entries()
            said = others | {name: _continued(others.get(name, ""), entry) for name, entry in said.items()}
            listed = [said[name] for name in complete.parameters if name in said]
            function.__doc__ = "\n".join([before, "Args:", *listed, *rest])


def _continued(shared: str, entry: str) -> str:
    """Return an argument's entry; one that begins with an ellipsis continues the entry that all calls share."""
    name, ellipsis, more = entry.partition(": …")
    if not ellipsis or ":" in name:
        return entry
    return f"{shared}\n{' ' * 8}{more.strip()}" if more else shared


def _entries(section: str) -> tuple[dict[str, str], list[str]]:
    """Return the entries of a docstring's section by their names, and the lines behind the section."""
    lines = section.splitlines()
    end = next((place for place, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    found: dict[str, str] = {}
    for line in lines[:end]:
        if line and not line.startswith(" " * 5):
            name = line.split(":")[0].strip()
            found[name] = line
        elif line:
            found[name] += f"\n{line}"
    return found, ["", *lines[end:]] if end < len(lines) else []


@functools.cache
def _shared_entries() -> dict[str, str]:
    docs = [inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[2] for kind in (How, MeasureHow)]
    return {name: entry for doc in (_NETWORK, *docs) for name, entry in _entries(doc)[0].items()}


@contextlib.contextmanager
def session(
    model: nn.Module,
    loss: Any,
    data: Any,
    options: Options | None = None,
    how: Mapping[str, Any] = _AS_IT_IS,
    *,
    reads: int = 1,
    ordered: bool = False,
    placed: bool = False,
    sharded: bool = False,
) -> Iterator[Task]:
    """Hold the user's model, loss and data ready to be measured; afterwards everything is as it was.

    The loss is what :func:`.losses.resolve` or :func:`.auto.of_model` takes, data what :class:`.data.Batches` takes; of
    the call's options those of :data:`.options.CALL` count here. Where something is drawn for samples, or with
    ``placed``, their places in the data of all ranks are known. With ``sharded`` the model's parameters may be spread
    over these ranks, see :mod:`.spread`.
    """
    reduction, forward, process_group = (how.get(name) for name in ("reduction", "forward", "process_group"))
    resolved = None if auto.is_auto(loss) else losses.resolve(loss, reduction)
    if forward is not None:
        check_function("forward", forward, "(model, batch) -> (outputs, targets)")
        forward = calling.of_user(forward)
    progress, in_eval = check_progress(how), check_flag("eval", how.get("eval", False))
    options = options or Options()
    with (
        joined(process_group) as ranks,
        explained(),
        state.observing(model, ranks if sharded else None, in_eval=in_eval) as (module, random),
    ):
        if not ranks.alone:
            _check_same(ranks, module, resolved, options, reads)
        parallel = spread.parallel()  # these ranks have the same samples
        shown_here = False if parallel.rank else progress
        batches = shards.batches(
            *(data, state.device(module), ranks if parallel.alone else ALONE),
            reads=reads,
            ordered=ordered,
            placed=placed or options.sampled,
            shown=shown_here,
        )
        resolved = resolved or auto.of_model(module, batches.peek(), reduction)
        with calling.aside():
            resolved = log_softmax.split(
                resolved, lambda: calling.run(module, copied(first(batches.peek(), 1)), forward)[0]
            )
        checked = Checked(module, resolved, forward, random)
        batches.count_by = functools.partial(_count, module, checked)
        if not parallel.alone:
            _check_same_outputs(parallel, module, batches, checked)
        yield Task(module, resolved, batches, checked, options, shown_here)


def _count(model: nn.Module, forward: calling.Forward, batch: Whole) -> int:
    """Return the samples of a batch that is not cut, which are those of the model's outputs."""
    with calling.aside(), torch.no_grad():
        calling.run(model, batch, forward)
    return batch.counted or 0


def _check_same(ranks: Ranks, model: nn.Module, loss: losses.Loss | None, options: Options, reads: int) -> None:
    """Raise a RankError unless the ranks have the same model and want the same."""
    ranks.check_alike(
        "the beginning of the call",
        {
            "options": repr(replace(options, memory=None, backend="auto")),
            "loss": None if loss is None else [type(loss).__name__, loss.reduction],
            "reads of the data": reads,
            "weights": fingerprint.of_tensors(model.named_parameters()),
            "buffers": fingerprint.of_buffers(model),
        },
    )


def _check_same_outputs(ranks: Ranks, model: nn.Module, batches: Batches, forward: calling.Forward) -> None:
    """Raise a RankError unless a tensor-parallel model has the same samples and outputs on its ranks."""
    batch = batches.peek()
    parts = [(f"{place}", part) for place, part in enumerate(leaves(batch)) if isinstance(part, Tensor)]
    ranks.check_alike("the first batch", {"batches": len(batches), "samples": fingerprint.of_tensors(parts)})
    with calling.dry_run():
        outputs, _ = calling.run(model, first(batch, 1), forward)
    ranks.check_alike("the first outputs", {"outputs": fingerprint.of_tensors([("outputs", outputs)])})

"""Check what every value relies on: the forward pass is one function of a sample, and autograd sees all of it.

A value is of one function of a sample, and of a loss of that function's outputs. So a forward pass must not draw random
numbers that matter, outputs must not change with the batch that a sample is in, and the loss must not depend on the
parameters except by the outputs. These are checked on batches that are run anyway: the first check compares two states
of generators per batch (and takes a second pass if they differ), the second takes a pass of two samples per call, if no
few samples were run before, and the third, for a loss that is a callable, the same and one evaluation of the loss.

Autograd takes results of ``detach``, ``.data``, ``torch.no_grad`` and Python numbers as constants, and no graph shows
that they are not. So a pass whose graph will be differentiated is watched: a tensor without a graph that is computed
from tensors with one is followed through all operations of torch to the outputs. It is followed by its memory, and so
are its views, tensors that it is written to and parameters made from it. Comparisons and indices have no derivative to
miss. A number or a NumPy array cannot be followed, and may be for a log: a few samples run twice more, once with the
number a little larger, and it counts if the outputs change in any bit. TorchScript cannot be watched, and counts.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import interrupts, private
from ..errors import FlatnessError, InputError
from ..losses import Loss, loss_notes
from ..losses.log_softmax import Last, OfLogits
from ..losses.parameter_dependence import REFUSAL, depends_on
from ..messages import IN_TRAINING, is_out_of_memory
from ..model import calling, data, state, walk
from ..model.generators import Randomness, outside
from ..model.outputs import meant
from ..model.parameters import requiring
from .linearity import users_of

TAKEN_AS_CONSTANT = (
    "the model's outputs may depend on tensors that its forward pass takes out of autograd's graph (detach, .data, "
    "torch.no_grad, item, numpy, or anything in TorchScript, which cannot be watched): derivatives take these as "
    "constant, and are not those of the function it computes"
)

HOOKED = (
    "a hook that the forward pass puts on a tensor (register_hook) changes gradients: derivatives are not those of the "
    "function it computes"
)

TWICE_WRONG = (
    "the model calls torch.logcumsumexp, whose second derivative torch gets wrong where a gradient that reaches it is "
    "0 (2.13): where all of them are nonzero this value is right"
)

RENORMED = (
    "an embedding with max_norm= changes its weight in the forward pass: derivatives are those in the changed weight, "
    "and not those of the function that the model computes"
)

_WITHOUT_VALUES = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
_WITHOUT_VALUES |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"}
_AS_ANOTHER = {"to", "type_as", "view_as", "reshape_as", "expand_as"}  # whose values are not read
_LARGER = 1 + 2**-6  # changes bfloat16 numbers too, and comparisons seldom


class Detached(calling.Watcher):
    """Watch one forward pass; see :meth:`doubts`. ``doubt`` is called if hooks of it change gradients.

    With ``nudges`` numbers that are taken out of tensors with a graph are a little larger, to see whether outputs
    depend on them.
    """

    def __init__(self, doubt: Callable[[str], None] | None = None, *, nudges: bool = False) -> None:
        self._doubt, self._nudges = doubt, nudges
        self._held: dict[int, Tensor] = {}  # by id; the tensors are kept so that ids and memory stay theirs
        self._versions: dict[int, int] = {}  # of these
        # Memory of these; False if tensors with a graph share it, so that only those without one are followed by it.
        self._memory: dict[int, bool] = {}
        self._recording = True  # the grad mode that the model's own code has set
        self.is_lost = False  # whether such a tensor, or one with a graph, became a number or an array
        self._script = _last_script()
        self._of_operations: dict[str, None] = {}  # doubts that one operation raises
        self._had_graph = False  # whether the tensor about to be detached in place has one

    def doubts(self, outputs: Tensor, again: Callable[[], Tensor]) -> list[str]:
        """Return why derivatives of the outputs may not be those of the function computed; see :meth:`is_cut`."""
        scripted = private.last_script() is not self._script
        return [TAKEN_AS_CONSTANT] * (scripted or self.is_cut(outputs, again)) + [*self._of_operations]

    def is_cut(self, outputs: Tensor, again: Callable[[], Tensor]) -> bool:
        """Return whether the outputs depend on tensors cut from the graph.

        If numbers were taken out, perhaps for a log, ``again`` runs the model twice more, on a few samples.
        """
        reached = self.reaches(outputs)
        if reached or not self.is_lost:
            return reached
        watched, same = Detached(nudges=True), False
        with interrupts.suppressed():  # of a model that does not run on a few samples
            before = again()
            with calling.watched_by(watched):
                same = torch.allclose(before, again(), rtol=0, atol=0, equal_nan=True)
        return not (same and watched.is_lost)

    def reaches(self, tensor: Tensor) -> bool:
        """Return whether a tensor is followed, or shares memory with one that is."""
        if self._held.get(id(tensor)) is tensor:
            return True
        whole = self._memory.get(memory_of(tensor))
        return whole is not None and (whole or tensor.is_leaf)

    def loses(self, name: str, args: Sequence[Any]) -> bool:
        """Return whether an operation takes a number out of a tensor that is followed or has a graph."""
        if name not in calling.OUT_OF_TORCH or not (args[0].is_floating_point() or args[0].is_complex()):
            return False
        return args[0].requires_grad or self.reaches(args[0])

    def before(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """See :class:`.calling.Watcher`."""
        self._had_graph = name == "detach_" and any(tensor.requires_grad for tensor in _tensors(args))
        if name == "register_hook" and self._doubt is not None and _is_user_s(args[1]):
            return args[0], self._noting(args[1])
        if self._nudges and self.loses(name, args):
            self.is_lost = True
            return args[0].detach() * _LARGER, *args[1:]
        return args

    def see(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See :class:`.calling.Watcher`."""
        if name == "logcumsumexp":
            self._of_operations[TWICE_WRONG] = None
        if kwargs.get("max_norm") is not None and args[1].requires_grad:
            norms = args[1].detach().norm(kwargs["norm_type"], dim=1)
            if bool((norms > 0.999 * kwargs["max_norm"]).any()):  # it leaves smaller rows as they are
                self._of_operations[RENORMED] = None
        if name == "_set_grad_enabled":
            self._recording = args[0]
        elif name in calling.OUT_OF_TORCH:
            self.is_lost |= self.loses(name, args)
        elif name in ("__setitem__", "__set__"):  # of entries, of ``.data``
            self._follow(name, _tensors(args), _tensors(args[:1]))
        elif (
            not self._held
            and isinstance(result, Tensor)
            and result.requires_grad
            and torch.is_grad_enabled()
            and not private.is_wrapped(result)
        ):
            return  # as for most operations: there is nothing to follow
        elif isinstance(result, (Tensor, tuple, list)):
            read = args[:1] if name in _AS_ANOTHER else (args, kwargs)
            self._follow(name, _tensors(read), _tensors(result), had_graph=self._had_graph and name == "detach_")

    def _noting(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
        """Return a hook that reports if it changes a gradient."""

        def noted(gradient: Tensor) -> Tensor | None:
            before = gradient.detach().clone()
            result = hook(gradient)
            after = (gradient if result is None else result).detach()
            if not torch.allclose(after, before, rtol=0, atol=0, equal_nan=True):
                assert self._doubt is not None
                self._doubt(HOOKED)
            return result

        return noted

    def _follow(self, name: str, inputs: list[Tensor], results: list[Tensor], *, had_graph: bool = False) -> None:
        depends = bool(self._held) and any(map(self.reaches, inputs))
        for tensor in inputs:  # a loop, since this is asked of every operation
            had_graph |= tensor.requires_grad
        if not (depends or had_graph):
            return
        if name in _WITHOUT_VALUES:
            return
        for tensor in results:
            if (tensor.is_floating_point() or tensor.is_complex()) and (depends or self._is_cut(tensor)):
                self._hold(tensor, inputs)

    def _hold(self, tensor: Tensor, inputs: Sequence[Tensor]) -> None:
        """Follow a tensor from here on, with the tensors that share its memory.

        In memory of a tensor with a graph, only tensors without one are followed; a view of a leaf is followed alone.
        """
        is_written = any(given is tensor for given in inputs) and self._versions.get(id(tensor)) != calling.version(
            tensor
        )
        self._held[id(tensor)], self._versions[id(tensor)] = tensor, calling.version(tensor)
        memory = memory_of(tensor)
        of = [given for given in inputs if given is not tensor and given.requires_grad and memory_of(given) == memory]
        if not of:
            if is_written or memory not in self._memory:  # otherwise it is a followed tensor or a view of one
                self._memory[memory] = True
        elif not all(given.is_leaf for given in of):
            self._memory.setdefault(memory, False)

    def _is_cut(self, tensor: Tensor) -> bool:
        """Return whether the result of an operation on a tensor with a graph has none.

        Inside the ``forward`` of a ``torch.autograd.Function`` no result has one, and the function's derivative counts.
        """
        if torch.is_grad_enabled() or tensor.is_inference():
            return not tensor.requires_grad
        return not self._recording


def _is_user_s(hook: Any) -> bool:
    """Return whether a hook is not one of torch's or ours, which do not change gradients."""
    return not (getattr(hook, "__module__", None) or "").startswith(("torch.", "pyflatness."))


def memory_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory, equal for tensors that share it."""
    try:
        memory: int = tensor.untyped_storage()._cdata
        return memory
    except NotImplementedError:  # it may be sparse
        return id(tensor)


def _last_script() -> Any:
    """Return what torch has noted as the last run of TorchScript in this thread; a run makes it another one."""
    if private.last_script() is not None:
        private.empty_script()(0)  # the next run may be of the same code
    return private.last_script()


def _tensors(*values: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or results, as they are below ``torch.func``'s transformations."""
    found, waiting = [], [*values]
    for value in waiting:  # which grows meanwhile
        if isinstance(value, Tensor):
            while private.is_wrapped(value):
                value = private.unwrapped(value)
            found.append(value)
        elif isinstance(value, (tuple, list)):
            waiting.extend(value)  # not by +, which a tuple of a library may have for its numbers
        elif isinstance(value, dict):
            waiting += value.values()
    return found


Result = TypeVar("Result")
Check = Callable[[Tensor], None]
"""(outputs for a batch) -> None; raises if they differ from earlier ones for some of its samples."""


class Spacing:
    """Choose the batches of which some samples are run alone: the first, the second and the last.

    If the number of batches is not known, some at doubling distances replace the last.
    """

    def __init__(self, batches: int) -> None:
        self._last = batches - 1
        self._done = 0  # samples before the last batch that was checked

    def due(self, number: int, done: int) -> bool:
        """Return whether to check batch ``number``, after ``done`` samples; called once for each batch."""
        if done <= self._done:
            return False
        follows = self._done == 0 or (self._last < 0 and done >= 2 * self._done)
        due = follows or number == self._last
        self._done = done if due else self._done
        return due


class Decisions(calling.Watcher):
    """Watch whether a forward pass turns floating-point values into truth values, indices or whole numbers.

    A decision by these, ``if h.mean() > 0``, may depend on the whole batch, and no derivative shows it.
    """

    def __init__(self) -> None:
        self.seen = False

    def see(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See :class:`.calling.Watcher`."""
        if self.seen:
            return
        left = False  # a loop, since this is asked of every operation
        for part in result if isinstance(result, (tuple, list)) else (result,):
            left |= isinstance(part, Tensor) and not (part.is_floating_point() or part.is_complex())
        if left or name in _TO_PYTHON:
            given = [*args, *kwargs.values()]
            self.seen = any(isinstance(part, Tensor) and part.is_floating_point() for part in given) and _by_model()


def _by_model() -> bool:
    """Return whether the current operation is the model's, and not of a hook of this package."""
    frame = sys._getframe(3)  # the caller of the watcher and of the watch
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith("pyflatness.")


_TO_PYTHON = {"__bool__", "__int__", "__index__", *calling.OUT_OF_TORCH}


def check_of_user(error: Exception) -> None:
    """Raise an error again unless it is of the user's code: one of ours, or of a signal's handler."""
    if isinstance(error, FlatnessError) and not isinstance(error, data.NotCutError):
        raise error
    interrupts.pass_on(error)


def alone(batch: Any, run: Callable[[Any], Result]) -> Result | None:
    """Return the result of ``run`` on some samples without the rest of their batch; None if it fails on so few."""
    try:
        with calling.dry_run(), torch.no_grad():
            return run(batch)
    except Exception as error:
        interrupts.pass_on(error)
        return None  # the batch cannot be cut; an error of the model itself comes again with the whole batch


def two_alone(
    batch: Any,
    run: Callable[[Any], tuple[Tensor, Any]],
    read: Callable[[Tensor, Any], Tensor] = lambda outputs, targets: outputs,
    what: str = "outputs",
) -> Check:
    """Run two samples of a batch alone, and return a check that compares the whole batch's outputs with theirs.

    The check passes anything for a batch of fewer than three, or one that cannot be cut. ``read`` selects what is
    compared.
    """
    samples = data.size(batch)
    # Two that lose the samples in front of them, or behind.
    two = torch.tensor([1, samples - 1], dtype=torch.int64, device="cpu")
    found = alone(data.take(batch, two), run) if samples > 2 and not isinstance(batch, data.Whole) else None
    if found is None:
        return unchecked
    before = read(*found)
    return lambda given: check_unchanged(before, data.rows_of(given, samples, two), what)


def unchecked(given: Tensor) -> None:
    """Accept anything: nothing is known of these samples."""


def check_unchanged(before: Tensor, now: Tensor, what: str = "outputs") -> None:
    """Raise an InputError if two runs of a model on the same samples differ by more than rounding."""
    count = min(len(before), len(now))
    before, now = before[:count], now.detach()[:count]
    exactly = agree(before, now, rounding(before.dtype, now.dtype))
    if not (exactly or agree(before, now, rounding(_narrowest(before), _narrowest(now)))):
        raise InputError(
            f"the model's {what} for the same samples change with the batch they are in, or from call to call: it "
            f"{_keeps()}mixes samples, decides by all of them (if h.mean() > 0), draws random numbers, or its batches "
            "cannot be cut into samples (tensors of other things whose first dimension is as long as the batch)"
        )


def _keeps() -> str:
    """Return in words what forward passes keep in the model, and what to do about it; empty if they keep nothing."""
    kept = state.kept()
    if not kept:
        return ""
    listed = ", ".join(map(repr, kept[:_LISTED])) + (", …" if kept[_LISTED:] else "")
    return f"keeps {listed} from call to call (reset it in forward=, a function that then calls the model), "


def rounding(*dtypes: torch.dtype) -> float:
    """Return the relative difference allowed between two runs in some dtypes; 0 if none is floating point."""
    floating = [8 * torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    return max(1e-3, *floating) if floating else 0.0


def _narrowest(tensor: Tensor) -> torch.dtype:
    """Return the half precision that holds a tensor exactly, as where accelerate makes it float32; else its dtype."""
    halves = (torch.float16, torch.bfloat16) if tensor.is_floating_point() else ()
    return next((half for half in halves if torch.equal(tensor.to(half).to(tensor.dtype), tensor)), tensor.dtype)


def agree(before: Tensor, now: Tensor, tolerance: float) -> bool:
    """Return whether tensors are the same to within ``tolerance`` of each entry and of the largest; NaN is NaN."""
    if before.shape != now.shape:
        return False
    if before.dtype != now.dtype:  # autocast does not reach both
        before, now = before.double(), now.double()
    if before.numel() and before.is_floating_point():  # faster on large outputs; False with NaN and infinity
        farthest, largest = (_largest(each) for each in (now - before, before))
        if bool((farthest <= tolerance * largest) & largest.isfinite()):
            return True
    largest = before.abs().nan_to_num(0, 0, 0).amax() if before.numel() else before.new_zeros(())
    return torch.allclose(before, now, tolerance, tolerance * float(largest), equal_nan=True)


def _largest(values: Tensor) -> Tensor:
    """Return the largest size of an entry; NaN if one is."""
    return torch.maximum(-values.amin(), values.amax())  # half of the time of aminmax


_CALL = "_pyflatness_call"  # attribute of an error of a forward pass: the call, and the parameters' kinds
GIVEN_COPIES = "the model changes its inputs in place, so that it was given copies of them"
_WITHOUT_GRAPH = "does not require grad and does not have a grad_fn"  # torch's words for a derivative without one
_LOOKS = 3  # passes of few samples to watch for decisions by values
_ALONE = 32  # at most, of a batch with decisions, that are each run alone
_LISTED = 4  # names in a message
_REPEATS = 3  # more passes of one batch, for a model that keeps something, to see if its outputs depend on it
_ROUNDING = 8  # units of the outputs' rounding that two forward passes of the same batch may differ by


class Checked:
    """Call the user's ``forward``, or the model itself, and check the pass and its outputs."""

    def __init__(self, model: nn.Module, loss: Loss, forward: calling.Forward | None, random: Randomness) -> None:
        self._forward, self._loss, self._random = forward, loss, random
        self.by_user = forward is not None  # whether the user's own forward picks the targets of a batch
        self._parameters = walk.parameters(model)
        self._changes_inputs: bool | None = None  # whether the model does so in place; None before it ran
        self._changes_values = False  # whether their values change, and not only requires_grad
        self._looks = _LOOKS  # watched passes that are left
        self._batches = 0  # that were run to be measured
        self.decides = False  # whether values decide something, see :class:`.Decisions`
        self._is_first = True  # whether no batch was run yet, except in dry runs
        self._has_dtypes = False  # whether the dtypes in the outputs' graph were checked
        self._has_run = False  # whether any batch was, so that the model may have kept something
        self._fewest = math.inf  # fewest samples in a dry run
        self.notes: tuple[str, ...] | None = None  # of an estimate; known once a batch was measured
        self.doubts: tuple[str, ...] = ()  # why derivatives may not be those of what the model computes
        self._loss_is_open = True  # whether it may depend on more than the outputs, see :meth:`_check_loss`
        self._in_full = False  # whether to return the model's own outputs even if the loss is of its logits
        self._takes_derivatives = False  # whether the model needs a graph in its forward pass, as for forces

    @contextlib.contextmanager
    def in_full(self) -> Iterator[None]:
        """Return the model's own outputs inside, even if the loss is taken in its logits."""
        before, self._in_full = self._in_full, True
        try:
            yield
        finally:
            self._in_full = before

    def compare_by_itself(self) -> None:
        """Have the next batch compared with two of its samples alone, since it is not compared with earlier runs."""
        self._fewest = math.inf

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """See :data:`.calling.Forward`."""
        if calling.now.dry:
            before = self._random.states()
            outputs, targets = self._run(model, batch)
            if not (self._has_run or self._random.states() != before):
                self._check_state(model, batch, outputs)
            self._fewest = min(self._fewest, data.size(batch))
        else:
            before, others = self._random.states(), outside() if self._is_first else None
            is_unseen = self._is_first and self._looks == _LOOKS
            with self._random.watched() if is_unseen else contextlib.nullcontext():
                run = functools.partial(self._run, model)
                outputs, targets = self.watched(run, batch) if torch.is_grad_enabled() else run(batch)
            if self._random.states() != before or (others is not None and others != outside()):
                self._check_repeated(model, batch, outputs)
            elif not self._has_run:
                self._check_state(model, batch, outputs)
            if self._is_first and self._fewest >= data.size(batch):
                self._check_independent(model, batch, outputs)
            self._is_first = False
            if self.decides:
                self._check_decisions(model, batch, outputs)
            if self.notes is None and not outputs.is_meta and isinstance(targets, Tensor):
                self.notes = (GIVEN_COPIES,) if self._changes_values else ()
                with interrupts.suppressed():  # the measure raises if they do not fit together
                    self.notes += loss_notes.of(self._loss, outputs, targets, self._parameters)
            if self.notes is not None and not self._has_dtypes and outputs.requires_grad:
                self._has_dtypes = True
                self.notes += _coarser(outputs, self._parameters)
        self._has_run = True
        if self._loss_is_open and not outputs.is_meta and isinstance(targets, Tensor):
            may_be_computed = self.by_user and targets.is_floating_point()  # with the model
            if may_be_computed or not self._loss.known:
                self._check_loss(model, batch)
        return outputs, targets

    def _tensor(self, returned: Any) -> Tensor:
        """Return the outputs among the returned values: side by side if there are several and the loss takes all."""
        found = meant(returned, self._loss.known)
        return self._loss.side_by_side(returned) if found is None else found

    def _call(self, batch: Any) -> str:
        """Return in words what was called, and its inputs."""
        if self._forward is not None:
            return f"forward(model, batch) on the batch {data.description(batch)}"
        if isinstance(batch, Mapping):
            keywords = {key: part for key, part in batch.items() if key != "labels"}
            return f"model(**inputs) on the inputs {data.description(keywords)} (`labels` are the targets)"
        return f"model(inputs) on the inputs {data.description(batch[0])}"

    def _kinds(self) -> str:
        """Return the dtypes and devices of the parameters in words."""
        kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in self._parameters}
        return ", ".join(sorted(kinds)).replace("torch.", "")

    def _run(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Run a batch, or a copy for a model that may change its inputs in place; the first pass shows whether.

        Samples of a batch that is not cut are counted.
        """
        given = batch if self._changes_inputs is False else data.copied(batch)
        before = _marks(given)
        if self._looks and calling.now.dry:
            self._looks -= 1
            # A later pass may raise, and then only this one shows what is drawn.
            decisions = Decisions()
            with calling.watched_by(decisions), self._random.watched():
                outputs, targets = self._run_on(model, given)
            self.decides |= decisions.seen
        else:
            outputs, targets = self._run_on(model, given)
        marks = _marks(given) if given is batch or self._changes_inputs is None else before
        if self._changes_inputs is None:
            changed = [version for version, _ in marks] != [version for version, _ in before]
            with private.without_functions():  # which is no operation of the model's
                self._changes_values = changed or not data.same(batch, given)
            self._changes_inputs = self._changes_values or marks != before
        elif marks != before:
            raise InputError(
                f"model: it changes its inputs in place on the batch {data.description(batch)}, which is changed now, "
                "and did not on those before; have it work on a copy, x = x.clone()"
            )
        if isinstance(batch, data.Whole):
            batch.counted = len(outputs) if outputs.ndim else 0
        return outputs, targets

    def _run_on(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        try:
            if torch.is_grad_enabled() or not self._takes_derivatives:
                return self._outputs(model, batch)
            with torch.enable_grad():
                outputs, targets = self._outputs(model, batch)
            return outputs.detach(), targets
        except FlatnessError:
            raise
        except StopIteration as error:  # left alone, it would end a loop, or be an error in a generator
            stopped = RuntimeError("the forward pass raised StopIteration")
            setattr(stopped, _CALL, (self._call(batch), self._kinds()))
            raise stopped from error
        except Exception as error:
            interrupts.pass_on(error)
            if _WITHOUT_GRAPH in str(error) and not (torch.is_grad_enabled() or self._takes_derivatives):
                self._takes_derivatives = True
                return self._run_on(model, batch)
            if not is_out_of_memory(error):
                setattr(error, _CALL, (self._call(batch), self._kinds()))
            raise

    def _outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Return outputs and targets; the outputs are the logits if the loss is of those in front of a log_softmax."""
        if self._in_full or not isinstance(self._loss, OfLogits):
            return calling.run(model, batch, self._forward, self._tensor)
        last = Last()
        with calling.watched_by(last):
            outputs, targets = calling.run(model, batch, self._forward, self._tensor)
        logits = last.argument(outputs)
        if logits is None:
            raise InputError(
                "model: the outputs of the first sample are those of a log_softmax over dimension 1, and here they "
                "are not; have it end in one for all batches"
            )
        return logits, targets

    def watched(self, run: Callable[[Any], tuple[Tensor, Any]], batch: Any) -> tuple[Tensor, Any]:
        """Return the result of a forward pass that will be differentiated, and note tensors cut from its graph."""
        detached = Detached(self.doubt)
        with calling.watched_by(detached):
            outputs, targets = run(batch)

        def again() -> Tensor:
            with calling.aside(), calling.accounting(), self._random.watched(), requiring(self._parameters, flag=True):
                return run(data.first(batch, min(2, data.size(batch))))[0]

        for doubt in detached.doubts(outputs, again):
            self.doubt(doubt)
        return outputs, targets

    def doubt(self, why: str) -> None:
        """Register why derivatives may not be those of the function that the model computes."""
        self.doubts = tuple(dict.fromkeys([*self.doubts, why]))

    def _check_repeated(self, model: nn.Module, batch: Any, outputs: Tensor) -> None:
        """Raise if a second forward pass of a batch, in which random numbers were drawn, has other outputs."""
        if not outputs.is_meta and self._is_repeated(model, batch, outputs):
            return
        mode = f"it {IN_TRAINING}, and " if model.training else ""
        raise InputError(
            f"model: it draws random numbers in its forward pass: on the same batch, {data.description(batch)}, a "
            f"second pass has other outputs, so that a value would be one of many; {mode}switch off what draws them "
            "(dropout that does not ask for self.training, added noise, sampling), or have it draw the same at every "
            "call"
        )

    def _check_state(self, model: nn.Module, batch: Any, outputs: Tensor) -> None:
        """Raise if the first forward pass kept something in the model that later ones of the same batch depend on."""
        if outputs.is_meta or not state.kept():
            return
        if not all(self._is_repeated(model, batch, outputs) for _ in range(_REPEATS)):
            raise InputError(
                f"model: its outputs depend on the calls before: it {_keeps()}and on the same batch, "
                f"{data.description(batch)}, a later pass has other outputs"
            )

    def _is_repeated(self, model: nn.Module, batch: Any, outputs: Tensor) -> bool:
        """Return whether one more forward pass of a batch has the same outputs."""
        outputs = outputs.detach()
        with calling.aside(), torch.no_grad(), self._random.watched():
            again, _ = self._run(model, batch)
        return agree(outputs, again, _ROUNDING * torch.finfo(outputs.dtype).eps if outputs.is_floating_point() else 0.0)

    def _check_independent(self, model: nn.Module, batch: Any, outputs: Tensor) -> None:
        """Raise if two samples of a batch have other outputs without the others."""
        if not (outputs.is_meta or outputs.ndim == 0 or len(outputs) % data.size(batch)):
            with calling.aside():
                check = two_alone(batch, functools.partial(self._run, model))
            check(outputs)

    def _check_decisions(self, model: nn.Module, batch: Any, outputs: Tensor) -> None:
        """Raise if samples have other outputs when run alone: many samples of some batches, one of the others."""
        if outputs.is_meta or outputs.ndim == 0 or isinstance(batch, data.Whole):
            return
        samples, self._batches = data.size(batch), self._batches + 1
        if samples < 2 or len(outputs) % samples:
            return
        is_power_of_two = self._batches & (self._batches - 1) == 0
        count = min(samples, _ALONE)
        places = [place * samples // count for place in range(count)] if is_power_of_two else [self._batches % samples]
        with calling.aside():
            for place in places:
                index = torch.tensor([place], dtype=torch.int64, device="cpu")
                found = alone(data.take(batch, index), functools.partial(self._run, model))
                if found is not None and found[0].ndim == outputs.ndim:  # a model may drop a dimension of length one
                    check_unchanged(found[0], data.rows_of(outputs, samples, index))

    def _check_loss(self, model: nn.Module, batch: Any) -> None:
        """Raise if the loss depends on the model's parameters other than by the outputs; checked once."""
        held = {*self._parameters, *model.parameters()}  # others where the model is run functionally
        # Only the innermost hooks are called, so that a dry run does not count this graph as the sweep's. Undetached,
        # a node that saves its own output would be in a cycle that is never freed.
        uncounted = functools.partial(
            torch.autograd.graph.saved_tensors_hooks, lambda kept: kept.detach(), lambda kept: kept
        )
        for part in (data.first(batch, min(2, data.size(batch))), batch):
            with interrupts.suppressed(), state.made_anew(model), calling.aside(), uncounted():
                found = depends_on(self._loss, functools.partial(self._run, model, part), held)
                break
        else:  # the loss does not take these outputs; the measure has the better message
            return
        self._loss_is_open = False
        if found:
            raise InputError(REFUSAL)


def _coarser(outputs: Tensor, parameters: Sequence[Tensor]) -> tuple[str, ...]:
    """Return notes on lower precision in the graph of a float64 model, such as a softmax in float32."""
    if any(parameter.dtype != torch.float64 for parameter in parameters if parameter.is_floating_point()):
        return ()
    nodes = [node for node in (outputs.grad_fn, *users_of(outputs)) if node is not None]
    found = {entry.dtype for node in nodes for entry in private.results_of(node)}
    coarse = [dtype for dtype in (torch.float32, torch.float16, torch.bfloat16) if dtype in found]
    return tuple(
        f"the model computes in {str(dtype).removeprefix('torch.')} in places, though its parameters are float64: "
        "values have that rounding"
        for dtype in coarse
    )


def _marks(batch: Any) -> list[tuple[int, bool]]:
    """Return how often each tensor of a batch was changed in place, and whether it requires a gradient."""
    with private.without_functions():
        leaves = [part for part in data.leaves(batch) if isinstance(part, Tensor)]
        return [(calling.version(part), part.requires_grad) for part in leaves]


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Replace an uncaught error of the user's forward pass inside by one that says what was called."""
    try:
        yield
    except interrupts.Signalled as signalled:
        raise signalled.raised from signalled.raised.__cause__
    except Exception as error:
        interrupts.replaced(error)
        if not hasattr(error, _CALL):
            raise
        raised = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
        call, parameters_are = getattr(error, _CALL)
        of_dtype = "same dtype" in str(raised) and parameters_are.startswith("float32")
        such_as = ", such as inputs.float()" if of_dtype else ""
        try:
            raise InputError(
                f"model: {call} raised {type(raised).__name__}: {raised}; pass data that fit the model{such_as} (its "
                f"parameters are {parameters_are}), or forward=, a function (model, batch) -> (outputs, "
                "targets) that calls it as it wants to be called"
            ) from raised
        finally:
            del raised  # as it would hold this frame, which holds it

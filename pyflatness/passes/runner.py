"""Running a model over data with the chosen layers recorded, a batch cut into parts that fit the memory."""

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from ..errors import InputError, NotYetError
from ..messages import is_out_of_memory
from ..model import calling, data, layers
from ..model.data import Batches
from ..model.selectors import Selection
from . import batch_layout, dry_run, independence, linearity
from .batch_layout import Layout
from .independence import Spacing, check_unchanged
from .recorder import Call, Recorder, frozen

DEFAULT_MEMORY = 512 * 2**20  # bytes that the graph, the layers' inputs and output gradients of a part may take
_SECOND_ORDER = 3  # about the memory that a graph takes together with that of its derivatives

Result = TypeVar("Result")
Check = Callable[[Tensor], None]
"""Of the outputs of a run: raises if these samples had others before."""


@dataclass(frozen=True)
class Run:
    """A forward pass of some samples, recorded.

    Attributes:
        batch: these samples.
        outputs: the model's, with their graph.
        targets: as they came.
        samples: how many.
        number: of the user's batch.
        numbers: (n,) int64, of the samples, counted over all data.
        recorder: the layers' calls; empty once the run is over.
        layouts: where each layer keeps the samples.
        nonlinear: layers in whose weight the model is not certified to be locally linear.
        again: the model on these samples once more, unrecorded, with a graph of what requires gradients.
    """

    batch: Any
    outputs: Tensor
    targets: Any
    samples: int
    number: int
    numbers: Tensor
    recorder: Recorder
    layouts: dict[str, Layout]
    nonlinear: frozenset[str]
    again: Callable[[], tuple[Tensor, Any]]

    def calls(self, name: str) -> list[Call]:
        """A layer's calls; none if it did not run."""
        return self.recorder.calls.get(name, [])

    def samples_first(self, name: str, tensor: Tensor) -> Tensor:
        """An input or gradient of a layer as (n, q, …)."""
        layout = self.layouts[name]
        if not layout.fits(tensor, self.samples):
            raise batch_layout.mixed(name, tensor.shape, self.samples)
        return layout.samples_first(tensor, self.samples)


@dataclass(frozen=True)
class Repeatable:
    """What is left of a run that is over: see :class:`Run`; the outputs have no graph."""

    batch: Any
    outputs: Tensor
    number: int
    numbers: Tensor

    @classmethod
    def of(cls, run: Run) -> "Repeatable":
        """A run's."""
        return cls(run.batch, run.outputs.detach(), run.number, run.numbers)


class Runner:
    """A model, its data and chosen layers.

    Args:
        model: inside :func:`.state.observing`.
        selection: the layers.
        batches: the data.
        forward: see :func:`.calling.run`.
        memory: bytes for the graph, layer inputs and output gradients of a part; None takes :data:`DEFAULT_MEMORY`.
        approve: called before each part is measured, with the layers that are not linear so far, and why.
        second_order: whether second derivatives will be taken behind those, which makes their graph larger.
        order_matters: whether values of single samples are asked for, so that rows in another order have to be noticed.
        certify: whether it matters which layers are linear.
        reserve: bytes a sample that the work takes besides, by what was found out on the first samples.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        batches: Batches,
        forward: calling.Forward | None = None,
        memory: int | None = None,
        approve: Callable[[dict[str, str]], None] = lambda nonlinear: None,
        *,
        second_order: bool = False,
        order_matters: bool = False,
        certify: bool = True,
        reserve: Callable[[dry_run.Findings], int] = lambda found: 0,
    ) -> None:
        self._certify, self._reserve = certify, reserve
        self.model, self.batches, self.selected = model, batches, selection.modules
        self._approve, self._second_order, self._order_matters = approve, second_order, order_matters
        self._named, self._optional, self._forward = selection.named, selection.optional, forward
        self._asked, self._memory = memory, memory or DEFAULT_MEMORY
        self.notes: tuple[str, ...] = ()  # what a reader of a value should know of how it was come by
        self._recorder = Recorder(selection.modules)
        self._looked_at = 0  # samples behind what is known
        self._layouts: dict[str, tuple[Layout, ...]] = {}
        self._measured: set[str] = set()  # layers whose layout was relied on
        self._part = 1  # samples that go through the model together
        self._cuttable = True
        self._nonlinear: dict[str, str] = {}
        self._twice_differentiable = False  # whether attention is run so that it has second derivatives
        self._unseen: set[str] = set()  # layers that ran for the first time
        self._idle: dict[str, frozenset[int]] = {}  # calls of layers that outputs do not depend on, by number
        self._detached: set[str] = set()  # layers to which autograd has no path, left out like those that do not run
        self._spacing = Spacing(len(batches))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The chosen layers that ran, in the model's order."""
        return {name: module for name, module in self.selected.items() if name in self._layouts}

    @property
    def cuttable(self) -> bool:
        """Whether the model runs on other numbers of samples than a batch has."""
        return self._cuttable

    def why_not_linear(self, name: str) -> str:
        """One of :mod:`.linearity`'s reasons; empty for a layer that is linear."""
        return self._nonlinear.get(name, "")

    def is_linear(self, name: str) -> bool:
        """Whether the model is locally linear in the layer's weight at all samples so far, see :mod:`.linearity`."""
        return name not in self._nonlinear

    def results(self, work: Callable[[Run], Result]) -> Generator[Result, None, None]:
        """``work`` done on a run of every part of the data; out of memory, parts are halved.

        Raises:
            InputError: see :func:`.dry_run.look`; a layer that was named does not run; outputs that change with the
                batch that a sample is in.
        """
        with self._recorder.attached(), frozen(self.model):
            done = 0
            for number, batch in enumerate(self.batches):
                yield from self._of_batch(batch, number, done, work)
                done += data.size(batch)

    def _of_batch(
        self, batch: Any, number: int, done: int, work: Callable[[Run], Result]
    ) -> Generator[Result, None, None]:
        seen, samples = self._look(batch), data.size(batch)
        numbers = torch.arange(done, done + samples, device="cpu")
        compare = seen is None and self._cuttable and self._spacing.due(number, done)

        def step(start: int, stop: int) -> Result | None:
            part = data.part(batch, start, stop)
            check: Check = _unchecked
            if start == 0 and seen is not None:
                check = partial(_check_as_seen, seen, stop - start)
            elif start == 0 and compare:
                check = self._two_alone(part)
            return self._tried(part, number, numbers[start:stop], work, check)

        yield from self._in_parts(samples, samples, step)

    def repeated(
        self, run: Repeatable, rows: Tensor, work: Callable[[Run, slice], Result]
    ) -> Generator[Result, None, None]:
        """``work`` done on further runs of samples of a run that is over, and on which of ``rows`` they are.

        While the iteration of :meth:`results` stands at that run's result; its graph is gone by then.

        Args:
            run: what was.
            rows: (r,) places of samples in it; one may come more than once.
            work: to do.
        """

        def again(start: int, stop: int) -> Result | None:
            index = rows[start:stop]
            seen = data.rows_of(run.outputs, len(run.numbers), index)
            part, numbers = data.take(run.batch, index), run.numbers[index]
            with calling.dry_run():  # these samples went through the model before
                own = partial(check_unchanged, seen)
                return self._tried(part, run.number, numbers, lambda found: work(found, slice(start, stop)), own)

        yield from self._in_parts(len(rows), len(run.numbers), again)

    def _in_parts(
        self, samples: int, limit: int, step: Callable[[int, int], Result | None]
    ) -> Generator[Result, None, None]:
        """Results of steps from one sample to another; one without a result is done again."""
        start = 0
        while start < samples:
            stop = start + _even(samples - start, min(self._part, limit))
            try:
                result = step(start, stop)
            except RuntimeError as error:
                if stop - start == 1 or not is_out_of_memory(error):
                    raise
                self._part = (stop - start) // 2
                continue
            if result is not None:
                yield result
                start = stop

    def _tried(
        self, part: Any, number: int, numbers: Tensor, work: Callable[[Run], Result], check: Check
    ) -> Result | None:
        """None: to be tried again, with what was found out."""
        # Around all of it: activation checkpointing runs the model again in backward passes.
        with self._attention(), calling.differentiated(), _checkpointing():
            result = self._run(part, number, numbers, work, check)
        if result is None and self._unseen:
            self._look(part, again=True)
        return result

    def _run(
        self, part: Any, number: int, numbers: Tensor, work: Callable[[Run], Result], check: Check
    ) -> Result | None:
        recorder, samples = self._recorder, data.size(part)

        def forward() -> tuple[Tensor, Any]:
            with torch.enable_grad():
                return calling.run(self.model, part, self._forward)

        def again() -> tuple[Tensor, Any]:
            with calling.dry_run():
                return forward()

        try:
            with recorder.recording():
                outputs, targets = forward()
            for name in self._detached:
                recorder.calls.pop(name, None)
            self._unseen = recorder.calls.keys() - self._layouts.keys()
            if self._unseen:
                return None
            overwritten = recorder.overwritten()
            if overwritten:
                raise InputError(f"batch {number}: the inputs of {', '.join(overwritten)} are modified in place")
            dry_run.check_samples(outputs, samples)
            check(outputs)
            users = linearity.users_of(outputs)
            if self._finds_idle(outputs, users, part):
                return None
            self._narrow(outputs, samples)
            if not self._settled(outputs, users, samples):
                return None
            first = {name: layouts[0] for name, layouts in self._layouts.items()}
            if samples > 1:
                self._measured |= recorder.calls.keys()
            numbers = numbers.to(outputs.device)
            nonlinear = frozenset(self._nonlinear).intersection(recorder.calls)
            return work(Run(part, outputs, targets, samples, number, numbers, recorder, first, nonlinear, again))
        finally:
            recorder.calls.clear()

    def _two_alone(self, part: Any) -> Check:
        """Holds outputs for a part of the data against those for two of its samples without the others."""
        samples = data.size(part)
        two = independence.pair(samples)
        seen = None if two is None else dry_run.apart(self.model, data.take(part, two), self._forward)
        if two is None or seen is None:
            return _unchecked
        return lambda outputs: check_unchanged(seen, data.rows_of(outputs, samples, two))

    def _finds_idle(self, outputs: Tensor, users: linearity.Users, part: Any) -> bool:
        """Whether there are layers, not known before, without a path to the outputs; these do not depend on them.

        Raises:
            InputError: they do, so that derivatives of zero would be wrong.
        """
        unreached = linearity.unreached(outputs, users, self._recorder.calls)
        new = {name: calls for name, calls in unreached.items() if not calls <= self._idle.get(name, frozenset())}
        for name, calls in new.items():
            if not dry_run.matters(self.model, self.selected[name], calls, part, self._forward):
                self._idle[name] = self._idle.get(name, frozenset()) | calls
            elif name in self._named or name in self._measured or len(self._layouts) == 1:
                raise InputError(
                    f"layer {name!r}: the model's outputs change with what it gives, but autograd has no path between "
                    "them (detach, .data, numpy, or an operation without a derivative is on the way), and derivatives "
                    "of zero would be wrong; write that way in differentiable operations, or choose other layers"
                )
            else:
                self._detached.add(name)
                self._layouts.pop(name, None)
        return bool(new)  # the user's forward was called since: have the run once more

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        """The kernel of attention that has second derivatives, where they will be taken."""
        return sdpa_kernel(SDPBackend.MATH) if self._twice_differentiable else contextlib.nullcontext()

    def _narrow(self, outputs: Tensor, samples: int) -> None:
        """Hold the layouts against this run, wherever it could differ from what was seen before.

        Flattened samples and gathered outputs may have other lengths in this batch, rows may be in another order.
        """
        gathered = len(outputs) != samples or self._order_matters
        doubtful = {
            name: layouts
            for name, layouts in self._layouts.items()
            if name in self._recorder.calls
            and (
                gathered
                or len(layouts) > 1
                or len(self._recorder.calls[name]) > 1
                or any(call.output.shape[layouts[0].dim] != samples for call in self._recorder.calls[name])
            )
        }
        for name, layouts in dry_run.narrow(outputs, self._recorder, doubtful, samples).items():
            if name in self._measured and layouts[0] != self._layouts[name][0]:
                raise batch_layout.mixed(name, self._recorder.calls[name][0].output.shape, samples)
            self._layouts[name] = layouts

    def _settled(self, outputs: Tensor, users: linearity.Users, samples: int) -> bool:
        """Take in which layers are linear; False to have the run once more, so that it has second derivatives."""
        if not self._certify:
            return True
        nonlinear = linearity.nonlinear_layers(
            outputs, users, self._recorder, filter(self.is_linear, self._recorder.calls)
        )
        if nonlinear and not self._twice_differentiable and linearity.has_fused_attention(users):
            self._twice_differentiable = True
            return False
        if nonlinear and not self._nonlinear and self._second_order and self._cuttable:
            # The graph of the first derivatives comes on top.
            self._part = max(1, self._part // _SECOND_ORDER)
        self._nonlinear.update(nonlinear)
        self._approve(self._nonlinear)
        return not nonlinear or samples <= self._part

    def _look(self, batch: Any, *, again: bool = False) -> dry_run.Findings | None:
        """What was found out on some of the batch's samples, if these had to be looked at."""
        samples = data.size(batch)
        if samples < 1:
            raise InputError(
                f"data: a batch of type {type(batch).__name__} holds no tensor with samples in dimension 0"
            )
        if not again and (self._looked_at > 1 or (self._looked_at == 1 and samples == 1)):
            return None
        modules = self.selected
        with calling.differentiated(), _checkpointing():
            found = dry_run.look(self.model, modules, self._recorder, batch, self._forward, whole=again)
        if self._unseen - found.layouts.keys():
            listed = ", ".join(map(repr, sorted(self._unseen)))
            raise InputError(f"layer {listed} runs at one call of the model and not at the next, on the same batch")
        missing = [name for name in modules if name in self._named and name not in found.layouts]
        if not again and modules and not self._optional and (missing or not found.layouts):
            raise layers.did_not_run(self.model, missing or modules)
        for name in found.layouts:
            layers.check_measurable(name, modules[name])
        known = self._layouts if self._looked_at > 1 else {}
        layouts = {**self._layouts, **found.layouts, **known}
        self._layouts = {name: kept for name, kept in layouts.items() if name not in self._detached}
        self._looked_at = max(self._looked_at, found.samples)
        if not again:
            self._cuttable = found.cuttable
            needed = max(1, found.bytes + self._reserve(found))
            if self._asked and needed > self._asked and found.cuttable:
                self.notes = (f"one sample takes about {needed:,} bytes at a time, more than memory={self._asked:,}",)
            self._part = max(1, self._memory // needed) if found.cuttable else samples
        return found


@contextlib.contextmanager
def _checkpointing() -> Iterator[None]:
    """Inside, an error of activation checkpointing says what to do.

    Raises:
        NotYetError: such an error.
    """
    try:
        yield
    except CheckpointError as error:
        raise NotYetError(
            f"model: its activation checkpointing does not go with this ({str(error)[:120]}…): second derivatives of "
            "some operations in place, weight_norm under measures over all parameters, or parts that compute other "
            "things when they are called again; switch checkpointing off to measure"
        ) from error


def _unchecked(outputs: Tensor) -> None:
    """Nothing is known of these outputs."""


def _check_as_seen(found: dry_run.Findings, samples: int, outputs: Tensor) -> None:
    """Raise if the first samples of a batch, so many, have other outputs than when some of them were looked at."""
    check_unchanged(found.outputs, outputs[found.start * (len(outputs) // samples) :])


def _even(left: int, limit: int) -> int:
    """The size of the next part, such that all parts left are about equal."""
    parts = -(-left // limit)
    return -(-left // parts)

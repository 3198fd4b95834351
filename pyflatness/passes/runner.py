"""Run a model over data with the chosen layers recorded, in micro-batches that fit the memory."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..contractions.layer import Memory
from ..errors import InputError
from ..messages import is_out_of_memory
from ..model import calling, data, uses
from . import batch_layout, guards, linearity
from .batch_layout import Layout
from .dry_run import Findings
from .guards import Check, Spacing, check_unchanged
from .known_layers import KnownLayers
from .limit import Tell
from .memory import MicroBatches, Place
from .recorder import RecordedCall, Recorder, frozen
from .task import Task

Result = TypeVar("Result")

_PACKED = 256  # size of batches of chosen samples, so that plans do not depend on the user's batches


@dataclass(frozen=True)
class Run:
    """Hold a recorded forward pass of a micro-batch."""

    batch: Any
    outputs: Tensor  # the model's, with their graph
    targets: Any
    samples: int
    number: int  # of the user's batch
    numbers: Tensor  # (n,) int64, of the samples, counted over all data
    recorder: Recorder  # the layers' calls; empty once the run is over
    layouts: dict[str, Layout]  # where each layer keeps the samples
    users: linearity.Users  # of the nodes in the outputs' graph
    nonlinear: frozenset[str]  # layers in whose weight the model is not certified to be locally linear
    differentiated: frozenset[str]  # layers of these whose weight acts in a derivative that the model takes
    again: Callable[[], tuple[Tensor, Any]]  # the model on these samples once more, unrecorded
    tell: Tell | None  # told what exact values cost, if these are wanted

    def calls(self, name: str) -> list[RecordedCall]:
        """Return a layer's calls; none if it did not run."""
        return self.recorder.calls.get(name, [])

    def samples_first(self, name: str, tensor: Tensor, memory: Memory | None = None) -> Tensor:
        """Return an input or gradient of a layer as (n, q, …); a copy, if one is needed, goes into ``memory``."""
        layout = self.layouts[name]
        if not layout.fits(tensor, self.samples):
            raise batch_layout.mixed(name, tensor.shape, self.samples)
        return layout.samples_first(tensor, self.samples, memory)


@dataclass(frozen=True)
class Repeatable:
    """Hold what remains of a finished :class:`Run`; the outputs have no graph."""

    batch: Any
    outputs: Tensor
    number: int
    numbers: Tensor

    @classmethod
    def of(cls, run: Run) -> "Repeatable":
        """Return what remains of a run."""
        return cls(run.batch, run.outputs.detach(), run.number, run.numbers)


class Runner:
    """Run a model over its data, with chosen layers recorded.

    ``approve`` is called before work on a micro-batch, with the layers found not linear so far, and why.
    ``order_matters``, ``by_sample`` and ``certify`` tell whether the work depends on the order of rows, on where layers
    keep samples, and on linearity. ``reserve`` returns the bytes per sample that the work takes besides the graph, and
    ``inside`` is entered around each pass and its work.
    """

    def __init__(
        self,
        task: Task,
        approve: Callable[[dict[str, str]], None] = lambda nonlinear: None,
        *,
        second_order: bool = False,
        order_matters: bool = False,
        by_sample: bool = True,
        certify: bool = True,
        reserve: Callable[[Findings], int] = lambda found: 0,
        inside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        forward: calling.Forward | None = None,
        halved: bool = False,
    ) -> None:
        selection, self._forward = task.selection, forward or task.forward
        self._options, self._checked = task.options, task.forward
        self._tell = None if task.options.sampled or not task.loss.convex else task.batches.tell
        self.model, self.batches, self.selected = task.model, task.batches, selection.modules
        self._approve, self.reserve, self._inside = approve, reserve, inside
        self._second_order, self._by_sample, self._certify = second_order, by_sample, certify
        self.places = {name: place for place, name in enumerate(selection.modules)}
        self._recorder = Recorder(selection.modules)
        self._known = KnownLayers(task.model, selection, self._recorder, self._forward, order_matters=order_matters)
        self._certificate = linearity.Certificate()
        self.budget = task.budget(halved=halved)
        self._micro_batches = MicroBatches(self.budget)
        self._spacing = Spacing(len(task.batches))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Return the chosen layers that ran, in the model's order."""
        return self._known.modules

    @property
    def cuttable(self) -> bool:
        """Return whether the model runs on other numbers of samples than a batch has."""
        return self._micro_batches.cuttable

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader of a value should know about how it was computed."""
        return self._micro_batches.notes

    def why_not_linear(self, name: str) -> str:
        """Return one of :mod:`.linearity`'s reasons; empty for a layer that is linear."""
        return self._certificate.reasons.get(name, "")

    def is_linear(self, name: str) -> bool:
        """Return whether the model is locally linear in the layer's weight at all samples so far."""
        return name not in self._certificate.reasons

    def look(self) -> None:
        """Do the dry run of the first batch, which stays in the data."""
        with self._recorder.attached(), frozen(self.model), uses.attached(self.selected):
            self._dry_run(self.batches.peek(), first=True)

    def each(
        self,
        work: Callable[[Run], Result | None],
        take: Callable[[Result], None],
        *,
        first: Callable[[], int | None] = lambda: None,
        chosen: Tensor | None = None,
    ) -> None:
        """Do ``work`` on a run of every micro-batch, or of ``chosen`` samples (N,), and ``take`` each result.

        If memory does not suffice, or ``work`` returns None, the work is repeated, so that only ``take`` may add up
        results; it is called when the run is over. ``first`` returns the most samples for the first micro-batch.
        """
        with self._recorder.attached(), frozen(self.model), uses.attached(self.selected):
            done = 0
            batches = ((batch, None) for batch in self.batches) if chosen is None else self._packed(chosen)
            for number, (batch, taken) in enumerate(batches):
                seen = self._dry_run(batch, first=True)
                compare = seen is None and self.cuttable and self._spacing.due(number, done)
                is_whole = isinstance(batch, data.Whole)
                samples = 1 if is_whole else data.size(batch)  # that could be cut apart
                for place in self._micro_batches.places(samples, first if done == 0 else lambda: None):
                    micro_batch = batch if is_whole else data.part(batch, place.start, place.stop)
                    numbers = partial(self._numbers, taken, done, place)
                    check: Check = guards.unchecked
                    if place.start == 0 and seen is not None:
                        check = partial(_check_as_seen, seen, place.stop)
                    elif place.start == 0 and compare:
                        check = guards.two_alone(micro_batch, self._outputs_and_targets)
                    with contextlib.nullcontext() if chosen is None else calling.dry_run():
                        result = self._run(micro_batch, number, numbers, work, check)
                    if result is not None:
                        place.done = True
                        take(result)
                done += data.size(batch)
            self._unite()
            self._known.finish()

    def _numbers(self, taken: Tensor | None, done: int, place: Place, samples: int) -> Tensor:
        """Return the numbers, in all data, of a micro-batch's samples; ``taken`` has those of chosen samples."""
        return self.batches.shard.numbers(done + place.start, samples) if taken is None else taken[place.slice]

    def _packed(self, chosen: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield the chosen samples in batches of one size, whatever the user's are, and their numbers in all data."""
        held: list[tuple[Any, Tensor]] = []
        done = 0
        for batch in self.batches:
            numbers = self.batches.shard.numbers(done, data.size(batch))
            index = chosen[done : done + len(numbers)].nonzero().flatten()
            done += len(numbers)
            if len(index):
                held.append((data.take(batch, index), numbers[index]))
            if sum(len(places) for _, places in held) < _PACKED:
                continue
            whole, held = _joined(held), []
            if len(whole) > 1:  # they do not fit together
                yield from whole
                continue
            ((joined, places),) = whole
            for start in range(0, len(places), _PACKED):
                piece = data.part(joined, start, start + _PACKED), places[start : start + _PACKED]
                if len(piece[1]) == _PACKED:
                    yield piece
                else:
                    held = [piece]
        yield from _joined(held)

    def _unite(self) -> None:
        """Collect, at the end of a data read, what other ranks found out from their samples."""
        shard = self.batches.shard
        if shard.ranks.alone:
            return
        found = {
            "ran": dict.fromkeys(self._known.modules, True),
            "left out": dict.fromkeys(self._known.left_out, True),
            "not linear": self._certificate.reasons,
            "notes": dict.fromkeys(self.notes, True),
        }
        united = shard.united("the layers that ran", found)
        self._known.unite(united["ran"].keys(), united["left out"].keys())
        self._certificate.reasons.update(united["not linear"])
        self._approve(self._certificate.reasons)
        self._micro_batches.notes = (*united["notes"],)

    def repeat(
        self, run: Repeatable, rows: Tensor, work: Callable[[slice, Run], Result], take: Callable[[Result], None]
    ) -> None:
        """Do ``work`` on further runs of samples, slices of (r,) rows, of a finished run; pass each result to ``take``.

        It is called from the ``take`` of :meth:`each`, which has that run's result; its graph is gone by then.
        """
        samples = len(run.numbers)
        for place in self._micro_batches.places(len(rows)):
            index = rows[place.slice]
            check = partial(check_unchanged, data.rows_of(run.outputs, samples, index))
            numbers = partial(self._numbers, run.numbers[rows], 0, place)
            with calling.dry_run():  # these samples went through the model before
                result = self._run(data.take(run.batch, index), run.number, numbers, partial(work, place.slice), check)
            if result is not None:
                place.done = True
                take(result)

    def _run(
        self,
        micro_batch: Any,
        number: int,
        numbers: Callable[[int], Tensor],
        work: Callable[[Run], Result | None],
        check: Check,
    ) -> Result | None:
        """Do ``work`` on a run of a micro-batch; return None if it is to be tried again, as with fewer samples."""
        try:
            # Around the work too: activation checkpointing runs the model again in backward passes.
            with self._certificate.attention(), calling.differentiated(), self._inside():
                run = self._recorded(micro_batch, number, numbers, check)
                if run is not None:
                    return work(run)
            if self._known.unseen:
                self._dry_run(micro_batch, first=False)
        except RuntimeError as error:
            if not is_out_of_memory(error) or data.size(micro_batch) == 1:
                raise
            data.check_cut(micro_batch)
            self._micro_batches.halve(data.size(micro_batch))
        finally:
            self._recorder.calls.clear()
        return None

    def _recorded(self, batch: Any, number: int, numbers: Callable[[int], Tensor], check: Check) -> Run | None:
        """Run the model on a micro-batch; return None if the run shows that it has to be repeated."""
        recorder, known, is_whole = self._recorder, self._known, isinstance(batch, data.Whole)
        with recorder.recording(data.size(batch) if recorder.needs_samples or not is_whole else 1):
            outputs, targets = self._outputs_and_targets(batch)
        samples = data.size(batch)
        known.note_unseen()
        if known.unseen:
            return None
        overwritten = recorder.overwritten()
        if overwritten:
            raise InputError(f"batch {number}: the inputs of {', '.join(overwritten)} are modified in place")
        batch_layout.check_outputs(outputs, samples)
        check(outputs)
        users = linearity.users_of(outputs)
        if known.find_otherwise_used(users) or known.find_without_path(outputs, users, batch):
            return None
        if self._by_sample:
            known.narrow(outputs, users, samples, whole=is_whole)
        if self._certify and self._is_sampled(outputs, samples):
            self._certificate.reasons |= dict.fromkeys(
                recorder.calls.keys() - self._certificate.reasons, linearity.UNASKED
            )
        elif self._certify and not self._certified(outputs, users, samples):
            return None
        if samples > 1:
            known.rely_on(recorder.calls.keys())
        return Run(
            batch,
            outputs,
            targets,
            samples,
            number,
            numbers(samples).to(outputs.device),
            recorder,
            known.layouts(),
            users,
            frozenset(self._certificate.reasons).intersection(recorder.calls),
            frozenset(self._certificate.differentiated.intersection(recorder.calls)),
            partial(self._again, batch),
            self._tell,
        )

    def _is_sampled(self, outputs: Tensor, samples: int) -> bool:
        """Return whether GGN values are sampled, and so are not exact even if they estimate the Hessian's."""
        draws = self._options.draws
        return self._options.by_ggn and draws is not None and outputs.numel() > samples * (len(draws) + 1)

    def _certified(self, outputs: Tensor, users: linearity.Users, samples: int) -> bool:
        """Register which layers are linear; return False if the run has to be repeated, also for lack of memory."""
        was_linear = not self._certificate.reasons
        new = self._certificate.extend(outputs, users, self._recorder)
        if new is None:
            return False
        if new and was_linear and self._second_order:
            self._micro_batches.make_room_for_second_order()
        self._approve(self._certificate.reasons)
        return not new or samples <= self._micro_batches.largest

    def _outputs_and_targets(self, batch: Any) -> tuple[Tensor, Any]:
        return calling.run(self.model, batch, self._forward)

    def _again(self, batch: Any) -> tuple[Tensor, Any]:
        with calling.dry_run(), torch.enable_grad():
            return self._outputs_and_targets(batch)

    def _dry_run(self, batch: Any, *, first: bool) -> Findings | None:
        """Return the findings of a dry run of the ``first`` batch, or one with a new layer; None if not needed."""
        if first and self._known.suffice(batch):
            return None
        with calling.differentiated():
            found = self._known.look(batch, first=first)
        for why in found.doubts:
            self._checked.doubt(why)
        if found.differentiated:
            names = filter(found.differentiated.__contains__, self.selected)
            self._certificate.reasons |= dict.fromkeys(names, linearity.DIFFERENTIATED)
            self._approve(self._certificate.reasons)
        if first:
            self._micro_batches.plan(found.bytes + self.reserve(found), cuttable=found.cuttable)
        return found


def _joined(batches: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
    """Return numbered batches joined to one, or as they are if they do not fit together."""
    whole = data.joined([batch for batch, _ in batches]) if batches else None
    return batches if whole is None else [(whole, torch.cat([numbers for _, numbers in batches]))]


def _check_as_seen(found: Findings, samples: int, outputs: Tensor) -> None:
    """Raise if samples of the dry run have other outputs now."""
    check_unchanged(found.outputs, outputs[found.start * (len(outputs) // samples) :])

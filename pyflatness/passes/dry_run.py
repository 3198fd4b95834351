"""Run a few samples before a sweep to find which layers run, where they keep samples, and how much memory they take."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointError

from .. import interrupts, private
from ..errors import InputError
from ..model import calling, data, layers, spread, uses, walk
from ..model.uses import Use
from ..numerics.normal_vectors import NormalVectors
from . import batch_layout, kept_rows, linearity
from .accounting import UNSEEN, Account, Accounting
from .batch_layout import ByRow, Layout, check_outputs
from .guards import agree, alone, check_of_user, memory_of, rounding
from .recorder import RecordedCall, Recorder

_SHARE = 16  # the dry run takes one in this many samples of the first batch, at least two and at most _MOST
_MOST = 16
_NUDGE = 16  # in units of rounding: smooth operations pass it on, and a comparison hardly ever does


@dataclass
class Findings:
    """Hold what a dry run found; all but ``samples``, ``start`` and ``outputs`` holds for later batches too."""

    samples: int  # how many were run
    start: int  # place in the batch of the first sample in ``outputs``: not 0 if possible, to see effects of the place
    layouts: dict[str, tuple[Layout, ...]]  # the possible ones of each layer that ran, likely ones first
    outputs: Tensor  # of the model, for samples from ``start`` on
    bytes: int  # estimate per sample, of the graph with the layers' inputs and output gradients
    inputs: int  # bytes of the layers' inputs per sample
    places: dict[str, int]  # positions of a sample in all calls of each layer
    cuttable: bool  # whether the model runs on micro-batches
    mixed: frozenset[str]  # embeddings whose rows cannot be told apart by sample, to be left out
    differentiated: frozenset[str]  # layers whose weight is used in a derivative that the model itself takes
    doubts: tuple[str, ...]  # why derivatives may not be those of what the model computes


class DryRuns:
    """Run a few samples of a model with some layers recorded, and see what these runs show."""

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], recorder: Recorder, forward: calling.Forward | None
    ) -> None:
        self._model, self._modules, self._recorder, self._forward = model, modules, recorder, forward

    def run(self, batch: Any, *, whole: bool = False) -> Findings:
        """Run some samples of a batch, or the ``whole`` of it, and send cotangents back from some of them."""
        recorder, samples = self._recorder, data.size(batch)
        count = samples if whole else min(samples, max(2, min(_MOST, samples // _SHARE)))
        start, cuttable = int(count < samples), True
        try:
            several = data.part(batch, start, start + count)
            outputs, stored, largest, account = self._accounted(several, count)
        except Exception as error:  # the batch cannot be cut; an error of the model itself comes again
            check_of_user(error)
            several, start, count, cuttable = batch, 0, samples, False
            outputs, stored, largest, account = self._accounted(several, count)
        check_outputs(outputs, count)
        users = linearity.behind(outputs, recorder.calls)
        uses.note_flat(self._model, account.flat)
        uses.note_elsewhere({self._modules[name]: account.elsewhere.get(name, "") for name in recorder.calls})
        if samples == 1:  # with more samples, those that run alone show it
            self._check_computed(batch)
        lookups = {name: calls for name, calls in recorder.calls.items() if layers.kind_of(self._modules[name]).tokens}
        once = kept_rows.repeated(outputs, users, lookups, count)
        for name in once:
            recorder.share(name, shared=True)
        whole = isinstance(batch, data.Whole)
        layouts = {name: found for name, found in layouts_of(recorder, count, whole=whole).items() if name not in once}
        try:
            narrowed = narrow(outputs, users, recorder, layouts, count, lookups)
        except CheckpointError:  # recomputation in backward passes has the weights as constants
            outputs, stored, largest = self._run(several, count)
            narrowed = narrow(outputs, linearity.behind(outputs, recorder.calls), recorder, layouts, count, lookups)
        narrowed |= dict.fromkeys(once, (Layout(),))
        mixed = lookups.keys() - narrowed.keys()
        if mixed:
            mixed = {name for name in mixed if not self._is_repeatable(name, outputs, several, count)}
            outputs, stored, largest = self._run(several, count)
            users, once = linearity.behind(outputs, recorder.calls), set()
            narrowed = narrow(outputs, users, recorder, layouts_of(recorder, count, whole=whole), count, mixed)
        received = sum(
            call.output.numel() * call.output.element_size() * (count if name in once else 1)
            for name, made in recorder.calls.items()
            for call in made
        )
        taken = sum(_bytes(call.inputs) for made in recorder.calls.values() for call in made)
        if 1 < count == samples and cuttable:  # otherwise the batch itself will show it
            second = alone(data.part(batch, 1, 2), lambda one: calling.run(self._model, one, self._forward)[0])
            start, outputs = (0, outputs) if second is None else (1, second)
        return Findings(
            samples=count,
            start=start,
            layouts=narrowed,
            outputs=outputs.detach(),
            # A backward pass holds the gradients of the layers' outputs, or those of one node's outputs and inputs.
            bytes=(stored + 2 * max(received, largest)) // count,
            inputs=taken // count,
            places={
                name: places_of(self._modules[name], made, count)
                for name, made in recorder.calls.items()
                if name in narrowed
            },
            cuttable=cuttable,
            mixed=frozenset(mixed),
            differentiated=account.differentiated,
            doubts=account.doubts,
        )

    def matters(self, name: str, calls: Collection[int], batch: Any) -> bool:
        """Return whether the model's outputs change in any bit if the outputs of some calls of a layer are nudged."""
        numbers, random = itertools.count(), NormalVectors()

        def nudge(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            if output.numel() == 0 or next(numbers) not in calls:
                return output
            size = output.detach().abs().amax()  # detached, since a model may take derivatives
            by = _NUDGE * torch.finfo(output.dtype).eps * torch.where(size > 0, size, 1)
            return output + by * random.like(output)

        def outputs() -> Tensor:
            with calling.dry_run(), torch.no_grad():
                return calling.run(self._model, batch, self._forward)[0]

        before = outputs()
        handle = self._modules[name].register_forward_hook(nudge, with_kwargs=True, prepend=True)
        try:
            return not torch.allclose(before, outputs(), rtol=0, atol=0, equal_nan=True)
        finally:
            handle.remove()

    def check_uses(self, nodes: Collection[Node]) -> None:
        """Raise if the nodes of a run show that the model uses the weight of a stand-in outside its calls."""
        others = uses.otherwise(self._modules, self._recorder.calls.keys(), nodes)
        if others:
            listed = ", ".join(f"{name!r}: {why}" for name, why in others.items())
            raise InputError(f"layer {listed}, so that its calls are not all of its uses").about(others)

    def _check_computed(self, batch: Any) -> None:
        """Raise if a weight that a module computes from its parameter depends on the module's inputs too."""
        stand_ins = {name: use for name, use in self._modules.items() if isinstance(use, Use)}
        computed = {
            name: use for name, use in stand_ins.items() if use.ran and not use.refusal and use.source.effective
        }
        if not computed:
            return
        random = NormalVectors()

        def other(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                part + random.like(part) * (1 + part.abs().amax())
                if isinstance(part, Tensor) and part.is_floating_point() and part.numel()
                else part
                for part in args
            )

        with contextlib.ExitStack() as stack:
            for use in computed.values():
                (holder, _), *_ = use.source.places
                stack.callback(holder.register_forward_pre_hook(other).remove)
            with interrupts.suppressed(), calling.aside(), torch.no_grad():  # the model may refuse random inputs
                calling.run(self._model, batch, self._forward)
        why = "its weight is computed of its inputs too"
        varying = {name: why for name, use in computed.items() if use.source.varies}
        if varying:
            raise InputError(f"layer {', '.join(map(repr, varying))}: {why}, so that it has no one weight").about(
                varying
            )

    def _is_repeatable(self, name: str, outputs: Tensor, batch: Any, samples: int) -> bool:
        """Return whether an embedding shared by all samples can be recorded as if each looked up its own rows.

        The outputs have to stay the same.
        """
        recorder = self._recorder
        recorder.share(name, shared=True)
        try:
            now, _, _ = self._run(batch, samples)
            layouts = {name: layouts_of(recorder, samples)[name]}
            if agree(outputs, now, rounding(outputs.dtype)) and narrow(
                now, linearity.behind(now, recorder.calls), recorder, layouts, samples, layouts
            ):
                return True
        except Exception as error:
            check_of_user(error)
        recorder.share(name, shared=False)
        return False

    def _accounted(self, batch: Any, samples: int) -> tuple[Tensor, int, int, Account]:
        """Return the results of :meth:`_run` and the account of the layers' weights, from one pass if it shows both."""
        if spread.is_held():  # the tensors for gathered weights exist only after a first run
            self._run(batch, samples)
        accounting = Accounting(self._model, self._modules, self._recorder, batch, self._forward)
        try:
            found = self._measured(lambda: accounting.run(samples))
            account = accounting.account(found[0])
        except Exception as error:  # a weight that changes in place, or an error of the model, which comes again
            check_of_user(error)
            account = Account(doubts=(UNSEEN,))
        if account.is_partial:
            found = self._run(batch, samples)
        self.check_uses(linearity.users_of(found[0]) if account.is_partial else ())
        return *found, account

    def _run(self, batch: Any, samples: int) -> tuple[Tensor, int, int]:
        """Run the model with its weights as constants; see :meth:`_measured`."""

        def run() -> Tensor:
            with calling.dry_run(), self._recorder.recording(samples, checking=True):
                return calling.run(self._model, batch, self._forward)[0]

        return self._measured(run)

    def _measured(self, run: Callable[[], Tensor]) -> tuple[Tensor, int, int]:
        """Return the outputs, the bytes of the graph and the kept inputs, and the bytes of the largest tensor."""
        for _ in range(2):
            with saved_storages() as storages:
                outputs = run()
            if not self._recorder.overwritten():  # otherwise once more, with copies
                break
        for calls in self._recorder.calls.values():
            storages.update({call.inputs.untyped_storage()._cdata: _bytes(call.inputs) for call in calls})
        stand_ins = (use.source.parameter for use in self._recorder.stand_ins)
        for tensor in (*walk.parameters(self._model), *walk.buffers(self._model), *stand_ins):  # whose views are saved
            storages.pop(tensor.untyped_storage()._cdata, None)
        return outputs, sum(storages.values()), max(storages.values(), default=0)


def places_of(module: nn.Module, calls: Sequence[RecordedCall], samples: int) -> int:
    """Return the positions of a sample in all of a layer's calls."""
    return sum(call.output.numel() for call in calls) // (samples * len(layers.without_entries(module)))


def layouts_of(recorder: Recorder, samples: int, *, whole: bool = False) -> dict[str, tuple[Layout, ...]]:
    """Return the layouts that the shapes of their outputs allow the layers that ran; a ``whole`` batch is not cut."""
    found: dict[str, tuple[Layout, ...]] = {}
    for name, calls in recorder.calls.items():
        output, kinds = calls[0].output, [call.kind for call in calls]
        dims = min(1 if kind.class_dim == 1 else output.ndim - kind.row_dims for kind in kinds)
        found[name] = (ByRow(dims=dims),) if whole else tuple(batch_layout.candidates(output.shape, samples, dims))
    return found


def narrow(
    outputs: Tensor,
    users: linearity.Users,
    recorder: Recorder,
    layouts: Mapping[str, tuple[Layout, ...]],
    samples: int,
    may_mix: Collection[str] = (),
) -> dict[str, tuple[Layout, ...]]:
    """Return the layouts that agree with cotangents sent back from some samples only.

    A layer in ``may_mix`` may be left with none. For each bit of the samples' numbers, cotangents go back from those
    without it and from those with it: any two samples differ in a bit, so that a row of another one is noticed. None
    is sent for layers whose layout the graph shows.
    """
    if samples == 1 or not layouts:
        return {
            name: (Layout(),) if several and isinstance(several[0], ByRow) else several
            for name, several in layouts.items()
        }
    shown = kept_rows.in_place(outputs, users, {name: recorder.calls[name] for name in layouts}, samples)
    left = {name: (Layout(),) if name in shown else several for name, several in layouts.items()}
    by_row = {name: several[0] for name, several in left.items() if several and isinstance(several[0], ByRow)}
    asked = [name for name in layouts if name not in shown | by_row.keys()]
    if by_row:
        made = {name: recorder.calls[name] for name in by_row}
        for name, owners in kept_rows.owners(outputs, users, made, samples).items():
            of_rows = [
                own.repeat_interleave(call.output.shape[: by_row[name].dims].numel() // len(own))
                for own, call in zip(owners, made[name], strict=True)
            ]
            left[name] = batch_layout.of_owners(by_row[name], of_rows, samples)
            if left[name]:
                del by_row[name]
    if not (by_row or asked):
        return {name: several for name, several in left.items() if several}
    cotangent = NormalVectors().like(outputs)
    if by_row:
        left |= batch_layout.by_row(by_row, cotangent, lambda sent: recorder.gradients(outputs, sent, by_row))
        for name in by_row:
            if not left[name] and name not in may_mix:
                raise batch_layout.mixed(name, recorder.calls[name][0].output.shape, samples)
    if not asked:
        return {name: several for name, several in left.items() if several}
    place = torch.arange(samples, device=outputs.device)
    for bit, digit in itertools.product(range((samples - 1).bit_length()), (0, 1)):
        senders = (place >> bit) % 2 == digit
        rows = senders.repeat_interleave(len(outputs) // samples).view(-1, *(1,) * (outputs.ndim - 1))
        gradients = recorder.gradients(outputs, cotangent * rows.to(cotangent.dtype), asked)
        for name in asked:
            left[name] = batch_layout.consistent(left[name], senders, gradients.get(name, []), samples)
            if not left[name] and name not in may_mix:
                raise batch_layout.mixed(name, gradients[name][0].shape, samples)
        asked = [name for name in asked if left[name]]
        if not asked:
            break
    return {name: several for name, several in left.items() if several}


@contextlib.contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Collect the sizes of the storages that autograd saves inside, without parameters."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        with private.without_functions():
            if type(tensor) is Tensor or not isinstance(tensor, nn.Parameter):  # class first: isinstance is slow
                storages[memory_of(tensor)] = _bytes(tensor)
            return tensor.detach()  # the tensor itself would hold its graph, in a cycle that is never freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of the tensor, not of its storage, which may hold all of the user's data."""
    return tensor.numel() * tensor.element_size()

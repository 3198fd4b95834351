"""Learn from runs of a model which chosen layers ran, where they keep samples, and which have no gradient."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..model import calling, data, layers, uses
from ..model.selectors import Selection
from ..model.uses import Use
from . import batch_layout, linearity
from .batch_layout import Layout
from .dry_run import DryRuns, Findings, layouts_of, narrow
from .recorder import Recorder


class KnownLayers:
    """Hold what the runs so far showed about the chosen layers; ``unseen`` are the layers new in the last one.

    If ``order_matters``, a change in the order of rows has to be noticed.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        recorder: Recorder,
        forward: calling.Forward | None,
        *,
        order_matters: bool,
    ) -> None:
        self._model, self._recorder = model, recorder
        self._dry_runs = DryRuns(model, selection.modules, recorder, forward)
        self._selected, self._named, self._optional = selection.modules, selection.named, selection.optional
        self._order_matters = order_matters
        self._samples = 0  # of the largest dry run
        self._layouts: dict[str, tuple[Layout, ...]] = {}
        self._relied_on: set[str] = set()  # layers whose layout already gave a value
        self._idle: dict[str, frozenset[int]] = {}  # numbers of calls that the outputs do not depend on
        self.left_out: set[str] = set()  # ran, but are left out: without a path, mixed, …
        self._elsewhere: set[str] = set()  # layers that ran on other ranks
        self.unseen: set[str] = set()

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Return the chosen layers that ran, in the model's order."""
        ran = self._layouts.keys() | self._elsewhere
        return {name: module for name, module in self._selected.items() if name in ran}

    def unite(self, ran: Collection[str], left_out: Collection[str]) -> None:
        """Merge the layers that ran on some rank, and those that some rank leaves out."""
        both = [name for name in self._selected if name in ran and name in left_out]
        if both:
            raise InputError(
                f"layer {both[0]!r}: it has a value for samples of some ranks, and is left out for those of others "
                "(rows that cannot be told apart by sample, or no path from it to the outputs); choose other layers"
            )
        self._elsewhere = {*ran} - self._layouts.keys()

    def layouts(self) -> dict[str, Layout]:
        """Return where each layer that ran keeps the samples."""
        return {name: layouts[0] for name, layouts in self._layouts.items()}

    def suffice(self, batch: Any) -> bool:
        """Return whether a batch needs no dry run."""
        return self._samples > 1 or (self._samples == 1 and data.size(batch) == 1)

    def look(self, batch: Any, *, first: bool) -> Findings:
        """Return the findings of a dry run of a batch: of some samples the ``first`` time, and then of all.

        Stand-ins that it shows to be invalid are left out, and the first time the named layers have to run.
        """
        if data.size(batch) < 1:
            raise InputError(
                f"data: a batch of type {type(batch).__name__} holds no tensor with samples in dimension 0"
            )
        while True:
            try:
                found = self._dry_runs.run(batch, whole=not first)
                break
            except InputError as error:
                self._leave_out_for(error)
        self._add(found, first=first)
        return found

    def _add(self, found: Findings, *, first: bool) -> None:
        """Register the findings of a dry run."""
        self._leave_out_transformed()
        if self.unseen - found.layouts.keys():
            listed = ", ".join(map(repr, sorted(self.unseen)))
            raise InputError(f"layer {listed} runs at one call of the model and not at the next, on the same batch")
        for name in found.mixed:
            if name in self._named or self._selected.keys() == found.mixed:
                raise batch_layout.mixed(name, self._recorder.calls[name][0].output.shape, found.samples)
            self._leave_out(name, "what it looks up is of all samples, and cannot be told apart by sample")
        if first:
            routed = self._recorder.empty.union(
                name
                for name, use in self._selected.items()
                if isinstance(use, Use) and use.routed and not use.refusal  # whether it runs depends on the samples
            )
            self._check_ran(found.layouts.keys() | routed)
        for name in found.layouts:
            layers.check_measurable(name, self._selected[name])
        known = self._layouts if self._samples > 1 else {}
        layouts = {**self._layouts, **found.layouts, **known}
        self._layouts = {name: kept for name, kept in layouts.items() if name not in self.left_out}
        self._samples = max(self._samples, found.samples)

    def finish(self) -> None:
        """Register the end of the data; raise if a named layer, or every layer, did not run."""
        if not self._samples:
            return
        ran = self._layouts.keys() | self.left_out | self._elsewhere
        self._check_ran(ran)
        for name in self._selected.keys() - ran:
            others = uses.ties(self._model, self._selected[name])
            tied = f", and its weight is that of {', '.join(others)} too" if others else ""
            why = layers.kind_of(self._selected[name]).when_idle or f"its module is not called{tied}"
            uses.leave_out(self._model, self._selected[name], why)

    def _leave_out(self, name: str, why: str) -> None:
        """Leave a layer out from now on."""
        uses.leave_out(self._model, self._selected[name], why)
        self.left_out.add(name)
        self._layouts.pop(name, None)

    def _leave_out_transformed(self) -> None:
        """Leave out the layers that were called inside of a transform of ``torch.func``."""
        for name in self._recorder.transformed - self.left_out:
            why = "it is called inside of torch.func.vmap (or grad, jvp) or dual_level, where it cannot be observed"
            if name in self._named | self._relied_on or self._selected.keys() <= self._recorder.transformed:
                advice = (
                    "call it outside (a derivative: torch.autograd.grad(…, create_graph=True)), or choose other layers"
                )
                raise InputError(f"layer {name!r}: {why}; {advice}")
            self._leave_out(name, why)

    def _check_ran(self, names: Collection[str]) -> None:
        """Raise if a named layer is not among those that ran, or if no layer ran."""
        missing = [name for name in self._selected if name in self._named and name not in names]
        if self._selected and not self._optional and (missing or not names):
            raise layers.did_not_run(missing or self._selected, self._selected)

    def note_unseen(self) -> None:
        """Find layers that are new in the recorded calls, and drop the calls of layers that are left out."""
        self._leave_out_transformed()
        for name in self.left_out:
            self._recorder.calls.pop(name, None)
        self.unseen = self._recorder.calls.keys() - self._layouts.keys()

    def rely_on(self, names: Collection[str]) -> None:
        """Register layers whose layouts give values now, and so must not change any more."""
        self._relied_on.update(names)

    def find_without_path(self, outputs: Tensor, users: linearity.Users, batch: object) -> bool:
        """Return whether some calls, not known before, have no path in autograd's graph to the outputs.

        If the outputs depend on them all the same, the layer is left out from now on.
        """
        unreached = linearity.unreached(outputs, users, self._recorder.calls)
        new = {name: calls for name, calls in unreached.items() if not calls <= self._idle.get(name, frozenset())}
        for name, calls in new.items():
            if not self._dry_runs.matters(name, calls, batch):
                self._idle[name] = self._idle.get(name, frozenset()) | calls
            elif name in self._named or name in self._relied_on or len(self._layouts) == 1:
                raise InputError(
                    f"layer {name!r}: the model's outputs change with what it gives, but autograd has no path between "
                    "them (detach, .data, numpy, or an operation without a derivative is on the way), and derivatives "
                    "of zero would be wrong; write that way in differentiable operations, or choose other layers"
                )
            else:
                self._leave_out(
                    name, "autograd has no path between what it gives and the outputs, which change with it"
                )
        return bool(new)

    def _leave_out_for(self, error: InputError) -> None:
        """Leave out the stand-ins that an error is about if other layers can be measured; otherwise raise the error."""
        reasons = uses.with_siblings(self._selected, error.layers)
        for name in reasons or {"": ""}:
            use = self._selected.get(name)
            if not isinstance(use, Use) or name in self._named | self._relied_on or len(self._selected) == 1:
                raise error
        for name, why in reasons.items():
            use = self._selected[name]
            assert isinstance(use, Use)
            use.source.refuse(use, why)
            self._leave_out(name, why)

    def find_otherwise_used(self, users: linearity.Users) -> bool:
        """Return whether stand-ins were left out just now, see :meth:`.DryRuns.check_uses`."""
        try:
            self._dry_runs.check_uses(users)
        except InputError as error:
            self._leave_out_for(error)
            return True
        return False

    def narrow(self, outputs: Tensor, users: linearity.Users, samples: int, *, whole: bool) -> None:
        """Compare the layouts with a run, for layers whose lengths or order of rows may differ from earlier ones.

        For a ``whole`` batch, which is not cut, the layouts are those of this run alone.
        """
        made = self._recorder.calls
        if whole:
            possible = layouts_of(self._recorder, samples, whole=True)
            self._layouts |= narrow(outputs, users, self._recorder, possible, samples)
            return
        gathered = len(outputs) != samples or self._order_matters
        doubtful = {
            name: layouts
            for name, layouts in self._layouts.items()
            if name in made
            and (
                gathered
                or len(layouts) > 1
                or len(made[name]) > 1
                or any(call.output.shape[layouts[0].dim] != samples for call in made[name])
            )
        }
        for name, layouts in narrow(outputs, users, self._recorder, doubtful, samples).items():
            if name in self._relied_on and layouts[0] != self._layouts[name][0]:
                raise batch_layout.mixed(name, made[name][0].output.shape, samples)
            self._layouts[name] = layouts

"""Running a model over data with the chosen layers on tape, a batch cut into parts that fit the memory."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import capture, data, layers, ownership, preflight
from .data import Batches
from .errors import InputError
from .ownership import Layout
from .selectors import Selection
from .tape import Call, Tape, frozen

DEFAULT_MEMORY = 512 * 2**20  # bytes that the graph, the layers' inputs and signals of a part may take
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Run:
    """A forward pass of some samples, on tape.

    Attributes:
        batch: these samples.
        outputs: the model's, with their graph.
        targets: as they came.
        samples: how many.
        number: of the user's batch.
        tape: the layers' calls; empty once the run is over.
        layouts: where each layer keeps the samples.
    """

    batch: Any
    outputs: Tensor
    targets: Any
    samples: int
    number: int
    tape: Tape
    layouts: dict[str, Layout]

    def calls(self, name: str) -> list[Call]:
        """A layer's calls; none if it did not run."""
        return self.tape.calls.get(name, [])

    def samples_first(self, name: str, tensor: Tensor) -> Tensor:
        """An input or gradient of a layer as (n, q, …)."""
        layout = self.layouts[name]
        if not layout.fits(tensor, self.samples):
            raise ownership.mixed(name, tensor.shape, self.samples)
        return layout.samples_first(tensor, self.samples)


class Runner:
    """A model, its data and chosen layers.

    Args:
        model: inside :func:`.capture.observing`.
        selection: the layers.
        batches: the data.
        forward: see :func:`.capture.run`.
        memory: bytes for the graph, layer inputs and signals of a part; None takes :data:`DEFAULT_MEMORY`.
        approve: called when it is known which layers are linear, before anything is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        batches: Batches,
        forward: capture.Forward | None = None,
        memory: int | None = None,
        approve: Callable[[dict[str, bool]], None] = lambda linear: None,
    ) -> None:
        self._approve = approve
        self.model, self.batches = model, batches
        self._selection, self._forward, self._memory = selection, forward, memory or DEFAULT_MEMORY
        self._tape = Tape(selection.modules)
        self._looked_at = 0  # samples behind what is known
        self._layouts: dict[str, Layout] = {}
        self._part = 1  # samples that go through the model together
        self._linear: dict[str, bool] = {}
        self._sampled: frozenset[str] = frozenset()  # layers whose linearity is to be looked at in every sample

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The chosen layers that run, in the model's order; known once a batch was looked at."""
        return {name: module for name, module in self._selection.modules.items() if name in self._layouts}

    def is_linear(self, name: str) -> bool:
        """Whether the model is locally linear in the layer's weight, see :mod:`.curvature`."""
        return self._linear[name]

    def results(self, work: Callable[[Run], Result]) -> Iterator[Result]:
        """``work`` done on a run of every part of the data; out of memory, parts are halved.

        Raises:
            InputError: see :func:`.preflight.look`; a layer that was named does not run; outputs that change with the
                batch that a sample is in.
        """
        with self._observing():
            for number, batch in enumerate(self.batches):
                seen = self._look(batch)
                start, samples = 0, data.size(batch)
                while start < samples:
                    stop = start + _even(samples - start, self._part)
                    try:
                        part = batch if stop - start == samples else data.part(batch, start, stop)
                        yield self._run(part, number, work, seen if start == 0 else None)
                    except RuntimeError as error:
                        if stop - start == 1 or not any(text in str(error) for text in _OUT_OF_MEMORY):
                            raise
                        self._part = (stop - start) // 2
                        continue
                    start = stop

    def _run(self, part: Any, number: int, work: Callable[[Run], Result], seen: Tensor | None) -> Result:
        try:
            with self._tape.recording():
                outputs, targets = capture.run(self.model, part, self._forward)
            names = self._tape.overwritten()
            if names:
                raise InputError(f"batch {number}: the inputs of {', '.join(names)} are modified in place")
            if seen is not None:
                _check_unchanged(seen, outputs)
            run = Run(part, outputs, targets, data.size(part), number, self._tape, self._layouts)
            _check_apart(run)
            unproven = [name for name in self._sampled if run.calls(name) and self._linear[name]]
            if unproven:
                self._linear.update(dict.fromkeys(preflight.bent_here(outputs, self._tape, unproven), False))
                self._approve(self._linear)
            return work(run)
        finally:
            self._tape.calls.clear()

    @contextlib.contextmanager
    def _observing(self) -> Iterator[None]:
        with self._tape.attached(), frozen(self.model):
            yield

    def _look(self, batch: Any) -> Tensor | None:
        """The outputs for the batch's first samples, if these had to be looked at."""
        samples = data.size(batch)
        if samples < 1:
            raise InputError(
                f"data: a batch of type {type(batch).__name__} holds no tensor with samples in dimension 0"
            )
        if self._looked_at > 1 or (self._looked_at == 1 and samples == 1):
            return None
        modules = self._selection.modules
        found = preflight.look(self.model, modules, self._tape, batch, self._forward)
        missing = [name for name in modules if name in self._selection.named and name not in found.layouts]
        if missing or not found.layouts:
            names = ", ".join(map(repr, missing or modules))
            raise InputError(f"layer: {names} did not run in the model's forward pass")
        for name in found.layouts:
            layers.check_measurable(name, modules[name])
        self._looked_at, self._layouts = found.samples, found.layouts
        self._linear = {name: linear and self._linear.get(name, True) for name, linear in found.linear.items()}
        self._sampled = found.sampled
        self._approve(self._linear)
        self._part = max(1, self._memory // max(1, found.bytes)) if found.cuttable else samples
        return found.outputs


def _check_apart(run: Run) -> None:
    """Flattened or windowed samples: a gather of other lengths in this batch would not show in a row's place."""
    flattened = [
        name
        for name, calls in run.tape.calls.items()
        if any(call.output.shape[run.layouts[name].dim] != run.samples for call in calls)
    ]
    if not flattened or run.samples == 1:
        return
    of_sample = torch.arange(len(run.outputs), device=run.outputs.device) // (len(run.outputs) // run.samples)
    signal = torch.randn_like(run.outputs.detach())
    for parity in (0, 1):
        sent = signal * (of_sample % 2 == parity).view(-1, *(1,) * (signal.ndim - 1))
        gradients = run.tape.gradients(run.outputs, sent)
        for name in flattened:
            layout = run.layouts[name]
            for gradient in gradients[name]:
                if not layout.fits(gradient, run.samples) or bool(
                    ownership.reached(layout, gradient, run.samples)[1 - parity :: 2].any()
                ):
                    raise ownership.mixed(name, gradient.shape, run.samples)


def _even(left: int, limit: int) -> int:
    """The size of the next part, such that all parts left are about equal."""
    parts = -(-left // limit)
    return -(-left // parts)


def _check_unchanged(before: Tensor, outputs: Tensor) -> None:
    count = min(len(before), len(outputs))
    before, now = before[:count], outputs.detach()[:count]
    tolerance = max(1e-3, 8 * torch.finfo(now.dtype).eps) if now.is_floating_point() else 0.0
    size = float(before.abs().amax().nan_to_num(0, 0, 0)) if before.numel() else 0.0
    if before.shape != now.shape or not torch.allclose(before, now, tolerance, tolerance * size, equal_nan=True):
        raise InputError(
            "the model's outputs for the same samples change with the batch they are in, or from call to call: it "
            "mixes samples, draws random numbers, or its batches cannot be cut into samples (tensors of other things "
            "whose first dimension is as long as the batch)"
        )

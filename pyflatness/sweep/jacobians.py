"""Measure Jacobians of a model's outputs in its input and in its layers' inputs, in one sweep.

J_i = ∂f_i/∂x has the derivatives of all outputs of a sample by every path from x, including paths that skip the layer
with input x. One backward pass for each of the C outputs, for all samples and places together, gives the rows of J, and
these give G = J Jᵀ and a few sums. J is held for one micro-batch, of a size within the memory budget.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .. import contractions
from ..contractions import backends
from ..errors import InputError, NonFiniteError
from ..model import inputs, layers
from ..numerics.accumulate import Accumulator, non_finite
from ..numerics.shard import Shard
from ..passes.dry_run import Findings
from ..passes.layer_form import LayerForm
from ..passes.recorder import RecordedCall
from ..passes.runner import Run, Runner
from ..passes.task import Task
from ..report import Estimate
from .jacobian_rows import QUANTITIES, PlaceRows, WeightGradient

_SMALL = 32  # the most outputs for which kernels have eigenvalues

INPUT = ""  # the place of the model's input; a layer's input has the layer's name
_EVERYWHERE = "size"  # a quantity that every place has
Key = tuple[str, str]  # a place and a quantity


@dataclass(frozen=True)
class Samples:
    """Hold the quantities of every sample at every place."""

    task: Task
    layers: tuple[str, ...]  # places that are layers' inputs, in the model's order
    width: int  # outputs of a sample
    kept: Tensor  # (n,), samples that count
    calls: dict[str, int]  # the most calls of each layer in a run
    apart: dict[str, str]  # why a layer is not one matrix that is used once; empty if it is
    passed: frozenset[str]  # layers whose input also reaches the outputs by a path that skips them
    backend: str  # of the eigenvalues
    _found: dict[Key, Tensor]

    @property
    def has_input(self) -> bool:
        """Return whether the model's input has a derivative."""
        return self.has(INPUT, _EVERYWHERE)

    def has(self, place: str, quantity: str) -> bool:
        """Return whether a place has a quantity."""
        return (place, quantity) in self._found

    def each(self, place: str, quantity: str) -> Tensor:
        """Return a quantity of each sample, (n,) float64; NaN for a sample that was left out."""
        return self._found[place, quantity]

    def counted(self, place: str, quantity: str) -> Tensor:
        """Return a quantity of the samples that count."""
        return self._found[place, quantity][self.kept]

    def estimate(self, value: float, place: str, notes: Sequence[str], per_sample: Tensor | None = None) -> Estimate:
        """Return the estimate of a value at a layer's input, or of the model's or the network's ("")."""
        counted = int(self.kept.sum())
        return Estimate(
            value=value,
            stderr=None,
            samples=counted,
            method="jacobian",
            exact=True,
            backend=self.backend,
            per_sample=per_sample if self.task.options.per_sample else None,
            layer=place,
            omitted=len(self.kept) - counted,
            notes=tuple(notes),
        )


@dataclass
class _MicroBatch:
    """Hold the quantities of a micro-batch at every place, and how many samples it has."""

    number: int
    samples: int
    values: dict[Key, Tensor] = field(default_factory=dict)

    def of(self, key: Key) -> Tensor:
        """Return a quantity of each sample, (n,); for a layer that did not run, its value for J = 0."""
        found, zero = self.values.get(key), QUANTITIES[key[1]].of_zero
        return torch.full((self.samples,), zero, dtype=torch.float64, device="cpu") if found is None else found.cpu()

    def fine(self) -> Tensor:
        """Return whether each sample has finite values at all places, (n,)."""
        return torch.stack([*self._fine().values()]).all(dim=0)

    def error(self) -> NonFiniteError:
        """Return the error for samples with values that are not finite."""
        places = dict.fromkeys(place for (place, _), where in self._fine().items() if not bool(where.all()))
        listed = ", ".join(f"layer {name!r}" if name else "the model's input" for name in [*places][:4])
        return non_finite(self.number, self.fine(), f"in the input, or in the derivatives, of {listed}")

    def _fine(self) -> dict[Key, Tensor]:
        """Return whether each sample has finite values, but for logarithms of volumes, which may be minus infinity."""
        looked_at = {name for name, row in QUANTITIES.items() if math.isfinite(row.of_zero)}
        return {key: values.isfinite() for key, values in self.values.items() if key[1] in looked_at}


def measured(
    task: Task, needs: Collection[str] = (), top: int | None = None, scales: Mapping[str, Tensor] | None = None
) -> Samples:
    """Return the quantities ``needs`` of :data:`.jacobian_rows.QUANTITIES`, and those that are always computed.

    ``top`` is the number of singular values in ``log_volume``, or None for all; ``scales`` has by layer the b of
    ``rescaled``, for its features.
    """
    with task.forward.in_full():
        return _Sweep(task, needs, top, scales or {}).samples()


class _Sweep:
    def __init__(self, task: Task, needs: Collection[str], top: int | None, scales: Mapping[str, Tensor]) -> None:
        self._task, self._top, self._scales = task, top, scales
        self._wanted = {name: row for name, row in QUANTITIES.items() if row.always or name in needs}
        self._of_weights = any(row.of_weight for row in self._wanted.values())
        self._inputs = inputs.Inputs(task.forward, task.forward.by_user)
        options = task.options
        self._runner = Runner(
            task, order_matters=options.by_sample, certify=False, reserve=self._reserve, forward=self._inputs
        )
        # A backend that cannot be used is an error before any pass.
        self._backend = contractions.choose(options.backend, torch.device("cpu"), torch.float64)
        self._forms: dict[str, LayerForm] = {}
        self._calls: dict[str, int] = {}
        self._apart: dict[str, str] = {}
        self._passed: set[str] = set()
        self._width = 0

    def samples(self) -> Samples:
        taken: list[_MicroBatch] = []
        over = Accumulator(self._task.options.nan_policy)

        def take(micro_batch: _MicroBatch) -> None:
            over.kept(micro_batch.fine(), micro_batch.error)
            over.add(micro_batch.samples)
            taken.append(micro_batch)

        self._runner.each(self._measure, take)
        shard = self._task.batches.shard
        over.together(shard, {})
        over.check()
        fine = torch.cat([micro_batch.fine() for micro_batch in taken])
        keys = self._united(shard, dict.fromkeys(key for micro_batch in taken for key in micro_batch.values))
        each = [torch.cat([micro_batch.of(key) for micro_batch in taken]) for key in keys]
        *rows, fine = shard.rows("the values of samples", torch.stack([*each, fine.double()])) if keys else [fine]
        fine = fine.bool()
        kept = fine if over.omitted else torch.ones_like(fine)
        found = {key: whole.masked_fill(~fine, torch.nan) for key, whole in zip(keys, rows, strict=True)}
        names = tuple(name for name in self._task.selection.modules if (name, _EVERYWHERE) in found)
        if self._runner.modules and not names:
            raise self._no_places()
        backend = self._backend.name
        passed = frozenset(self._passed)
        return Samples(self._task, names, self._width, kept, self._calls, self._apart, passed, backend, found)

    def _united(self, shard: Shard, keys: Mapping[Key, None]) -> list[Key]:
        """Return the places and quantities of all ranks; add what these found about layers to what is known here."""
        if shard.ranks.alone:
            return [*keys]
        apart = {name: why for name, why in self._apart.items() if why}
        facts = {"apart": apart, "passed": dict.fromkeys(self._passed), "keys": keys}
        united = shard.united("what is known of layers", facts)
        self._passed |= united["passed"].keys()
        for calls in shard.every("the calls of layers", self._calls):
            self._calls = {name: max(count, self._calls.get(name, 0)) for name, count in (self._calls | calls).items()}
        self._apart = {place: united["apart"].get(place, "") for place, _ in united["keys"]}
        return [*united["keys"]]

    def _reserve(self, found: Findings) -> int:
        """Return the bytes of J for one sample."""
        width = found.outputs.numel() // max(1, min(len(found.outputs), found.samples))
        own = 0 if self._inputs.tensor is None else self._inputs.tensor[0].numel() * self._inputs.tensor.element_size()
        copies = 2 if self._of_weights else 1  # J, and its part by paths that skip the layers
        return width * (copies * found.inputs + own)

    def _measure(self, run: Run) -> _MicroBatch:
        before, self._width = self._width, run.outputs.numel() // run.samples
        if self._of_weights and before not in (0, self._width):
            raise InputError(
                f"bounds: samples of {before} and of {self._width} outputs; they are for one number of them"
            )
        most = self._task.options.max_passes
        if self._width > most:
            raise InputError(
                f"batch {run.number}: the {self._width} outputs of a sample take as many backward passes, more than "
                f"max_passes={most}; pass max_passes={self._width}, or take mls_adversarial, which needs no Jacobian"
            )
        places = self._places(run)
        if not places:
            raise self._no_places()
        edges = [edge for place in places for edge in place.edges]
        for cotangent in _identity(run.outputs, run.samples):
            arrived: tuple[Tensor | None, ...] = (None,) * len(edges)
            if run.outputs.requires_grad:
                arrived = torch.autograd.grad(run.outputs, edges, cotangent, retain_graph=True, allow_unused=True)
            gradients = iter(arrived)
            for place in places:
                place.add([next(gradients) for _ in place.edges])
        self._backend = contractions.choose(self._task.options.backend, run.outputs.device, torch.float64)
        found = _MicroBatch(run.number, run.samples)
        for place in places:
            values = place.values(self._wanted, self._eigenvalues, self._top)
            found.values |= {(place.name, name): each for name, each in values.items()}
            if place.weight is not None:
                self._apart[place.name] = self._apart.get(place.name) or place.weight.apart
                self._passed |= {place.name} if place.passed else set()
        return found

    def _eigenvalues(self, matrices: Tensor) -> Tensor:
        """Return the eigenvalues of positive semidefinite (n, C, C), ascending, (n, C); NaN if not finite."""
        backend = self._backend if matrices.shape[1] <= _SMALL else backends.reference
        return backend.small_eigenvalues(matrices).clamp_min(0.0)

    def _places(self, run: Run) -> list[PlaceRows]:
        places = []
        tensor = self._inputs.tensor
        if tensor is not None and INPUT not in run.recorder.calls:  # a model that is itself a layer has the name ""
            places.append(PlaceRows(INPUT, [get_gradient_edge(tensor)], [tensor], lambda x: x))
        for name, calls in run.recorder.calls.items():
            if not layers.kind_of(self._runner.selected[name]).has_input:
                continue
            self._calls[name] = max(self._calls.get(name, 0), len(calls))
            edges, tensors = [_input_edge(name, call) for call in calls], [call.inputs for call in calls]
            weight = self._weight(run, name) if self._of_weights else None
            arrange = partial(run.samples_first, name)
            places.append(PlaceRows(name, edges, tensors, arrange, weight, self._scales.get(name)))
        return places

    def _no_places(self) -> InputError:
        """Return the error for layers without an input in which there is a Jacobian."""
        return InputError(
            f"layers: none of {', '.join(map(repr, self._runner.modules))} has an input with a derivative: tokens have "
            "none, and of several inputs there is not one; choose other layers"
        )

    def _weight(self, run: Run, name: str) -> WeightGradient:
        module, options = self._runner.selected[name], self._task.options
        if name not in self._forms:
            self._forms[name] = LayerForm(name, module, ("squares",), replace(options, conv="filter"))
        return WeightGradient(run, name, module, self._forms[name], self._width)


def _input_edge(name: str, call: RecordedCall) -> GradientEdge:
    if call.input_edge is None:
        raise InputError(
            f"layer {name!r}: its input is a view (reshaped, transposed, a slice) that is modified in place later, "
            "so that autograd does not keep the gradient in it; write x = x + y in the place of x += y behind it"
        )
    return call.input_edge


def _identity(outputs: Tensor, samples: int) -> Iterator[Tensor]:
    """Yield for each output the cotangent, of the outputs' shape, that selects it in all samples."""
    cotangent = torch.zeros(outputs.shape, dtype=outputs.dtype, device=outputs.device)
    columns = cotangent.view(samples, -1)
    for c in range(columns.shape[1]):
        columns[:, c] = 1
        yield cotangent
        columns[:, c] = 0

"""Run a model with per-sample parameters, so that one backward pass gives every sample's gradients.

    f_i = f(x_i, θ_i),   θ_i = θ for all i:   ∂ Σ_i ⟨s_i, f_i⟩ / ∂θ_i = ∂⟨s_i, f(x_i, θ)⟩ / ∂θ,   and ∂²/∂θ_i∂θ_j = 0

Samples go through the model together if ``torch.vmap`` can run it with the outputs as before, and the last sample's
derivatives are those that it has alone: torch's batching rule is wrong for some kernels, such as BatchNorm behind
weights that are ``channels_last``. Otherwise samples go one by one.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import contractions, interrupts
from ..messages import is_out_of_memory
from ..model import calling, data, parameters
from ..numerics.normal_vectors import NormalVectors
from ..passes import dry_run, linearity
from ..passes.guards import agree, check_unchanged, rounding
from ..passes.runner import Run
from ..passes.second_derivatives import written_out
from ..passes.task import Task

Result = TypeVar("Result")
Leaves = dict[str, Tensor]  # parameters by name, in a graph

_COPIES = 6  # about how many copies of a sample's parameters exist at once: they, their gradients, directions, changes
_NO_PADDING = 2**64 - 1  # the padding index in autograd's graph of an embedding without one
_GRAPHS = 3  # about the memory of a graph with that of its derivatives, in graphs


@dataclass(frozen=True)
class Group:
    """Hold some samples of a run, with per-sample parameters."""

    outputs: Tensor  # the model's, with their graph
    targets: Any
    leaves: Leaves  # (samples, *shape), the parameters of these names
    place: slice  # of the group's samples in the run

    @property
    def samples(self) -> int:
        """Return the number of samples of the group."""
        return int(self.place.stop - self.place.start)


class PerSampleParameters:
    """Run a model with per-sample parameters; a group's parameters and graph fit in half of the memory."""

    def __init__(self, task: Task) -> None:
        self._task, self._memory = task, task.budget(halved=True).work
        self._together, self._compared = True, False
        self._graph = -1  # bytes of a sample's graph, once known

    def each(self, run: Run, values: Mapping[str, Tensor], work: Callable[[Group], None]) -> None:
        """Do ``work``, which may have backward passes, on the samples of a run in groups that fit in the memory."""
        start = 0
        with _undisturbed(run):
            most = self._most(run, values)
            while start < run.samples:
                stop = min(start + most, run.samples) if self._together else start + 1
                group = self._at_once(run, values, slice(start, stop)) if stop - start > 1 else None
                if group is None:
                    stop = start + 1
                    self._alone(run, values, slice(start, stop), work)
                else:
                    work(group)
                start = stop

    def shared(
        self, run: Run, values: Mapping[str, Tensor], work: Callable[[Tensor, dict[str, Tensor]], Result]
    ) -> Result:
        """Do ``work`` on the outputs of the run's samples, with parameters that they share as leaves.

        It must have no backward pass of the run itself, in which checkpointing would call the layers again.
        """
        leaves = {name: w.clone().requires_grad_() for name, w in values.items()}
        with _undisturbed(run), parameters.inside(self._task.model, leaves):
            with torch.enable_grad():
                outputs, _ = self._task.run(run.batch)
            return work(outputs, leaves)

    def _most(self, run: Run, values: Mapping[str, Tensor]) -> int:
        """Return the most samples that are run together."""
        if self._graph < 0:
            # Runs of layers have no graph of other parameters, so cuts of the graph are noted here.
            with dry_run.saved_storages() as storages:
                self._alone(run, values, slice(0, 1), lambda group: None, watched=True)
            self._graph = sum(storages.values())
        size = sum(w.numel() * w.element_size() for w in values.values())
        return max(1, self._memory // max(1, _COPIES * size + _GRAPHS * self._graph))

    def _at_once(self, run: Run, values: Mapping[str, Tensor], place: slice) -> Group | None:
        """Run samples by ``torch.vmap``; None if that fails: an error of the model comes again with one sample."""
        samples = place.stop - place.start
        leaves = {name: _copies(w, samples).requires_grad_() for name, w in values.items()}
        held: list[Tensor] = []
        _changed_samples(run, lambda tensor: held.append(tensor[place]))

        def one(own: dict[str, Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
            parts = iter(inputs)
            batch = _changed_samples(run, lambda tensor: next(parts).unsqueeze(0))
            return self._task.run(batch, own)

        try:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore", UserWarning)  # of operations without a batching rule
                outputs, targets = (part.flatten(0, 1) for part in torch.vmap(one)(leaves, held))
            check_unchanged(_rows(run, place), outputs)
            group = Group(outputs, targets, leaves, place)
            if not self._compared and outputs.requires_grad:  # activation checkpointing fails here
                self._together = not _pads(outputs) and self._agrees(run, values, group)
                self._compared = True
        except Exception as error:
            interrupts.pass_on(error)
            if is_out_of_memory(error):
                raise
            self._together = False
        return group if self._together else None

    def _agrees(self, run: Run, values: Mapping[str, Tensor], group: Group) -> bool:
        """Return whether the last sample of a group has the first and second derivatives that it has alone."""
        found: list[list[Tensor]] = []
        place = slice(group.place.stop - 1, group.place.stop)
        self._alone(run, values, place, lambda alone: found.append(_derivatives(alone)))
        several = [part[-1:] for part in _derivatives(group)]
        half = len(several) // 2  # those of first order; each order is compared relative to its largest, as some are 0
        alone = found[0][:half], found[0][half:]
        together = several[:half], several[half:]
        joined = [(_joined(one), _joined(other)) for one, other in zip(alone, together, strict=True)]
        return all(agree(one, other, rounding(one.dtype)) for one, other in joined)

    def _alone(
        self,
        run: Run,
        values: Mapping[str, Tensor],
        place: slice,
        work: Callable[[Group], None],
        *,
        watched: bool = False,
    ) -> None:
        leaves = {name: w.unsqueeze(0).clone().requires_grad_() for name, w in values.items()}
        batch = _changed_samples(run, lambda tensor: tensor[place])

        with torch.enable_grad():
            own = {name: leaf[0] for name, leaf in leaves.items()}
        with parameters.inside(self._task.model, own):
            with torch.enable_grad():
                run_it = self._task.run
                outputs, targets = self._task.forward.watched(run_it, batch) if watched else run_it(batch)
            check_unchanged(_rows(run, place), outputs)
            work(Group(outputs, targets, leaves, place))


@contextlib.contextmanager
def _undisturbed(run: Run) -> Iterator[None]:
    """Return a context in which the model can run again, with other parameters and with second derivatives."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(calling.aside())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(contractions.full_precision(run.outputs))
        stack.enter_context(written_out())
        yield


def _pads(outputs: Tensor) -> bool:
    """Return whether an embedding has padding, which torch.vmap respects only for the first of several weights."""
    nodes = linearity.users_of(outputs)
    return any(getattr(node, "_saved_padding_idx", _NO_PADDING) != _NO_PADDING for node in nodes)


def _copies(values: Tensor, samples: int) -> Tensor:
    """Return a contiguous copy of a parameter for each sample; in other memory formats some kernels fail under vmap."""
    return values.expand(samples, *values.shape).clone(memory_format=torch.contiguous_format)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


@torch.enable_grad()
def _derivatives(group: Group) -> list[Tensor]:
    """Return a group's gradients of a random sum of outputs, and the gradients' derivatives in random directions."""
    leaves, random = [*group.leaves.values()], NormalVectors()
    each = len(group.outputs) // group.samples
    cotangent = random.like(group.outputs[:each]).repeat(group.samples, *[1] * (group.outputs.ndim - 1))
    gradients = torch.autograd.grad(group.outputs, leaves, cotangent, create_graph=True, materialize_grads=True)
    # Drawn for all gradients, so that they do not depend on which of these have a graph.
    drawn = [random.like(gradient[0]) for gradient in gradients]
    along = zip(gradients, drawn, strict=True)
    pushed = [(gradient * direction).sum() for gradient, direction in along if gradient.requires_grad]
    changes: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
    if pushed:
        changes = torch.autograd.grad(torch.stack(pushed).sum(), leaves, retain_graph=True, materialize_grads=True)
    return [part.detach() for part in (*gradients, *changes)]


def _changed_samples(run: Run, change: Callable[[Tensor], Any]) -> Any:
    """Return the run's batch with ``change`` applied to every tensor that has a row for each sample."""
    data.check_cut(run.batch)
    return data.map_tensors(lambda held: change(held) if held.ndim and len(held) == run.samples else held, run.batch)


def _rows(run: Run, place: slice) -> Tensor:
    """Return the outputs of some samples of a run."""
    each = len(run.outputs) // run.samples
    return run.outputs[place.start * each : place.stop * each]

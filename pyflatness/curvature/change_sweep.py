"""Sum what changes of layers' weights do to the loss, to first and second order, in one sweep over the data.

With M_i = Σ_p δ_ip φ_ipᵀ, the gradient in a layer's weight w (d, m) that a cotangent gives for sample i, a change Δ of
that weight enters through

    ⟨M_i, Δ⟩ = Σ_p ⟨δ_ip, Δ φ_ip⟩

The products Δ φ do not depend on the cotangent: they are made once a micro-batch, and each cotangent then takes a
scalar product with them. M is never written out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from .. import contractions
from ..contractions import promoted
from ..errors import InputError, NonFiniteError
from ..model import layers
from ..numerics.accumulate import counting
from ..passes import cotangents, linearity
from ..passes.cotangents import Cotangents
from ..passes.layer_form import LayerForm
from ..passes.memory import Budget
from ..passes.runner import Run, Runner
from ..passes.task import Task
from ..sweep.layer_sweep import Values
from ..sweep.totals import Sums, Totals, layer_error

FIRST, SECOND = 0, 1  # the columns of the sums: ⟨∇E, Δ⟩, and ½⟨Δ, H Δ⟩
_PER_PRODUCT = 3  # backward passes that take as long as a Hessian product, about


def as_called(name: str, module: nn.Module, change: Tensor) -> Tensor:
    """Return a change of a parameter's shape as the view of it that the operation has, once the layer ran.

    Raises:
        InputError: the operation has another tensor than a view of the parameter.
    """
    found = layers.as_called(module, change)
    if found is None:
        assert isinstance(module.weight, Tensor)
        raise InputError(
            f"changes[{name!r}]: the weight is used as a tensor of shape {tuple(module.weight.shape)} that is no view "
            f"of one of the shape {tuple(change.shape)}; its change has no such form"
        )
    return found


@dataclass(frozen=True)
class ChangeCosts:
    """Hold the sums over the data.

    Attributes:
        sums: a row for each layer, one for all changes together, and a last one without meaning; columns as above.
        names: of the layers, in the order of the rows.
        by_factors: layers whose second order is in the sums.
        together: whether that of all changes together is, as the GGN has it.
        linear: layers in whose weight the model is certified to be locally linear.
    """

    sums: Sums
    names: tuple[str, ...]
    by_factors: frozenset[str]
    together: bool
    linear: frozenset[str]

    def rows(self, name: str) -> Tensor | None:
        """Return the second order of each row of a layer's change by itself, (d,); None where it is not there."""
        return self.sums.parts.get((name, "rows")) if name in self.by_factors else None


class ChangeSweep:
    """Sweep once over a task's data.

    Args:
        task: its layers are those that change.
        changes: by layer, of the shape of its weight.
    """

    def __init__(self, task: Task, changes: Mapping[str, Tensor]) -> None:
        self._task, self._changes, self._options = task, changes, task.options
        self._forms: dict[str, LayerForm] = {}
        self._most = _PER_PRODUCT * (len(changes) + 1)
        self._many = False
        self._runner = Runner(
            task.model,
            task.selection,
            task.batches,
            task.forward,
            Budget.of(task.model, task.options.memory),
            partial(linearity.refuse_custom_functions, task.options),
            order_matters=task.options.by_sample or not task.loss.convex,
        )

    def found(self) -> ChangeCosts:
        """Return the sums.

        Raises:
            InputError: see :meth:`.Runner.each`; targets that do not fit.
            NonFiniteError: NaN or infinity, by the policy.
        """
        task, shard = self._task, self._task.batches.shard
        totals = Totals(task.loss.reduction, task.options, self._error, shard=shard)
        self._runner.each(self._values, totals.add)
        facts = {
            "many": {"": True} if self._many else {},
            "linear": {n: self._runner.is_linear(n) for n in self._names},
        }
        every = shard.every("what changes take", facts)
        many = any(bool(fact["many"]) for fact in every)
        linear = frozenset(name for name in self._names if all(fact["linear"][name] for fact in every))
        by_factors = frozenset() if many else frozenset(self._names) if self._options.by_ggn else linear
        together = not many and (self._options.by_ggn or (len(self._names) == 1 and by_factors == {*self._names}))
        return ChangeCosts(totals.sums(), self._names, by_factors, together, linear)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(self._runner.selected)

    def _values(self, run: Run) -> Values:
        sent = cotangents.of_run(run, self._task.loss)
        ran = [name for name in self._names if run.calls(name)]
        moved = {name: self._moved(run, name) for name in ran}
        values = sent.sample_weights.new_zeros(1, len(self._names) + 1, 2, run.samples)
        gradient = self._loss_gradient(run)
        for name, along in self._along(run, gradient, moved).items():
            values[0, self._runner.places[name], FIRST] = along.sum(dim=1)
            values[0, -1, FIRST] += along.sum(dim=1)
        self._many = self._many or sent.passes > self._most
        rows = {} if self._many else self._second_order(run, sent, moved, values[0, :, SECOND])
        values = sent.marked(values)
        kept = counting(self._options.nan_policy, values)
        of_rows = [name for name in rows if not layers.is_together(self._runner.selected[name])]
        parts = {(name, "rows"): rows[name][kept].sum(dim=0) for name in of_rows}
        return Values(values, sent.sample_weights, run.number, parts=parts, lost=sent.bad)

    def _second_order(
        self, run: Run, sent: Cotangents, moved: Mapping[str, Tensor], values: Tensor
    ) -> dict[str, Tensor]:
        """Add ½ Σ_c σ_c ⟨M^(c), Δ⟩² of layers and of all together to values (layers + 1, n); return that of rows."""
        rows = {name: values.new_zeros(len(each), each.shape[1] * each.shape[3]) for name, each in moved.items()}
        send = partial(run.recorder.gradients, run.outputs, names=moved)
        for cotangent, signs in sent.exact(self._most, send):
            half = 0.5 * (torch.ones_like(values[-1]) if signs is None else signs)
            together = torch.zeros_like(values[-1])
            for name, along in self._along(run, cotangent, moved).items():
                whole = along.sum(dim=1)
                together += whole
                values[self._runner.places[name]] += half * whole.square()
                rows[name] += along.square() * half.unsqueeze(1)
            values[-1] += half * together.square()
        return rows

    def _along(self, run: Run, cotangent: Tensor, moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return Σ_p δ_p ∘ (Δ φ_p) of each layer for a cotangent of the outputs: by row, (n, G d) float64."""
        gradients = run.recorder.gradients(run.outputs, cotangent, moved)
        return {
            name: (self._by_position(run, name, gradients[name]) * each).sum(dim=2, dtype=torch.float64).flatten(1)
            for name, each in moved.items()
        }

    def _moved(self, run: Run, name: str) -> Tensor:
        """Return Δ φ of all calls by position, (n, G, P, d)."""
        module = self._runner.selected[name]
        if name not in self._forms:
            self._forms[name] = LayerForm(name, module, (), self._options)
        change = promoted(as_called(name, module, self._changes[name]))
        with contractions.full_precision(run.outputs):
            outputs = [
                call.kind.varied(call.inputs.detach(), change, call.output, call.coefficients)
                for call in run.calls(name)
            ]
        return self._by_position(run, name, outputs)

    def _by_position(self, run: Run, name: str, outputs: Sequence[Tensor]) -> Tensor:
        """Return outputs of all calls, or gradients in these, by position, (n, G, P, d).

        Of a weight in all of its uses it is (n, 1, P, 1): the rows of one use need not be those of another.
        """
        if layers.is_together(self._runner.selected[name]):
            flat = [promoted(run.samples_first(name, output)).flatten(1) for output in outputs]
            return torch.cat(flat, dim=1)[:, None, :, None]
        if not layers.kind_of(self._runner.selected[name]).tokens:
            return self._forms[name].rows(run, outputs)
        calls = [promoted(run.samples_first(name, output)) for output in outputs]
        return torch.cat([rows.reshape(len(rows), 1, -1, rows.shape[-1]) for rows in calls], dim=2)

    def _error(self, part: Values, fine: Tensor) -> NonFiniteError:
        return layer_error(self._runner.selected, replace(part, values=part.values[:, :-1]), fine)

    def _loss_gradient(self, run: Run) -> Tensor:
        """Return the derivative of the loss terms' sum in the outputs."""
        outputs = run.outputs.detach().requires_grad_()
        with torch.enable_grad():
            value = self._task.loss.value(outputs, run.targets.detach())
        (gradient,) = torch.autograd.grad(value, outputs)
        return gradient

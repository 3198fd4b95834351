"""Compute relative flatness by a formula, without cotangents, in layers that are the head for a micro-batch.

    Σ_p scale_p |φ_p|² ⟨w wᵀ, ∂²ℓ_p/∂z_p²⟩        for a sample with loss terms p, z_p = w φ_p + b the model's outputs
    Σ_p scale_p |w φ_p|² Tr ∂²ℓ_p/∂z_p²           by columns

A layer is the head if it is called once, the model's output is the layer's output or a view of it (tokens with classes
moved to dimension 1, all positions but the last), and each loss term reads one row of it. Each micro-batch is checked.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .. import contractions
from ..contractions.quantities import QUANTITIES
from ..losses import Curvature, Loss
from ..model import layers
from ..model.row_order import order_in_memory
from ..passes.cotangents import Cotangents
from ..passes.layer_form import LayerForm
from ..passes.memory import Budget
from ..passes.recorder import RecordedCall
from ..passes.runner import Run, Runner

_TRACE = "squares"
_VIEWS = re.compile(
    r"(Alias|Movedim|Narrow|Permute|ReshapeAlias|Select|Slice|Squeeze|T|Transpose|Unflatten|UnsafeView|Unsqueeze|View)"
    r"Backward\d+"
)
"""Names of autograd's nodes of operations whose result is a view of their input."""


class HeadFormula:
    """Hold the formula of each layer that is a head, and which layers have been heads in every micro-batch so far.

    ``quantities`` are in the order of their values: those with a formula come last, in the slice ``columns``. The keys
    of ``seen`` are the layers that were a head, or no head, in a micro-batch, and those of which all probes of the
    trace agreed, or differed, in one.
    """

    def __init__(self, runner: Runner, loss: Loss, budget: Budget, quantities: Sequence[str]) -> None:
        self._runner, self._loss = runner, loss
        self._memory = min(budget.buffers, contractions.default_memory(budget.device))
        self.quantities = sorted(quantities, key=lambda name: QUANTITIES[name].at_head)
        self._others = [name for name in self.quantities if not QUANTITIES[name].at_head]
        self.columns = slice(len(self._others), len(self.quantities))
        self._curvatures: dict[str, Curvature] = {}
        self._forms: dict[str, LayerForm] = {}
        self.seen: dict[str, dict[str, bool]] = {what: {} for what in ("head", "no head", "agreeing", "differing")}

    def split(
        self, run: Run, sent: Cotangents, forms: Mapping[str, LayerForm]
    ) -> tuple[dict[str, Tensor], dict[str, LayerForm]]:
        """Return the values of heads by layer, (quantities, n) not yet divided, and forms that need cotangents."""
        heads = {}
        for name, form in forms.items() if self._others != self.quantities else ():
            order = self._order(run, sent, form)
            self.seen["no head" if order is None else "head"][name] = True
            if order is not None:
                heads[name] = self._values(run, sent, form, order)
        taking = {name: form for name, form in forms.items() if self._others or name not in heads}
        for name in taking.keys() & heads.keys():
            taking[name] = self._forms[name] = self._forms.get(name) or forms[name].of(self._others)
        return heads, taking

    def always(self, names: Iterable[str], quantity: str) -> bool:
        """Return whether a quantity was computed by its formula in every run of some layers."""
        return QUANTITIES[quantity].at_head and self._throughout(names, "head", "no head")

    def compare(self, run: Run, sent: Cotangents, forms: Mapping[str, LayerForm]) -> None:
        """Note whether all probes of a layer's trace agree: a head's do if a sample's cotangents have one norm."""
        for name, form in forms.items() if _TRACE in self.quantities else ():
            if name not in self.seen["differing"]:
                agree = sent.same_lengths and self._order(run, sent, form) is not None
                self.seen["agreeing" if agree else "differing"][name] = True

    def agree(self, names: Iterable[str], quantity: str) -> bool:
        """Return whether all probes of a quantity gave the same value in every run of some layers."""
        return quantity == _TRACE and self._throughout(names, "agreeing", "differing")

    def _throughout(self, names: Iterable[str], what: str, otherwise: str) -> bool:
        """Return whether some layers were one thing in a micro-batch, and never the other."""
        return {*names} <= self.seen[what].keys() - self.seen[otherwise].keys()

    def _order(self, run: Run, sent: Cotangents, form: LayerForm) -> Tensor | None:
        """Return the rows of a head's output that loss terms read; empty for all in order, None if it is no head."""
        calls, module, rows = run.calls(form.name), self._runner.selected[form.name], sent.rows()
        call = calls[-1]
        if len(calls) != 1 or not form.pointwise or rows is None or rows.dtype != call.output.dtype:
            return None
        output = _output_of(call, run.outputs)
        # The output may have been changed in a way that autograd's graph does not show.
        if output is None or not layers.computes(module, call.inputs, output):
            return None
        own = output.movedim(layers.kind_of(module).class_dim, -1)
        same = (rows.shape[-1], rows.stride(-1)) == (own.shape[-1], own.stride(-1))
        return order_in_memory(rows, own) if same else None

    def _values(self, run: Run, sent: Cotangents, form: LayerForm, order: Tensor) -> Tensor:
        features = form.input_rows(run)
        if order.numel():
            features = features[order.to(features.device)]
        made = [self._by_columns if contractions.of_outputs(name) else self._by_rows for name in self.quantities]
        with contractions.full_precision(features):
            rows = torch.stack([of_rows(sent, form, features) for of_rows in made[self.columns]])
        return rows.view(len(rows), run.samples, -1).sum(dim=2)

    def _by_columns(self, sent: Cotangents, form: LayerForm, features: Tensor) -> Tensor:
        rows, lengths = contractions.promoted(features), torch.zeros_like(sent.terms.scale)
        for part in form.matrix.squeeze(0).split(max(1, self._memory // (16 * sum(rows.shape)))):
            outputs = contractions.product(rows, contractions.promoted(part).to(rows.dtype).t())
            lengths += form.backend.row_dots(outputs, outputs)
        return sent.traces() * lengths

    def _by_rows(self, sent: Cotangents, form: LayerForm, features: Tensor) -> Tensor:
        scale = sent.terms.scale
        if form.name not in self._curvatures:
            weight, bias = form.matrix.squeeze(0), layers.matrix(self._runner.selected[form.name])[1]
            expected = len(features) * max(1, len(self._runner.batches))
            curvature = self._loss.curvature(weight, bias, form.backend, expected, self._memory, 0.0)
            self._curvatures[form.name] = curvature
        rows = self._curvatures[form.name].by_row(features, scale, *sent.terms.extra).values
        return torch.where(scale != 0, rows * scale, 0.0)


def _output_of(call: RecordedCall, outputs: Tensor) -> Tensor | None:
    """Return the output of a layer's call, without its graph, if the model's output is that or a view of it."""
    node, shape = outputs.grad_fn, call.output.shape
    if node == call.edge.node:
        return outputs.detach() if outputs.shape == shape else None
    while node is not None and node != call.edge.node:
        node = node.next_functions[0][0] if _VIEWS.fullmatch(node.name()) else None
    whole = outputs.untyped_storage().nbytes() == call.output.numel() * outputs.itemsize
    return outputs.detach().as_strided(shape, call.output.stride(), 0) if node is not None and whole else None

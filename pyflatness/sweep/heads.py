"""Take relative flatness by a formula, without cotangents, in layers that are the head of a micro-batch.

    Σ_p scale_p |φ_p|² ⟨w wᵀ, ∂²ℓ_p/∂z_p²⟩        of a sample with loss terms p, z_p = w φ_p + b the model's outputs

A layer is the head if the output of its only call is the model's output, untouched, and each of its rows is what one
loss term reads. Whether it is so is looked at in every micro-batch.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .. import contractions
from ..contractions.quantities import QUANTITIES
from ..losses import Curvature, Loss
from ..model import layers
from ..passes.cotangents import Cotangents
from ..passes.layer_form import LayerForm
from ..passes.memory import Budget
from ..passes.runner import Run, Runner


class Heads:
    """Hold the formula of each layer that is a head, and which layers have been nothing else so far.

    Args:
        runner: of the layers and data.
        loss: of the model's outputs.
        memory: the user's, in bytes, or None; of these the formula takes the buffers.
        quantities: the wanted ones.

    Attributes:
        quantities: the same in the order of their values: those that have a formula come last.
        columns: these.
    """

    def __init__(self, runner: Runner, loss: Loss, memory: int | None, quantities: Sequence[str]) -> None:
        self._runner, self._loss, self._memory = runner, loss, Budget(memory).buffers
        self.quantities = sorted(quantities, key=lambda name: QUANTITIES[name].at_head)
        self._others = [name for name in self.quantities if not QUANTITIES[name].at_head]
        self.columns = slice(len(self._others), len(self.quantities))
        self._curvatures: dict[str, Curvature] = {}
        self._forms: dict[str, LayerForm] = {}
        self._always: dict[str, bool] = {}

    def apart(
        self, run: Run, sent: Cotangents, forms: Mapping[str, LayerForm]
    ) -> tuple[dict[str, Tensor], dict[str, LayerForm]]:
        """Return by layer what has a formula, and the forms of what takes cotangents: of a head the other quantities.

        Args:
            run: of a micro-batch.
            sent: made of its outputs.
            forms: of layers that ran, for all quantities.

        Returns:
            Of a head the values that all of its :attr:`columns` have, (n,) float64, not yet divided; and forms.
        """
        heads = {}
        for name, form in forms.items() if self._others != self.quantities else ():
            is_head = self._is_head(run, sent, form)
            self._always[name] = is_head and self._always.get(name, True)
            if is_head:
                heads[name] = self._values(run, sent, form)
        taking = {name: form for name, form in forms.items() if self._others or name not in heads}
        for name in taking.keys() & heads.keys():
            taking[name] = self._forms[name] = self._forms.get(name) or forms[name].of(self._others)
        return heads, taking

    def always(self, names: Iterable[str], quantity: str) -> bool:
        """Return whether a quantity came by its formula in every run of some layers."""
        return QUANTITIES[quantity].at_head and all(self._always.get(name, False) for name in names)

    def _is_head(self, run: Run, sent: Cotangents, form: LayerForm) -> bool:
        calls, outputs, module = run.calls(form.name), run.outputs, self._runner.selected[form.name]
        call = calls[-1]
        return (
            call.edge.node == outputs.grad_fn
            and (call.output.shape, call.output.dtype) == (outputs.shape, outputs.dtype)
            and len(calls) == 1
            and form.pointwise
            and sent.is_row_dim(layers.class_dim(module))
            and layers.computes(module, call.inputs, outputs)  # else they were changed where autograd does not see it
        )

    def _values(self, run: Run, sent: Cotangents, form: LayerForm) -> Tensor:
        features, scale = form.input_rows(run), sent.terms.scale
        with contractions.full_precision(features):
            if form.name not in self._curvatures:
                weight, bias = form.matrix.squeeze(0), layers.matrix(self._runner.selected[form.name])[1]
                expected = len(features) * max(1, len(self._runner.batches))
                curvature = self._loss.curvature(weight, bias, form.backend, expected, self._memory, 0.0)
                self._curvatures[form.name] = curvature
            rows = self._curvatures[form.name].by_row(features, scale, *sent.terms.extra).values
        return torch.where(scale != 0, rows * scale, 0.0).view(run.samples, -1).sum(dim=1)

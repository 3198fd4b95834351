"""Multiply all rows' blocks H_ss by a vector each, for layers whose blocks are too large to be written out.

    H_ss v_s = Σ_i Σ_c σ_ic u_is^(c) M_is^(c),    u_is^(c) = ⟨M_is^(c), v_s⟩ = Σ_p δ_ips^(c) (V φ_ip)_s

V φ is a pass of the layer forward, on V for its weight. The cotangents u_is δ_ips are added up over c and go back
through that pass at once. No M, nor any patch, is written out.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from .. import contractions
from ..losses import Loss
from ..model import layers
from ..passes import cotangents
from ..passes.runner import Run


@torch.enable_grad()
def of_run(
    run: Run, loss: Loss, modules: Mapping[str, nn.Module], vectors: Mapping[str, Tensor], most: int
) -> dict[str, Tensor]:
    """Return H_ss v_s of some samples, (b, m) float64, for the rows v_s of V (b, m) of each layer, undivided.

    Raises:
        InputError: more than ``most`` backward passes.
    """
    with contractions.full_precision(run.outputs):
        passes = {name: _Pass(run, name, modules[name], vectors[name]) for name in vectors if run.calls(name)}
        send = partial(run.recorder.gradients, run.outputs, names=passes)
        for cotangent, signs in cotangents.of_run(run, loss).exact(most, send):
            gradients = send(cotangent)
            for name, layer in passes.items():
                layer.add(gradients[name], signs)
        return {name: layer.product() for name, layer in passes.items()}


class _Pass:
    """Hold a layer's calls with V for its weight, and the cotangent that will go back."""

    def __init__(self, run: Run, name: str, module: nn.Module, vectors: Tensor) -> None:
        self._run, self._name, self._module = run, name, module
        kind, dtype = layers.kind_of(module), contractions.promoted_dtype(layers.matrix(module)[0].dtype)
        self._weight = layers.as_weight(module, vectors.to(dtype)).detach().requires_grad_()
        self._outputs = [
            self._rows(kind.varied(call.inputs.detach(), self._weight, call.output, call.coefficients))
            for call in run.calls(name)
        ]
        self._cotangents = [torch.zeros_like(rows) for rows in self._outputs]

    def add(self, gradients: list[Tensor], signs: Tensor | None) -> None:
        """Take in the gradients of one cotangent, one for each call."""
        with torch.no_grad():
            deltas = [self._rows(gradient) for gradient in gradients]
            products = [(delta * rows).sum(dim=2) for delta, rows in zip(deltas, self._outputs, strict=True)]
            along = torch.stack(products).sum(dim=0)  # u, n, b
            along = along if signs is None else along * signs.to(along.dtype).unsqueeze(1)
            for cotangent, delta in zip(self._cotangents, deltas, strict=True):
                cotangent += along.unsqueeze(2) * delta

    def product(self) -> Tensor:
        """Return the product, (b, m) float64."""
        (product,) = torch.autograd.grad(self._outputs, self._weight, self._cotangents)
        return layers.as_matrix(self._module, product).double()

    def _rows(self, outputs: Tensor) -> Tensor:
        """Return an output of the layer, or a gradient in it, as (n, b, positions)."""
        rows = self._run.samples_first(self._name, outputs)
        return rows.movedim(2 if layers.is_convolution(self._module) else -1, 1).flatten(2)

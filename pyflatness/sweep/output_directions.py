"""Compute values of layers of one position by directions of their outputs, if these are fewer than cotangents.

A layer of one position has weight gradients M = δ φᵀ with δ^(c) = Jᵀ s_c, J = ∂f/∂z of the sample in the layer's
outputs z (d,). With S the square-root factor of the loss Hessian H = S diag(σ) Sᵀ in the model's outputs, and r_k the
rows of R,

    Σ_c σ_c |R M^(c)|² = |φ|² Σ_k ⟨J r_k, H J r_k⟩        Σ_c σ_c |M^(c)|² = |φ|² Σ_s ⟨J e_s, H J e_s⟩

and with |w φ|² in the place of |φ|² in the second for values by columns. This takes min(d, m) directions r_k, or d unit
vectors e_s, of each layer, in place of C - 1 cotangents of every loss term that go backward for all layers at once.
J r is the derivative of a backward pass in its cotangent v, in which it is linear: ⟨J r, v⟩ = ⟨r, Jᵀ v⟩.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .. import contractions
from ..contractions.factor import gram_factor
from ..hessian.block_traces import derivatives
from ..hessian.entries_and_neurons import batch_of
from ..messages import lacks_a_second_derivative
from ..passes.batch_layout import Layout
from ..passes.cotangents import Cotangents
from ..passes.layer_form import LayerForm
from ..passes.runner import Run

_FEWEST = 64  # cotangents for which directions are considered: with fewer there is little to gain

_FEWER = 0.8  # directions for each cotangent, at most; by measurement each takes about as long


def _units(weight: Tensor) -> Tensor:
    return torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)


_DIRECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gram_weighted": lambda weight: gram_factor(weight).squeeze(0),
    "squares": _units,
    "gram_weighted_columns": _units,
}
"""By quantity: (weight (1, d, m)) -> directions (r, d)."""


def are_fewer(run: Run, sent: Cotangents, forms: Mapping[str, LayerForm], most: int) -> bool:
    """Return whether layers have one position, and fewer directions than cotangents, at most ``most``."""
    if sent.passes < _FEWEST or not sent.has_forms:
        return False
    count = 0
    for name, form in forms.items():
        calls, (groups, d, m) = run.calls(name), form.matrix.shape
        single = len(calls) == groups == 1 and form.pointwise and calls[0].output.shape == (run.samples, d)
        if not single or run.layouts[name] != Layout() or not _DIRECTIONS.keys() >= set(form.quantities):
            return False
        count += sum(min(d, m) if key == "gram_weighted" else d for key in form.quantities)
    return count <= min(most, _FEWER * sent.passes)


def values(run: Run, sent: Cotangents, forms: Mapping[str, LayerForm]) -> dict[str, Tensor] | None:
    """Return the quantities of layers that pass :func:`are_fewer`, (quantities, n); None without second derivative."""
    cotangent = torch.zeros_like(run.outputs, requires_grad=True)
    found = {}
    try:
        with torch.enable_grad():
            arrived = run.recorder.gradients(run.outputs, cotangent, forms, create_graph=True)
        for name, form in forms.items():
            features = contractions.promoted(form.input_rows(run))
            with contractions.full_precision(features):
                weight, rows = contractions.promoted(form.matrix), []
                for key in form.quantities:
                    vectors = features
                    if contractions.of_outputs(key):
                        vectors = contractions.product(features, weight[0].t().to(features.dtype))
                    norms = vectors.double().square().sum(dim=1)
                    rows.append(norms * _sum(sent, arrived[name][0], cotangent, _DIRECTIONS[key](weight)))
                found[name] = torch.stack(rows)
    except RuntimeError as error:
        if not lacks_a_second_derivative(error):
            raise
        return None
    return found


def _sum(sent: Cotangents, gradient: Tensor, cotangent: Tensor, directions: Tensor) -> Tensor:
    """Return Σ_k ⟨J r_k, H J r_k⟩ of every sample, (n,), for directions (r, d)."""
    total, changed = torch.zeros_like(sent.sample_weights), derivatives(gradient, [cotangent])
    size = max(gradient.numel() * gradient.itemsize, cotangent.numel() * cotangent.itemsize)
    for some in directions.to(gradient.dtype).split(batch_of(size)):
        (changes,) = changed(some.unsqueeze(1).expand(-1, *gradient.shape))
        for change in () if changes is None else changes:
            total += sent.form(change)
    return total

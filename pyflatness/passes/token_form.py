"""Bring an embedding into the form of its contractions: tokens and cotangents by position, and no one-hot vectors.

Second derivatives are taken in the columns of the tokens that a run has, :attr:`TokenForm.columns`, as in those of a
smaller layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contractions import TokenContraction, promoted, promoted_dtype
from ..model import layers
from . import normalize
from .layer_form import LayerForm, Parts
from .pooled import Pooled
from .recorder import Call
from .runner import Run


class TokenForm(LayerForm):
    """Hold one embedding's weight, tokens and output gradients; see :class:`.LayerForm`.

    A token enters with a coefficient: that of a bag, 0 for padding, and divided by its scale.
    """

    pointwise = False

    def _of(self, weight: Tensor) -> TokenContraction:
        """Return the contraction with a weight (1, d, m)."""
        return TokenContraction(weight, self.backend, self.quantities)

    def weight(self, run: Run) -> Tensor:
        """Return the columns of the run's tokens, (1, d, U), for inputs as :meth:`patches` has them."""
        columns = self.columns(run)
        weight = layers.matrix(self._module)[0][:, columns].unsqueeze(0)
        return weight if self._scale is None else normalize.multiplied(weight, self._scale[columns], 2)

    def columns(self, run: Run) -> Tensor:
        """Return the tokens of a run, (U,), ascending."""
        columns: Tensor = torch.unique(self.inputs(run)[0])
        return columns

    def whole_weight(self, run: Run) -> Tensor:
        """Return the weight (1, d, m) with all of its columns, also those that no input of a run has."""
        return self.matrix

    def inputs(self, run: Run) -> Parts:
        """Return the tokens of all calls, (n, P)."""
        return [torch.cat([self._by_sample(run, call.inputs).long() for call in run.calls(self.name)], dim=1)]

    def cotangent(self, run: Run, gradients: Sequence[Tensor]) -> Parts:
        """Return δ of all calls by position, (n, P, d)."""
        calls = run.calls(self.name)
        return [torch.cat([self._rows(run, *pair) for pair in zip(calls, gradients, strict=True)], dim=1)]

    def cotangents(self, run: Run, gradients: Tensor) -> None:
        """Return that several gradients are taken one by one."""

    def pooled(self, run: Run) -> Pooled | None:
        """Return that there is no pooling of channels behind the layer."""
        return None

    def rows(self, run: Run, gradients: Sequence[Tensor]) -> Tensor:
        """Return δ of all calls by position, (n, 1, P, d)."""
        return promoted(self.cotangent(run, gradients)[0]).unsqueeze(1)

    def fingerprints(self, run: Run) -> Tensor:
        """Return a number for each sample's tokens, (n,), by which its row can be known again."""
        (tokens,) = self.inputs(run)
        return tokens.double() @ torch.arange(tokens.shape[1], device=tokens.device).cos().double()

    def patches(self, run: Run, call: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return φ of all calls in the columns of the run's tokens, (n, 1, P, U), written out."""
        (tokens,), columns = self.inputs(run), self.columns(run)
        dtype = promoted_dtype(layers.matrix(self._module)[0].dtype)
        return (tokens.unsqueeze(2) == columns).to(dtype).unsqueeze(1)

    def gradients(self, inputs: Parts, cotangent: Parts) -> Tensor:
        """Return M of some samples, (n, 1, d, m), written out."""
        (tokens,), delta = inputs, promoted(cotangent[0])
        columns = delta.new_zeros(len(delta), self._count, delta.shape[2])
        columns.scatter_add_(1, tokens.unsqueeze(2).expand_as(delta), delta)
        gradients: Tensor = columns.transpose(1, 2).unsqueeze(1)
        return gradients

    def on_all_columns(self, run: Run, found: Tensor) -> Tensor:
        """Return what was found for the columns of the run's tokens, (…, U), for all columns, (…, m)."""
        whole = found.new_zeros(*found.shape[:-1], self._count)
        return whole.index_copy_(whole.ndim - 1, self.columns(run), found)

    @property
    def _count(self) -> int:
        """Return m, how many tokens there are."""
        count: int = layers.matrix(self._module)[0].shape[1]
        return count

    def _by_sample(self, run: Run, tensor: Tensor) -> Tensor:
        """Return tokens of a call, or what is of their shape, as (n, P)."""
        rows: Tensor = run.samples_first(self.name, tensor).flatten(1)
        return rows

    def _rows(self, run: Run, call: Call, gradient: Tensor) -> Tensor:
        rows = run.samples_first(self.name, gradient)
        if gradient.ndim > call.inputs.ndim:
            rows = rows.reshape(len(rows), -1, rows.shape[-1])
        else:  # each bag's for all of its tokens
            bags = run.samples_first(self.name, call.inputs)
            rows = rows.unsqueeze(2).expand(-1, -1, bags.shape[2], -1).flatten(1, 2)
        coefficients = None if rows.is_meta else self._coefficients(run, call)
        return rows if coefficients is None else rows * coefficients.unsqueeze(2).to(rows.dtype)

    def _coefficients(self, run: Run, call: Call) -> Tensor | None:
        given = None if call.coefficients is None else self._by_sample(run, call.coefficients)
        if self._scale is None:
            return given
        inverse = torch.where(self._scale > 0, 1 / self._scale, 0.0)[self._by_sample(run, call.inputs)]
        return inverse if given is None else inverse * given

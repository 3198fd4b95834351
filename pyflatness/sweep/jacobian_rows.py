"""Keep what is asked for of the rows of a Jacobian as they arrive at one place, for the samples of a run."""

from collections.abc import Callable, Collection, Sequence
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .. import contractions
from ..model import layers
from ..numerics import spectra
from ..passes.layer_form import LayerForm
from ..passes.runner import Run

QUANTITIES = ("size", "largest", "trace", "square", "scaled", "log_volume", "weights", "past", "rescaled")
"""Of each sample: |x|², s_max, Tr G, Tr G²; on request |J diag(x)|_F², Σ log s; |∂f/∂w|_F² of a layer's weight w and
with it s_max of J - (∂f/∂z) w, the derivative in x by other ways than the layer's output z; and
|J diag(b)^-½|_F² |diag(b)^½ x|² over the features with b > 0, where there is a b for them."""


class WeightGradient:
    """Sum |∂f/∂w|_F² of each sample for a layer's weight w, and take the part (∂f/∂z) w of J through the layer.

    Args:
        run: with the layer recorded.
        name: of the layer.
        module: the layer.
        form: for the contraction ``"squares"``.
        width: how many cotangents will come.

    Attributes:
        total: (n,) float64.
        apart: why w is not one matrix that is used once; empty if it is.
    """

    def __init__(self, run: Run, name: str, module: nn.Module, form: LayerForm, width: int) -> None:
        self._run, self._module, self._form, self.calls = run, module, form, run.calls(name)
        with contractions.full_precision(run.outputs):
            self._squares = form.contraction(run).at(form.inputs(run), width).of
        self.total = torch.zeros(run.samples, dtype=torch.float64, device=run.outputs.device)
        self.apart = _shape_apart(module, [call.inputs for call in self.calls], run.samples)

    def add(self, deltas: Sequence[Tensor]) -> None:
        """Take in the gradients in the layer's outputs of one output of the model."""
        with contractions.full_precision(self._run.outputs):
            self.total += self._squares(self._form.cotangent(self._run, deltas)).values[0]

    def carried(self, deltas: Sequence[Tensor]) -> list[Tensor]:
        """Return such gradients carried to the layer's inputs, of their shapes, through the layer alone."""
        with contractions.full_precision(self._run.outputs):
            sizes = [tuple(call.inputs.shape[1:]) for call in self.calls]
            pairs = zip(deltas, sizes, strict=True)
            return [layers.carried(self._module, delta, size) for delta, size in pairs]


class Place:
    """Hold the rows of J at one place, of all samples of a run, and quantities of theirs.

    Args:
        name: of the place.
        edges: where the gradients are taken: at one tensor, or one for each call of a layer.
        tensors: the tensors, x.
        samples_first: lays one of them out as (n, …).
        needs: those of :data:`QUANTITIES` on request.
        weight: if the layer's weight is looked at.
        scales: (m,) b of ``"rescaled"``, for an x of m features.

    Attributes:
        edges: those, and where ``weight`` wants gradients.
        passed: whether x goes to the outputs another way than through the layer too, as past a residual branch.
    """

    def __init__(
        self,
        name: str,
        edges: Sequence[GradientEdge],
        tensors: Sequence[Tensor],
        samples_first: Callable[[Tensor], Tensor],
        needs: Collection[str],
        weight: WeightGradient | None = None,
        scales: Tensor | None = None,
    ) -> None:
        self.name, self.weight = name, weight
        self.edges = [*edges, *(call.edge for call in weight.calls)] if weight else [*edges]
        self._tensors, self._samples_first, self._needs = tensors, samples_first, needs
        self._x = self._flat([tensor.detach() for tensor in tensors])
        self._scaled = torch.zeros(len(self._x), dtype=torch.float64, device=self._x.device)
        self._rows: list[Tensor] = []
        self._past: list[Tensor | None] = []
        self.passed = False
        self._scales: Tensor | None = None
        if scales is not None and len(scales) == self._x.shape[1]:
            self._scales = scales.to(self._x.device)
            self._rescaled = torch.zeros_like(self._scaled)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Take in the gradients of one output at all edges; None where there is no way."""
        shapes = [*self._tensors, *(call.output for call in self.weight.calls)] if self.weight else self._tensors
        found = [
            torch.zeros(like.shape, dtype=like.dtype, device=self._x.device) if gradient is None else gradient
            for gradient, like in zip(gradients, shapes, strict=True)
        ]
        row = self._flat(found[: len(self._tensors)])
        self._rows.append(row)
        if "scaled" in self._needs:
            self._scaled += (row.double() * self._x).square().sum(dim=1)
        if self._scales is not None:
            self._rescaled += (row.double().square() / self._scales)[:, self._scales > 0].sum(dim=1)
        if self.weight is not None:
            deltas = found[len(self._tensors) :]
            self.weight.add(deltas)
            self._past.append(self._clear(row - self._flat(self.weight.carried(deltas)), row))

    def values(self, backend: ModuleType, device: torch.device, top: int | None) -> dict[str, Tensor]:
        """Return quantities of the rows, (n,) float64 on the CPU each, and let the rows go.

        Args:
            backend: of the eigenvalues of G.
            device: where it has them.
            top: see :func:`.spectra.log_volumes`.
        """
        rows, past = self._rows, self._past
        self._rows, self._past = [], []
        gram = spectra.gram(rows)
        squares = spectra.eigenvalues(gram.to(device), backend)
        found = {
            "size": self._x.double().square().sum(dim=1),
            "largest": squares[:, -1].sqrt(),
            "trace": gram.diagonal(dim1=1, dim2=2).sum(dim=1),
            "square": gram.square().sum(dim=(1, 2)),
        }
        if "scaled" in self._needs:
            found["scaled"] = self._scaled
        if "log_volume" in self._needs:
            found["log_volume"] = spectra.log_volumes(rows, squares, top)
        if self._scales is not None:
            found["rescaled"] = self._rescaled * (self._x.double().square() @ self._scales)
        if self.weight is not None:
            found["weights"] = self.weight.total
            found["past"] = torch.zeros_like(self.weight.total)
        if self.passed:
            whole = [torch.zeros_like(rows[0]) if row is None else row for row in past]
            found["past"] = spectra.eigenvalues(spectra.gram(whole).to(device), backend)[:, -1].sqrt()
        return {quantity: values.cpu() for quantity, values in found.items()}

    def _clear(self, rest: Tensor, row: Tensor) -> Tensor | None:
        """Return what is left of a row without the way through the layer; None where that is rounding."""
        left, size = (part.nan_to_num(0.0, 0.0, 0.0).norm() for part in (rest, row))
        if not bool(left > torch.finfo(row.dtype).eps ** 0.5 * size):
            return None
        self.passed = True
        return rest

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return (n, M), what belongs to each sample in all calls side by side."""
        parts = [self._samples_first(tensor) for tensor in tensors]
        rows = [part.reshape(len(part), -1) for part in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def _shape_apart(module: nn.Module, inputs: Sequence[Tensor], samples: int) -> str:
    """Return why the layer is not one matrix that is used once, by its shapes."""
    if layers.is_convolution(module):
        return "a convolution"
    if len(inputs) > 1:
        return "called several times"
    return "several positions" if inputs[0].numel() != samples * inputs[0].shape[-1] else ""

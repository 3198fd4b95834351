"""Square every sample's gradients in the weights and biases of linear layers and convolutions, from φ and δ.

    ∂⟨s, f_i⟩/∂w = M_i = Σ_p δ_ip φ_ipᵀ,   ∂⟨s, f_i⟩/∂b = Σ_p δ_ip
    |a ∘ M_i|², a = 1 or w;   |a ∘ Σ_p δ_ip|², a = 1 or b;   entry by entry, Σ_i M_i ∘ M_i

If the model also uses a parameter elsewhere (tied, or read by other code), its gradient is not that of the layer's
calls. Each layer is checked once, and such layers are not used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import contractions
from ..model import kinds, layers
from ..numerics.normal_vectors import NormalVectors
from ..passes.guards import agree, rounding
from ..passes.layer_form import LayerForm
from ..passes.runner import Run
from ..passes.task import Task
from .entry_sums import Draw, EntrySums
from .per_sample_parameters import PerSampleParameters

Gradients = Mapping[str, Sequence[Tensor]]
Sign = Tensor | float | None


class LayerGradients:
    """Square gradients of layers with a weight or bias in ``theta``, times θ if ``adaptive``; sum entries too."""

    def __init__(self, task: Task, theta: Mapping[str, Tensor], *, adaptive: bool, by_entry: bool) -> None:
        self._task, self._theta, self._adaptive = task, theta, adaptive
        self._quantity = "weighted" if adaptive else "diagonal" if by_entry else "squares"
        self._options = replace(task.options, conv="filter", normalize=None)
        self.modules = {name: module for name, module in task.model.named_modules() if self._is_candidate(name, module)}
        self.backend = "reference"
        self._forms: dict[str, LayerForm] = {}
        self._usable: dict[str, bool] = {}

    def parameters(self, name: str) -> list[str]:
        """Return the names of a layer's weight and bias, if they are in ``theta``."""
        return [full for what in ("weight", "bias") if (full := _joined(name, what)) in self._theta]

    def usable(self, run: Run) -> list[str]:
        """Return the layers that ran and whose parameters are used by their own calls alone; after :meth:`check`."""
        return [name for name in self.modules if run.calls(name) and self._usable.get(name, False)]

    def check(self, run: Run, per_sample: PerSampleParameters) -> None:
        """Compare the parameters' gradients with those of the layers' calls, for layers that ran for the first time.

        With NaN in gradients they cannot be compared; the layer is then not used until a later run has none.
        """
        new = [name for name in self.modules if run.calls(name) and name not in self._usable]
        if not new:
            return
        names = [parameter for name in new for parameter in self.parameters(name)]
        cotangent = NormalVectors().like(run.outputs)

        def gradients_of_all(outputs: Tensor, leaves: dict[str, Tensor]) -> Sequence[Tensor | None]:
            if not outputs.requires_grad:
                return [None] * len(leaves)
            return torch.autograd.grad(outputs, [*leaves.values()], cotangent, allow_unused=True)

        found = per_sample.shared(run, {name: self._theta[name] for name in names}, gradients_of_all)
        whole = dict(zip(names, found, strict=True))
        gradients = run.recorder.gradients(run.outputs, cotangent, new)
        for name in new:
            self._forms.setdefault(name, self._form(name))
            if all(bool(part.isfinite().all()) for part in gradients[name]):
                self._usable[name] = self._is_whole(run, name, gradients[name], whole)

    def squares(
        self, run: Run, names: Sequence[str], passes: int, entries: EntrySums | None
    ) -> Callable[[Draw, Gradients, Sign], Tensor]:
        """Return a function (a probe's number, gradients, signs) -> (n,) float64, which also adds to ``entries``."""
        contracted = {}
        for name in names:
            form = self._forms[name]
            if _joined(name, "weight") in self._theta:
                contracted[name] = form.contraction(run).at(form.inputs(run), passes).of

        def of(draw: Draw, gradients: Gradients, sign: Sign) -> Tensor:
            total = torch.zeros(run.samples, dtype=torch.float64, device=run.outputs.device)
            for name in names:
                form = self._forms[name]
                if name in contracted:
                    found = contracted[name](form.cotangent(run, gradients[name]), sign)
                    total += found.values[0]
                    if entries is not None:
                        matrix = found.summands[self._quantity].flatten(0, 1)
                        entries.add(draw, _joined(name, "weight"), layers.as_weight(self.modules[name], matrix))
                bias = _joined(name, "bias")
                if bias in self._theta:
                    gradient = form.rows(run, gradients[name]).sum(dim=2).flatten(1)
                    scale = self._theta[bias] if self._adaptive else 1.0
                    squares = signed((gradient * scale).double().square(), sign)
                    total += squares.sum(dim=1)
                    if entries is not None:
                        entries.add(draw, bias, squares.sum(dim=0))
            return total

        return of

    def _is_whole(self, run: Run, name: str, gradients: Sequence[Tensor], whole: Mapping[str, Tensor | None]) -> bool:
        """Return whether the gradients of the layer's calls, summed over samples, are those of its parameters."""
        module, form = self.modules[name], self._forms[name]
        delta = form.rows(run, gradients)
        weight, bias = whole.get(_joined(name, "weight")), whole.get(_joined(name, "bias"))
        if _joined(name, "weight") in whole:
            rows, patches = (each.transpose(0, 1).flatten(1, 2) for each in (delta, form.patches(run)))
            summed = form.on_all_columns(run, contractions.product(rows.mT, patches)).flatten(0, 1)
            if not _same(summed, None if weight is None else layers.as_matrix(module, weight)):
                return False
        return _joined(name, "bias") not in whole or _same(delta.sum(dim=(0, 2)).flatten(), bias)

    def _form(self, name: str) -> LayerForm:
        form = LayerForm(name, self.modules[name], (self._quantity,), self._options)
        self.backend = form.backend.name
        return form

    def _is_candidate(self, name: str, module: nn.Module) -> bool:
        plain = isinstance(module._parameters.get("weight"), nn.Parameter)
        return plain and kinds.is_plain(module) and bool(self.parameters(name))


def signed(squares: Tensor, sign: Sign) -> Tensor:
    """Return squares (n, …) of samples times their signs: one number, (n,), or None for +1."""
    if sign is None:
        return squares
    return squares * (sign.view(-1, *(1,) * (squares.ndim - 1)) if isinstance(sign, Tensor) else sign)


def _joined(name: str, what: str) -> str:
    return f"{name}.{what}" if name else what


def _same(summed: Tensor, whole: Tensor | None) -> bool:
    """Return whether gradients agree up to rounding; None is a gradient of zeros, and NaN agrees with nothing."""
    if whole is None:
        return not bool((summed != 0).any())
    return not bool(whole.isnan().any()) and agree(summed, whole, rounding(whole.dtype))

"""One sweep over the data for the blocks H_ss = ∂²E/∂w_s² of the rows of layers' weights.

By output factors sent backward, where the model is locally linear in the layer's weight or the GGN is asked for. Else
by second derivatives: in the layer's outputs if there is one position and one call,

    h_is = ∂²ℓ_i/∂z_is²,   a pass for each row,

otherwise in the weights themselves, a product for each of their entries.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from . import contractions, curvature, layers, normalize, signals, totals
from .errors import InputError, NonFiniteError, NotYetError
from .lanczos import Ritz
from .products import TRUSTED, Products, check_filters, spread
from .row_blocks import RowBlocks
from .runner import DEFAULT_MEMORY, Run, Runner
from .selectors import Selection
from .sweep import Layer
from .task import Task


@dataclass(frozen=True)
class Rows:
    """What was found of a layer.

    Attributes:
        norms: (b,) float64, |w_s|².
        ritz: λ_max(H_ss) (b,).
        method: ``"ggn"`` or ``"hessian"``.
        exact: whether that is the Hessian's.
    """

    norms: Tensor
    ritz: Ritz
    method: str
    exact: bool


class RowSweep:
    """The sweep.

    Args:
        task: the model, its layers, loss and data.

    Attributes:
        samples: of the data, once it was read.

    Raises:
        InputError: see :meth:`.Runner.results`; targets that do not fit, or are all ignored.
        NotYetError: ``conv="affine"``; too many passes; blocks that are too large.
    """

    def __init__(self, task: Task) -> None:
        check_filters(task)
        self._task, self._options = task, task.options
        memory = task.options.memory or DEFAULT_MEMORY
        self._runner = Runner(task.model, task.selection, task.batches, task.forward, memory)
        self._scales: dict[str, Tensor] = {}
        if task.options.normalize:
            self._scales = normalize.feature_scales(self._runner, task.loss, task.options.nan_policy)
        self._kept = memory // len(task.selection.modules)
        self._layers: dict[str, Layer] = {}
        self._blocks: dict[str, RowBlocks] = {}
        self._by_products: set[str] = set()
        self._opaque: set[str] = set()
        self.samples, self._mass = 0, 0.0

    def rows(self) -> dict[str, Rows]:
        """Of every layer that ran."""
        with contextlib.closing(self._runner.results(self._of_run)) as parts:
            for samples, mass in parts:
                self.samples, self._mass = self.samples + samples, self._mass + mass
        if self._mass == 0:
            raise InputError("targets: every one is ignored (or has class weight 0), so the loss has no terms")
        return {name: self._row(name, module) for name, module in self._runner.modules.items()}

    def notes(self, name: str) -> tuple[str, ...]:
        """What a reader of a layer's value should know."""
        trusted = (TRUSTED,) if name in self._opaque else ()
        return (*layers.tie_notes(self._task.model, self._runner.modules[name]), *trusted)

    def _row(self, name: str, module: nn.Module) -> Rows:
        linear, ggn = self._runner.is_linear(name), self._options.curvature == "ggn"
        ritz = self._by_entries(name, module) if name in self._by_products else self._of_blocks(name)
        weight = layers.matrix(module)[0].double() * self._spread(name)
        method = "ggn" if linear or ggn else "hessian"
        exact = ritz.converged and (linear or not ggn) and name not in self._opaque
        return Rows(weight.square().sum(dim=1), ritz, method, exact)

    def _of_blocks(self, name: str) -> Ritz:
        ritz = self._blocks[name].largest(self._options.seed)
        divisor = self._mass if self._task.loss.reduction == "mean" else 1.0
        return replace(ritz, values=ritz.values / divisor, residuals=ritz.residuals / divisor)

    def _by_entries(self, name: str, module: nn.Module) -> Ritz:
        """From the whole block of the layer, a product for each weight."""
        d, m = layers.matrix(module)[0].shape
        if d * m > signals.PASSES:
            raise NotYetError(
                f"layer {name!r}: the model is not locally linear in its weight, and it sees several positions of a "
                f"sample (or is called several times): the Hessians of its rows need {d * m} products, more than "
                f"{signals.PASSES}; curvature='ggn' gives the GGN's value, another number"
            )
        products = Products(replace(self._task, selection=Selection({name: module}, frozenset())))
        identity = torch.eye(d * m, dtype=torch.float64, device=products.device)
        matrix = products({(name,): identity})[name,].view(d, m, d, m)
        blocks = RowBlocks(name, self._spread(name) != 0, 0)
        blocks.add_blocks(torch.einsum("sjsk->sjk", matrix))
        return blocks.largest(self._options.seed)

    def _of_run(self, run: Run) -> tuple[int, float]:
        """Samples and mass of a part of the data; the blocks take the part in."""
        sent = signals.of_run(run, self._task.loss)
        for name in run.tape.calls:
            if name not in self._layers:
                self._set_up(name)
        single = {name: features for name in run.tape.calls if (features := self._features(run, name)) is not None}
        bent = {name for name in run.tape.calls if not self._runner.is_linear(name)}
        if self._options.curvature == "ggn":
            bent = set()
        with contractions.full_precision(run.outputs):
            weights = self._by_factors(run, sent, run.tape.calls.keys() - bent, single)
            weights.update(self._by_second_derivatives(run, bent & single.keys()))
        for name in weights:
            self._blocks[name].add_weighted(single[name], weights[name])
        self._by_products |= bent - single.keys()
        if bent:
            self._opaque |= curvature.read(run.outputs, {name: run.calls(name) for name in bent}).opaque
        self._check_finite(run)
        return run.samples, float(sent.mass.sum())

    def _by_factors(
        self, run: Run, sent: signals.Signals, names: set[str], single: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Of layers with one position: h (n, b). The M of the others go into their blocks."""
        weights: dict[str, Tensor] = {}
        if not names:
            return weights
        for signal, signs in sent:
            gradients = run.tape.gradients(run.outputs, signal)
            for name in names:
                delta = self._layers[name].signal(run, gradients[name])
                if name not in single:
                    self._add_gradients(run, name, delta, signs)
                    continue
                squares = delta[0].flatten(1).double().square()
                share = squares if signs is None else squares * signs.unsqueeze(1)
                weights[name] = weights[name] + share if name in weights else share
        return weights

    def _add_gradients(self, run: Run, name: str, delta: Sequence[Tensor], signs: Tensor | None) -> None:
        geometry, inputs = layers.geometry(self._runner.modules[name]), self._layers[name].inputs(run)
        entries = self._spread(name).numel() + sum(
            x[0].numel() * geometry.taps + y[0].numel() for x, y in zip(inputs, delta, strict=True)
        )
        chunk = max(1, (self._options.memory or DEFAULT_MEMORY) // (16 * entries))
        for start in range(0, run.samples, chunk):
            part = slice(start, start + chunk)
            gradients = [
                geometry.rows(contractions.promoted(y[part])).mT @ geometry.patches(contractions.promoted(x[part]))
                for x, y in zip(inputs, delta, strict=True)
            ]
            total = torch.stack(gradients).sum(dim=0).flatten(1, 2)
            self._blocks[name].add_gradients(total, None if signs is None else signs[part])

    @torch.enable_grad()
    def _by_second_derivatives(self, run: Run, names: set[str]) -> dict[str, Tensor]:
        """The h (n, b) of layers with one position: the diagonal of ∂²ℓ_i/∂z_i²."""
        found: dict[str, Tensor] = {}
        if not names:
            return found
        value = self._task.loss.value(run.outputs, run.targets.detach())
        slopes = run.tape.gradients(value, torch.ones_like(value), create_graph=True)
        for name in names:
            (slope,), (call,) = slopes[name], run.calls(name)
            dim = layers.class_dim(self._runner.modules[name])
            columns = []
            for s in range(slope.shape[dim]):
                turn = None
                if slope.requires_grad:
                    along = slope.select(dim, s).sum()
                    (turn,) = torch.autograd.grad(along, [call.edge], retain_graph=True, allow_unused=True)
                turn = torch.zeros_like(slope) if turn is None else turn
                columns.append(self._layers[name].signal(run, [turn])[0].flatten(1)[:, s].double())
            found[name] = torch.stack(columns, dim=1)
        return found

    def _features(self, run: Run, name: str) -> Tensor | None:
        """φ (n, m) where the layer sees one position of each sample; None where it sees several."""
        geometry, parts = layers.geometry(self._runner.modules[name]), self._layers[name].inputs(run)
        if geometry.groups > 1 or len(parts) > 1 or geometry.places(parts[0].shape[2:]) != (1, 1, 1):
            return None
        return geometry.patches(contractions.promoted(parts[0])).flatten(1)

    def _set_up(self, name: str) -> None:
        module = self._runner.modules[name]
        weight = layers.matrix(module)[0]
        dtype = contractions.promoted_dtype(weight.dtype)
        backend = contractions.choose(self._options.backend, weight.device, dtype)
        self._layers[name] = Layer(name, module, self._scales.get(name), backend, (), self._options)
        self._blocks[name] = RowBlocks(name, self._spread(name) != 0, self._kept)

    def _spread(self, name: str) -> Tensor:
        """(b, m), what the weights are multiplied by."""
        module = self._runner.modules[name]
        if name in self._scales:
            return spread(module, self._scales[name])
        return torch.ones_like(layers.matrix(module)[0], dtype=torch.float64)

    def _check_finite(self, run: Run) -> None:
        if self._options.nan_policy == "propagate":
            return
        bad = [name for name in run.tape.calls if not self._blocks[name].is_finite()]
        if bad:
            totals.check_finite_weights(self._runner.modules)
            raise NonFiniteError(
                f"batch {run.number}: NaN or infinity in the inputs or signals of layer {bad[0]!r}; an eigenvalue is "
                "one of all samples together, so that nan_policy='omit' can leave none of them out: leave them out of "
                "the data, or pass nan_policy='propagate' for NaN"
            )

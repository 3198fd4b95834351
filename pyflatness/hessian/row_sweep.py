"""Sweep over the data for the blocks H_ss = ∂²E/∂w_s² of the rows of layers' weights.

If the model is locally linear in the layer's weight, or for the GGN, the blocks come from square-root factors sent
backward: in one sweep, or if blocks are too large for the memory, in one sweep for each product
(:func:`_products_of_run`). Otherwise they come from second derivatives: in the layer's outputs if there is one position
and one call,

    h_is = ∂²ℓ_i/∂z_is²,   a backward pass for each row,

or else in the weights themselves, with a Hessian product for each entry.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from .. import contractions
from ..errors import NotYetError
from ..losses import Loss
from ..model import layers
from ..model.selectors import Selection
from ..numerics import lanczos
from ..numerics.accumulate import Accumulator, all_finite
from ..numerics.lanczos import LargestEigenvalues
from ..passes import cotangents, linearity, normalize
from ..passes.layer_form import LayerForm
from ..passes.runner import Run, Runner
from ..passes.task import Task
from . import block_traces, row_blocks
from .products import Products, check_batch, check_filters, spread
from .row_blocks import RowBlocks

_COARSE_TOLERANCE = 1e-5  # for products in other than double precision


@dataclass(frozen=True)
class LayerRows:
    """Hold the norms and eigenvalues of the rows of a layer."""

    norms: Tensor  # (b,) float64, |w_s|²
    ritz: LargestEigenvalues  # λ_max(H_ss) (b,)
    method: str
    exact: bool  # whether the eigenvalues are the Hessian's


@dataclass
class _RowMicroBatch:
    """Hold a micro-batch's contributions by layer, which are added when it is done, as it may be run again."""

    samples: int
    weight: float
    number: int
    weighted: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)

    def is_finite(self, name: str) -> bool:
        blocks = [self.blocks[name]] if name in self.blocks else []
        return all(map(all_finite, (*self.weighted.get(name, ()), *blocks)))


class RowSweep:
    """Sweep for the rows of all layers of a task."""

    def __init__(self, task: Task) -> None:
        check_filters(task)
        task.batches.shard.ranks.refuse("relative_flatness_max", "leave it out of measures=, ")
        self._task, self._options = task, task.options
        self._budget = task.budget(halved=True)
        self._runner = Runner(task, self._approve, second_order=not task.options.by_ggn, halved=True)
        self._scales: dict[str, Tensor] = {}
        if task.options.normalize:
            self._scales = normalize.feature_scales(self._runner, task.loss, task.options.nan_policy)
        self._forms: dict[str, LayerForm] = {}
        self._blocks: dict[str, RowBlocks] = {}
        self._by_entries: set[str] = set()
        self._by_sweeps: set[str] = set()
        self._custom: set[str] = set()
        self.samples, self._normaliser = 0, 1.0

    def _approve(self, nonlinear: Mapping[str, str]) -> None:
        linearity.refuse_custom_functions(self._options, nonlinear)
        linearity.refuse_ggn_of_derivatives(self._options, nonlinear)

    def rows(self) -> dict[str, LayerRows]:
        """Return the rows' norms and eigenvalues of every layer that ran."""
        over = Accumulator(self._options.nan_policy, self._task.loss.reduction)

        def take(micro_batch: _RowMicroBatch) -> None:
            over.add(micro_batch.samples, micro_batch.weight)
            self._take(micro_batch)

        self._runner.each(self._found, take)
        self.samples, self._normaliser = over.samples, over.normaliser
        if not self._options.by_ggn:
            self._by_entries |= {name for name in self._by_sweeps if not self._runner.is_linear(name)}
        for name in self._by_entries:
            self._check_entries(name)
        swept = self._by_sweeps - self._by_entries
        found = self._swept(swept) if swept else {}
        for name, blocks in self._blocks.items():
            if name in self._by_entries:
                found[name] = self._of_entries(name)
            elif name not in swept:
                found[name] = self._normalised(blocks.largest(self._options.seed))
        return {name: self._rows(name, module, found[name]) for name, module in self._runner.modules.items()}

    def notes(self, name: str) -> tuple[str, ...]:
        """Return the notes on a layer's value."""
        trusted = (linearity.TAKEN_AS_THEY_ARE,) if name in self._custom else ()
        return (*layers.tie_notes(self._task.model, self._runner.selected[name]), *trusted)

    def _rows(self, name: str, module: nn.Module, ritz: LargestEigenvalues) -> LayerRows:
        linear, ggn = self._runner.is_linear(name), self._options.by_ggn
        weight = layers.matrix(module)[0].double() * self._spread(name)
        exact = ritz.converged and (linear or not ggn) and name not in self._custom
        return LayerRows(weight.square().sum(dim=1), ritz, "ggn" if linear or ggn else "hessian", exact)

    def _normalised(self, ritz: LargestEigenvalues) -> LargestEigenvalues:
        return replace(ritz, values=ritz.values / self._normaliser, residuals=ritz.residuals / self._normaliser)

    def _check_entries(self, name: str) -> None:
        weight = layers.matrix(self._runner.selected[name])[0]
        if weight.numel() > self._options.max_passes:
            raise NotYetError(
                f"layer {name!r}: the model is not locally linear in its weight, and it sees several positions of a "
                "sample, is called several times, or has too large blocks for memory=: the Hessians of its rows need "
                f"{weight.numel()} products, more than max_passes={self._options.max_passes}; curvature='ggn' gives "
                "the GGN's value, another number"
            )

    def _of_entries(self, name: str) -> LargestEigenvalues:
        """Return eigenvalues from the layer's whole Hessian block, by a product for each weight."""
        module = self._runner.selected[name]
        d, m = layers.matrix(module)[0].shape
        products = Products(replace(self._task, selection=Selection({name: module}, frozenset())))
        identity = torch.eye(d * m, dtype=torch.float64, device=products.device)
        matrix = products({(name,): identity})[name,].view(d, m, d, m)
        blocks = RowBlocks(self._spread(name) != 0, 0, self._budget)
        blocks.add_blocks(torch.einsum("sjsk->sjk", matrix))
        return blocks.largest(self._options.seed)

    def _check_batch(self, number: int, name: str, fine: bool) -> None:
        """Raise unless a batch's contribution to a layer's blocks is ``fine``, or may be NaN."""
        what = f"NaN or infinity in the targets, or the inputs or output gradients of layer {name!r}"
        check_batch(self._options, self._runner, number, fine, what)

    # --- one sweep ----------------------------------------------------------------------------------------------------

    def _found(self, run: Run) -> _RowMicroBatch:
        sent = cotangents.of_run(run, self._task.loss)
        micro_batch = _RowMicroBatch(run.samples, sent.weight, run.number)
        for name in run.recorder.calls:
            if name not in self._forms:
                self._set_up(name)
        single = {name: phi for name in run.recorder.calls if (phi := self._features(run, name)) is not None}
        nonlinear = set() if self._options.by_ggn else set(run.nonlinear)
        self._custom |= {name for name in nonlinear if self._runner.why_not_linear(name) == linearity.CUSTOM}
        with contractions.full_precision(run.outputs):
            linear = run.recorder.calls.keys() - nonlinear
            weights = self._by_factors(run, sent, linear, single.keys(), micro_batch.blocks)
            weights.update(self._by_second_derivatives(run, nonlinear & single.keys()))
        micro_batch.weighted = {name: (single[name], weights[name]) for name in weights}
        self._by_entries |= nonlinear - single.keys()
        return micro_batch

    def _take(self, micro_batch: _RowMicroBatch) -> None:
        measured = micro_batch.weighted.keys() | micro_batch.blocks.keys()
        finite = math.isfinite(micro_batch.weight)
        for name in self._runner.modules:  # so that an error names the first layer in the model's order
            if name in measured:
                self._check_batch(micro_batch.number, name, finite and micro_batch.is_finite(name))
        for name, (features, weights) in micro_batch.weighted.items():
            self._blocks[name].add_weighted(features, weights)
            if self._blocks[name].full:
                self._by_sweeps.add(name)
        for name, blocks in micro_batch.blocks.items():
            self._blocks[name].add_blocks(blocks)

    def _by_factors(
        self, run: Run, sent: cotangents.Cotangents, names: set[str], single: Iterable[str], blocks: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return h (n, b) of layers with a ``single`` position; add the ``blocks`` of the others, if they fit."""
        columns = {name: self._spread(name) for name in names - set(single)}
        self._by_sweeps |= {name for name in columns if not row_blocks.fit(columns[name], self._budget)}
        names = names - self._by_sweeps
        blocks.update({name: row_blocks.empty(columns[name]) for name in names & columns.keys()})
        weights: dict[str, Tensor] = {}
        if not names:
            return weights
        send = partial(run.recorder.gradients, run.outputs, names=names)
        for cotangent, signs in sent.exact(self._options.max_passes, send):
            gradients = send(cotangent)
            for name in names:
                delta = self._forms[name].cotangent(run, gradients[name])
                if name in blocks:
                    self._add_gradients(blocks[name], run, name, delta, signs)
                    continue
                squares = delta[0].flatten(1).double().square()
                contribution = squares if signs is None else squares * signs.unsqueeze(1)
                weights[name] = weights[name] + contribution if name in weights else contribution
        return weights

    def _add_gradients(
        self, blocks: Tensor, run: Run, name: str, delta: Sequence[Tensor], signs: Tensor | None
    ) -> None:
        form, inputs = self._forms[name], self._forms[name].inputs(run)
        written = sum(x[0].numel() * form.kernel_elements + y[0].numel() for x, y in zip(inputs, delta, strict=True))
        chunk = max(1, self._budget.buffers // (16 * (written + blocks.shape[0] * blocks.shape[1])))
        for start in range(0, run.samples, chunk):
            some = slice(start, start + chunk)
            gradients = form.gradients([x[some] for x in inputs], [y[some] for y in delta]).flatten(1, 2)
            row_blocks.add_gradients(blocks, gradients, None if signs is None else signs[some])

    @torch.enable_grad()
    def _by_second_derivatives(self, run: Run, names: set[str]) -> dict[str, Tensor]:
        """Return h (n, b) of layers with one position, the diagonal of ∂²ℓ_i/∂z_i²."""
        found: dict[str, Tensor] = {}
        if not names:
            return found
        with block_traces.differentiable(names):
            gradients = block_traces.gradients(run, self._task.loss.value, names)
            for name in names:
                found[name] = self._diagonal(run, name, gradients[name][0])
        return found

    def _diagonal(self, run: Run, name: str, gradient: Tensor) -> Tensor:
        """Return h (n, b), by a backward pass for each row, for all samples at once, as these are independent."""
        if name in self._custom:
            linearity.check_complete(f"layer {name!r}", [gradient])
        (call,), dim = run.calls(name), layers.kind_of(self._runner.selected[name]).class_dim
        columns = []
        for s in range(gradient.shape[dim]):
            derivatives = None
            if gradient.requires_grad:
                along = gradient.select(dim, s).sum()
                (derivatives,) = torch.autograd.grad(along, [call.edge], retain_graph=True, allow_unused=True)
            derivatives = torch.zeros_like(gradient) if derivatives is None else derivatives
            columns.append(self._forms[name].cotangent(run, [derivatives])[0].flatten(1)[:, s].double())
        return torch.stack(columns, dim=1)

    def _features(self, run: Run, name: str) -> Tensor | None:
        """Return φ (n, m) if blocks are Σ_i h_is φ_i φ_iᵀ, for one position, call and group; otherwise None."""
        kind, parts = layers.kind_of(self._runner.selected[name]), self._forms[name].inputs(run)
        if kind.tokens or self._forms[name].by_weight or name in run.differentiated:
            return None
        geometry = kind.geometry
        if geometry.groups > 1 or len(parts) > 1 or geometry.places(parts[0].shape[2:]) != (1, 1, 1):
            return None
        return geometry.patches(contractions.promoted(parts[0])).flatten(1)

    def _set_up(self, name: str) -> None:
        module, scale = self._runner.selected[name], self._scales.get(name)
        self._forms[name] = LayerForm(name, module, (), self._options, scale)
        kept = self._budget.work // len(self._runner.selected)
        self._blocks[name] = RowBlocks(self._spread(name) != 0, kept, self._budget)

    def _spread(self, name: str) -> Tensor:
        """Return the factors of the weights, (b, m)."""
        module = self._runner.selected[name]
        if name in self._scales:
            return spread(module, self._scales[name])
        return torch.ones_like(layers.matrix(module)[0], dtype=torch.float64)

    # --- a sweep for each product -------------------------------------------------------------------------------------

    def _swept(self, names: set[str]) -> dict[str, LargestEigenvalues]:
        """Return the eigenvalues of layers whose blocks do not fit in memory, by a sweep for each product of all."""
        spreads = {name: self._spread(name) for name in names}
        inverse = {name: torch.where(spread > 0, 1 / spread, 0.0) for name, spread in spreads.items()}

        def times(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            sent = {name: vector * inverse[name] for name, vector in vectors.items()}
            sums = {name: torch.zeros_like(vector) for name, vector in vectors.items()}
            modules, loss, most = self._runner.modules, self._task.loss, self._options.max_passes

            def take(found: tuple[int, dict[str, Tensor]]) -> None:
                number, products = found
                for name, product in products.items():
                    self._check_batch(number, name, all_finite(product))
                    sums[name] += product

            self._runner.each(lambda run: (run.number, _products_of_run(run, loss, modules, sent, most)), take)
            return {name: product * inverse[name] for name, product in sums.items()}

        dtypes = {name: layers.matrix(self._runner.selected[name])[0].dtype for name in names}
        searches = {
            name: row_blocks.search(
                spreads[name] != 0,
                self._options.seed,
                self._budget,
                row_blocks.TOLERANCE if dtypes[name] == torch.float64 else _COARSE_TOLERANCE,
            )
            for name in names
        }
        return {name: self._normalised(ritz) for name, ritz in lanczos.solved_in_step(searches, times).items()}


@torch.enable_grad()
def _products_of_run(
    run: Run, loss: Loss, modules: Mapping[str, nn.Module], vectors: Mapping[str, Tensor], most: int
) -> dict[str, Tensor]:
    """Return H_ss v_s summed over a run's samples, (b, m) float64, for the rows v_s of V (b, m) of each layer."""
    with contractions.full_precision(run.outputs):
        passes = {name: _Pass(run, name, modules[name], vectors[name]) for name in vectors if run.calls(name)}
        send = partial(run.recorder.gradients, run.outputs, names=passes)
        for cotangent, signs in cotangents.of_run(run, loss).exact(most, send):
            gradients = send(cotangent)
            for name, layer in passes.items():
                layer.add(gradients[name], signs)
        return {name: layer.product() for name, layer in passes.items()}


class _Pass:
    """Hold the outputs of a layer's calls with V in place of its weight, and the cotangents of these outputs."""

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
        """Add the gradients of one cotangent of the model, one for each call."""
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

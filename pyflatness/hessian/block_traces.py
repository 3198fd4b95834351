"""Compute block traces of one layer's Hessian by second derivatives, for any twice differentiable model and loss.

Change the layer's weight w to w + D Vᵀ, for columns V (m, ρ) and any D (d, ρ). Autograd gives products of a sample's
Hessian in D with one D at a time: H D, (d, ρ). Columns that span the sample's inputs are enough: with K (P, ρ), K Kᵀ
the Gram matrix of its inputs φ_p, the layer's outputs change by δz_p = Σ_b D[:, b] K_pb, and

    T = Σ_b (H (e_s e_bᵀ))[t, b]        over unit vectors e_s, e_b: the block traces T[s, t]

In a basis U (r, d) of the rows, D = Uᵀ B, a quantity is ⟨C, U T Uᵀ⟩. If U has the rows of R, RᵀR = w wᵀ, the trace of
U T Uᵀ is relative flatness. For unit rows ⟨w wᵀ, T⟩ is relative flatness, and the trace of T is the trace.

Exact values take all unit vectors B: r products for a layer of one position, r min(P, m) for P positions. Sampled
values are in :mod:`.probes`.

Second derivatives in the outputs are not enough if the input of a call depends on the output of another (a recurrence),
or if the model takes a derivative in its forward pass in which the weight is used again. D is then added to the weight
of each sample in the layer itself, with unit vectors V, which takes r m products.

Quantities that are not functions of T are in :mod:`.entries_and_neurons`, which also computes T from its products if
both are wanted.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..contractions import product, promoted
from ..contractions.factor import gram_factor
from ..contractions.quantities import QUANTITIES, Contribution
from ..interrupts import cached_property
from ..messages import second_derivatives
from ..model import layers
from ..numerics.signs import Signs
from ..passes import linearity
from ..passes.layer_form import LayerForm
from ..passes.limit import MANY, check_passes
from ..passes.linear_map import LinearMap
from ..passes.runner import Run
from .entries_and_neurons import EntriesAndNeurons, Varied, WeightDirections, tells_all

Value = Callable[[Tensor, Any], Tensor]
"""(outputs, targets) of a run -> a scalar with a graph that is a sum over samples, such as :meth:`.Loss.value`."""

_MOST_POSITIONS = 256  # the most positions with which a sampled value uses an eigendecomposition of every sample
_RANK = 1e-13  # an eigenvalue below this fraction of the largest is rounding


@dataclass(frozen=True)
class RowBasis:
    """Hold a basis of the rows in which a layer's weight is changed, and each quantity as a function of T in it."""

    size: int  # r
    rows: Tensor | None  # U, (G, r, d); None for unit vectors
    readouts: Sequence[Tensor | None]  # C of each quantity ⟨C, U T Uᵀ⟩, (G, r, r); None for the identity

    def directions(self, coefficients: Tensor) -> Tensor:
        """Return the directions D for coefficients B: (k, n or 1, G, ρ, r) -> (k, n or 1, G, ρ, d)."""
        return coefficients if self.rows is None else product(coefficients, self.rows)


class BlockTraces:
    """Compute the block traces T of one layer for the samples of a run, and quantities of its Hessian.

    Second derivatives are those of ``value`` in the layer's outputs, or if ``in_weight`` in the weight itself.
    """

    def __init__(
        self,
        run: Run,
        form: LayerForm,
        module: nn.Module,
        value: Value,
        gradients: Sequence[Tensor],
        quantities: Sequence[str],
        most: int,
    ) -> None:
        self._run, self._form, self._module, self._value, self._gradients = run, form, module, value, gradients
        self._weight, whole = promoted(form.weight(run)), promoted(form.whole_weight(run))
        self._quantities, self._most = quantities, most
        self._traced = [name for name in quantities if QUANTITIES[name].of_block_trace]
        self._basis = _basis(whole, self._traced, partial(form.factor, run))
        self._behind = [name for name in quantities if QUANTITIES[name].of_outputs]
        self._others = [name for name in quantities if name not in (*self._traced, *self._behind)]
        by_entries = quantities if tells_all(quantities) else self._others
        self._entries = EntriesAndNeurons(self._weight, form.kernel_elements, by_entries, whole)
        calls, self._columns = run.calls(form.name), self._weight.shape[2]  # ρ, the columns of K
        self.in_weight = form.by_weight or form.name in run.differentiated or linearity.feeds_itself(calls)
        if not self.in_weight:
            outputs = [call.output for call in calls]  # only their shapes matter
            self._columns = min(form.rows(run, outputs).shape[2], self._columns)

    @property
    def products(self) -> int:
        """Return the most Hessian products that an exact value may take."""
        if self._entries.tell_all:
            return self._entries.products(self._columns)
        traced = len(self._weight) * self._basis.size * self._columns if self._traced or not self._quantities else 0
        groups, d, _ = self._weight.shape
        behind = groups * d * min(d, self._columns) if self._behind else 0
        return traced + behind + self._entries.products(self._columns)

    def exact(self) -> Contribution:
        """Return the quantities of every sample, and the summands of those that are sums over neurons."""
        self._check_affordable()
        with self._directions() as directions:
            if self._entries.tell_all:
                return self._on_all_columns(self._entries.exact(directions, self._run.samples))
            rows: list[Tensor] = []
            if self._traced:
                rows.extend(self._sums(directions, self._basis))
            if self._behind:
                outputs = replace(directions, span=self._few_outputs(directions.patches.shape[2]))
                rows.extend(self._sums(outputs, RowBasis(self._weight.shape[1], None, [None])))
            found = self._entries.exact(directions, self._run.samples)
        values = dict(zip([*self._traced, *self._behind, *self._others], [*rows, *found.values], strict=True))
        in_order = torch.stack([values[name] for name in self._quantities])
        return self._on_all_columns(Contribution(in_order, found.summands))

    def matrix(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ_i T_i over the samples that are ``kept`` (n,), (G, d, d), and Tr T_i of all, (n,); float64."""
        groups, d, _ = self._weight.shape
        total = self._weight.new_zeros(groups * d, d, dtype=torch.float64)
        traces = self._weight.new_zeros(len(kept), dtype=torch.float64)
        self._check_affordable()
        with self._directions() as directions:
            scale = kept.new_ones(len(kept), groups) if directions.scale is None else directions.scale
            for place, column, units in self._units(directions, d):
                k, group = torch.arange(len(place), device=place.device), place // d
                row = directions.products(units)[k, :, group, column].double() * scale.t()[group].unsqueeze(2)
                total.index_add_(0, place, row[:, kept].sum(dim=1))
                traces += row[k, :, place % d].sum(dim=0)
        return total.view(groups, d, d), traces

    def probe(self, quantity: str, signs: Signs, stream: int) -> Tensor:
        """Return random changes v of the outputs, (probes, n, G, P, d), with E⟨v, H v⟩ the quantity of each sample."""
        numbers, row = self._run.numbers, QUANTITIES[quantity]
        if not (row.of_block_trace or row.of_outputs):
            return self._entries.probe(self._patches(), signs, stream, numbers, self._form.columns(self._run))
        span = self._patches() if self._few_columns is None else self._few_columns
        span = self._few_outputs(_MOST_POSITIONS) if row.of_outputs else span
        rows = self._form.factor(self._run) if row.gram_factor else None
        groups, size = len(self._weight), self._weight.shape[1] if rows is None else rows.shape[1]
        drawn = signs(stream, numbers, span.shape[3], groups, size)  # fewer columns, the same signs
        drawn = drawn.transpose(2, 3).to(self._weight.dtype)
        return product(span, drawn if rows is None else product(drawn, rows.to(drawn.dtype)))

    def _on_all_columns(self, found: Contribution) -> Contribution:
        """Return a contribution whose summands by column have all columns of the layer's weight."""
        summands = {
            name: self._form.on_all_columns(self._run, part) if QUANTITIES[name].by_column else part
            for name, part in found.summands.items()
        }
        return found._replace(summands=summands)

    def _sums(self, directions: WeightDirections, basis: RowBasis) -> Tensor:
        """Return Σ ⟨B C, Uᵀ H Uᵀ B⟩ over the unit directions B of all groups, (readouts, n) float64."""
        total = self._weight.new_zeros(len(basis.readouts), self._run.samples, dtype=torch.float64)
        for _, _, units in self._units(directions, basis.size):
            along = basis.directions(units)
            products = directions.products(along)
            for value, readout in zip(total, basis.readouts, strict=True):
                read = along if readout is None else basis.directions(product(units, readout.to(units.dtype)))
                found = (products * read).sum(dim=(3, 4)).double()
                scaled = found if directions.scale is None else found * directions.scale
                value += scaled.sum(dim=(0, 2))
        return total

    def _units(self, directions: WeightDirections, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield unit directions e_s e_bᵀ, k at a time: s over all groups (k,), b (k,), and B (k, 1, G, ρ, rows)."""
        groups, columns = len(self._weight), directions.columns
        count = groups * rows * columns
        for chosen in torch.arange(count, device=self._weight.device).split(directions.batch):
            place, column = chosen // columns, chosen % columns
            units = self._weight.new_zeros(len(chosen), 1, groups, columns, rows)
            units[torch.arange(len(chosen), device=place.device), 0, place // rows, column, place % rows] = 1.0
            yield place, column, units

    def _check_affordable(self) -> None:
        """Raise if an exact value takes more products than the user allows."""
        if self.products <= min(self._most, MANY):
            return
        groups, d, _ = self._weight.shape
        rows = f"{self.products // self._columns} rows of its weight x {self._columns} directions of a sample's inputs"
        listed = f" ({rows})" if len(self._traced) == len(self._quantities) else ""
        what = f"layer {self._form.name!r}: its exact Hessian value takes {self.products} Hessian products{listed}"
        with self._directions(few=False) as directions:
            at_once = min(directions.batch, self.products)
            one = partial(directions.products, self._weight.new_zeros(at_once, 1, groups, directions.columns, d))
            check = partial(check_passes, by_hessian=True, tell=self._run.tell)
            check(self.products, self._most, what, one, self._run.samples, at_once=at_once)

    def varied(self) -> contextlib.AbstractContextManager[Varied]:
        """Return a context with the tensors that change with the weight."""
        return self._in_every_call() if self.in_weight else contextlib.nullcontext(self._outputs())

    @contextlib.contextmanager
    def _directions(self, *, few: bool = True) -> Iterator[WeightDirections]:
        """Yield the directions of the layer's weight: if ``few``, as few as possible, by eigenvectors; else all."""
        patches, span = self._patches(), None
        if not self.in_weight:
            span = _spanning(patches, patches.shape[2]) if few else patches
        with self.varied() as varied:
            yield WeightDirections(span, patches, varied, derivatives(varied.gradient, varied.inputs))

    def _patches(self) -> Tensor:
        """Return patches φ, (n or 1, G, P, m), which may be large; unit vectors if ``in_weight``."""
        if not self.in_weight:
            return self._form.patches(self._run)
        groups, _, columns = self._weight.shape
        units = torch.eye(columns, dtype=self._weight.dtype, device=self._weight.device)
        return units.expand(1, groups, -1, -1)

    @cached_property
    def _few_columns(self) -> Tensor | None:
        """Return K for sampled values; None if it is φ itself."""
        if self.in_weight:
            return None
        patches = self._patches()
        by_token = self._form.columns(self._run) is not None  # the columns depend on the other samples of the run
        span = _by_token(patches) if by_token else _spanning(patches, _MOST_POSITIONS)
        return None if span is patches else span

    def _few_outputs(self, most: int) -> Tensor:
        """Return K for inputs Q φ in place of φ, with QᵀQ = wᵀw; Qᵀ itself if ``in_weight``."""
        outputs = product(self._patches(), gram_factor(self._weight.mT).mT)
        return outputs if self.in_weight else _spanning(outputs, most)

    def _outputs(self) -> Varied:
        """Return the outputs of the layer's calls as the tensors that change."""
        run, form, calls = self._run, self._form, self._run.calls(self._form.name)
        with torch.enable_grad():
            gradient = form.rows(run, self._gradients)

        def rows(found: Sequence[Tensor | None], count: int) -> Tensor:
            if all(part is None for part in found):
                return gradient.new_zeros(count, *gradient.shape)
            filled = [
                gradient.new_zeros(count, *call.output.shape) if part is None else part
                for part, call in zip(found, calls, strict=True)
            ]
            laid_out: Tensor = torch.func.vmap(lambda *gradients: form.rows(run, gradients))(*filled)
            return laid_out

        return Varied(gradient, [call.edge for call in calls], rows)

    @contextlib.contextmanager
    def _in_every_call(self) -> Iterator[Varied]:
        """Yield a change of each sample's weight, added in every call of the layer."""
        run, form = self._run, self._form
        groups, d, columns = self._weight.shape
        added = self._weight.new_zeros(run.samples, groups, columns, d).requires_grad_()

        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            kind = layers.kind_of_call(module)
            inputs = kind.inputs_of(args, kwargs)
            if output.numel() == 0:
                return output
            assert inputs is not None
            return output + form.changed(run, kind, inputs, output, added)

        def rows(found: Sequence[Tensor | None], count: int) -> Tensor:
            (part,) = found
            return added.new_zeros(count, *added.shape) if part is None else part

        handle = self._module.register_forward_hook(add, with_kwargs=True, prepend=True)
        try:  # the hook stays until all products are done, since activation checkpointing calls the layer in them
            outputs, targets = run.again()
            with torch.enable_grad():
                value = self._value(outputs, targets)
                (gradient,) = torch.autograd.grad(value, added, create_graph=True)
            yield Varied(gradient, [added], rows)
        finally:
            handle.remove()


def gradients(run: Run, value: Value, names: Iterable[str]) -> dict[str, list[Tensor]]:
    """Return gradients of a value of the run in the output of every call of some layers, with their graph."""
    with torch.enable_grad():
        found = value(run.outputs, run.targets)
    return run.recorder.gradients(found, torch.ones_like(found), names, create_graph=True)


def differentiable(
    names: Iterable[str], advice: str = "curvature='ggn' gives the GGN value, another number", what: str = "layer"
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which it is an error, with advice, if an operation behind layers has no second derivative."""
    listed = ", ".join(map(repr, names))
    return second_derivatives(f"{what} {listed}: an operation behind it has no second derivative", advice)


def _basis(weight: Tensor, quantities: Sequence[str], factor: Callable[[], Tensor]) -> RowBasis:
    """Return the min(d, m) rows of R if relative flatness is the only quantity; otherwise d unit vectors."""
    weighted = [QUANTITIES[name].gram_factor for name in quantities]
    if weighted == [True]:
        rows = factor()
        return RowBasis(rows.shape[1], rows, [None])
    gram = weight.double() @ weight.double().mT if any(weighted) else None
    return RowBasis(weight.shape[1], None, [gram if by_gram else None for by_gram in weighted])


def _spanning(patches: Tensor, most: int) -> Tensor:
    """Return K (n, G, P, ρ), K Kᵀ = Φ Φᵀ, with few columns for inputs Φ (n, G, P, m); Φ itself for many positions."""
    _, _, positions, columns = patches.shape
    if positions == 1:
        return _norms(patches)
    if positions >= min(columns, most + 1):
        return patches
    gram = patches.double() @ patches.double().mT
    bad = ~gram.isfinite().all(dim=(2, 3), keepdim=True)
    values, vectors = torch.linalg.eigh(gram.masked_fill(bad, 0.0))
    rank = max(1, int((values > _RANK * values[..., -1:]).sum(dim=2).max()))
    scaled = vectors[..., -rank:] * values[..., -rank:].clamp_min(0).sqrt().unsqueeze(2)
    span: Tensor = scaled.flip(3).masked_fill(bad, torch.nan).to(patches.dtype)
    return span


def _by_token(patches: Tensor) -> Tensor:
    """Return K (n, G, P, P) of one-hot inputs, from each sample alone: a token's column is at its first position."""
    same = patches @ patches.mT
    first: Tensor = same.tril(-1).sum(dim=3) == 0
    return same * first.unsqueeze(2)


def _norms(patches: Tensor) -> Tensor:
    """Return K for one position, |φ|, (n, G, 1, 1)."""
    norms: Tensor = torch.linalg.vector_norm(patches, dim=3, keepdim=True, dtype=torch.float64)
    return norms.to(patches.dtype)


def derivatives(gradient: Tensor, inputs: Sequence[Any]) -> Callable[[Tensor], list[Tensor | None]]:
    """Return the map from directions (k, …) to the derivatives of ⟨gradient, direction⟩ in each input; None is 0."""
    if not gradient.requires_grad:
        return lambda directions: [None] * len(inputs)

    def along(direction: Tensor) -> tuple[Any, ...]:
        return torch.autograd.grad(gradient, inputs, direction, retain_graph=True, allow_unused=True)

    return LinearMap(along)

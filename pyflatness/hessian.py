"""Second derivatives of the loss through one layer: block traces of the Hessian behind any twice differentiable tail.

Move the layer's weight to w + Σ_ab B_ab u_a v_bᵀ, for r rows u_a (d,) and ρ columns v_b (m,). A sample's loss has
second derivatives in B, which autograd gives a product at a time; for coefficients a (r,), b (ρ,)

    y(a, b) = (∂²ℓ/∂B∂B · a bᵀ) b        (r,)

Over the unit vectors b of columns that span the layer's inputs, the y(e_s, b) add up to row s of T, the block traces in
the basis u: T itself for unit rows u, and for the rows of R, RᵀR = w wᵀ, a matrix whose trace is relative flatness.
With random signs a, b the mean of ⟨a, C y(a, b)⟩ is ⟨C, T⟩: E⟨wU, H(wU)⟩ for U = a bᵀ, of uncorrelated entries.

In the layer's outputs z_p = w φ_p a direction is δz_p = u_a ⟨v_b, φ_p⟩, and the v need only span a sample's own inputs:
r products for a layer of one position, r min(P, m) for P. Where the input of a call depends on the output of another (a
recurrence) that is not all there is: B is put into the layer itself, with unit vectors v, and takes r m products.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import curvature
from .contractions import promoted
from .contractions.layer import root
from .errors import InputError
from .layer_form import LayerForm
from .losses import Loss
from .runner import Run
from .signs import Signs

PRODUCTS = 2048  # Hessian products of a layer, for all samples of a part at once, that an exact value may take
_TOGETHER = 2**21  # bytes of directions that go through the graph in one pass; more would only leave the caches
_NOT_TWICE = ("is not implemented", "once_differentiable", "differentiate twice")
_NOT_BATCHED = ("vmap", "atching rule")
_RANK = 1e-13  # an eigenvalue below so much of the largest is rounding


@dataclass(frozen=True)
class Basis:
    """Rows u in which a layer's weight is moved, and what is read off T in them.

    Attributes:
        rows: (G, r, d); None: unit vectors.
        readout: C, (quantities, G, r, r): a quantity is ⟨C, T⟩.
    """

    rows: Tensor | None
    readout: Tensor

    @property
    def size(self) -> int:
        """How many rows, r."""
        return self.readout.shape[-1]

    def combined(self, coefficients: Tensor) -> Tensor:
        """Σ_a c_a u_a: (…, G, r) -> (…, G, d)."""
        if self.rows is None:
            return coefficients
        vectors: Tensor = torch.einsum("...gr,grd->...gd", coefficients, self.rows)
        return vectors


@dataclass(frozen=True)
class Directions:
    """Where the weight of a layer can be moved at the samples of a run.

    Attributes:
        columns: ρ.
        bytes: of one direction, for all samples.
        turned: a (k, n or 1, G, r), b (k, n or 1, G, ρ) -> what y(a, b) is read from, (k, n, G, d or r).
        reading: c (…, G, r) -> the vectors with which :attr:`turned` has the product ⟨c, y⟩, (…, G, d or r).
        scale: (n, G), by which the product is to be multiplied; or None.
    """

    columns: int
    bytes: int
    turned: Callable[[Tensor, Tensor], Tensor]
    reading: Callable[[Tensor], Tensor]
    scale: Tensor | None = None

    @property
    def together(self) -> int:
        """How many directions to take at a time."""
        return max(1, _TOGETHER // max(1, self.bytes))


class BlockTraces:
    """T of one layer at the samples of a run, and what is read off it.

    Args:
        run: on tape.
        form: the layer.
        module: the same.
        loss: the user's.
        slope: from :func:`slopes`, of this layer's calls.
        quantities: of :data:`.contractions.layer.QUANTITIES`; none: for T itself.
    """

    def __init__(
        self,
        run: Run,
        form: LayerForm,
        module: nn.Module,
        loss: Loss,
        slope: Sequence[Tensor],
        quantities: Sequence[str] = (),
    ) -> None:
        self._run, self._form, self._module, self._loss, self._slope = run, form, module, loss, slope
        self._weight = promoted(form.weight(run))
        self._basis = _basis(self._weight, quantities)

    @property
    def products(self) -> int:
        """Hessian products that an exact value takes, at most."""
        calls, (groups, _, columns) = self._run.calls(self._form.name), self._weight.shape
        positions = self._form.rows(self._run, [torch.empty_like(call.output) for call in calls]).shape[2]
        return groups * self._basis.size * min(positions, columns)

    def exact(self) -> Tensor:
        """(quantities, n) float64.

        Raises:
            InputError: more than :data:`PRODUCTS` products.
        """
        total = self._weight.new_zeros(len(self._basis.readout), self._run.samples, dtype=torch.float64)
        with self._directions(_spanning) as directions:
            for a, b in self._units(directions):
                total += self._read(directions, a, b).sum(dim=1)
        return total

    def matrix(self, kept: Tensor) -> Tensor:
        """Σ_i T_i over the samples that are kept (n,), (G, d, d) float64.

        Raises:
            InputError: more than :data:`PRODUCTS` products.
        """
        groups, d, _ = self._weight.shape
        total = self._weight.new_zeros(groups, d, d, dtype=torch.float64)
        with self._directions(_spanning) as directions:
            for a, b in self._units(directions):
                y = torch.where(kept.view(-1, 1, 1), directions.turned(a, b).double(), 0.0)
                if directions.scale is not None:
                    y = y * torch.where(kept.unsqueeze(1), directions.scale, 0.0).unsqueeze(2)
                total += torch.einsum("kgs,kngt->gst", a[:, 0].double(), y)
        return total

    def sampled(self, signs: Signs, stream: int) -> Tensor:
        """(draws, quantities, n) float64, each with the exact value for its mean; streams ``stream`` and the next."""
        groups, numbers, dtype = len(self._weight), self._run.numbers, self._weight.dtype
        with self._directions(lambda patches: _norms(patches) if patches.shape[2] == 1 else patches) as directions:
            a = signs(stream, numbers, groups, self._basis.size).to(dtype)
            b = signs(stream + 1, numbers, groups, directions.columns).to(dtype)
            some = zip(a.split(directions.together), b.split(directions.together), strict=True)
            return torch.cat([self._read(directions, a, b) for a, b in some], dim=1).transpose(0, 1)

    def _read(self, directions: Directions, a: Tensor, b: Tensor) -> Tensor:
        """⟨C a, y(a, b)⟩ over all groups, (quantities, k, n) float64."""
        turned = directions.turned(a, b)
        parts = []
        for readout in self._basis.readout:
            vectors = directions.reading(torch.einsum("kngr,grt->kngt", a, readout.to(a.dtype)))
            products = (turned * vectors).sum(dim=3).double()
            parts.append((products if directions.scale is None else products * directions.scale).sum(dim=2))
        return torch.stack(parts)

    def _units(self, directions: Directions) -> Iterator[tuple[Tensor, Tensor]]:
        """Every pair of a row and a column of the same group, some at a time."""
        groups, rows, columns = len(self._weight), self._basis.size, directions.columns
        count = groups * rows * columns
        if count > PRODUCTS:
            raise InputError(
                f"layer {self._form.name!r}: its exact Hessian value takes {count} Hessian products ({groups * rows} "
                f"rows of its weight x {columns} directions of a sample's inputs), more than {PRODUCTS}; pass probes= "
                "for a sampled value with a standard error"
            )
        for chosen in torch.arange(count, device=self._weight.device).split(directions.together):
            place, column = chosen // columns, chosen % columns
            a = self._weight.new_zeros(len(chosen), groups * rows).scatter_(1, place.unsqueeze(1), 1.0)
            b = self._weight.new_zeros(len(chosen), groups * columns)
            b.scatter_(1, (place // rows * columns + column).unsqueeze(1), 1.0)
            yield a.view(-1, 1, groups, rows), b.view(-1, 1, groups, columns)

    def _directions(self, spanning: Callable[[Tensor], Tensor]) -> contextlib.AbstractContextManager[Directions]:
        recurrent = curvature.feeds_itself(self._run.calls(self._form.name))
        return self._of_weight() if recurrent else self._of_outputs(spanning)

    @contextlib.contextmanager
    def _of_outputs(self, spanning: Callable[[Tensor], Tensor]) -> Iterator[Directions]:
        """Moves of the layer's outputs, δz_p = Σ_a a_a u_a Σ_b b_b K_pb, with K Kᵀ the Gram matrix of its inputs."""
        run, form, basis, calls = self._run, self._form, self._basis, self._run.calls(self._form.name)
        span = spanning(form.patches(run, [call.inputs.detach() for call in calls]))  # K, (n, G, P, ρ)
        with torch.enable_grad():
            slope = form.rows(run, self._slope)
        single = span.shape[2] == span.shape[3] == 1  # then K is a number by which the rest can be multiplied

        def turned(a: Tensor, b: Tensor) -> Tensor:
            moved = basis.combined(a).unsqueeze(3).expand(-1, run.samples, -1, span.shape[2], -1)
            if single:
                return by_rows(moved).squeeze(3)
            amounts = torch.einsum("ngpr,kngr->kngp", span, b.expand(-1, run.samples, -1, -1))
            return torch.einsum("kngp,kngpd->kngd", amounts, by_rows(moved * amounts.unsqueeze(4)))

        def by_rows(moved: Tensor) -> Tensor:
            found = _products(slope, [call.edge for call in calls], moved)
            if all(part is None for part in found):
                return torch.zeros_like(moved)
            filled = [
                moved.new_zeros(len(moved), *call.output.shape) if part is None else part
                for part, call in zip(found, calls, strict=True)
            ]
            rows: Tensor = torch.func.vmap(lambda *gradients: form.rows(run, gradients))(*filled)
            return rows

        scale = span[:, :, 0, 0].double().square() if single else None
        yield Directions(span.shape[3], slope.numel() * slope.element_size(), turned, basis.combined, scale)

    @contextlib.contextmanager
    def _of_weight(self) -> Iterator[Directions]:
        """Moves of the weight in every call of the layer, B of each sample its own."""
        run, form, basis = self._run, self._form, self._basis
        groups, _, columns = self._weight.shape
        moved = self._weight.new_zeros(run.samples, groups, basis.size, columns).requires_grad_()

        def move(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            patches = form.patches(run, [args[0] if args else next(iter(kwargs.values()))])
            change = basis.combined(torch.einsum("ngpm,ngrm->npgr", patches, moved)).transpose(1, 2)
            return output + form.placed(run, change, output)

        def turned(a: Tensor, b: Tensor) -> Tensor:
            directions = (a.unsqueeze(4) * b.unsqueeze(3)).expand(-1, *moved.shape)
            (found,) = _products(slope, [moved], directions)
            found = torch.zeros_like(directions) if found is None else found
            return torch.einsum("kngrm,kngm->kngr", found, b.expand(-1, run.samples, -1, -1))

        handle = self._module.register_forward_hook(move, with_kwargs=True, prepend=True)
        try:  # until all products are done: activation checkpointing calls the layer again in them
            outputs, targets = run.again()
            with torch.enable_grad():
                value = self._loss.value(outputs, targets)
                (slope,) = torch.autograd.grad(value, moved, create_graph=True)
            yield Directions(columns, moved.numel() * moved.element_size(), turned, lambda coefficients: coefficients)
        finally:
            handle.remove()


def slopes(run: Run, loss: Loss, names: Iterable[str]) -> dict[str, list[Tensor]]:
    """Gradients of the run's summed loss in the output of every call of some layers, with their graph."""
    with torch.enable_grad():
        value = loss.value(run.outputs, run.targets)
    return run.tape.gradients(value, torch.ones_like(value), names, create_graph=True)


@contextlib.contextmanager
def differentiable(
    names: Iterable[str], advice: str = "curvature='ggn' gives the GGN value, another number"
) -> Iterator[None]:
    """Inside, an operation without a second derivative is an error that says so, and gives some advice.

    Raises:
        InputError: with what torch said of it.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in _NOT_TWICE):
            raise
        raise InputError(
            f"layer {', '.join(map(repr, names))}: an operation behind it has no second derivative ({error}); {advice}"
        ) from error


def _basis(weight: Tensor, quantities: Sequence[str]) -> Basis:
    """For relative flatness alone the rows of R, min(d, m) of them; else unit vectors, d."""
    groups, d, _ = weight.shape
    if tuple(quantities) == ("rooted",):
        rows = root(weight)
        return Basis(rows, torch.eye(rows.shape[1], device=weight.device).expand(1, groups, -1, -1))
    unit = torch.eye(d, dtype=torch.float64, device=weight.device).expand(groups, -1, -1)
    readout = {"squares": unit, "rooted": weight.double() @ weight.double().mT}
    chosen = [readout[name] for name in quantities]
    return Basis(None, torch.stack(chosen) if chosen else unit.unsqueeze(0))


def _spanning(patches: Tensor) -> Tensor:
    """K (n, G, P, ρ) with K Kᵀ = Φ Φᵀ for inputs Φ (n, G, P, m), of few columns."""
    _, _, positions, columns = patches.shape
    if positions == 1:
        return _norms(patches)
    if positions >= columns:
        return patches
    gram = patches.double() @ patches.double().mT
    bad = ~gram.isfinite().all(dim=(2, 3), keepdim=True)
    values, vectors = torch.linalg.eigh(gram.masked_fill(bad, 0.0))
    rank = max(1, int((values > _RANK * values[..., -1:]).sum(dim=2).max()))
    scaled: Tensor = vectors[..., -rank:] * values[..., -rank:].clamp_min(0).sqrt().unsqueeze(2)
    return scaled.masked_fill(bad, torch.nan).to(patches.dtype)


def _norms(patches: Tensor) -> Tensor:
    """For one position K is |φ|, (n, G, 1, 1)."""
    norms: Tensor = torch.linalg.vector_norm(patches, dim=3, keepdim=True, dtype=torch.float64)
    return norms.to(patches.dtype)


def _products(slope: Tensor, inputs: Sequence[Any], directions: Tensor) -> list[Tensor | None]:
    """Derivatives of ⟨slope, direction⟩ in each input, for (k, …) directions; None where there are none."""
    if not slope.requires_grad:
        return [None] * len(inputs)
    if len(directions) > 1:
        try:
            return list(_derivatives(slope, inputs, directions, is_grads_batched=True))
        except RuntimeError as error:
            if not any(text in str(error) for text in _NOT_BATCHED):  # one at a time may do
                raise
    each = [_derivatives(slope, inputs, direction) for direction in directions]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)]


def _derivatives(slope: Tensor, inputs: Sequence[Any], direction: Tensor, **how: bool) -> tuple[Any, ...]:
    return torch.autograd.grad(slope, inputs, direction, retain_graph=True, allow_unused=True, **how)

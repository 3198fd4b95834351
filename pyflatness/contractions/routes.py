"""Compute the forms of a layer's M from its inputs φ and a cotangent δ, by one of several routes.

A route is prepared once for the inputs of a micro-batch, and then computes the forms of one cotangent after another. It
is chosen by its multiply-adds per sample and cotangent; K cotangents share φ. For one position, M = δ φᵀ, it is
:class:`OnePosition`: |φ|² |R δ|². For more positions, kernels (:class:`KernelRoutes`) have

- :class:`Direct`: M, then R M, with d m P + r d m multiply-adds; for early convolutions;
- :class:`Gram`: Σ_pp' ⟨φ_p, φ_p'⟩ ⟨R δ_p, R δ_p'⟩, with r d P + r P² + m P² / K; for late convolutions and sequences.

With a matrix library (:class:`LibraryRoutes`), |M|² and |R M|² are |a φ|² = ⟨a G, a⟩ for rows a = δ or a = R δ (r, P)
and patches φ (P, m), with G = φ φᵀ. The stacked rows of K cotangents, (K r, P), are one operand (:class:`Stacked`).
R δ takes r d P multiply-adds, and then

- :class:`_ByPatches`: a φ, with φ of some samples at a time, takes r m P; for early convolutions;
- :class:`_ByGram`: a G takes r P² + m P² / K; for late convolutions and sequences.

Forms of w ∘ M at several positions need M itself (:class:`Both`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..interrupts import cached_property
from .factor import gram_factors, half_factor
from .geometry import Geometry
from .precision import product, promoted, promoted_dtype
from .quantities import Forms, Made

if TYPE_CHECKING:
    from .reference import Backend

Calls = Sequence[Tensor]
"""One tensor in the form of :mod:`.geometry`, or one for each call of the layer if they cannot be joined."""

_ENTRIES = 2**20  # entries of a weight that are squared at a time

_MANY = 1024  # matrices, whose inner products use all of a GPU


@dataclass(frozen=True)
class PreparedWeight:
    """Hold a layer's weight w (G, d, m) as the routes need it, prepared once."""

    shape: torch.Size
    geometry: Geometry
    backend: "Backend"
    forms: Made
    factored: Tensor | None  # w, if R is needed
    weight: Tensor | None  # w, if w ∘ M is needed
    memory: int  # bytes for working buffers of M
    factor_rows: int  # r of R (G, r, d); 0 if it is not needed
    serves_half: bool = False  # whether products with R in bfloat16 are allowed

    @cached_property
    def _made(self) -> tuple[Tensor | None, bool]:
        if self.factored is None:
            return None, False
        ((factor, triangular),) = gram_factors([promoted(self.factored)])
        return factor, triangular

    @staticmethod
    def make_factors(layers: Iterable["PreparedWeight"]) -> None:
        """Compute the factors of several layers, for which the host waits for the device once."""
        missing = [(layer, layer.factored) for layer in layers if "_made" not in vars(layer)]
        weights = [(layer, promoted(weight)) for layer, weight in missing if weight is not None]
        found = gram_factors([weight for _, weight in weights])
        for (layer, _), made in zip(weights, found, strict=True):
            vars(layer)["_made"] = made

    @property
    def has_factor(self) -> bool:
        """Return whether R is available without work: it was computed, is wᵀ, or is not needed."""
        return "_made" in vars(self) or self.factored is None or self.shape[2] <= self.shape[1]

    @property
    def factor(self) -> Tensor | None:
        """Return R, (G, r, d) with RᵀR = w wᵀ, computed once; None if it is not needed."""
        return self._made[0]

    @property
    def triangular(self) -> bool:
        """Return whether R is Cholesky's factor, with zeros below its diagonal."""
        return self._made[1]

    @cached_property
    def half_factor(self) -> Tensor | None:
        """Return R in bfloat16, if products with it are precise enough; otherwise None."""
        return half_factor(self.factor, self.factored) if self.serves_half and self.factored is not None else None

    def places(self, phi: Tensor) -> int:
        """Return the number of positions of the layer for inputs φ."""
        return math.prod(self.geometry.places(phi.shape[2:]))

    def chunk(self, elements: int, dtype: torch.dtype) -> int:
        """Return how many samples, with ``elements`` each once promoted, fit in the memory for buffers."""
        return max(1, self.memory // (promoted_dtype(dtype).itemsize * max(1, elements)))

    def patches(self, phi: Tensor) -> Tensor:
        """Return patches of φ, (n, G, P, m)."""
        return self.backend.patches(phi, self.geometry)

    def gradients(self, inputs: Calls, cotangent: Calls) -> Tensor:
        """Return M, (n, G, d, m)."""
        first, *others = (
            product(self.geometry.rows(promoted(delta)).mT, self.patches(promoted(x)))
            for x, delta in zip(inputs, cotangent, strict=True)
        )
        return sum(others, start=first)


class LayerRoute:
    """Compute the forms of cotangents, with a layer's inputs prepared; it ``takes_several`` if they may be stacked."""

    takes_several = False

    def forms(self, cotangent: Calls) -> Forms:
        """Return the forms of a cotangent, (n, …); of k stacked ones, (k n, …)."""
        raise NotImplementedError


class Direct(LayerRoute):
    """Compute M by the kernels, and the forms of it."""

    def __init__(self, layer: PreparedWeight, phi: Tensor, factor: Tensor | None) -> None:
        self._layer, self._phi, self._factor = layer, phi, factor

    def forms(self, cotangent: Calls) -> Forms:
        phi, delta = promoted(self._phi), promoted(cotangent[0])
        factor, weight = (None if t is None else t.to(delta.dtype) for t in (self._factor, self._layer.weight))
        return self._layer.backend.direct(phi, delta, self._layer.geometry, factor, weight)


class DirectGathered(LayerRoute):
    """Contract several cotangents together, from positions where any is not zero, or from given positions."""

    takes_several = True

    def __init__(self, layer: PreparedWeight, phi: Tensor, positions: Tensor | None = None) -> None:
        self._layer, self._phi, self._positions = layer, phi, positions

    def forms(self, cotangent: Calls) -> Forms:
        layer, each = self._layer, promoted(cotangent[0]).split(len(self._phi))
        return layer.backend.direct_gathered(self._phi, each, layer.geometry, layer.factor, self._positions)


class Gram(LayerRoute):
    """Compute |M|² and |R M|² from the Gram matrices of inputs and cotangent, for several positions."""

    takes_several = True

    def __init__(self, layer: PreparedWeight, phi: Tensor, *, squares: bool) -> None:
        self._layer, self._squares = layer, squares
        self._gram = layer.backend.patch_gram(phi, layer.geometry)

    def forms(self, cotangent: Calls) -> Forms:
        layer, gram = self._layer, self._gram
        rows = layer.geometry.rows(promoted(cotangent[0]))
        squares = gram_weighted = None
        if layer.factor is not None:
            factor, triangular = layer.factor.to(rows.dtype), layer.triangular
            gram_weighted = layer.backend.gram_weighted(rows, factor, gram, triangular=triangular)
        if self._squares:
            squares = layer.backend.gram(rows, gram)
        return Forms(squares, gram_weighted)


class Carried(LayerRoute):
    """Compute |R M|² by Gram matrices from the cotangent at the layer's input, γ = wᵀ δ, for many positions."""

    takes_several = True

    def __init__(self, layer: PreparedWeight, phi: Tensor) -> None:
        self._layer, self._gram = layer, layer.backend.patch_gram(phi, layer.geometry)

    def forms(self, cotangent: Calls) -> Forms:
        """Return the forms of a cotangent, from γ (n, m, positions)."""
        rows = self._layer.geometry.rows(cotangent[0])
        return Forms(gram_weighted=self._layer.backend.gram(rows, self._gram))


class Both(LayerRoute):
    """Compute |R M|² by Gram matrices, if there is ``by_gram``, and other forms from M."""

    def __init__(self, by_gradients: LayerRoute, by_gram: LayerRoute | None) -> None:
        self._by_gradients, self._by_gram = by_gradients, by_gram

    def forms(self, cotangent: Calls) -> Forms:
        found = self._by_gradients.forms(cotangent)
        if self._by_gram is None:
            return found
        return found._replace(gram_weighted=self._by_gram.forms(cotangent).gram_weighted)


class OnePosition(LayerRoute):
    """Compute all forms of layers of one position, M = δ φᵀ; the terms of φ alone are prepared once.

    |M|² = |φ|² |δ|², |R M|² = |φ|² |R δ|², |w ∘ M|² = Σ_s δ_s² (Σ_j w_sj² φ_j²); the sums of w ∘ M are δ_s ⟨w_s, φ⟩ by
    row and φ_j Σ_s δ_s w_sj by column. If not ``by_factor``, |R δ| is computed as |wᵀ δ|.
    """

    def __init__(self, layer: PreparedWeight, inputs: Tensor, *, by_factor: bool = True) -> None:
        groups, d, m = layer.shape
        self.takes_several = layer.weight is None
        self._layer, phi = layer, layer.geometry.patches(promoted(inputs)).squeeze(2)  # n, G, m
        flat = phi.flatten(0, 1)
        self._norms = layer.backend.row_dots(flat, flat).view(len(phi), groups)
        factor = layer.factor if by_factor or layer.factored is None else promoted(layer.factored).mT
        self._factor = None if factor is None else factor.to(phi.dtype)
        self._phi, weight = phi, layer.weight
        if weight is None:
            return
        self._weight = weight = weight.to(phi.dtype)
        if layer.forms.by_row:
            self._outputs = _applied(phi, weight)
        if layer.forms.weighted:
            self._variances = phi.new_empty(*phi.shape[:2], d)  # Σ_j w_sj² φ_j²
            rows, squares = max(1, _ENTRIES // m), phi.square()
            for part, made in zip(weight.split(rows, dim=1), self._variances.split(rows, dim=2), strict=True):
                made.copy_(_applied(squares, part.square()))  # without a second matrix of the weight's size

    def forms(self, cotangent: Calls) -> Forms:
        """Return the forms of a cotangent, (n, …); of k stacked ones, (k n, …), without those of w ∘ M."""
        layer, made = self._layer, self._layer.forms
        delta = promoted(layer.geometry.rows(cotangent[0]))  # n, G, 1, d
        rows = delta.squeeze(2)
        squares = gram_weighted = weighted = by_column = by_row = None
        if self._factor is not None:
            factor = self._factor.to(rows.dtype)
            single = len(factor) == 1
            projected = _applied(rows, factor) if single else product(factor, delta.mT).mT.squeeze(2)
            gram_weighted = self._times_norms(projected)
        if made.squares:
            squares = self._times_norms(rows)
        if made.weighted:
            weighted = (rows.square().flatten(1) * self._variances.flatten(1)).sum(dim=1, dtype=torch.float64)
        if made.by_column:
            columns = self._phi * _applied(rows, self._weight.mT)
            by_column = columns.unflatten(2, (-1, layer.geometry.kernel_elements)).sum(dim=3).flatten(1).double()
        if made.by_row:
            by_row = (rows * self._outputs).flatten(1).double()
        return Forms(squares, gram_weighted, weighted, by_column, by_row)

    def _times_norms(self, rows: Tensor) -> Tensor:
        """Return |φ|² |a|² summed over groups, (n,), for a (n, G, …)."""
        flat = rows.flatten(0, 1)
        squares = self._layer.backend.row_dots(flat, flat)
        terms = squares.view(-1, *self._norms.shape) * self._norms  # stacked cotangents share the inputs
        return terms.sum(dim=2).flatten()


def _applied(vectors: Tensor, weight: Tensor) -> Tensor:
    """Return w times vectors: (n, G, m), (G, d, m) -> (n, G, d); one matrix in a batched product would be copied."""
    if len(weight) == 1:
        return product(vectors.squeeze(1), weight[0].t()).unsqueeze(1)
    return product(vectors.transpose(0, 1), weight.mT).transpose(0, 1)


class Summed(LayerRoute):
    """Compute M, and its forms, for several calls that cannot be joined."""

    def __init__(self, layer: PreparedWeight, inputs: Calls) -> None:
        self._layer, self._inputs = layer, inputs

    def forms(self, cotangent: Calls) -> Forms:
        layer, gradients = self._layer, self._layer.gradients(self._inputs, cotangent)
        factor, weight = (None if t is None else t.to(gradients.dtype) for t in (layer.factor, layer.weight))
        return layer.backend.products(gradients, layer.geometry, factor, weight)


class Stacked(LayerRoute):
    """Compute |M|² and |R M|² of at most ``size`` cotangents together, so that it does not take any number of them."""

    def __init__(self, layer: PreparedWeight, phi: Tensor, size: int, *, by_gram: bool, squares: bool) -> None:
        half = layer.half_factor is not None and phi.dtype == layer.half_factor.dtype
        phi = phi if half else promoted(phi)
        groups, d, _ = layer.shape
        self._samples, self._size, self._dtype = len(phi), size, phi.dtype
        self._shape = len(phi) * groups, d, layer.places(phi)
        self._squares: _ByGram | _ByPatches = _ByGram(layer, phi) if by_gram else _ByPatches(layer, phi)
        self._factors: dict[str, Tensor | None] = {"squares": None} if squares else {}
        factor = layer.half_factor if half else layer.factor
        if factor is not None:
            each = factor.to(phi.dtype).expand(self._samples, *factor.shape)
            self._factors["gram_weighted"] = each.flatten(0, 1)  # a view if there is one group
        self._rows: dict[str, Tensor] = {}  # of kept cotangents, (n G, size, r, P)
        self._each: dict[str, tuple[Tensor, ...]] = {}  # views of these, one for each cotangent

    def put(self, number: int, cotangent: Tensor) -> None:
        delta = cotangent.reshape(self._shape).to(self._dtype)
        for name, factor in self._factors.items():
            if name not in self._rows:
                count = delta.shape[1] if factor is None else factor.shape[1]
                rows = delta.new_empty(len(delta), self._size, count, delta.shape[2])
                self._rows[name], self._each[name] = rows, rows.unbind(1)
            if factor is None:
                self._each[name][number].copy_(delta)
            elif delta.shape[1] == 1:
                torch.mul(factor, delta, out=self._each[name][number])  # a depthwise convolution has many such groups
            else:
                multiply = product if self._dtype == promoted_dtype(self._dtype) else torch.bmm
                multiply(factor, delta, out=self._each[name][number])

    def taken(self, count: int) -> Forms:
        rows, self._rows, self._each = self._rows, {}, {}
        found = {}
        for name in self._factors:
            values = self._squares.of(rows.pop(name)[:, :count])
            found[name] = values.unflatten(0, (self._samples, -1)).sum(dim=1).t().flatten()
        return Forms(**found)

    def forms(self, cotangent: Calls) -> Forms:
        each = cotangent[0].split(self._samples)
        for number, one in enumerate(each):
            self.put(number, one)
        return self.taken(len(each))


class _ByPatches:
    """Compute |a φ|², (n G, K) float64 for rows a (n G, K, r, P), with patches φ of some samples at a time."""

    def __init__(self, layer: PreparedWeight, phi: Tensor) -> None:
        self._layer, self._phi = layer, phi

    def of(self, rows: Tensor) -> Tensor:
        layer, (groups, _, m) = self._layer, self._layer.shape
        _, count, r, places = rows.shape
        chunk = layer.chunk(groups * m * (count * r + places), rows.dtype)
        found = []
        for phi, some in zip(self._phi.split(chunk), rows.split(chunk * groups), strict=True):
            made = product(some.flatten(1, 2), layer.patches(phi).flatten(0, 1)).view(-1, r, m)
            found.append(_dots(layer, made, made))
        return torch.cat(found).view(-1, count)


class _ByGram:
    """Compute the same, ⟨a G, a⟩, with Gram matrices G = φ φᵀ of patches, made once."""

    def __init__(self, layer: PreparedWeight, phi: Tensor) -> None:
        self._layer, (groups, _, m) = layer, layer.shape
        places = layer.places(phi)
        found = []
        for some in phi.split(layer.chunk(groups * places * (m + places), phi.dtype)):
            patches = layer.patches(some).flatten(0, 1)
            found.append(product(patches, patches.mT))
        self._gram = found[0] if len(found) == 1 else torch.cat(found)

    def of(self, rows: Tensor) -> Tensor:
        _, count, r, places = rows.shape
        half = rows.dtype != self._gram.dtype
        chunk = self._layer.chunk(places * (places if half else count * r), self._gram.dtype)
        contract = self._pairs if half else self._products
        each = zip(rows.split(chunk), self._gram.split(chunk), strict=True)
        return torch.cat([contract(some, gram) for some, gram in each])

    def _products(self, rows: Tensor, gram: Tensor) -> Tensor:
        """Return ⟨a G, a⟩."""
        made = product(rows.flatten(1, 2), gram).view(-1, *rows.shape[2:])
        return _dots(self._layer, made, rows.flatten(0, 1)).view(rows.shape[:2])

    def _pairs(self, rows: Tensor, gram: Tensor) -> Tensor:
        """Return ⟨aᵀ a, G⟩ of rows in half precision, so that G is not rounded to that."""
        each = [_dots(self._layer, product(some.mT, some), gram) for some in rows.unbind(1)]
        return torch.stack(each, dim=1)


def _dots(layer: PreparedWeight, a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of matrices (k, rows, columns), (k,) float64; if k is small, in parallel over rows."""
    if len(a) >= _MANY:
        return layer.backend.row_dots(a.flatten(1), b.flatten(1))
    return layer.backend.row_dots(a.flatten(0, 1), b.flatten(0, 1)).view(a.shape[:2]).sum(dim=1)


class Written(Direct):
    """Compute M in torch for some samples at a time, for forms of w ∘ M; see :class:`Direct`."""

    def forms(self, cotangent: Calls) -> Forms:
        layer, (groups, d, m) = self._layer, self._layer.shape
        places, dtype = layer.places(self._phi), promoted(self._phi[:0]).dtype
        factor, weight = (None if t is None else t.to(dtype) for t in (self._factor, layer.weight))
        chunk = layer.chunk(groups * m * (2 * d + places), dtype)
        parts = []
        for phi, delta in zip(self._phi.split(chunk), cotangent[0].split(chunk), strict=True):
            gradients = layer.gradients([phi], [delta])
            parts.append(layer.backend.products(gradients, layer.geometry, factor, weight))
        return Forms.joined(parts)


class LibraryRoutes:
    """Choose among the routes by products of a matrix library, which stack the rows a of several cotangents.

    At least ``fewest`` cotangents are contracted together; if it ``gathers``, they may have some elements of each row.
    """

    fewest = 2
    gathers = False

    def __init__(self, layer: PreparedWeight) -> None:
        self._layer = layer

    def of(self, phi: Tensor, stack_size: int, positions: Tensor | None, *, by_gram: bool) -> LayerRoute:
        """Return the route prepared for a layer's inputs; see :meth:`.Contractor.at`."""
        layer = self._layer
        if layer.weight is None:
            return Stacked(layer, phi, stack_size, by_gram=by_gram, squares=layer.forms.squares)
        if not by_gram or not layer.factor_rows:
            return Written(layer, phi, layer.factor)
        by_gram_alone = Stacked(layer, phi, stack_size, by_gram=True, squares=False)
        return Both(Written(layer, phi, None), by_gram_alone)

    def room(self, held: int) -> int:
        """Return how many of ``held`` bytes the cotangents that are held back may take."""
        return held

    def rows(self) -> int:
        """Return the rows that are held back for each group of a cotangent, with several positions."""
        layer = self._layer
        d, r = layer.shape[1], layer.factor_rows
        return r + (d if layer.forms.squares else 0) if r else d

    def direct(self, places: int, rows: int) -> int:
        """Return the multiply-adds for one sample and cotangent by M or a φ, with ``rows`` rows a."""
        _, d, m = self._layer.shape
        return self._layer.factor_rows * d * places + rows * m * places

    def carried(self, places: int, count: int) -> float:
        """Return the multiply-adds from a given wᵀ δ in place of δ; infinity if that is no route."""
        return math.inf


class KernelRoutes(LibraryRoutes):
    """Choose among the routes by kernels; copies of cotangents that are held back fit in a processor's caches."""

    fewest = 4
    gathers = True

    def of(self, phi: Tensor, stack_size: int, positions: Tensor | None, *, by_gram: bool) -> LayerRoute:
        layer, phi = self._layer, promoted(phi)
        if not by_gram and stack_size > 1:
            return DirectGathered(layer, phi, positions)
        if not by_gram:
            return Direct(layer, phi, layer.factor)
        if layer.weight is None:
            return Gram(layer, phi, squares=layer.forms.squares)
        gram = Gram(layer, phi, squares=False) if layer.factor_rows else None
        return Both(Direct(layer, phi, None), gram)

    def room(self, held: int) -> int:
        return min(held, self._layer.memory)

    def rows(self) -> int:
        return self._layer.shape[1]

    def direct(self, places: int, rows: int) -> int:
        _, d, m = self._layer.shape
        return d * m * places + self._layer.factor_rows * d * m

    def carried(self, places: int, count: int) -> float:
        return self._layer.shape[2] * places**2 * (1 + 1 / max(1, count))

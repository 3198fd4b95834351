"""Go from a layer's inputs φ and a cotangent δ to what its quantities are made of, by several routes.

Each is prepared once for the inputs of a micro-batch, and then makes the products of one cotangent after another. They
are chosen by :mod:`.layer`, by their multiply-adds per sample and cotangent, K cotangents sharing φ:

- :class:`Direct`: M, then R M: d m P + r d m. Early convolutions.
- :class:`Gram`: Σ_pp' ⟨φ_p, φ_p'⟩ ⟨R δ_p, R δ_p'⟩: r d P + r P² + m P² / K. Late convolutions, sequences; with one
  position it is |φ|² |R δ|² (:class:`OnePosition`).

There is no such form of w ∘ M: M is made for it (:class:`Both`), but for one position, where M = δ φᵀ. The two are for
the kernels in C++; where there are none :mod:`.stacked` has their counterparts.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from . import compiled, reference
from .factor import gram_factor, half_factor
from .geometry import Geometry
from .precision import product, promoted, promoted_dtype
from .quantities import Made
from .reference import Products

Calls = Sequence[Tensor]
"""One tensor in the form of :mod:`.geometry`, or one for each call of the layer where they cannot be joined."""

_ENTRIES = 2**20
"""Of a weight that are squared at a time."""


@dataclass(frozen=True)
class Prepared:
    """Hold what the routes need of a layer's weight w (G, d, m), prepared once.

    Attributes:
        shape: (G, d, m).
        geometry: which inputs a position sees.
        backend: a module from :func:`.backends.choose`.
        products: what is to be made.
        factored: w, if R is needed.
        weight: w, if w ∘ M is needed.
        memory: bytes for working buffers of M.
        serves_half: whether products with R in bfloat16 may be taken.
    """

    shape: torch.Size
    geometry: Geometry
    backend: ModuleType
    products: Made
    factored: Tensor | None
    weight: Tensor | None
    memory: int
    serves_half: bool = False

    @functools.cached_property
    def factor(self) -> Tensor | None:
        """Return R, (G, r, d) with RᵀR = w wᵀ, if it is needed; it is made when it first is."""
        return None if self.factored is None else gram_factor(promoted(self.factored))

    @functools.cached_property
    def half_factor(self) -> Tensor | None:
        """Return R in bfloat16, where products of that serve."""
        return half_factor(self.factor, self.factored) if self.serves_half and self.factored is not None else None

    @property
    def factor_rows(self) -> int:
        """Return the rows r of R; 0 if it is not needed."""
        return 0 if self.factored is None else min(self.shape[1:])

    def places(self, phi: Tensor) -> int:
        """Return how many positions the layer has on inputs."""
        return math.prod(self.geometry.places(phi.shape[2:]))

    def chunk(self, elements: int, dtype: torch.dtype) -> int:
        """Return how many samples, of so many elements each once they are promoted, the memory for buffers holds."""
        return max(1, self.memory // (promoted_dtype(dtype).itemsize * max(1, elements)))

    def patches(self, phi: Tensor) -> Tensor:
        """Return φ by position, (n, G, P, m)."""
        patches: Tensor = self.backend.patches(phi, self.geometry)
        return patches

    def gradients(self, inputs: Calls, cotangent: Calls) -> Tensor:
        """Return M, (n, G, d, m)."""
        first, *others = (
            product(self.geometry.rows(promoted(delta)).mT, self.patches(promoted(x)))
            for x, delta in zip(inputs, cotangent, strict=True)
        )
        return sum(others, start=first)


class Direct:
    """Make M by the kernels, and what is wanted of it.

    Args:
        layer: the weight.
        phi: the inputs, joined.
        factor: R, if |R M|² is to be made here.
    """

    def __init__(self, layer: Prepared, phi: Tensor, factor: Tensor | None) -> None:
        self._layer, self._phi, self._factor = layer, phi, factor

    def products(self, cotangent: Calls) -> Products:
        """Return the products of a cotangent."""
        phi, delta = promoted(self._phi), promoted(cotangent[0])
        factor, weight = (None if t is None else t.to(delta.dtype) for t in (self._factor, self._layer.weight))
        return compiled.direct(phi, delta, self._layer.geometry, factor, weight)


class Gathered:
    """Contract several cotangents together, from the positions where any of them is not zero.

    Args:
        layer: the weight.
        phi: the inputs, joined.
        positions: (n, G d, elements) int32, those of the cotangents' elements, if these are not whole.
    """

    def __init__(self, layer: Prepared, phi: Tensor, positions: Tensor | None = None) -> None:
        self._layer, self._phi, self._positions = layer, phi, positions

    def products(self, cotangents: Calls) -> Products:
        """Return the products of cotangents of which all samples of one are behind those of another."""
        layer, each = self._layer, promoted(cotangents[0]).split(len(self._phi))
        return compiled.direct_gathered(self._phi, each, layer.geometry, layer.factor, self._positions)


class Gram:
    """Compute |M|² and |R M|² from the Gram matrices of inputs and cotangent, without M.

    It is the route for layers of several positions.

    Args:
        layer: the weight.
        phi: the inputs, joined.
        squares: whether |M|² is to be made here.
    """

    def __init__(self, layer: Prepared, phi: Tensor, *, squares: bool) -> None:
        self._layer, self._squares = layer, squares
        self._gram = compiled.patch_gram(phi, layer.geometry)

    def products(self, cotangent: Calls) -> Products:
        """Return the products of a cotangent."""
        layer, gram = self._layer, self._gram
        rows = layer.geometry.rows(promoted(cotangent[0]))
        squares = gram_weighted = None
        if layer.factor is not None:
            # of a convolution's cotangent as it lies in memory: R (r, d) times (d, P)
            gram_weighted = compiled.gram(product(layer.factor.to(rows.dtype), rows.mT).mT, gram)
        if self._squares:
            squares = compiled.gram(rows, gram)
        return Products(squares, gram_weighted, None, None, None)


class Carried:
    """Compute |R M|² by Gram matrices from the cotangent carried to the layer's input, γ = wᵀ δ, of many positions.

    Args:
        layer: the weight.
        phi: the inputs, joined.
    """

    def __init__(self, layer: Prepared, phi: Tensor) -> None:
        self._geometry, self._gram = layer.geometry, compiled.patch_gram(phi, layer.geometry)

    def products(self, carried: Calls) -> Products:
        """Return the products of a cotangent, from γ (n, m, positions)."""
        return Products(None, compiled.gram(self._geometry.rows(carried[0]), self._gram), None, None, None)


class Route(Protocol):
    """Know what has been prepared of a layer's inputs."""

    def products(self, cotangent: Calls) -> Products:
        """Return the products of a cotangent."""


class Both:
    """Compute what has a form without M by that form, and the rest by M.

    Args:
        by_gradients: the route by M.
        by_gram: the route to |R M|²; None if that is not wanted.
    """

    def __init__(self, by_gradients: Route, by_gram: Route | None) -> None:
        self._by_gradients, self._by_gram = by_gradients, by_gram

    def products(self, cotangent: Calls) -> Products:
        """Return the products of a cotangent."""
        found = self._by_gradients.products(cotangent)
        if self._by_gram is None:
            return found
        return found._replace(gram_weighted=self._by_gram.products(cotangent).gram_weighted)


class OnePosition:
    """Compute all products of layers of one position, M = δ φᵀ; what depends on φ alone is prepared once.

    |M|² = |φ|² |δ|², |R M|² = |φ|² |R δ|², |w ∘ M|² = Σ_s δ_s² (Σ_j w_sj² φ_j²), and of w ∘ M the sums by row
    δ_s ⟨w_s, φ⟩ and by column φ_j Σ_s δ_s w_sj.

    Args:
        layer: the weight.
        inputs: φ.
    """

    def __init__(self, layer: Prepared, inputs: Tensor) -> None:
        groups, d, m = layer.shape
        self._layer, phi = layer, layer.geometry.patches(promoted(inputs)).squeeze(2)  # n, G, m
        flat = phi.flatten(0, 1)
        norms: Tensor = layer.backend.row_dots(flat, flat)
        self._norms = norms.view(len(phi), groups)
        self._phi, weight = phi, layer.weight
        if weight is None:
            return
        self._weight = weight = weight.to(phi.dtype)
        if layer.products.by_row:
            self._outputs = _applied(phi, weight)
        if layer.products.weighted:
            self._variances = phi.new_empty(*phi.shape[:2], d)  # Σ_j w_sj² φ_j²
            rows, squares = max(1, _ENTRIES // m), phi.square()
            for part, made in zip(weight.split(rows, dim=1), self._variances.split(rows, dim=2), strict=True):
                made.copy_(_applied(squares, part.square()))  # no second matrix of the weight's size

    def products(self, cotangent: Calls) -> Products:
        """Return the products of a cotangent; without those of w ∘ M of several, one behind the other."""
        layer, made = self._layer, self._layer.products
        delta = promoted(layer.geometry.rows(cotangent[0]))  # n, G, 1, d
        rows = delta.squeeze(2)
        squares = gram_weighted = weighted = by_column = by_row = None
        if layer.factor is not None:
            factor = layer.factor.to(rows.dtype)
            single = len(factor) == 1
            turned = _applied(rows, factor) if single else product(factor, delta.mT).mT.squeeze(2)
            gram_weighted = self._times_norms(turned)
        if made.squares:
            squares = self._times_norms(rows)
        if made.weighted:
            weighted = reference.row_dots(rows.square().flatten(1), self._variances.flatten(1))
        if made.by_column:
            columns = self._phi * _applied(rows, self._weight.mT)
            by_column = columns.unflatten(2, (-1, layer.geometry.kernel_elements)).sum(dim=3).flatten(1).double()
        if made.by_row:
            by_row = (rows * self._outputs).flatten(1).double()
        return Products(squares, gram_weighted, weighted, by_column, by_row)

    def _times_norms(self, rows: Tensor) -> Tensor:
        """Return |φ|² |a|² over all groups for a (n, G, …)."""
        flat = rows.flatten(0, 1)
        squares: Tensor = self._layer.backend.row_dots(flat, flat)
        terms = squares.view(-1, *self._norms.shape) * self._norms  # of cotangents that share the inputs
        return terms.sum(dim=2).flatten()


def _applied(vectors: Tensor, weight: Tensor) -> Tensor:
    """Return w times vectors: (n, G, m), (G, d, m) -> (n, G, d); a batched product of one matrix would copy it."""
    if len(weight) == 1:
        return product(vectors.squeeze(1), weight[0].t()).unsqueeze(1)
    return product(vectors.transpose(0, 1), weight.mT).transpose(0, 1)


class Summed:
    """Write M out, of several calls that cannot be joined.

    Args:
        layer: the weight.
        inputs: of each call.
    """

    def __init__(self, layer: Prepared, inputs: Calls) -> None:
        self._layer, self._inputs = layer, inputs

    def products(self, cotangent: Calls) -> Products:
        """Return the products of a cotangent."""
        layer, gradients = self._layer, self._layer.gradients(self._inputs, cotangent)
        factor, weight = (None if t is None else t.to(gradients.dtype) for t in (layer.factor, layer.weight))
        found: Products = layer.backend.products(gradients, layer.geometry, factor, weight)
        return found


def joined(parts: Sequence[Products]) -> Products:
    """Return the products of several pieces' samples, one piece behind the other."""
    return Products(*(None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)))

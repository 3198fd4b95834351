"""Go from a layer's inputs φ and a cotangent δ to what its quantities are made of, by several routes.

Each is prepared once for the inputs of a micro-batch, and then makes the products of one cotangent after another. They
are chosen by :mod:`.layer`, by their multiply-adds per sample and cotangent, K cotangents sharing φ:

- :class:`Direct`: M, then R M: d m P + r d m. Early convolutions.
- :class:`Gram`: Σ_pp' ⟨φ_p, φ_p'⟩ ⟨R δ_p, R δ_p'⟩: r d P + r P² + m P² / K. Late convolutions, sequences; with one
  position it is |φ|² |R δ|² (:class:`OnePosition`).

There is no such form of w ∘ M: M is made for it (:class:`Both`), but for one position, where M = δ φᵀ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from . import cuda, reference
from .geometry import Geometry
from .precision import promoted, promoted_dtype
from .quantities import Made
from .reference import Products

Calls = Sequence[Tensor]
"""One tensor in the form of :mod:`.geometry`, or one for each call of the layer where they cannot be joined."""

_ENTRIES = 2**20
"""Of a weight that are squared at a time."""


class Workspace:
    """Keep memory for what one layer after another makes and forgets: pages that come and go cost as much as products.

    Args:
        limit: bytes that are kept at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = torch.empty(0, dtype=torch.uint8)

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Return a tensor of a shape, of another one's dtype and device: the memory of the last one that was taken."""
        needed = math.prod(shape) * like.element_size()
        if needed > self._limit:
            return like.new_empty(shape)
        if len(self._kept) < needed or self._kept.device != like.device:
            self._kept = torch.empty(needed, dtype=torch.uint8, device=like.device)
        return self._kept[:needed].view(like.dtype).view(shape)


@dataclass(frozen=True)
class Prepared:
    """Hold what the routes need of a layer's weight w (G, d, m), prepared once.

    Attributes:
        shape: (G, d, m).
        geometry: which inputs a position sees.
        backend: a module from :func:`.backends.choose`.
        products: what is to be made.
        factor: R, (G, r, d) with RᵀR = w wᵀ, if it is needed.
        half_factor: the same in bfloat16, where products of that serve.
        weight: w, if w ∘ M is needed.
        memory: bytes for working buffers of M.
        workspace: kept from one call to the next.
    """

    shape: torch.Size
    geometry: Geometry
    backend: ModuleType
    products: Made
    factor: Tensor | None
    half_factor: Tensor | None
    weight: Tensor | None
    memory: int
    workspace: Workspace

    def taken(self, tensor: Tensor) -> Tensor:
        """Return it as the kernels take it: half precision as it is, where they do, else as float32."""
        return tensor if self.backend is cuda and tensor.dtype in cuda.HALF else promoted(tensor)

    def gradients(self, inputs: Calls, cotangent: Calls) -> Tensor:
        """Return M, (n, G, d, m)."""
        first, *others = (
            self.geometry.rows(promoted(delta)).transpose(2, 3) @ self.geometry.patches(promoted(x))
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
        layer, phi, delta = self._layer, self._phi, self._layer.taken(cotangent[0])
        if delta.dtype != phi.dtype:
            phi, delta = promoted(phi), promoted(delta)
        dtype = promoted_dtype(delta.dtype)
        factor, weight = self._factor, layer.weight
        factor, weight = None if factor is None else factor.to(dtype), None if weight is None else weight.to(dtype)
        if layer.backend is not reference:
            return cast(Products, layer.backend.direct(phi, delta, layer.geometry, factor, weight))
        groups, d, m = layer.shape  # the reference writes patches and M out, and w ∘ M
        places = delta.shape[2] * delta.shape[3] * delta.shape[4]
        chunk = max(1, layer.memory // (phi.element_size() * groups * m * (places + (2 if weight is None else 6) * d)))
        parts = [
            reference.direct(x, y, layer.geometry, factor, weight)
            for x, y in zip(phi.split(chunk), delta.split(chunk), strict=True)
        ]
        return parts[0] if len(parts) == 1 else joined(parts)


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
        layer, each = self._layer, self._layer.taken(cotangents[0]).split(len(self._phi))
        found = layer.backend.direct_gathered(self._phi, each, layer.geometry, layer.factor, self._positions)
        return cast(Products, found)


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
        self._gram = layer.backend.patch_gram(phi, layer.geometry)

    def products(self, cotangent: Calls) -> Products:
        """Return the products of a cotangent."""
        layer, gram = self._layer, self._gram
        rows = layer.geometry.rows(layer.taken(cotangent[0]))
        squares = gram_weighted = None
        if layer.half_factor is not None and rows.dtype == torch.bfloat16:
            gram_weighted = cuda.factored_gram(layer.half_factor, rows, gram)
        elif layer.factor is not None:
            full = promoted(rows)  # float16 would leave its range
            # of a convolution's cotangent as it lies in memory: R (r, d) times (d, P)
            gram_weighted = layer.backend.gram(self._factored(full), gram)
        if self._squares:
            squares = layer.backend.gram(rows, gram)
        return Products(squares, gram_weighted, None, None, None)

    def _factored(self, rows: Tensor) -> Tensor:
        """Return R δ for δ (n, G, P, d), (n, G, P, r)."""
        layer = self._layer
        assert layer.factor is not None
        n, groups, positions, d = rows.shape
        r = layer.factor.shape[1]
        factor = layer.factor.to(rows.dtype).expand(n, -1, -1, -1).reshape(-1, r, d)
        made = layer.workspace.take(rows, n * groups, r, positions)
        torch.bmm(factor, rows.mT.reshape(-1, d, positions), out=made)
        return made.view(n, groups, r, positions).mT


class Both:
    """Compute what has a form without M by that form, and the rest by M.

    Args:
        by_gradients: the route by M.
        by_gram: the route to |R M|²; None if that is not wanted.
    """

    def __init__(self, by_gradients: Direct, by_gram: Gram | None) -> None:
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
        delta = promoted(layer.geometry.rows(layer.taken(cotangent[0])))  # n, G, 1, d
        rows = delta.squeeze(2)
        squares = gram_weighted = weighted = by_column = by_row = None
        if layer.factor is not None:
            factor = layer.factor.to(rows.dtype)
            single = len(factor) == 1
            gram_weighted = self._times_norms(_applied(rows, factor) if single else (factor @ delta.mT).mT.squeeze(2))
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
        return (vectors.squeeze(1) @ weight[0].t()).unsqueeze(1)
    return (vectors.transpose(0, 1) @ weight.mT).transpose(0, 1)


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
        return reference.products(gradients, layer.geometry, factor, weight)


def joined(parts: Sequence[Products]) -> Products:
    """Return the products of several pieces' samples, one piece behind the other."""
    return Products(*(None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)))

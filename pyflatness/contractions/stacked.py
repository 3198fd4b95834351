"""Contract a layer by products of torch's matrix library, several cotangents in each.

With rows a = δ or a = R δ (r, P), and the layer's patches φ (P, m), |M|² and |R M|² are |a φ|² = ⟨a G, a⟩, G = φ φᵀ.
The rows of K cotangents one below the other, (K r, P), are one operand. It takes r d P multiply-adds of a sample and
cotangent to make R δ, which is written where the stack has it, and then

- :class:`_ByPatches`: a φ, with φ written out for some samples at a time: r m P. Early convolutions.
- :class:`_ByGram`: a G: r P² + m P² / K. Late convolutions, sequences.
"""

from typing import Protocol

import torch
from torch import Tensor

from .precision import product, promoted, promoted_dtype
from .reference import Products
from .routes import Calls, Prepared, joined

_MANY = 1024
"""Matrices whose inner products fill a GPU."""


class _Squares(Protocol):
    """Know the inputs φ of a micro-batch."""

    def of(self, rows: Tensor) -> Tensor:
        """Return |a φ|² of rows a (n G, K, r, P), (n G, K) float64."""


class Stacked:
    """Compute |M|² and |R M|² of several cotangents together.

    Args:
        layer: the weight.
        phi: the inputs, joined.
        by_gram: whether by their Gram matrices.
        size: how many cotangents at most.
        squares: whether |M|² is to be made here.
    """

    def __init__(self, layer: Prepared, phi: Tensor, size: int, *, by_gram: bool, squares: bool) -> None:
        half = layer.half_factor is not None and phi.dtype == layer.half_factor.dtype
        phi = phi if half else promoted(phi)
        groups, d, _ = layer.shape
        self._samples, self._size, self._dtype = len(phi), size, phi.dtype
        self._shape = len(phi) * groups, d, layer.places(phi)
        self._squares: _Squares = _ByGram(layer, phi) if by_gram else _ByPatches(layer, phi)
        self._factors: dict[str, Tensor | None] = {"squares": None} if squares else {}
        factor = layer.half_factor if half else layer.factor
        if factor is not None:
            each = factor.to(phi.dtype).expand(self._samples, *factor.shape)
            self._factors["gram_weighted"] = each.flatten(0, 1)  # of one group no copy
        self._rows: dict[str, Tensor] = {}  # of the cotangents that were taken in, (n G, size, r, P)
        self._each: dict[str, tuple[Tensor, ...]] = {}  # of one after the other

    def put(self, number: int, cotangent: Tensor) -> None:
        """Take a cotangent in as the one of this number."""
        delta = cotangent.reshape(self._shape).to(self._dtype)
        for name, factor in self._factors.items():
            if name not in self._rows:
                count = delta.shape[1] if factor is None else factor.shape[1]
                rows = delta.new_empty(len(delta), self._size, count, delta.shape[2])
                self._rows[name], self._each[name] = rows, rows.unbind(1)
            if factor is None:
                self._each[name][number].copy_(delta)
            elif delta.shape[1] == 1:
                torch.mul(factor, delta, out=self._each[name][number])  # depthwise, of many small products
            else:
                multiply = product if self._dtype == promoted_dtype(self._dtype) else torch.bmm
                multiply(factor, delta, out=self._each[name][number])

    def taken(self, count: int) -> Products:
        """Return the products of the first cotangents that were taken in, one behind the other."""
        rows, self._rows, self._each = self._rows, {}, {}
        found = {}
        for name in self._factors:
            values = self._squares.of(rows.pop(name)[:, :count])
            found[name] = values.unflatten(0, (self._samples, -1)).sum(dim=1).t().flatten()
        return Products(found.get("squares"), found.get("gram_weighted"), None, None, None)

    def products(self, cotangents: Calls) -> Products:
        """Return the products of cotangents of which all samples of one are behind those of another."""
        each = cotangents[0].split(self._samples)
        for number, cotangent in enumerate(each):
            self.put(number, cotangent)
        return self.taken(len(each))


class _ByPatches:
    """Multiply by patches that are written out for some samples at a time, and forgotten."""

    def __init__(self, layer: Prepared, phi: Tensor) -> None:
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
    """Multiply by Gram matrices of patches, made once."""

    def __init__(self, layer: Prepared, phi: Tensor) -> None:
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
        """Return ⟨aᵀ a, G⟩ of rows in half precision, which G would lose its digits in."""
        each = [_dots(self._layer, product(some.mT, some), gram) for some in rows.unbind(1)]
        return torch.stack(each, dim=1)


def _dots(layer: Prepared, a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of matrices (k, rows, columns), (k,) float64; of few a row at a time, in parallel."""
    if len(a) >= _MANY:
        found: Tensor = layer.backend.row_dots(a.flatten(1), b.flatten(1))
        return found
    found = layer.backend.row_dots(a.flatten(0, 1), b.flatten(0, 1))
    return found.view(a.shape[:2]).sum(dim=1)


class Written:
    """Write M out for some samples at a time, for what is made of w ∘ M.

    Args:
        layer: the weight.
        phi: the inputs, joined.
        factor: R, if |R M|² is to be made here.
    """

    def __init__(self, layer: Prepared, phi: Tensor, factor: Tensor | None) -> None:
        self._layer, self._phi, self._factor = layer, phi, factor

    def products(self, cotangent: Calls) -> Products:
        """Return the products of a cotangent."""
        layer, (groups, d, m) = self._layer, self._layer.shape
        places, dtype = layer.places(self._phi), promoted(self._phi[:0]).dtype
        factor, weight = (None if t is None else t.to(dtype) for t in (self._factor, layer.weight))
        chunk = layer.chunk(groups * m * (2 * d + places), dtype)
        parts = []
        for phi, delta in zip(self._phi.split(chunk), cotangent[0].split(chunk), strict=True):
            gradients = layer.gradients([phi], [delta])
            parts.append(layer.backend.products(gradients, layer.geometry, factor, weight))
        return parts[0] if len(parts) == 1 else joined(parts)

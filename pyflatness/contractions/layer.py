"""Quadratic forms in a layer's per-sample weight gradients M = Σ_p δ_p φ_pᵀ, without M where that is cheaper.

For signals δ (output factors sent backward) and R with RᵀR = w wᵀ (the R factor of wᵀ):

- ``squares``: |M|², the trace of the block Hessian's GGN;
- ``rooted``: |R M|² = ⟨w wᵀ, M Mᵀ⟩, relative flatness.

Routes, chosen per layer by their multiply-adds per sample and signal, K signals sharing φ:

- ``direct``: M, then R M: d m P + r d m. Early convolutions.
- ``gram``: Σ_pp' ⟨φ_p, φ_p'⟩ ⟨R δ_p, R δ_p'⟩: r d P + r P² + m P² / K. Late convolutions, sequences; with one position
  it is |φ|² |R δ|².
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from . import reference
from .geometry import Geometry
from .precision import promoted

Signals = Sequence[Tensor]
"""One tensor in the form of :mod:`.geometry`, or one for each call of the layer where they cannot be joined."""

QUANTITIES = ("squares", "rooted")
ROUTES = ("direct", "gram")


class WeightGradients:
    """Quadratic forms for one layer, with what depends on the weight alone prepared once.

    Args:
        weight: (G, d, m).
        geometry: which inputs a position sees.
        backend: a module from :func:`.backends.choose`.
        quantities: of :data:`QUANTITIES`.
        memory: bytes for working buffers of the direct route.
        route: of :data:`ROUTES`; None takes the cheaper.
    """

    def __init__(
        self,
        weight: Tensor,
        geometry: Geometry,
        backend: ModuleType,
        quantities: Sequence[str],
        *,
        memory: int,
        route: str | None = None,
    ) -> None:
        self._geometry, self._backend, self._quantities, self._route = geometry, backend, quantities, route
        self._shape, self._memory = weight.shape, memory
        self._root = root(promoted(weight)) if "rooted" in quantities else None

    def of(self, inputs: Signals, signals: int) -> Callable[[Signals], Tensor]:
        """For inputs φ (padded), of which so many signals will come: signal -> (quantities, n) float64."""
        inputs = [promoted(part) for part in inputs]
        if len(inputs) > 1:
            return lambda signal: self._summed(inputs, signal)
        (phi,) = inputs
        if (self._route or self.cheaper(phi, signals)) == "direct":
            return lambda signal: self._direct(phi, signal[0])
        gram = self._backend.patch_gram(phi, self._geometry)
        return lambda signal: self._gram(gram, signal[0])

    def cheaper(self, inputs: Tensor, signals: int) -> str:
        """The route with fewer multiply-adds."""
        _, d, m = self._shape
        a, b, c = self._geometry.places(inputs.shape[2:])
        places = a * b * c
        r = 0 if self._root is None else self._root.shape[1]
        pairs = (r + (d if "squares" in self._quantities else 0)) * places**2
        gram = r * d * places + pairs + m * places**2 / max(1, signals)
        return "gram" if gram < d * m * places + r * d * m else "direct"

    def traces(self, inputs: Signals, signal: Signals, coefficients: Tensor) -> Tensor:
        """Σ_i coefficient_i M_i M_iᵀ, (G, d, d) float64."""
        groups, d, m = self._shape
        total = coefficients.new_zeros(groups, d, d)
        phi = promoted(inputs[0])
        by_gram = len(inputs) == 1 and self.cheaper(phi, 1) == "gram"
        chunk = max(1, self._memory // (16 * groups * d * m))  # M and its copy in float64
        for start in range(0, len(phi), chunk):
            part = slice(start, start + chunk)
            some = coefficients[part]
            if by_gram:
                rows = self._geometry.rows(promoted(signal[0][part]))
                left = self._backend.patch_gram(phi[part], self._geometry).to(rows.dtype) @ rows
            else:
                left = rows = self._gradients([x[part] for x in inputs], [delta[part] for delta in signal]).mT
            total += ((rows.double() * some.view(-1, 1, 1, 1)).mT @ left.double()).sum(dim=0)
        return total

    def _direct(self, phi: Tensor, signal: Tensor) -> Tensor:
        groups, d, m = self._shape
        signal, parts, chunk = promoted(signal), [], len(phi)
        if self._backend is reference:  # which writes patches and M out
            places = signal.shape[2] * signal.shape[3] * signal.shape[4]
            chunk = max(1, self._memory // (phi.element_size() * groups * m * (places + 2 * d)))
        for x, delta in zip(phi.split(chunk), signal.split(chunk), strict=True):
            products = self._backend.direct(x, delta, self._geometry, self._root_like(delta), None)
            parts.append(self._stacked(products))
        return torch.cat(parts, dim=1)

    def _gram(self, gram: Tensor, signal: Tensor) -> Tensor:
        factors = {"squares": self._geometry.rows(promoted(signal))}
        if self._root is not None:
            root = self._root.to(gram.dtype)
            if factors["squares"].shape[1:3] == (1, 1):
                factors["rooted"] = factors["squares"] @ root.mT
            else:  # of a convolution's signal as it lies in memory: R (r, d) times (d, P)
                factors["rooted"] = (root @ factors["squares"].mT).mT
        return torch.stack([self._gram_of(factors[name], gram) for name in self._quantities])

    def _gram_of(self, rows: Tensor, gram: Tensor) -> Tensor:
        if rows.shape[1:3] != (1, 1):
            return cast(Tensor, self._backend.gram(rows, gram))
        flat = rows.flatten(1)
        return cast(Tensor, self._backend.row_dots(flat, flat)) * gram.flatten()

    def _summed(self, inputs: Signals, signal: Signals) -> Tensor:
        gradients = self._gradients(inputs, signal)
        return self._stacked(reference.products(gradients, self._geometry, self._root_like(gradients), None))

    def _gradients(self, inputs: Signals, signal: Signals) -> Tensor:
        gradients = [
            self._geometry.rows(promoted(delta)).transpose(2, 3) @ self._geometry.patches(promoted(x))
            for x, delta in zip(inputs, signal, strict=True)
        ]
        return torch.stack(gradients).sum(dim=0)

    def _root_like(self, tensor: Tensor) -> Tensor | None:
        return None if self._root is None else self._root.to(tensor.dtype)

    def _stacked(self, products: reference.Products) -> Tensor:
        return torch.stack([getattr(products, name) for name in self._quantities])


class DenseGradients:
    """The same for a convolution as one dense matrix W (all outputs × all inputs): M = Σ_calls vec(δ) vec(x)ᵀ.

    |Wᵀ M|² = Σ ⟨x_a, x_b⟩ ⟨γ_a, γ_b⟩ with γ = Wᵀ δ, the signal carried back through this layer alone.

    Args:
        carry: δ (n, …) -> γ, of the shape of the unpadded inputs.
        backend: a module from :func:`.backends.choose`.
        quantities: of :data:`QUANTITIES`.
    """

    def __init__(self, carry: Callable[[Tensor], Tensor], backend: ModuleType, quantities: Sequence[str]) -> None:
        self._carry, self._backend, self._quantities = carry, backend, quantities

    def of(self, inputs: Signals, signals: int) -> Callable[[Signals], Tensor]:
        """For unpadded inputs (n, …) of each call: signals (n, …) of each call -> (quantities, n) float64."""
        columns = _flat(inputs)
        gram = (columns @ columns.transpose(1, 2)).unsqueeze(1)

        def values(signal: Signals) -> Tensor:
            rows = {"squares": signal, "rooted": []}
            if "rooted" in self._quantities:
                rows["rooted"] = [self._carry(delta) for delta in signal]
            return torch.stack([self._backend.gram(_flat(rows[name]).unsqueeze(1), gram) for name in self._quantities])

        return values

    def traces(self, inputs: Signals, signal: Signals, coefficients: Tensor) -> Tensor:
        """Σ_i coefficient_i M_i M_iᵀ, (1, d, d) float64 for d the number of outputs of a sample."""
        columns, rows = _flat(inputs).double(), _flat(signal).double()
        return torch.einsum("nas,nab,nbt,n->st", rows, columns @ columns.transpose(1, 2), rows, coefficients)[None]


def root(weight: Tensor) -> Tensor:
    """R (G, min(d, m), d) with RᵀR = w wᵀ for weights (G, d, m).

    By the Cholesky factor of w wᵀ in float64, whose rounding is below float32's even after it is squared: a thin QR of
    wᵀ takes several times as long, and stalls where other processes share the cores.
    """
    columns: Tensor = weight.mT
    if columns.shape[1] <= columns.shape[2]:
        return columns
    gram = weight.double() @ columns.double()
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed.any()):  # rows that depend on each other, such as dead ones
        values, vectors = torch.linalg.eigh(gram.nan_to_num(0.0))
        factor = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
    found: Tensor = factor.mT.to(weight.dtype)
    return found


def _flat(calls: Signals) -> Tensor:
    """(n, calls, entries of a sample)."""
    return torch.stack([promoted(call).flatten(1) for call in calls], dim=1)

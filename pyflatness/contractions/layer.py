"""Quadratic forms in a layer's per-sample weight gradients M = Σ_p δ_p φ_pᵀ, without M where that is cheaper.

For signals δ (output factors sent backward) and R with RᵀR = w wᵀ (the R factor of wᵀ):

- ``squares``: |M|², the trace of the block Hessian's GGN;
- ``rooted``: |R M|² = ⟨w wᵀ, M Mᵀ⟩, relative flatness;
- ``weighted``: |w ∘ M|², adaptive sharpness;
- ``by_column``, ``by_row``: Σ_j (Σ_group j w ∘ M)², the summands beside the sum; a group is an input channel with its
  taps, or a row;
- ``diagonal``: |M|², and beside it M ∘ M summed over the samples, the diagonal of the Hessian.

Routes, chosen per layer by their multiply-adds per sample and signal, K signals sharing φ:

- ``direct``: M, then R M: d m P + r d m. Early convolutions.
- ``gram``: Σ_pp' ⟨φ_p, φ_p'⟩ ⟨R δ_p, R δ_p'⟩: r d P + r P² + m P² / K. Late convolutions, sequences; with one position
  it is |φ|² |R δ|².

There is no such form of w ∘ M: M is made for it, but for one position, where M = δ φᵀ.
"""

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import compiled, cuda, reference
from .geometry import Geometry
from .precision import promoted, promoted_dtype
from .root import root

Signals = Sequence[Tensor]
"""One tensor in the form of :mod:`.geometry`, or one for each call of the layer where they cannot be joined."""

NEURONS = ("by_column", "by_row")
WEIGHTED = ("weighted", *NEURONS)
QUANTITIES = ("squares", "rooted", *WEIGHTED, "diagonal")
ROUTES = ("direct", "gram")

_MANY_ROWS = 256
"""From here on the rounding of R to bfloat16 averages out of |R M|², if all its entries are of one size."""


_ENTRIES = 2**20
"""Of a weight that are squared at a time."""

_FEWEST = 4
"""Signals that are worth being contracted together."""


class Share(NamedTuple):
    """What one signal adds."""

    values: Tensor
    """(quantities, n) float64."""
    parts: dict[str, Tensor]
    """By quantity, float64: of :data:`NEURONS` the summands (n, neurons); of ``diagonal`` Σ_i M_i ∘ M_i, (G, d, m)."""


Contraction = Callable[..., Share]
"""(signal, its sign: one number, (n,), or None for +1) -> its share."""


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
        self._shape, self._device, self._memory = weight.shape, weight.device, memory
        self._root = root(promoted(weight)) if "rooted" in quantities else None
        self._half_root = self._as_bfloat16(weight.dtype)
        self._buffer: Tensor | None = None
        self._weight = promoted(weight) if set(WEIGHTED).intersection(quantities) else None

    def of(self, inputs: Signals, signals: int) -> Contraction:
        """For inputs φ (padded), of which so many signals will come."""
        inputs = [self._taken(part) for part in inputs]
        products = self._products(inputs, signals)

        def share(signal: Signals, sign: Tensor | float | None = None) -> Share:
            found = share_of(products(signal), self._quantities, sign)
            if "diagonal" in self._quantities:
                found.parts["diagonal"] = self.diagonal(inputs, signal, sign)
            return found

        return share

    def together(self, inputs: Signals, signals: int, memory: int) -> int:
        """How many signals of so many had better be contracted at a time, by :meth:`of_several`; 1: each alone.

        Shared out evenly, of what ``memory`` bytes hold: room for four at least, fewer are not worth the copy.
        """
        if len(inputs) > 1 or not set(self._quantities) <= {"squares", "rooted"}:
            return 1
        phi, d = inputs[0], self._shape[1]
        if self._route_of(phi, signals) == "gram":
            suits = math.prod(self._geometry.places(phi.shape[2:])) == 1
        else:
            suits = self._backend is compiled and compiled.listed_pays(phi, self._geometry, d)
        most = min(memory, self._memory) // max(1, self.signal_bytes(phi))
        return -(-signals // -(-signals // most)) if suits and min(most, signals) >= _FEWEST else 1

    def signal_bytes(self, inputs: Tensor) -> int:
        """What a signal takes, for inputs of a layer's calls joined."""
        groups, d, _ = self._shape
        places = math.prod(self._geometry.places(inputs.shape[2:]))
        return len(inputs) * groups * d * places * promoted_dtype(inputs.dtype).itemsize

    def of_several(self, inputs: Signals, signals: int) -> Callable[[Tensor, Tensor | None], Share]:
        """As :meth:`of`, for (several, n, …) signals: all samples of one behind those of another, signs too.

        Where :meth:`together` says more than one.
        """
        if self._route_of(inputs[0], signals) == "gram":
            contract = self.of(inputs, signals)
            return lambda several, sign: contract([several.flatten(0, 1)], sign)
        phi = self._taken(inputs[0])

        def share(several: Tensor, sign: Tensor | None) -> Share:
            found: reference.Products = self._backend.direct_listed(phi, several.unbind(), self._geometry, self._root)
            return share_of(found, self._quantities, sign)

        return share

    def buffer(self, count: int, signal: Tensor) -> Tensor:
        """Memory for so many such signals, (count, n, …): the same at every call, so that its pages stay."""
        needed = count * signal.numel()
        if self._buffer is None or len(self._buffer) < needed:
            self._buffer = signal.new_empty(needed, dtype=promoted_dtype(signal.dtype))
        return self._buffer[:needed].view(count, *signal.shape)

    def nothing(self, samples: int) -> Share:
        """Of no signal at all, such as a loss over a single class has."""
        groups, d, m = self._shape
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=self._device)
        neurons = {"by_column": groups * m // self._geometry.taps, "by_row": groups * d}
        parts = {name: zeros(samples, neurons[name]) for name in NEURONS if name in self._quantities}
        if "diagonal" in self._quantities:
            parts["diagonal"] = zeros(groups, d, m)
        return Share(zeros(len(self._quantities), samples), parts)

    def _products(self, inputs: Signals, signals: int) -> Callable[[Signals], reference.Products]:
        if len(inputs) > 1:
            return lambda signal: self._summed(inputs, signal)
        (phi,) = inputs
        if self._route_of(phi, signals) == "direct":
            return lambda signal: self._direct(phi, signal[0], self._root, self._weight)
        gram = self._patch_gram(phi)
        if self._weight is None:
            return lambda signal: self._gram(gram, signal[0])
        if gram.shape[2] == 1:
            rows = self._geometry.patches(promoted(phi)).squeeze(2)
            single = OnePosition(rows, self._weight, self._geometry.taps, self._quantities)

            def products(signal: Signals) -> reference.Products:
                rows = self._geometry.rows(promoted(signal[0])).squeeze(2)
                return single.products(self._gram(gram, signal[0]), rows)

            return products
        return lambda signal: self._both(gram, phi, signal[0])

    def _route_of(self, inputs: Tensor, signals: int) -> str:
        return self._route or self.cheaper(inputs, signals)

    def cheaper(self, inputs: Tensor, signals: int) -> str:
        """The route with fewer multiply-adds."""
        _, d, m = self._shape
        a, b, c = self._geometry.places(inputs.shape[2:])
        places = a * b * c
        r = 0 if self._root is None else self._root.shape[1]
        pairs = (r + (d if "squares" in self._quantities else 0)) * places**2
        gram = r * d * places + pairs + m * places**2 / max(1, signals)
        made = self._weight is not None and places > 1  # M, in either case
        return "gram" if gram < (0 if made else d * m * places) + r * d * m else "direct"

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

    def diagonal(self, inputs: Signals, signal: Signals, sign: Tensor | float | None = None) -> Tensor:
        """Σ_i sign_i M_i ∘ M_i, (G, d, m) float64."""
        groups, d, m = self._shape
        total = signal[0].new_zeros(groups, d, m, dtype=torch.float64)
        rows = self._geometry.rows(promoted(signal[0]))
        signs = None if sign is None else (rows.new_ones(len(rows)) * sign).view(-1, 1, 1, 1)
        if len(inputs) == 1 and rows.shape[2] == 1:
            patches = self._geometry.patches(inputs[0]).squeeze(2)
            left = rows.square() if signs is None else rows.square() * signs
            return torch.einsum("ngd,ngm->gdm", left.squeeze(2).double(), patches.double().square())
        chunk = max(1, self._memory // (rows.element_size() * groups * m * (2 * d + rows.shape[2])))  # M and patches
        for start in range(0, len(rows), chunk):
            some = slice(start, start + chunk)
            gradients = self._gradients([x[some] for x in inputs], [delta[some] for delta in signal]).square_()
            total += (gradients if signs is None else gradients.mul_(signs[some])).sum(dim=0)
        return total

    def _taken(self, tensor: Tensor) -> Tensor:
        """As the kernels take it: half precision as it is, where they do, else as float32."""
        return tensor if self._backend is cuda and tensor.dtype in cuda.HALF else promoted(tensor)

    def _direct(self, phi: Tensor, signal: Tensor, root: Tensor | None, weight: Tensor | None) -> reference.Products:
        groups, d, m = self._shape
        signal, chunk = self._taken(signal), max(1, len(phi))
        if signal.dtype != phi.dtype:
            phi, signal = promoted(phi), promoted(signal)
        root, weight = (None if t is None else t.to(promoted_dtype(signal.dtype)) for t in (root, weight))
        if self._backend is reference:  # which writes patches and M out, and w ∘ M
            places = signal.shape[2] * signal.shape[3] * signal.shape[4]
            copies = 2 if weight is None else 6
            chunk = max(1, self._memory // (phi.element_size() * groups * m * (places + copies * d)))
        parts = [
            self._backend.direct(x, delta, self._geometry, root, weight)
            for x, delta in zip(phi.split(chunk), signal.split(chunk), strict=True)
        ]
        if len(parts) == 1:
            return cast(reference.Products, parts[0])
        return reference.Products(*(None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)))

    def _patch_gram(self, phi: Tensor) -> Tensor:
        if self._geometry.places(phi.shape[2:]) != (1, 1, 1):
            return cast(Tensor, self._backend.patch_gram(phi, self._geometry))
        rows = self._geometry.patches(promoted(phi)).flatten(0, 2)
        norms = cast(Tensor, self._backend.row_dots(rows, rows))
        return norms.view(len(phi), self._shape[0], 1, 1)

    def _gram(self, gram: Tensor, signal: Tensor) -> reference.Products:
        rows = self._geometry.rows(self._taken(signal))
        if rows.shape[2] == 1:
            rows = promoted(rows)
        rooted = None if self._root is None else self._rooted_gram(self._root, rows, gram)
        squares = self._gram_of(rows, gram) if {"squares", "diagonal"}.intersection(self._quantities) else None
        return reference.Products(squares, rooted, None, None, None)

    def _rooted_gram(self, root: Tensor, rows: Tensor, gram: Tensor) -> Tensor:
        """``|R M|²`` of rows δ, (n, G, P, d)."""
        if self._half_root is not None and rows.dtype == torch.bfloat16:
            return cuda.rooted_gram(self._half_root, rows, gram)
        rows = promoted(rows)  # float16 would leave its range
        root = root.to(rows.dtype)
        if rows.shape[1:3] == (1, 1):
            return self._gram_of((rows.flatten(1) @ root[0].mT)[:, None, None], gram)
        # of a convolution's signal as it lies in memory: R (r, d) times (d, P)
        return self._gram_of((root @ rows.mT).mT, gram)

    def _as_bfloat16(self, dtype: torch.dtype) -> Tensor | None:
        """R for products with signals of bfloat16; None where its rounding could show.

        wᵀ is such already. Another R is multiplied by an orthogonal matrix, which leaves |R M|² alone and makes its
        entries of one size: of Cholesky's factor few count, and their rounding would not average out.
        """
        _, d, m = self._shape
        if self._root is None or self._backend is not cuda or dtype != torch.bfloat16 or min(d, m) < _MANY_ROWS:
            return None
        found = self._root
        if m > d:
            directions = torch.randn(
                d, d, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
            ).to(found.device)
            found = torch.linalg.qr(directions).Q @ found
        return found.bfloat16()

    def _both(self, gram: Tensor, phi: Tensor, signal: Tensor) -> reference.Products:
        """What has a form without M by that, the rest by M."""
        by_gradients = self._direct(phi, signal, None, self._weight)
        if self._root is None:
            return by_gradients
        rows = self._geometry.rows(self._taken(signal))
        return by_gradients._replace(rooted=self._rooted_gram(self._root, rows, gram))

    def _gram_of(self, rows: Tensor, gram: Tensor) -> Tensor:
        if rows.shape[2] > 1:
            return cast(Tensor, self._backend.gram(rows, gram))
        flat = rows.flatten(0, 2)
        squares = cast(Tensor, self._backend.row_dots(flat, flat))
        terms = squares.view(-1, *gram.shape[:2]) * gram[:, :, 0, 0]  # of signals that share the inputs
        return terms.sum(dim=2).flatten()

    def _summed(self, inputs: Signals, signal: Signals) -> reference.Products:
        gradients = self._gradients(inputs, signal)
        root, weight = (None if t is None else t.to(gradients.dtype) for t in (self._root, self._weight))
        return reference.products(gradients, self._geometry, root, weight)

    def _gradients(self, inputs: Signals, signal: Signals) -> Tensor:
        first, *others = (
            self._geometry.rows(promoted(delta)).transpose(2, 3) @ self._geometry.patches(promoted(x))
            for x, delta in zip(inputs, signal, strict=True)
        )
        return sum(others, start=first)


class OnePosition:
    """Sums over w ∘ M for layers of one position, M = δ φᵀ, with what depends on φ alone prepared once.

    Σ_s δ_s² (Σ_j w_sj² φ_j²),  by row (δ_s ⟨w_s, φ⟩)²,  by column (φ_j Σ_s δ_s w_sj)²

    Args:
        phi: φ, (n, G, m).
        weight: (G, d, m).
        taps: columns of an input channel.
        quantities: of :data:`WEIGHTED`, and any others.
    """

    def __init__(self, phi: Tensor, weight: Tensor, taps: int, quantities: Sequence[str]) -> None:
        self._phi, self._weight, self._taps, self._quantities = phi, weight.to(phi.dtype), taps, quantities
        if "by_row" in quantities:
            self._outputs = self._applied(phi, self._weight)
        if "weighted" in quantities:
            self._spread = phi.new_empty(*phi.shape[:2], weight.shape[1])
            rows, squares = max(1, _ENTRIES // weight.shape[2]), phi.square()
            for part, spread in zip(self._weight.split(rows, dim=1), self._spread.split(rows, dim=2), strict=True):
                spread.copy_(self._applied(squares, part.square()))  # no second matrix of the weight's size

    def products(self, others: reference.Products, rows: Tensor) -> reference.Products:
        """``others``, and beside them what is wanted, for δ (n, G, d)."""
        weighted = by_column = by_row = None
        quantities = self._quantities
        if "weighted" in quantities:
            weighted = reference.row_dots(rows.square().flatten(1), self._spread.flatten(1))
        if "by_column" in quantities:
            columns = self._phi * self._applied(rows, self._weight.mT)
            by_column = columns.unflatten(2, (-1, self._taps)).sum(dim=3).flatten(1).double()
        if "by_row" in quantities:
            by_row = (rows * self._outputs).flatten(1).double()
        return reference.Products(others.squares, others.rooted, weighted, by_column, by_row)

    @staticmethod
    def _applied(vectors: Tensor, weight: Tensor) -> Tensor:
        """(n, G, m), (G, d, m) -> (n, G, d); a batched product of one matrix would copy it."""
        if len(weight) == 1:
            return (vectors.squeeze(1) @ weight[0].t()).unsqueeze(1)
        return (vectors.transpose(0, 1) @ weight.mT).transpose(0, 1)


def share_of(products: reference.Products, quantities: Sequence[str], sign: Tensor | float | None) -> Share:
    """The values, and the summands of neurons, of a signal of this sign."""
    values = torch.stack([_value(products, name) for name in quantities])
    parts = {name: getattr(products, name).square() for name in NEURONS if name in quantities}
    if sign is not None:
        values, parts = values * sign, {name: (part.mT * sign).mT for name, part in parts.items()}
    return Share(values, parts)


def _value(products: reference.Products, quantity: str) -> Tensor:
    if quantity in NEURONS:
        return cast(Tensor, getattr(products, quantity)).square().sum(dim=1)
    return cast(Tensor, products.squares if quantity == "diagonal" else getattr(products, quantity))

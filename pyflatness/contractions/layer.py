"""Contract a layer: quadratic forms in per-sample weight gradients M = Σ_p δ_p φ_pᵀ, mostly without making M.

    layer = LayerContraction(weight, …)            what depends on the weight, once
    contraction = layer.at(inputs, count)          what depends on a micro-batch's inputs φ: the route, Gram matrices
    contraction.of(cotangent, sign)                for each cotangent δ: values and parts of :mod:`.quantities`

:mod:`.routes` says by which ways the products are made, :mod:`.quantities` what they are made for. Cotangents of small
layers, or that are zero at most positions, are worth being contracted several at a time: ``contraction.hold`` copies
them until there are enough.
"""

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from . import compiled, cuda
from .factor import gram_factor
from .geometry import Geometry
from .precision import promoted, promoted_dtype
from .quantities import Contribution, Wanted
from .reference import Products
from .routes import Both, Calls, Direct, Gathered, Gram, OnePosition, Prepared, Summed

ROUTES = ("direct", "gram")

_MANY_ROWS = 256
"""From here on the rounding of R to bfloat16 averages out of |R M|², if all its entries are of one size."""

_FEWEST = 4
"""Cotangents that are worth being contracted together."""

Sign = Tensor | float | None
"""Of a cotangent: one number, (n,), or None for +1."""


class Contraction:
    """Contract one cotangent after another with a layer's inputs of one micro-batch.

    Args:
        wanted: the quantities.
        products: of a cotangent, or of several one behind the other where ``stack_size`` are contracted at a time.
        entries: Σ_i sign_i M_i ∘ M_i of a cotangent and its sign, for quantities that come with it.
        stack_size: how many cotangents :meth:`hold` contracts at a time.
        buffer: of a cotangent, memory for so many.
        held: bytes that these take.
    """

    def __init__(
        self,
        wanted: Wanted,
        products: Callable[[Calls], Products],
        entries: Callable[[Calls, Sign], Tensor] | None = None,
        stack_size: int = 1,
        buffer: Callable[[int, Tensor], Tensor] | None = None,
        held: int = 0,
    ) -> None:
        self._wanted, self._products, self._entries = wanted, products, entries
        self.stack_size, self.held, self._make = stack_size, held, buffer
        self._signs: list[Sign] = []

    def of(self, cotangent: Calls, sign: Sign = None) -> Contribution:
        """Return the contribution of a cotangent by itself."""
        found = self._wanted.contribution(self._products(cotangent), sign)
        for name in self._wanted.entries:
            assert self._entries is not None
            found.parts[name] = self._entries(cotangent, sign)
        return found

    def hold(self, cotangent: Calls, sign: Sign = None) -> Contribution | None:
        """Return the contribution of the cotangents held back and this one; None if this one is held back too.

        They are copied: what backward passes give may be part of a much larger tensor, and when tensors of this size
        are kept and freed in turn, the C library gives their pages back each time, which costs more than the copies.
        """
        (delta,) = cotangent
        if not self._signs:
            assert self._make is not None
            self._buffer = self._make(self.stack_size, delta)
        self._buffer[len(self._signs)].copy_(delta)
        self._signs.append(sign)
        if len(self._signs) < self.stack_size:
            return None
        return self._released()

    def rest(self) -> Contribution | None:
        """Return the contribution of the cotangents that are still held back; None if there are none."""
        return self._released() if self._signs else None

    def of_several(self, cotangents: Tensor, signs: Sequence[Sign]) -> Contribution:
        """Return the contribution of cotangents one behind the other, (k n, …); ``stack_size`` of them at most."""
        count, sign = len(signs), None
        if any(one is not None for one in signs):
            each = cotangents.new_ones(len(cotangents) // count, dtype=torch.float64)
            sign = torch.cat([each if one is None else each * one for one in signs])
        return _over_cotangents(self._wanted.contribution(self._products([cotangents]), sign), count)

    def _released(self) -> Contribution:
        """Return the contribution of what is held back, and hold nothing from then on."""
        held, signs, self._signs = self._buffer[: len(self._signs)], self._signs, []
        return self.of_several(held.flatten(0, 1), signs)


class LayerContraction:
    """Prepare once what depends on one layer's weight alone, and contract the layer with it.

    Args:
        weight: (G, d, m).
        geometry: which inputs a position sees.
        backend: a module from :func:`.backends.choose`.
        quantities: names of :data:`.quantities.QUANTITIES`.
        memory: bytes for working buffers.
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
        self._wanted, self._route, self._device = Wanted(quantities), route, weight.device
        factor = gram_factor(promoted(weight)) if self._wanted.gram_factor else None
        self._prepared = Prepared(
            weight.shape,
            geometry,
            backend,
            self._wanted.products,
            factor,
            _as_bfloat16(factor, weight, backend),
            promoted(weight) if self._wanted.weighted else None,
            memory,
        )
        self._buffer: Tensor | None = None

    def at(self, inputs: Calls, count: int, held: int = 0, positions: Tensor | None = None) -> Contraction:
        """Return the contraction at the inputs φ (padded) of a micro-batch.

        Args:
            inputs: of all calls, joined where they can be.
            count: about how many cotangents will come.
            held: bytes of cotangents that may be held back.
            positions: (n, G d, elements) int32, where in a row each element of a cotangent is, -1: nowhere.
                None: cotangents are whole. Only where :meth:`gathers` says so.
        """
        layer, elements = self._prepared, None if positions is None else positions.shape[2]
        stack_size = self.stack_size(inputs, count, held, elements)
        held = stack_size * self.cotangent_bytes(inputs, elements) if stack_size > 1 else 0
        inputs = [layer.taken(part) for part in inputs]
        route: Summed | Direct | Gathered | Gram | OnePosition | Both
        if len(inputs) > 1:
            route = Summed(layer, inputs)
        elif self._route_of(inputs[0], count) == "direct":
            route = Direct(layer, inputs[0], layer.factor) if stack_size == 1 else Gathered(layer, inputs[0], positions)
        elif math.prod(layer.geometry.places(inputs[0].shape[2:])) == 1:
            route = OnePosition(layer, inputs[0])
        elif layer.weight is None:
            route = Gram(layer, inputs[0], squares=layer.products.squares)
        else:
            by_gram = None if layer.factor is None else Gram(layer, inputs[0], squares=False)
            route = Both(Direct(layer, inputs[0], None), by_gram)

        def entries(cotangent: Calls, sign: Sign) -> Tensor:
            return self.entries(inputs, cotangent, sign)

        return Contraction(self._wanted, route.products, entries, stack_size, self.buffer, held)

    def gathers(self, inputs: Calls, count: int, held: int, elements: int) -> bool:
        """Return whether cotangents of some elements a row, each at a position of its own, can be contracted."""
        return self.stack_size(inputs, count, held, elements) > 1 and self._route_of(inputs[0], count) == "direct"

    def stack_size(self, inputs: Calls, count: int, held: int, elements: int | None = None) -> int:
        """Return how many cotangents of so many had better be contracted at a time; 1: each alone.

        Shared out evenly, of what ``held`` bytes hold: room for four at least, fewer are not worth the copy.
        """
        if not held or len(inputs) > 1 or not self._wanted.plain:
            return 1
        phi, layer = inputs[0], self._prepared
        if self._route_of(phi, count) == "gram":
            suits = math.prod(layer.geometry.places(phi.shape[2:])) == 1
        else:
            suits = layer.backend is compiled and compiled.gathering_pays(phi, layer.geometry, layer.shape[1])
        most = min(held, layer.memory) // max(1, self.cotangent_bytes(inputs, elements))
        return -(-count // -(-count // most)) if suits and min(most, count) >= _FEWEST else 1

    def cotangent_bytes(self, inputs: Calls, elements: int | None = None) -> int:
        """Return what a cotangent takes, for the inputs of a layer's calls joined; of some elements a row, or whole."""
        groups, d, _ = self._prepared.shape
        each = math.prod(self._prepared.geometry.places(inputs[0].shape[2:])) if elements is None else elements
        return len(inputs[0]) * groups * d * each * promoted_dtype(inputs[0].dtype).itemsize

    def buffer(self, count: int, cotangent: Tensor) -> Tensor:
        """Return memory for so many such cotangents, (count, n, …): the same at every call, so that its pages stay."""
        needed = count * cotangent.numel()
        if self._buffer is None or len(self._buffer) < needed:
            self._buffer = cotangent.new_empty(needed, dtype=promoted_dtype(cotangent.dtype))
        return self._buffer[:needed].view(count, *cotangent.shape)

    def nothing(self, samples: int) -> Contribution:
        """Return the contribution of no cotangent at all, such as a loss over a single class has."""
        groups, d, m = self._prepared.shape
        return self._wanted.nothing(samples, (groups, d, m, self._prepared.geometry.kernel_elements), self._device)

    def cheaper(self, inputs: Tensor, count: int) -> str:
        """Return the route with fewer multiply-adds, for so many cotangents."""
        layer = self._prepared
        _, d, m = layer.shape
        places = math.prod(layer.geometry.places(inputs.shape[2:]))
        r = 0 if layer.factor is None else layer.factor.shape[1]
        pairs = (r + (d if self._wanted.squares else 0)) * places**2
        gram = r * d * places + pairs + m * places**2 / max(1, count)
        made = layer.weight is not None and places > 1  # M, in either case
        return "gram" if gram < (0 if made else d * m * places) + r * d * m else "direct"

    def traces(self, inputs: Calls, cotangent: Calls, coefficients: Tensor) -> Tensor:
        """Return Σ_i coefficient_i M_i M_iᵀ, (G, d, d) float64."""
        layer = self._prepared
        groups, d, m = layer.shape
        total = coefficients.new_zeros(groups, d, d)
        phi = promoted(inputs[0])
        by_gram = len(inputs) == 1 and self.cheaper(phi, 1) == "gram"
        chunk = max(1, layer.memory // (16 * groups * d * m))  # M and its copy in float64
        for start in range(0, len(phi), chunk):
            part = slice(start, start + chunk)
            some = coefficients[part]
            if by_gram:
                rows = layer.geometry.rows(promoted(cotangent[0][part]))
                left = layer.backend.patch_gram(phi[part], layer.geometry).to(rows.dtype) @ rows
            else:
                left = rows = layer.gradients([x[part] for x in inputs], [delta[part] for delta in cotangent]).mT
            total += ((rows.double() * some.view(-1, 1, 1, 1)).mT @ left.double()).sum(dim=0)
        return total

    def entries(self, inputs: Calls, cotangent: Calls, sign: Sign = None) -> Tensor:
        """Return Σ_i sign_i M_i ∘ M_i, (G, d, m) float64."""
        layer = self._prepared
        groups, d, m = layer.shape
        total = cotangent[0].new_zeros(groups, d, m, dtype=torch.float64)
        rows = layer.geometry.rows(promoted(cotangent[0]))
        signs = None if sign is None else (rows.new_ones(len(rows)) * sign).view(-1, 1, 1, 1)
        if len(inputs) == 1 and rows.shape[2] == 1:
            patches = layer.geometry.patches(inputs[0]).squeeze(2)
            left = rows.square() if signs is None else rows.square() * signs
            return torch.einsum("ngd,ngm->gdm", left.squeeze(2).double(), patches.double().square())
        chunk = max(1, layer.memory // (rows.element_size() * groups * m * (2 * d + rows.shape[2])))  # M and patches
        for start in range(0, len(rows), chunk):
            some = slice(start, start + chunk)
            gradients = layer.gradients([x[some] for x in inputs], [delta[some] for delta in cotangent]).square_()
            total += (gradients if signs is None else gradients.mul_(signs[some])).sum(dim=0)
        return total

    def _route_of(self, inputs: Tensor, count: int) -> str:
        return self._route or self.cheaper(inputs, count)


def _over_cotangents(found: Contribution, count: int) -> Contribution:
    """Return the sum of values that come for so many cotangents one behind the other."""
    return found._replace(values=found.values.unflatten(1, (count, -1)).sum(dim=1))


def _as_bfloat16(factor: Tensor | None, weight: Tensor, backend: ModuleType) -> Tensor | None:
    """Return R for products with cotangents of bfloat16; None where its rounding could show.

    wᵀ is such already. Another R is multiplied by an orthogonal matrix, which leaves |R M|² alone and makes its entries
    of one size: of Cholesky's factor few count, and their rounding would not average out.
    """
    _, d, m = weight.shape
    if factor is None or backend is not cuda or weight.dtype != torch.bfloat16 or min(d, m) < _MANY_ROWS:
        return None
    if m > d:
        directions = torch.randn(
            d, d, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
        ).to(factor.device)
        factor = torch.linalg.qr(directions).Q @ factor
    return cast(Tensor, factor).bfloat16()

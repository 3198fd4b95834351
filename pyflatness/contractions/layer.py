"""Contract a layer: quadratic forms in per-sample weight gradients M = Σ_p δ_p φ_pᵀ, mostly without making M.

    layer = LayerContraction(weight, …)            prepares the weight, once
    contraction = layer.at(inputs, count)          prepares a micro-batch's inputs φ: the route, Gram matrices
    contraction.of(cotangent, sign)                gives values and summands of :mod:`.quantities` for each δ

:mod:`.routes` has the ways to compute the products, :mod:`.quantities` what they are for. It is faster to contract
several cotangents at a time if the layer is small, if they are zero at most positions, or if a matrix library does it:
``contraction.hold`` keeps cotangents, or their products, until there are enough.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .factor import multiply_adds
from .geometry import Geometry
from .precision import AS_IT_IS, convolutions_in_tf32, float32_products, product, promoted, promoted_dtype
from .quantities import Contribution, Forms, Quantities, Sizes
from .reference import Backend
from .routes import Calls, Carried, LayerRoute, OnePosition, PreparedWeight, Stacked, Summed

ROUTES = ("direct", "gram")

_FEWEST = 4  # cotangents of one position that are faster contracted together

_OF_FACTOR, _CALLS = 3, 2_000_000
"""The cost of R in float32 multiply-adds: of each of its own multiply-adds, in float64, and of its calls.

Measured for 10 to 1,000 rows of 64 to 2,048 columns, one thread, this chooses the faster way in eight of nine cases; in
the other, the faster way takes 0.9 of the time.
"""

_ANY_NUMBER = 2**31  # of cotangents: so many that preparing the inputs costs nothing for each

Sign = Tensor | float | None  # of a cotangent: one number, (n,), or None for +1

Precision = Callable[[], contextlib.AbstractContextManager[Any]]


class Memory:
    """Keep memory for one tensor after another.

    If tensors of some size are allocated and freed in turn, the C library returns their pages to the system each time.
    """

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def of(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, spare: float = 0) -> Tensor:
        """Return a tensor that the next call overwrites; new memory is larger by the fraction ``spare``."""
        needed, held = math.prod(shape), self._held
        if held is None or held.dtype != dtype or held.device != device or len(held) < needed:
            self._held = held = torch.empty(int(needed * (1 + spare)), dtype=dtype, device=device)
        return held[:needed].view(*shape)


class Copies:
    """Keep copies of ``size`` cotangents, for a route that takes a stack of them.

    They are copied for two reasons. A gradient may be a view of a much larger tensor. And if tensors of this size are
    allocated and freed in turn, the C library returns their pages each time, which costs more than the copies.
    """

    def __init__(self, size: int, buffer: Callable[[int, Tensor], Tensor], forms: Callable[[Calls], Forms]) -> None:
        self._size, self._make, self._forms = size, buffer, forms

    def put(self, number: int, cotangent: Tensor) -> None:
        """Keep a cotangent under this number."""
        if number == 0:
            self._buffer = self._make(self._size, cotangent)
        self._buffer[number].copy_(cotangent)

    def taken(self, count: int) -> Forms:
        """Return the forms of the first ``count`` kept cotangents, (count n, …), and drop them."""
        return self._forms([self._buffer[:count].flatten(0, 1)])


class Contraction:
    """Contract one cotangent after another, or ``stack_size`` at a time, with a layer's inputs of one micro-batch.

    ``squared_entries`` computes Σ_i sign_i M_i ∘ M_i for a cotangent and its sign; ``precision`` is a context for
    products of float32. If ``takes_several``, cotangents that arrive together are contracted by :meth:`of_several`.
    """

    def __init__(
        self,
        wanted: Quantities,
        forms: Callable[[Calls], Forms],
        squared_entries: Callable[[Calls, Sign], Tensor] | None = None,
        stack: Copies | Stacked | None = None,
        stack_size: int = 1,
        held: int = 0,
        precision: Precision = contextlib.nullcontext,
        takes_several: bool = False,
    ) -> None:
        self._wanted, self.forms, self.squared_entries, self._precision = wanted, forms, squared_entries, precision
        self._stack, self.stack_size, self.held = stack, stack_size, held
        self.takes_several = stack_size > 1 or (takes_several and wanted.plain)
        self._signs: list[Sign] = []

    def of(self, cotangent: Calls, sign: Sign = None) -> Contribution:
        """Return the contribution of one cotangent."""
        with self._precision():
            found = self._wanted.contribution(self.forms(cotangent), sign)
            for name in self._wanted.squared_entries:
                assert self.squared_entries is not None
                found.summands[name] = self.squared_entries(cotangent, sign)
        return found

    def hold(self, cotangent: Calls, sign: Sign = None) -> Contribution | None:
        """Return the contribution of the cotangents held back and this one; None if this one is held back too."""
        (delta,) = cotangent
        assert self._stack is not None
        with self._precision():
            self._stack.put(len(self._signs), delta)
        self._signs.append(sign)
        if len(self._signs) < self.stack_size:
            return None
        return self._released()

    def rest(self) -> Contribution | None:
        """Return the contribution of the cotangents that are still held back; None if there are none."""
        return self._released() if self._signs else None

    def of_several(self, cotangents: Tensor, signs: Sequence[Sign]) -> Contribution:
        """Return the contribution of k cotangents, stacked as (k n, …); of a stack at most ``stack_size``."""
        with self._precision():
            return self._together(self.forms([cotangents]), signs)

    def _released(self) -> Contribution:
        """Return the contribution of the cotangents that are held back, and drop them."""
        signs, self._signs = self._signs, []
        assert self._stack is not None
        with self._precision():
            return self._together(self._stack.taken(len(signs)), signs)

    def _together(self, found: Forms, signs: Sequence[Sign]) -> Contribution:
        """Return the contribution of k cotangents from their stacked forms, (k n, …)."""
        sign = None
        if signs.count(None) < len(signs):
            (values, *_) = (values for values in found if values is not None)
            each = values.new_ones(len(values) // len(signs))
            sign = torch.cat([each if one is None else each * one for one in signs])
        contribution = self._wanted.contribution(found, sign)
        return contribution._replace(values=contribution.values.unflatten(1, (len(signs), -1)).sum(dim=1))


@dataclass(frozen=True)
class Ingredients:
    """Hold the arguments for the contraction of a layer."""

    weight: Tensor  # (G, d, m)
    backend: Backend
    quantities: Sequence[str]  # names of QUANTITIES
    memory: int  # bytes for working buffers
    gradients: Callable[[Calls, Calls], Tensor]  # inputs and cotangents of some samples -> M, (n, G, d, m)


class Contractor:
    """Prepare a layer's weight once, and contract the layer's inputs and cotangents with it."""

    def __init__(self, quantities: Sequence[str], sizes: Sizes, device: torch.device) -> None:
        self._wanted, self._sizes, self._device = Quantities.of(*quantities), sizes, device

    def at(self, inputs: Calls, count: int, held: int = 0, positions: Tensor | None = None) -> Contraction:
        """Return the contraction at the inputs of a micro-batch, of all calls, for about ``count`` cotangents.

        ``held`` bytes of cotangents may be held back. ``positions`` (n, G d, elements) int32, for layers that
        :meth:`gathers` allows, has the position of each element of a cotangent in its row, or -1 if it counts nowhere;
        None if cotangents are whole.
        """
        raise NotImplementedError

    def gathers(self, inputs: Calls, count: int, held: int, elements: int) -> bool:
        """Return whether cotangents can be contracted whose rows have some elements only, with their positions."""
        return False

    def carries(self, inputs: Calls, count: int) -> bool:
        """Return whether |R M|² is the only quantity and needs the fewest multiply-adds from a given wᵀ δ."""
        return False

    def at_carried(self, inputs: Calls) -> Contraction:
        """Return the contraction of wᵀ δ in place of δ, at the inputs φ of a micro-batch, if :meth:`carries`."""
        raise NotImplementedError

    def factored(self, inputs: Calls, count: int) -> PreparedWeight | None:
        """Return the weight whose factor R a contraction at these inputs needs; None if it needs none."""
        return None

    def kept(self, places: int) -> int:
        """Return the bytes for each sample that are prepared at ``places`` positions and kept for all cotangents."""
        return 0

    def nothing(self, samples: int) -> Contribution:
        """Return a contribution of zeros, as of a loss over a single class, which has no cotangents."""
        return self._wanted.nothing(samples, self._sizes, self._device)

    def traces(self, inputs: Calls, cotangent: Calls, coefficients: Tensor) -> Tensor:
        """Return Σ_i coefficient_i M_i M_iᵀ, (G, d, d) float64."""
        raise NotImplementedError


class LayerContraction(Contractor):
    """Contract a layer whose padded inputs and cotangents are in the form of :mod:`.geometry`.

    Float32 products on CUDA have the precision of the layer itself, which for a ``convolution`` is cuDNN's. Products of
    half precision use TF32, which has all of its digits.
    """

    def __init__(
        self,
        weight: Tensor,
        geometry: Geometry,
        backend: Backend,
        quantities: Sequence[str],
        *,
        memory: int,
        route: str | None = None,
        convolution: bool = False,
    ) -> None:
        groups, d, m = weight.shape
        super().__init__(quantities, (groups, d, m, geometry.kernel_elements), weight.device)
        self._on_gpu, self._half = backend.on_gpu(weight), promoted_dtype(weight.dtype) != weight.dtype
        self._itemsize = promoted_dtype(weight.dtype).itemsize
        self._route, self._convolution = route, convolution
        self._prepared = PreparedWeight(
            weight.shape,
            geometry,
            backend,
            self._wanted.forms,
            weight if self._wanted.gram_factor else None,
            promoted(weight) if self._wanted.weighted else None,
            memory,
            min(d, m) if self._wanted.gram_factor else 0,
            serves_half=self._on_gpu,
        )
        self._routes = backend.routes(self._prepared)
        self._memory = Memory()
        self._spared = 0  # multiply-adds that R would have saved so far

    def at(self, inputs: Calls, count: int, held: int = 0, positions: Tensor | None = None) -> Contraction:
        elements = None if positions is None else positions.shape[2]
        by_gram = self.by_gram(inputs, count)
        stack_size = self.stack_size(inputs, count, held, elements, by_gram=by_gram)
        held = stack_size * self.cotangent_bytes(inputs, elements) if stack_size > 1 else 0
        with self.precision():
            route = self._chosen(inputs, count, stack_size, positions, by_gram=by_gram)
        stack = route if isinstance(route, Stacked) else Copies(stack_size, self.buffer, route.forms)
        entries, several = partial(self.squared_entries, inputs), route.takes_several
        return Contraction(self._wanted, route.forms, entries, stack, stack_size, held, self.precision, several)

    def _chosen(
        self, inputs: Calls, count: int, stack_size: int, positions: Tensor | None, *, by_gram: bool
    ) -> LayerRoute:
        """Return the best route, prepared for these inputs."""
        layer, phi = self._prepared, inputs[0]
        if len(inputs) > 1:
            return Summed(layer, inputs)
        if by_gram and layer.places(phi) == 1:
            by_factor = self._takes_factor(phi, count)
            self._spared += self._spares(phi, count)
            return OnePosition(layer, phi, by_factor=by_factor)
        return self._routes.of(phi, stack_size, positions, by_gram=by_gram)

    def gathers(self, inputs: Calls, count: int, held: int, elements: int) -> bool:
        if not self._routes.gathers or self.by_gram(inputs, count):
            return False
        return self.stack_size(inputs, count, held, elements, by_gram=False) > 1

    def stack_size(self, inputs: Calls, count: int, held: int, elements: int | None = None, *, by_gram: bool) -> int:
        """Return how many of ``count`` cotangents are best contracted at a time, in stacks of about one size.

        It is 1 if each is best contracted alone.
        """
        if not held or len(inputs) > 1 or not self._wanted.plain:
            return 1
        phi, layer = inputs[0], self._prepared
        if by_gram and layer.places(phi) == 1:
            held, fewest = min(held, layer.memory), _FEWEST
        elif layer.backend.stacking_pays(phi, layer.geometry, layer.shape[1], by_gram=by_gram):
            held, fewest = self._routes.room(held), self._routes.fewest
        else:
            return 1
        most = held // max(1, self.cotangent_bytes(inputs, elements))
        return -(-count // -(-count // most)) if min(most, count) >= fewest else 1

    def cotangent_bytes(self, inputs: Calls, elements: int | None = None) -> int:
        """Return the bytes of a cotangent, with some ``elements`` of each row or whole, or of its stacked products."""
        layer, phi = self._prepared, inputs[0]
        groups, d, _ = layer.shape
        places = layer.places(phi)
        rows = self._routes.rows() if places > 1 else d
        return phi.shape[0] * groups * rows * (elements or places) * promoted_dtype(phi.dtype).itemsize

    def buffer(self, count: int, cotangent: Tensor) -> Tensor:
        """Return memory for ``count`` such cotangents, (count, n, …)."""
        return self._memory.of((count, *cotangent.shape), promoted_dtype(cotangent.dtype), cotangent.device)

    def carries(self, inputs: Calls, count: int) -> bool:
        """See :class:`Contractor`; not in half precision, to which wᵀ δ would be rounded, unlike R δ."""
        layer, places = self._prepared, self._prepared.places(inputs[0])
        alone = layer.factor_rows > 0 and self._wanted.plain and not self._wanted.squares
        if not alone or self._half or self._route is not None or places == 1 or len(inputs) > 1:
            return False
        return self._routes.carried(places, count) < min(self.multiply_adds(places, count).values())

    def at_carried(self, inputs: Calls) -> Contraction:
        return Contraction(self._wanted, Carried(self._prepared, promoted(inputs[0])).forms, takes_several=True)

    def factored(self, inputs: Calls, count: int) -> PreparedWeight | None:
        one = len(inputs) == 1 and self._prepared.places(inputs[0]) == 1 and self.by_gram(inputs, count)
        return None if one and not self._takes_factor(inputs[0], count) else self._prepared

    def _takes_factor(self, phi: Tensor, count: int) -> bool:
        """Return whether |R δ| is used at one position in place of |wᵀ δ|: once R saves more than it costs."""
        _, d, m = self._prepared.shape
        making = _OF_FACTOR * multiply_adds(d, m) + _CALLS
        return self._prepared.has_factor or self._spared + self._spares(phi, count) > making

    def _spares(self, phi: Tensor, count: int) -> int:
        """Return the multiply-adds that R saves at one position, for ``count`` cotangents."""
        _, d, m = self._prepared.shape
        return len(phi) * count * d * max(0, m - d)

    def kept(self, places: int) -> int:
        """See :class:`Contractor`: a Gram matrix if the route may use one; at one position outputs and the like."""
        groups, d, _ = self._prepared.shape
        if places == 1:
            kept = self._wanted.forms.weighted + self._wanted.forms.by_row
            return groups * d * self._itemsize * (kept + 2) if kept else 0  # 2 for a cotangent's squares and products
        found = self.multiply_adds(places, _ANY_NUMBER)
        by_gram = min(found["gram"], self._routes.carried(places, _ANY_NUMBER)) < found["direct"]
        return groups * places**2 * self._itemsize if by_gram and places > 1 else 0

    def by_gram(self, inputs: Calls, count: int) -> bool:
        """Return whether the route is that of Gram matrices: the given one, or else the cheaper one."""
        return self.gram_is_cheaper(inputs[0], count) if self._route is None else self._route == "gram"

    def gram_is_cheaper(self, phi: Tensor, count: int) -> bool:
        """Return whether Gram matrices take fewer multiply-adds for ``count`` cotangents."""
        found = self.multiply_adds(self._prepared.places(phi), count)
        return found["gram"] < found["direct"]

    def multiply_adds(self, places: int, count: int) -> dict[str, float]:
        """Return by route the multiply-adds for one sample and cotangent, with ``places`` positions."""
        layer = self._prepared
        _, d, m = layer.shape
        r = layer.factor_rows
        rows = r + (d if self._wanted.squares else 0)
        gram = r * d * places + rows * places**2 + m * places**2 / max(1, count)
        made = layer.weight is not None and places > 1  # both routes compute M
        return {"gram": gram, "direct": r * d * m if made else self._routes.direct(places, rows)}

    def traces(self, inputs: Calls, cotangent: Calls, coefficients: Tensor) -> Tensor:
        layer = self._prepared
        groups, d, m = layer.shape
        total = coefficients.new_zeros(groups, d, d)
        phi = promoted(inputs[0])
        by_gram = len(inputs) == 1 and self.gram_is_cheaper(phi, 1)
        places = sum(map(layer.places, inputs))
        # The Gram matrix and two factors, or patches and M; the summands are copied in float64, twice as large.
        elements = places * (places + 6 * d) if by_gram else m * (places + 3 * d)
        chunk = layer.chunk(groups * elements, phi.dtype)
        with self.precision():
            for start in range(0, len(phi), chunk):
                part = slice(start, start + chunk)
                some = coefficients[part]
                if by_gram:
                    rows = layer.geometry.rows(promoted(cotangent[0][part]))
                    left = product(layer.backend.patch_gram(phi[part], layer.geometry).to(rows.dtype), rows)
                else:
                    left = rows = layer.gradients([x[part] for x in inputs], [delta[part] for delta in cotangent]).mT
                total += ((rows.double() * some.view(-1, 1, 1, 1)).mT @ left.double()).sum(dim=0)
        return total

    def squared_entries(self, inputs: Calls, cotangent: Calls, sign: Sign = None) -> Tensor:
        """Return Σ_i sign_i M_i ∘ M_i, (G, d, m) float64."""
        layer = self._prepared
        groups, d, m = layer.shape
        total = cotangent[0].new_zeros(groups, d, m, dtype=torch.float64)
        rows = layer.geometry.rows(promoted(cotangent[0]))
        signs = None if sign is None else (rows.new_ones(len(rows)) * sign).view(-1, 1, 1, 1)
        if len(inputs) == 1 and rows.shape[2] == 1:
            patches = layer.patches(inputs[0]).squeeze(2)
            left = rows.square() if signs is None else rows.square() * signs
            return torch.einsum("ngd,ngm->gdm", left.squeeze(2).double(), patches.double().square())
        chunk = max(1, layer.memory // (rows.element_size() * groups * m * (2 * d + rows.shape[2])))  # M and patches
        for start in range(0, len(rows), chunk):
            some = slice(start, start + chunk)
            gradients = layer.gradients([x[some] for x in inputs], [delta[some] for delta in cotangent]).square_()
            total += (gradients if signs is None else gradients.mul_(signs[some])).sum(dim=0)
        return total

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for float32 products as precise as the layer's own."""
        if not self._on_gpu:
            return AS_IT_IS
        if self._half:
            return float32_products(tf32=True)
        if self._convolution:
            return float32_products(tf32=convolutions_in_tf32())
        return AS_IT_IS

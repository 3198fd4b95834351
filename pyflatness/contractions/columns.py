"""Contract a layer for relative flatness by columns, |w Mᵀ|², and for other quantities.

    |w Mᵀ|² = ⟨wᵀw, MᵀM⟩ = |Σ_p δ_p (Q φ_p)ᵀ|²        QᵀQ = wᵀw

is |M|² of a layer with the same positions and cotangents and with inputs Q φ_p, min(d, m) numbers, in place of φ_p. So
it is computed as every backend computes |M|², by the best route for those sizes. Q is w itself if w has no more rows
than columns.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..interrupts import cached_property
from .factor import gram_factor
from .geometry import Geometry
from .layer import Contraction, Contractor, Copies, LayerContraction
from .precision import product, promoted, promoted_dtype
from .quantities import Forms, of_outputs
from .reference import Backend
from .routes import Calls


class WithColumns(Contractor):
    """Contract a layer as :class:`.LayerContraction` does, with |w Mᵀ|² among the quantities."""

    def __init__(
        self,
        weight: Tensor,
        geometry: Geometry,
        backend: Backend,
        quantities: Sequence[str],
        *,
        memory: int,
        convolution: bool = False,
    ) -> None:
        groups, d, m = weight.shape
        super().__init__(quantities, (groups, d, m, geometry.kernel_elements), weight.device)
        self._weight, self._geometry, self._rows = weight, geometry, min(d, m)
        make = partial(LayerContraction, backend=backend, memory=memory, convolution=convolution)
        # The shape of this weight matters, not its entries.
        self._behind = make(weight[..., : self._rows], Geometry(groups), quantities=["squares"])
        others = [name for name in quantities if not of_outputs(name)]
        self._others = make(weight, geometry, quantities=others) if others else None

    def at(self, inputs: Calls, count: int, held: int = 0, positions: Tensor | None = None) -> Contraction:
        """See :class:`.Contractor`; as many cotangents are held back as for the other quantities."""
        with self._behind.precision():
            outputs = [self._applied(promoted(phi)) for phi in inputs]
        if self._others is None:
            return self._behind.at(outputs, count, held, positions)
        first, second = self._others.at(inputs, count, held // 2), self._behind.at(outputs, count, held // 2)

        def forms(cotangent: Calls) -> Forms:
            several = [cotangent]
            if len(cotangent) == 1:
                several = [[some] for some in cotangent[0].split(second.stack_size * len(inputs[0]))]
            values = [second.of(some).values[0] for some in several]
            return first.forms(cotangent)._replace(gram_weighted_columns=torch.cat(values))

        stack = Copies(first.stack_size, self._others.buffer, forms)
        return Contraction(
            self._wanted, forms, first.squared_entries, stack, first.stack_size, first.held, self._others.precision
        )

    def gathers(self, inputs: Calls, count: int, held: int, elements: int) -> bool:
        channels = len(self._weight) * self._rows
        sizes = [(len(phi), channels, *self._geometry.places(phi.shape[2:])) for phi in inputs]
        alike = [phi.new_empty(1).expand(size) for phi, size in zip(inputs, sizes, strict=True)]
        return self._others is None and self._behind.gathers(alike, count, held, elements)

    def kept(self, places: int) -> int:
        """See :class:`.Contractor`; Q φ is kept too."""
        of_inputs = len(self._weight) * self._rows * places * promoted_dtype(self._weight.dtype).itemsize
        return of_inputs + self._behind.kept(places) + (0 if self._others is None else self._others.kept(places))

    @cached_property
    def _factor(self) -> Tensor:
        """Return Q, (G, min(d, m), m)."""
        return gram_factor(promoted(self._weight).mT)

    def _applied(self, phi: Tensor) -> Tensor:
        """Return Q φ at all positions, (n, G min(d, m), p0, p1, p2)."""
        factor, geometry = self._factor.to(phi.dtype), self._geometry
        if geometry == Geometry():
            outputs: Tensor = product(phi.flatten(2).mT, factor[0].t()).mT.unflatten(2, phi.shape[2:])
            return outputs
        filters = factor.flatten(0, 1).unflatten(1, (-1, *geometry.kernel))
        return F.conv3d(phi, filters, None, geometry.stride, 0, geometry.dilation, geometry.groups)

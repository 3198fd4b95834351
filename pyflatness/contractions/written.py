"""Contract a layer whose weight gradients M are computed by a given function, in plain torch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..interrupts import cached_property
from .factor import gram_factor
from .geometry import Geometry
from .layer import Contraction, Contractor, Ingredients, Sign
from .precision import product, promoted
from .quantities import Forms
from .routes import Calls

_COPIES = 4  # copies of M that exist at once


class WrittenContraction(Contractor):
    """Contract inputs and cotangents by the function ``gradients``; M of some samples at a time fits the memory."""

    def __init__(self, given: Ingredients, geometry: Geometry) -> None:
        groups, d, m = given.weight.shape
        super().__init__(given.quantities, (groups, d, m, geometry.kernel_elements), given.weight.device)
        self._weight, self._geometry, self._backend = promoted(given.weight), geometry, given.backend
        self._gradients = given.gradients
        self._chunk = max(1, given.memory // (_COPIES * self._weight.element_size() * self._weight.numel()))

    @cached_property
    def _factor(self) -> Tensor | None:
        return gram_factor(self._weight) if self._wanted.gram_factor else None

    def at(self, inputs: Calls, count: int, held: int = 0, positions: Tensor | None = None) -> Contraction:
        """Return the contraction at some inputs, for any number of cotangents; none are held back."""

        def forms(cotangent: Calls) -> Forms:
            weight = self._weight if self._wanted.weighted else None
            parts = []
            for _, gradients in self._written(inputs, cotangent):
                found = self._backend.products(gradients, self._geometry, self._factor, weight)
                if self._wanted.forms.gram_weighted_columns:
                    outputs = product(self._weight, gradients.mT).flatten(1)
                    found = found._replace(gram_weighted_columns=self._backend.row_dots(outputs, outputs))
                parts.append(found)
            return Forms.joined(parts)

        def squared_entries(cotangent: Calls, sign: Sign) -> Tensor:
            signs = torch.ones(len(inputs[0]), dtype=torch.float64, device=self._weight.device)
            signs = signs if sign is None else signs * sign
            total = torch.zeros_like(self._weight, dtype=torch.float64)
            for some, gradients in self._written(inputs, cotangent):
                total += torch.einsum("n,ngdm->gdm", signs[some], gradients.double().square())
            return total

        return Contraction(self._wanted, forms, squared_entries)

    def traces(self, inputs: Calls, cotangent: Calls, coefficients: Tensor) -> Tensor:
        groups, d, _ = self._weight.shape
        total = coefficients.new_zeros(groups, d, d)
        for some, gradients in self._written(inputs, cotangent):
            rows = gradients.double()
            total += torch.einsum("n,ngdm,ngem->gde", coefficients[some], rows, rows)
        return total

    def _written(self, inputs: Calls, cotangent: Calls) -> Iterator[tuple[slice, Tensor]]:
        """Yield for some samples at a time their slice and their weight gradients M, (s, G, d, m)."""
        for start in range(0, len(inputs[0]), self._chunk):
            some = slice(start, start + self._chunk)
            yield some, self._gradients([x[some] for x in inputs], [delta[some] for delta in cotangent])

"""Compute quantities of a layer's Hessian that are not block traces: of single entries and of neurons.

With the second derivatives H_z of a sample's loss in the layer's outputs z_p = w φ_p, a direction Δ of the weight has
⟨Δ, H Δ⟩ = ⟨Δφ, H_z Δφ⟩, which takes one Hessian product.

- Entries of the diagonal: for a unit vector e of the outputs, at position p and row s, y = H_z e gives
  H_(sj),(tk) = φ_pj Σ_p' φ_p'k y_p't, to be summed over p, by d P products; or by d m products with e_s φ_pj if these
  are fewer. They determine H, and all other quantities are computed from the same products.
- Neurons alone take a product for each neuron, with Δ its weights and zeros elsewhere.
- Sampled values of |w ∘ M|² take Δ = diag(a) w diag(b) for random signs a, b, so that entries of Δ are uncorrelated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contractions import product
from ..contractions.quantities import QUANTITIES, Contribution, Neurons, RowHessian
from ..numerics.signs import Signs

_OF_COLUMNS = 2**32  # added to a stream of signs for columns
_BATCH = 2**22  # bytes of directions in one backward pass, which fit in a processor's caches


@dataclass(frozen=True)
class Varied:
    """Hold the tensors that change with a layer's weight: its outputs, or its weight for each sample of a run."""

    gradient: Tensor  # of the value in the outputs z_p = w φ_p, (n, G, P, d), with its graph
    inputs: Sequence[Any]  # in which the gradient is differentiated
    rows: Callable[[Sequence[Tensor | None], int], Tensor]  # (derivatives (k, …) in each input, k) -> (k, n, G, P, d)


@dataclass(frozen=True)
class WeightDirections:
    """Represent the directions in which a layer's weight is changed, for the samples of a run."""

    span: Tensor | None  # K (n, G, P, ρ): D changes the outputs by K D; None for the identity
    patches: Tensor  # φ_p of each sample, (n or 1, G, P, m)
    varied: Varied
    second: Callable[[Tensor], list[Tensor | None]]  # changes (k, n, G, P, d) -> derivatives in each input

    @property
    def columns(self) -> int:
        """Return ρ, the number of columns of K."""
        return self.varied.gradient.shape[2] if self.span is None else self.span.shape[3]

    @property
    def batch(self) -> int:
        """Return how many directions go through the graph at a time."""
        return batch_of(self.varied.gradient.numel() * self.varied.gradient.element_size())

    @property
    def scale(self) -> Tensor | None:
        """Return K², (n, G), which :meth:`products` lack, if K is a scalar; otherwise None."""
        if self.span is None or self.span.shape[2:] != (1, 1):
            return None
        return self.span[:, :, 0, 0].double().square()

    def products(self, directions: Tensor) -> Tensor:
        """Return H D, (k, n, G, ρ, d), for directions D (k, n or 1, G, ρ, d)."""
        if self.span is None or self.scale is not None:
            return self.by_position(directions)
        return product(self.span.mT, self.by_position(product(self.span, directions)))

    def by_position(self, changes: Tensor) -> Tensor:
        """Return the Hessian in the outputs times changes of these, (k, n or 1, G, P, d) -> (k, n, G, P, d)."""
        return self.varied.rows(self.second(changes.expand(-1, *self.varied.gradient.shape)), len(changes))


class EntriesAndNeurons:
    """Compute quantities of a layer's weight that are not block traces, or all if the products of one determine H.

    ``tell_all`` is True in the second case. ``whole`` is the weight with its columns of zero input too, for w wᵀ.
    """

    def __init__(self, weight: Tensor, kernel_elements: int, quantities: Sequence[str], whole: Tensor) -> None:
        self._weight, self._kernel_elements, self._whole = weight, kernel_elements, whole
        self._rows = {name: QUANTITIES[name] for name in quantities}
        self._neurons = {name: row.neurons for name, row in self._rows.items() if row.neurons is not None}
        self.tell_all = tells_all(quantities)
        groups, d, m = weight.shape
        self._sizes = groups, d, m, kernel_elements

    def products(self, positions: int) -> int:
        """Return the number of Hessian products for exact values."""
        groups, d, m = self._weight.shape
        if self.tell_all:
            return groups * d * min(positions, m)
        return sum(neurons.count(self._sizes) for neurons in self._neurons.values())

    def exact(self, directions: WeightDirections, samples: int) -> Contribution:
        """Return values (quantities, n) and their summands; entries of the diagonal are summed over all samples."""
        if self.tell_all:
            return self._off_units(directions, samples)
        summands = {name: self._forms(directions, samples, neurons) for name, neurons in self._neurons.items()}
        return Contribution(self._values({name: part.sum(dim=1) for name, part in summands.items()}, samples), summands)

    def probe(self, patches: Tensor, signs: Signs, stream: int, samples: Tensor, columns: Tensor | None) -> Tensor:
        """Return random changes v of the outputs, (probes, n, G, P, d), with E⟨v, H v⟩ = |w ∘ M|²."""
        groups, d, m = self._weight.shape
        a = signs(stream, samples, groups, 1, d).to(self._weight.dtype)
        if columns is None:
            b = signs(stream + _OF_COLUMNS, samples, groups, 1, m).to(self._weight.dtype)
        else:
            b = signs.at(stream + _OF_COLUMNS, samples, columns)[:, :, None, None].to(self._weight.dtype)
        return a * product(b * patches, self._weight.mT)

    def _off_units(self, directions: WeightDirections, samples: int) -> Contribution:
        """Return all quantities, computed from the products with unit vectors."""
        patches, dtype = directions.patches.expand(samples, -1, -1, -1), torch.float64
        summands = {
            name: patches.new_zeros(samples, n.count(self._sizes), dtype=dtype) for name, n in self._neurons.items()
        }
        entries = {
            name: torch.zeros_like(self._weight, dtype=dtype) for name, row in self._rows.items() if row.squared_entries
        }
        values = {name: patches.new_zeros(samples, dtype=dtype) for name in self._rows.keys() - summands.keys()}
        totals = values | summands
        for unit in self._units(directions, patches):
            for name, row in self._rows.items():
                row.of_unit(unit, totals[name])
            for part in entries.values():
                part[unit.group, unit.row, unit.columns] += unit.diagonal.sum(dim=0)
        values |= {name: part.sum(dim=1) for name, part in summands.items()}
        return Contribution(self._values(values, samples), summands | entries)

    def _values(self, found: dict[str, Tensor], samples: int) -> Tensor:
        """Return the values of all quantities, (n,) each, as (quantities, n) float64."""
        values = self._weight.new_zeros(len(self._rows), samples, dtype=torch.float64)
        for value, name in zip(values, self._rows, strict=True):
            value.copy_(found[name])
        return values

    def _units(self, directions: WeightDirections, patches: Tensor) -> Iterator[RowHessian]:
        """Yield second derivatives in entries of the weight, from one product at a time."""
        samples, groups, positions, m = patches.shape
        d, count, width = self._weight.shape[1], min(positions, m), self._kernel_elements
        gram = self._whole.double() @ self._whole.double().mT
        outputs = product(patches, self._weight.mT)
        for group in range(groups):
            phi = patches[:, group]
            for chosen in torch.arange(d * count, device=phi.device).split(directions.batch):
                k, row, unit = torch.arange(len(chosen), device=chosen.device), chosen // count, chosen % count
                changes = phi.new_zeros(len(chosen), samples, groups, positions, d)
                if positions <= m:
                    changes[k, :, group, unit, row] = 1.0
                else:
                    changes[k, :, group, :, row] = phi[:, :, unit].permute(2, 0, 1)
                products = directions.by_position(changes)[:, :, group]
                for place, y in zip(chosen.tolist(), products, strict=True):
                    s, at = divmod(place, count)
                    if positions <= m:
                        columns, left = slice(0, m), phi[:, at].double()
                    else:
                        columns = slice(at - at % width, at - at % width + width)
                        left = phi.new_zeros(samples, width, dtype=torch.float64)
                        left[:, at % width] = 1.0
                    at_group = phi[:, :, columns], outputs[:, group], y
                    yield RowHessian(self._weight, gram, width, group, s, columns, left, *at_group)

    def _forms(self, directions: WeightDirections, samples: int, neurons: Neurons) -> Tensor:
        """Return ⟨Δφ, H_z Δφ⟩ of all neurons, (n, G neurons)."""
        groups, d, _ = self._weight.shape
        patches, found = directions.patches.expand(samples, -1, -1, -1), []
        for group in range(groups):
            every = torch.arange(neurons.count(self._sizes) // groups, device=patches.device)
            for chosen in every.split(directions.batch):
                changes = patches.new_zeros(len(chosen), samples, groups, patches.shape[2], d)
                changes[:, :, group] = neurons.directions(
                    self._weight[group], chosen, patches[:, group], self._kernel_elements
                )
                found.append((changes * directions.by_position(changes)).sum(dim=(2, 3, 4), dtype=torch.float64))
        return torch.cat(found).t()


def batch_of(size: int) -> int:
    """Return how many directions of ``size`` bytes go through the graph at a time."""
    return max(1, _BATCH // max(1, size))


def tells_all(quantities: Sequence[str]) -> bool:
    """Return whether the products for some of these quantities determine the Hessian."""
    return any(QUANTITIES[name].of_diagonal for name in quantities)

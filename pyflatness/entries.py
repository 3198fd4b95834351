"""Single entries and neurons of a layer's Hessian: what is not a block trace.

With the second derivatives H_z of a sample's loss in the layer's outputs z_p = w φ_p, a move Δ of the weight has
⟨Δ, H Δ⟩ = ⟨Δφ, H_z Δφ⟩, a product.

- ``weighted``, ``diagonal``: for a unit e of the outputs, of position p and row s, y = H_z e has
  H_(sj),(sj) = Σ_p φ_pj Σ_p' φ_p'j y_p's: d P products, or d m from the moves e_s φ_pj if there are fewer of these.
- ``by_column``, ``by_row``: a product for each neuron, Δ its weights and zeros elsewhere.
- ``weighted`` sampled: Δ = diag(a) w diag(b) for random signs a, b, of which no two entries are correlated.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .contractions.layer import Share
from .signs import Signs

_OF_COLUMNS = 2**32  # between the streams of signs of rows and columns


class Moves(Protocol):
    """What :class:`.hessian.Directions` has of it."""

    @property
    def patches(self) -> Tensor:
        """φ_p, (n or 1, G, P, m)."""

    @property
    def by_position(self) -> Callable[[Tensor], Tensor]:
        """(k, n, G, P, d) -> H_z times it."""

    @property
    def together(self) -> int:
        """How many directions to take at a time."""


class Entries:
    """For a layer's weight.

    Args:
        weight: (G, d, m).
        taps: columns of an input channel.
        quantities: ``weighted``, ``by_column``, ``by_row``, ``diagonal``.
    """

    def __init__(self, weight: Tensor, taps: int, quantities: Sequence[str]) -> None:
        self._weight, self._taps, self._quantities = weight, taps, quantities

    def products(self, positions: int) -> int:
        """Hessian products of exact values."""
        groups, d, m = self._weight.shape
        counts = {"by_column": groups * m // self._taps, "by_row": groups * d}
        diagonal = not counts.keys() >= set(self._quantities)
        neurons = sum(counts.get(name, 0) for name in self._quantities)
        return neurons + diagonal * groups * d * min(positions, m)

    def exact(self, moves: Moves, samples: int) -> Share:
        """Values (quantities, n) and parts; ``diagonal`` is over all samples."""
        found: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        if {"weighted", "diagonal"}.intersection(self._quantities):
            found["weighted"] = self._weight.new_zeros(samples, dtype=torch.float64)
            found["diagonal"] = torch.zeros_like(found["weighted"])
            parts["diagonal"] = torch.zeros_like(self._weight, dtype=torch.float64)
            for group, row, diagonal in self._diagonals(moves, samples):
                found["weighted"] += diagonal @ self._weight[group, row].double().square()
                found["diagonal"] += diagonal.sum(dim=1)
                parts["diagonal"][group, row] += diagonal.sum(dim=0)
        _, d, m = self._weight.shape
        for name, neurons, made in (("by_column", m // self._taps, self._columns), ("by_row", d, self._rows)):
            if name in self._quantities:
                parts[name] = self._forms(moves, samples, neurons, made)
                found[name] = parts[name].sum(dim=1)
        values = self._weight.new_zeros(len(self._quantities), samples, dtype=torch.float64)
        for value, name in zip(values, self._quantities, strict=True):
            value.copy_(found[name])
        return Share(values, {name: part for name, part in parts.items() if name in self._quantities})

    def sampled(self, moves: Moves, signs: Signs, stream: int, samples: Tensor) -> Tensor:
        """Of ``weighted`` (quantities, draws, n)."""
        groups, d, m = self._weight.shape
        if not self._quantities:
            return self._weight.new_zeros(0, len(signs.draws), len(samples), dtype=torch.float64)
        a = signs(stream, samples, groups, 1, d).to(self._weight.dtype)
        b = signs(stream + _OF_COLUMNS, samples, groups, 1, m).to(self._weight.dtype)
        moved = a * ((b * moves.patches) @ self._weight.mT)
        return (moved * moves.by_position(moved)).sum(dim=(2, 3, 4), dtype=torch.float64).unsqueeze(0)

    def _diagonals(self, moves: Moves, samples: int) -> Iterator[tuple[int, int, Tensor]]:
        """Group, row, and shares (n, m) in the diagonal there, which are to be summed."""
        groups, d, m = self._weight.shape
        patches = moves.patches.expand(samples, -1, -1, -1)
        positions = patches.shape[2]
        count = min(positions, m)
        for group in range(groups):
            phi = patches[:, group]  # (n, P, m)
            for chosen in torch.arange(d * count, device=phi.device).split(moves.together):
                k, row, unit = torch.arange(len(chosen)), chosen // count, chosen % count
                moved = phi.new_zeros(len(chosen), samples, groups, positions, d)
                if positions <= m:
                    moved[k, :, group, unit, row] = 1.0
                else:
                    moved[k, :, group, :, row] = phi[:, :, unit].permute(2, 0, 1)
                turned = moves.by_position(moved)[k, :, group, :, row]  # (k, n, P)
                for place, y in zip(chosen.tolist(), turned, strict=True):
                    at = place % count
                    if positions <= m:
                        yield group, place // count, (phi[:, at] * (y.unsqueeze(1) @ phi).squeeze(1)).double()
                    else:
                        share = phi.new_zeros(samples, m, dtype=torch.float64)
                        share[:, at] = (phi[:, :, at].double() * y.double()).sum(dim=1)
                        yield group, place // count, share

    def _forms(self, moves: Moves, samples: int, neurons: int, made: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
        """⟨Δφ, H_z Δφ⟩ of so many neurons of each group, (n, G neurons); ``made`` makes Δφ, (k, n, P, d)."""
        groups, d, _ = self._weight.shape
        patches, found = moves.patches.expand(samples, -1, -1, -1), []
        for group in range(groups):
            for chosen in torch.arange(neurons, device=patches.device).split(moves.together):
                moved = patches.new_zeros(len(chosen), samples, groups, patches.shape[2], d)
                moved[:, :, group] = made(chosen, patches[:, group], group)
                found.append((moved * moves.by_position(moved)).sum(dim=(2, 3, 4), dtype=torch.float64))
        return torch.cat(found).t()

    def _columns(self, chosen: Tensor, phi: Tensor, group: int) -> Tensor:
        weight = self._weight[group].unflatten(1, (-1, self._taps))[:, chosen]  # (d, k, taps)
        return torch.einsum("npkt,dkt->knpd", phi.unflatten(2, (-1, self._taps))[:, :, chosen], weight)

    def _rows(self, chosen: Tensor, phi: Tensor, group: int) -> Tensor:
        outputs = phi @ self._weight[group, chosen].t()  # (n, P, k)
        moved = phi.new_zeros(len(chosen), *phi.shape[:2], self._weight.shape[1])
        moved[torch.arange(len(chosen)), :, :, chosen] = outputs.permute(2, 0, 1)
        return moved

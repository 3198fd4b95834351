"""Single entries and neurons of a layer's Hessian: what is not a block trace.

With the second derivatives H_z of a sample's loss in the layer's outputs z_p = w φ_p, a move Δ of the weight has
⟨Δ, H Δ⟩ = ⟨Δφ, H_z Δφ⟩, a product.

- ``weighted``, ``diagonal``: for a unit e of the outputs, of position p and row s, y = H_z e has
  H_(sj),(tk) = Σ_p φ_pj Σ_p' φ_p'k y_p't: d P products, or d m from the moves e_s φ_pj if there are fewer of these.
  They tell everything about H, and whatever else is wanted is read off the same ones.
- ``by_column``, ``by_row`` alone: a product for each neuron, Δ its weights and zeros elsewhere.
- ``weighted`` sampled: Δ = diag(a) w diag(b) for random signs a, b, of which no two entries are correlated.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..contractions.layer import NEURONS, Share
from ..numerics.signs import Signs

_OF_COLUMNS = 2**32  # between the streams of signs of rows and columns


class Moves(Protocol):
    """What :class:`.block_traces.Directions` has of it."""

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
        quantities: ``weighted``, ``by_column``, ``by_row``, ``diagonal``; beside ``weighted`` or ``diagonal`` any.
    """

    def __init__(self, weight: Tensor, taps: int, quantities: Sequence[str]) -> None:
        self._weight, self._taps, self._quantities = weight, taps, quantities
        self._by_units = tells_all(quantities)

    def products(self, positions: int) -> int:
        """Hessian products of exact values."""
        groups, d, m = self._weight.shape
        if self._by_units:
            return groups * d * min(positions, m)
        counts = {"by_column": groups * m // self._taps, "by_row": groups * d}
        return sum(counts[name] for name in self._quantities)

    def exact(self, moves: Moves, samples: int) -> Share:
        """Values (quantities, n) and parts; ``diagonal`` is over all samples."""
        found, parts = self._off_units(moves, samples) if self._by_units else ({}, self._neurons(moves, samples))
        parts = {name: part for name, part in parts.items() if name in self._quantities}
        found.update((name, parts[name].sum(dim=1)) for name in NEURONS if name in parts)
        values = self._weight.new_zeros(len(self._quantities), samples, dtype=torch.float64)
        for value, name in zip(values, self._quantities, strict=True):
            value.copy_(found[name])
        return Share(values, parts)

    def sampled(self, moves: Moves, signs: Signs, stream: int, samples: Tensor) -> Tensor:
        """Of ``weighted`` (quantities, draws, n)."""
        groups, d, m = self._weight.shape
        if not self._quantities:
            return self._weight.new_zeros(0, len(signs.draws), len(samples), dtype=torch.float64)
        a = signs(stream, samples, groups, 1, d).to(self._weight.dtype)
        b = signs(stream + _OF_COLUMNS, samples, groups, 1, m).to(self._weight.dtype)
        moved = a * ((b * moves.patches) @ self._weight.mT)
        return (moved * moves.by_position(moved)).sum(dim=(2, 3, 4), dtype=torch.float64).unsqueeze(0)

    def _off_units(self, moves: Moves, samples: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Values of sums and parts of the others, all of them read off the same products."""
        groups, d, m = self._weight.shape
        gram = self._weight.double() @ self._weight.double().mT
        patches = moves.patches.expand(samples, -1, -1, -1)
        outputs = patches @ self._weight.mT
        sums = {name: patches.new_zeros(samples, dtype=torch.float64) for name in ("squares", "rooted", "weighted")}
        parts = {
            "diagonal": torch.zeros_like(self._weight, dtype=torch.float64),
            "by_column": patches.new_zeros(samples, groups * m // self._taps, dtype=torch.float64),
            "by_row": patches.new_zeros(samples, groups * d, dtype=torch.float64),
        }
        for group, row, columns, left, y in self._units(moves, patches):
            phi, weight = patches[:, group, :, columns], self._weight[group, :, columns]
            own = weight[row].double()
            diagonal = left * _summed(y[:, :, row], phi)
            sums["squares"] += diagonal.sum(dim=1)
            sums["weighted"] += diagonal @ own.square()
            parts["diagonal"][group, row, columns] += diagonal.sum(dim=0)
            if "rooted" in self._quantities:
                sums["rooted"] += (left * _summed(y @ gram[group, row].to(y.dtype), phi)).sum(dim=1)
            if "by_row" in self._quantities:
                along = (y[:, :, row] * outputs[:, group, :, row]).sum(dim=1).double()
                parts["by_row"][:, group * d + row] += (left @ own) * along
            if "by_column" in self._quantities:
                channels = slice((group * m + columns.start) // self._taps, (group * m + columns.stop) // self._taps)
                along = (phi * (y @ weight)).sum(dim=1).double()
                parts["by_column"][:, channels] += self._by_channel(left * own) * self._by_channel(along)
        return {**sums, "diagonal": sums["squares"]}, parts

    def _by_channel(self, columns: Tensor) -> Tensor:
        sums: Tensor = columns.unflatten(1, (-1, self._taps)).sum(dim=2)
        return sums

    def _units(self, moves: Moves, patches: Tensor) -> Iterator[tuple[int, int, slice, Tensor, Tensor]]:
        """Group, row s, columns, a (n, columns) float64 and y (n, P, d): H_(sj),(tk) is the sum of a_j Σ_p φ_pk y_pt.

        Of a move of one column a has that alone, and the others of its channel, which are zero.
        """
        samples, groups, positions, m = patches.shape
        d, count = self._weight.shape[1], min(positions, m)
        for group in range(groups):
            phi = patches[:, group]
            for chosen in torch.arange(d * count, device=phi.device).split(moves.together):
                k, row, unit = torch.arange(len(chosen), device=chosen.device), chosen // count, chosen % count
                moved = phi.new_zeros(len(chosen), samples, groups, positions, d)
                if positions <= m:
                    moved[k, :, group, unit, row] = 1.0
                else:
                    moved[k, :, group, :, row] = phi[:, :, unit].permute(2, 0, 1)
                turned = moves.by_position(moved)[:, :, group]
                for place, y in zip(chosen.tolist(), turned, strict=True):
                    at = place % count
                    if positions <= m:
                        yield group, place // count, slice(0, m), phi[:, at].double(), y
                    else:
                        first = at - at % self._taps
                        left = phi.new_zeros(samples, self._taps, dtype=torch.float64)
                        left[:, at - first] = 1.0
                        yield group, place // count, slice(first, first + self._taps), left, y

    def _neurons(self, moves: Moves, samples: int) -> dict[str, Tensor]:
        _, d, m = self._weight.shape
        ways = (("by_column", m // self._taps, self._columns), ("by_row", d, self._rows))
        return {
            name: self._forms(moves, samples, count, made) for name, count, made in ways if name in self._quantities
        }

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
        moved[torch.arange(len(chosen), device=moved.device), :, :, chosen] = outputs.permute(2, 0, 1)
        return moved


def tells_all(quantities: Sequence[str]) -> bool:
    """Whether the products for some of these quantities tell everything about the Hessian."""
    return bool({"weighted", "diagonal"}.intersection(quantities))


def _summed(rows: Tensor, patches: Tensor) -> Tensor:
    """Σ_p rows_p φ_p for (n, P) and (n, P, columns), (n, columns) float64."""
    sums: Tensor = (rows.unsqueeze(1) @ patches).squeeze(1)
    return sums.double()

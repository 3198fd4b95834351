"""List the quantities of a layer's weight gradients, each as a row of :data:`QUANTITIES`.

Each is a quadratic form of a sample's weight gradient M (d, m) for one cotangent, summed over cotangents, and so is a
linear functional of the sample's Hessian H in the layer's weight w:

- ``squares``: |M|², the trace of H;
- ``gram_weighted``: |R M|² = ⟨w wᵀ, M Mᵀ⟩ with RᵀR = w wᵀ, relative flatness;
- ``gram_weighted_columns``: |w Mᵀ|² = ⟨wᵀw, MᵀM⟩, relative flatness by columns: |M|² of inputs w φ in place of φ;
- ``weighted``: |w ∘ M|², adaptive sharpness;
- ``by_column``, ``by_row``: Σ_j (Σ_group j w ∘ M)² and its summands; a group is an input channel with its kernel
  elements, or a row;
- ``diagonal``: |M|², and M ∘ M summed over the samples, the diagonal of the Hessian.

A row has what its quantity needs, and how it is computed from second derivatives. :mod:`.reference` and :mod:`.routes`
have how it is computed from M.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..interrupts import cached_property
from .precision import product


class Forms(NamedTuple):
    """Hold the forms of each sample's M, (n, …) float64; None for those that are not requested."""

    squares: Tensor | None = None  # |M|², (n,)
    gram_weighted: Tensor | None = None  # |R M|², (n,)
    weighted: Tensor | None = None  # |w ∘ M|², (n,)
    by_column: Tensor | None = None  # Σ w ∘ M over the rows, and the kernel elements, of each input channel, (n, G c)
    by_row: Tensor | None = None  # Σ w ∘ M over the columns of each row, (n, G d)
    gram_weighted_columns: Tensor | None = None  # |w Mᵀ|², (n,)

    @classmethod
    def joined(cls, parts: Sequence["Forms"]) -> "Forms":
        """Return the forms of several pieces of the samples, concatenated."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class RowHessian:
    """Hold second derivatives of every sample's loss in some entries (s, j) of one row s of a layer's weight.

    H_(sj),(tk) = a_j Σ_p φ_pk y_pt for the entries (t, k) of the same group.
    """

    weight: Tensor  # w, (G, d, m)
    gram: Tensor  # w wᵀ, (G, d, d) float64
    kernel_elements: int  # columns of an input channel
    group: int
    row: int  # s, in its group
    columns: slice  # j
    left: Tensor  # a, (n, columns) float64
    phi: Tensor  # φ in these columns, (n, P, columns)
    outputs: Tensor  # w φ_p over all columns, (n, P, d)
    y: Tensor  # (n, P, d)

    @cached_property
    def diagonal(self) -> Tensor:
        """Return H_(sj),(sj), (n, columns) float64."""
        return self.left * _summed(self.y[:, :, self.row], self.phi)

    @cached_property
    def weights(self) -> Tensor:
        """Return w_sj, (columns,) float64."""
        return self.weight[self.group, self.row, self.columns].double()


Sizes = tuple[int, int, int, int]  # of a layer: G, d, m, and the kernel elements of an input channel


@dataclass(frozen=True)
class Neurons:
    """Describe a quantity that is a sum over neurons: the number of neurons, and the direction of each.

    ``directions`` maps the weight of a group (d, m), its neurons' numbers (k,), φ (n, P, m) and the kernel elements to
    the changes Δφ of the layer's outputs, (k, n, P, d), where Δ has a neuron's weights, and zeros elsewhere.
    """

    count: Callable[[Sizes], int]
    directions: Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class LayerQuantity:
    """Describe a quantity, as a row of the table."""

    form: str  # its field of Forms; for neurons the field whose squares it sums
    of_unit: Callable[[RowHessian, Tensor], None]  # adds to a total, (n,) or for neurons (n, neurons)
    gram_factor: bool = False  # needs R, RᵀR = w wᵀ
    weighted: bool = False  # needs w ∘ M, for which M is made unless there is one position
    neurons: Neurons | None = None  # its summands
    squared_entries: bool = False  # has M ∘ M, summed over all samples, too
    of_block_trace: bool = False  # equals ⟨C, T⟩ for T = Σ_j H_(·j),(·j), with C = w wᵀ if gram_factor, else I
    of_outputs: bool = False  # is the trace of T for inputs w φ in place of φ
    of_diagonal: bool = False  # is a sum over single entries H_(sj),(sj)
    sampled: bool = True  # has a sampled value
    of_dense: bool = True  # exists for a convolution as one dense matrix
    of_repeated: bool = True  # exists there even if the padding repeats pixels
    by_column: bool = False  # has summands by column, or by channel of columns
    at_head: bool = False  # has a formula for layers that are the head, see sweep/head_formula.py

    def value(self, forms: Forms) -> Tensor:
        """Return the quantity of every sample, (n,) float64."""
        found: Tensor = getattr(forms, self.form)
        return found if self.neurons is None else found.square().sum(dim=1)


class Contribution(NamedTuple):
    """Hold what one cotangent, or several, add to a layer's quantities."""

    values: Tensor  # (quantities, n) float64
    summands: dict[str, Tensor]
    """By quantity, float64: the summands of neurons, (n, neurons), or entries Σ_i M_i ∘ M_i, (G, d, m)."""


class Made(NamedTuple):
    """Hold which fields of :class:`Forms` are needed."""

    squares: bool
    gram_weighted: bool
    weighted: bool
    by_column: bool
    by_row: bool
    gram_weighted_columns: bool


class Quantities:
    """Hold the wanted quantities, in their order, and what they need.

    They are ``plain`` if all have forms without M for any number of positions, and none has entries. ``squares`` is
    True if one is |M|² without the entries of M ∘ M, for which M is made in any case.
    """

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, *names: str) -> "Quantities":
        """Return the quantities of some names; the same names give the same object."""
        return cls(names)

    def __init__(self, names: Sequence[str]) -> None:
        self.rows = {name: QUANTITIES[name] for name in names}
        every = self.rows.values()
        self.forms = Made(*(any(row.form == field for row in every) for field in Made._fields))
        self.gram_factor = any(row.gram_factor for row in every)
        self.weighted = any(row.weighted for row in every)
        self.squared_entries = [name for name, row in self.rows.items() if row.squared_entries]
        self.neurons = {name: row.neurons for name, row in self.rows.items() if row.neurons is not None}
        self.plain = not self.weighted and not self.squared_entries
        self.squares = any(row.form == "squares" and not row.squared_entries for row in every)

    def __len__(self) -> int:
        return len(self.rows)

    def contribution(self, forms: Forms, sign: Tensor | float | None) -> Contribution:
        """Return the values of a cotangent, and neurons' summands; ``sign`` is a number, (n,), or None for +1."""
        values = torch.stack([row.value(forms) for row in self.rows.values()])
        summands = {name: getattr(forms, self.rows[name].form).square() for name in self.neurons}
        if sign is not None:
            values, summands = values * sign, {name: (each.mT * sign).mT for name, each in summands.items()}
        return Contribution(values, summands)

    def nothing(self, samples: int, sizes: Sizes, device: torch.device) -> Contribution:
        """Return a contribution of zeros, as of a loss over a single class, which has no cotangents."""
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        summands = {name: zeros(samples, neurons.count(sizes)) for name, neurons in self.neurons.items()}
        summands.update((name, zeros(*sizes[:3])) for name in self.squared_entries)
        return Contribution(zeros(len(self), samples), summands)


def of_outputs(name: str) -> bool:
    """Return whether a quantity is |M|² for inputs w φ in place of φ."""
    return QUANTITIES[name].of_outputs


def needs_weight(names: Sequence[str]) -> bool:
    """Return whether some quantities need the entries of a layer's weight."""
    wanted = Quantities.of(*names)
    return wanted.gram_factor or wanted.weighted or wanted.forms.gram_weighted_columns


def _squares(unit: RowHessian, total: Tensor) -> None:
    total += unit.diagonal.sum(dim=1)


def _gram_weighted(unit: RowHessian, total: Tensor) -> None:
    rows = product(unit.y, unit.gram[unit.group, unit.row].to(unit.y.dtype))
    total += (unit.left * _summed(rows, unit.phi)).sum(dim=1)


def _gram_weighted_columns(unit: RowHessian, total: Tensor) -> None:
    left = unit.left @ unit.weight[unit.group, :, unit.columns].double().mT
    total += (left * _summed(unit.y[:, :, unit.row], unit.outputs)).sum(dim=1)


def _weighted(unit: RowHessian, total: Tensor) -> None:
    total += unit.diagonal @ unit.weights.square()


def _by_row(unit: RowHessian, total: Tensor) -> None:
    along = (unit.y[:, :, unit.row] * unit.outputs[:, :, unit.row]).sum(dim=1).double()
    total[:, unit.group * unit.weight.shape[1] + unit.row] += (unit.left @ unit.weights) * along


def _by_column(unit: RowHessian, total: Tensor) -> None:
    first, width = unit.group * unit.weight.shape[2], unit.kernel_elements
    channels = slice((first + unit.columns.start) // width, (first + unit.columns.stop) // width)
    along = (unit.phi * product(unit.y, unit.weight[unit.group, :, unit.columns])).sum(dim=1).double()
    total[:, channels] += _by_channel(unit.left * unit.weights, width) * _by_channel(along, width)


def _by_channel(columns: Tensor, kernel_elements: int) -> Tensor:
    sums: Tensor = columns.unflatten(1, (-1, kernel_elements)).sum(dim=2)
    return sums


def _summed(rows: Tensor, patches: Tensor) -> Tensor:
    """Return Σ_p rows_p φ_p, (n, columns) float64, for rows (n, P) and patches φ (n, P, columns)."""
    sums: Tensor = product(rows.unsqueeze(1), patches).squeeze(1)
    return sums.double()


def _of_columns(weight: Tensor, chosen: Tensor, phi: Tensor, kernel_elements: int) -> Tensor:
    columns = weight.unflatten(1, (-1, kernel_elements))[:, chosen]  # (d, k, kernel elements)
    return torch.einsum("npkt,dkt->knpd", phi.unflatten(2, (-1, kernel_elements))[:, :, chosen], columns)


def _of_rows(weight: Tensor, chosen: Tensor, phi: Tensor, kernel_elements: int) -> Tensor:
    outputs = product(phi, weight[chosen].t())  # (n, P, k)
    changes = phi.new_zeros(len(chosen), *phi.shape[:2], len(weight))
    changes[torch.arange(len(chosen), device=changes.device), :, :, chosen] = outputs.permute(2, 0, 1)
    return changes


QUANTITIES = {
    "squares": LayerQuantity("squares", _squares, of_block_trace=True),
    "gram_weighted": LayerQuantity(
        "gram_weighted", _gram_weighted, gram_factor=True, of_block_trace=True, at_head=True
    ),
    "gram_weighted_columns": LayerQuantity(
        "gram_weighted_columns", _gram_weighted_columns, of_outputs=True, at_head=True
    ),
    "weighted": LayerQuantity("weighted", _weighted, weighted=True, of_diagonal=True, of_repeated=False),
    "by_column": LayerQuantity(
        "by_column",
        _by_column,
        weighted=True,
        neurons=Neurons(lambda sizes: sizes[0] * sizes[2] // sizes[3], _of_columns),
        sampled=False,
        by_column=True,
    ),
    "by_row": LayerQuantity(
        "by_row", _by_row, weighted=True, neurons=Neurons(lambda sizes: sizes[0] * sizes[1], _of_rows), sampled=False
    ),
    "diagonal": LayerQuantity(
        "squares", _squares, squared_entries=True, of_diagonal=True, sampled=False, of_dense=False, by_column=True
    ),
}
"""Every quantity by its name."""

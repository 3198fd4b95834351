"""Find which entries of a layer's input and output belong to which sample.

A measurement needs each sample's own positions. Most layers keep samples in dimension 0, but models flatten them
(n T, m), cut windows (n W, P, m), or put positions first (T, n, m). A layout says which. It is found by sending
cotangents from some samples only, which must reach none of the other samples' rows.

In a batch that is not cut, such as one of graphs, a sample may have any rows. There the cotangents are sent from all
samples once as they are, and again multiplied by a power of two whose exponent is a digit of the sample's number. The
gradient at a row is multiplied by exactly this power if it comes from one sample alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contractions.layer import Memory
from ..errors import InputError
from ..model.row_order import SampleRows


@dataclass(frozen=True)
class Layout:
    """Say where a layer keeps the samples: along ``dim``, as its outer or inner factor if it is longer than n."""

    dim: int = 0
    inner: bool = False

    def samples_first(self, tensor: Tensor, samples: int, memory: Memory | None = None) -> Tensor:
        """Return the tensor as (n, q, …), q the other factor of ``dim``; the dimensions in front of it follow q.

        A copy, if one is needed, goes into ``memory``.
        """
        sizes = (-1, samples) if self.inner else (samples, -1)
        split = tensor.unflatten(self.dim, sizes)
        own = self.dim + self.inner
        first: Tensor = split.movedim((own, self.dim + 1 - self.inner), (0, 1))
        return first

    def entries(self, tensor: Tensor, samples: int) -> int:
        """Return how many entries of a tensor in this layout a sample has."""
        return tensor.numel() // samples

    def fits(self, tensor: Tensor, samples: int) -> bool:
        """Return whether a tensor of a batch of this many samples can have this layout."""
        return self.dim < tensor.ndim and tensor.shape[self.dim] % samples == 0


@dataclass(frozen=True)
class ByRow(Layout):
    """Say to which sample each row of a layer's calls belongs; rows are the places in the first ``dims`` dimensions."""

    dims: int = 1
    rows: Mapping[int, SampleRows] = field(default_factory=dict)  # of the calls, by their number of rows
    sure: bool = True  # whether the sample of every row was found

    def samples_first(self, tensor: Tensor, samples: int, memory: Memory | None = None) -> Tensor:
        """Return (n, P, …), a sample's rows one after another, padded with zeros."""
        flat = tensor.flatten(0, self.dims - 1)
        return self.rows[len(flat)].laid_out(flat, memory)

    def entries(self, tensor: Tensor, samples: int) -> int:
        """Return how many entries of a tensor in this layout a sample has, padding included."""
        return self.present(tensor).shape[1] * math.prod(tensor.shape[self.dims :])

    def present(self, tensor: Tensor) -> Tensor:
        """Return which rows of a tensor in this layout, (n, P), are not padding."""
        count = math.prod(tensor.shape[: self.dims])
        return self.rows[count].place < count

    def fits(self, tensor: Tensor, samples: int) -> bool:
        """Return whether the samples of a tensor's rows are known."""
        return math.prod(tensor.shape[: self.dims]) in self.rows


Sent = Callable[[Tensor], Mapping[str, Sequence[Tensor]]]
"""(cotangent of the outputs) -> the gradients at the output of each call of some layers."""


def by_row(layouts: Mapping[str, ByRow], cotangent: Tensor, send: Sent) -> dict[str, tuple[ByRow, ...]]:
    """Return the sample of each row; a layer has no layout if one of its rows reaches several samples.

    A row without a gradient, for example in front of an inactive ReLU, goes to the sample of the row before it.
    """
    samples, base = len(cotangent), _DIGITS if torch.finfo(cotangent.dtype).max > 1e30 else _FEW_DIGITS
    numbers = torch.arange(samples, device=cotangent.device)
    arrived = {name: [(_flat(part, layouts[name].dims)) for part in parts] for name, parts in send(cotangent).items()}
    largest = {name: [part.abs().argmax(dim=1, keepdim=True) for part in parts] for name, parts in arrived.items()}
    found = {
        name: [torch.zeros(len(part), dtype=torch.int64, device=part.device) for part in parts]
        for name, parts in arrived.items()
    }
    mixed = {name: numbers.new_zeros((), dtype=torch.bool) for name in arrived}
    place = 1
    while place < samples:
        powers = torch.exp2((numbers // place % base - base // 2).to(cotangent.dtype))
        for name, parts in send(cotangent * powers.view(-1, *(1,) * (cotangent.ndim - 1))).items():
            for call, part in enumerate(parts):
                whole, at = arrived[name][call], largest[name][call]
                size, coded = whole.gather(1, at), _flat(part, layouts[name].dims)
                power = torch.where(size == 0, 0.0, (coded.gather(1, at) / size).log2().round())
                digits = power.squeeze(1) + base // 2
                off = (coded - whole * power.exp2()).abs() > coded.abs().amax(dim=1, keepdim=True) * _near(coded.dtype)
                mixed[name] |= off.any() | ~((digits >= 0) & (digits < base)).all()
                found[name][call] += digits.nan_to_num(0).long() * place
        place *= base
    layouts_of = {}
    for name, parts in arrived.items():
        owners = [torch.where(part.any(dim=1), own, -1) for part, own in zip(parts, found[name], strict=True)]
        layouts_of[name] = () if bool(mixed[name]) else of_owners(layouts[name], owners, samples)
    return layouts_of


def of_owners(layout: ByRow, owners: Sequence[Tensor], samples: int) -> tuple[ByRow, ...]:
    """Return a layout with the sample of each row, (r,) for each call; none if calls of one length disagree.

    A row without a sample, −1, goes to the sample of the row before it.
    """
    filled = [_filled(own, own >= 0) for own in owners]
    known = {len(own): own for own in filled}
    if not all(own.equal(known[len(own)]) and bool((own < samples).all()) for own in filled):
        return ()
    rows = {count: SampleRows.of(own, samples) for count, own in known.items()}
    return (ByRow(dims=layout.dims, rows=rows, sure=all(bool((own >= 0).all()) for own in owners)),)


_DIGITS, _FEW_DIGITS = 32, 4  # base of the digits of samples' numbers, by the range of powers of two in a dtype


def _flat(tensor: Tensor, dims: int) -> Tensor:
    """Return a gradient as (rows, entries), the rows from its first dimensions, with 0 for NaN."""
    return tensor.flatten(0, dims - 1).flatten(1).nan_to_num(0.0, 0.0, 0.0)


def _filled(owners: Tensor, known: Tensor) -> Tensor:
    """Return each row's owner; an unknown one is that of the last known row before it, or else of the first known."""
    places = torch.where(known, torch.arange(len(known), device=known.device), -1).cummax(dim=0).values
    return owners[torch.where(places < 0, known.int().argmax(), places)]


def _near(dtype: torch.dtype) -> float:
    """Return the relative difference up to which two numbers count as equal up to rounding."""
    return math.sqrt(torch.finfo(dtype).eps)


def candidates(shape: Sequence[int], samples: int, dims: int) -> Iterator[Layout]:
    """Yield layouts that a tensor may have, likely ones first; samples are in one of its first ``dims`` dimensions."""
    for dim, size in enumerate(shape[:dims]):
        if size and size % samples == 0:
            yield Layout(dim)
            if size > samples:
                yield Layout(dim, inner=True)


def consistent(
    layouts: Iterable[Layout], senders: Tensor, gradients: Sequence[Tensor], samples: int
) -> tuple[Layout, ...]:
    """Return the layouts in which gradients of a cotangent are zero outside the rows of its ``senders``, (n,) bool."""
    return tuple(
        layout
        for layout in layouts
        if all(layout.fits(gradient, samples) and stays(layout, gradient, senders) for gradient in gradients)
    )


def check_outputs(outputs: Tensor, samples: int) -> None:
    """Raise if the model's output is not floating point, or does not have the samples in dimension 0."""
    if not outputs.is_floating_point():
        raise InputError(
            f"model: its output {tuple(outputs.shape)} is {outputs.dtype}, which has no derivative; have the model (or "
            "forward=) return floating-point outputs, such as the logits in front of argmax"
        )
    if outputs.ndim == 0 or samples < 1 or len(outputs) % samples:
        raise InputError(
            f"the model's output {tuple(outputs.shape)} does not hold {samples} samples in dimension 0; have the model "
            "(or forward=) return outputs with the samples there, such as (n, classes)"
        )


def mixed(name: str, shape: Sequence[int], samples: int) -> InputError:
    """Return the error for a layer whose rows cannot be told apart."""
    return InputError(
        f"layer {name!r}: its rows {tuple(shape)} cannot be told apart by the {samples} samples: what is sent back "
        "from one sample reaches rows of the others, however they are laid out. Either the model mixes samples, so "
        "that a sample's loss depends on its batch, or it gathers them, or the layer's input has no dimension of "
        "samples (class embeddings) or only a part of the batch. Leave the layer out by layers=, and the others may be "
        "measured; or pass batches of one sample"
    ).about({name: "its rows cannot be told apart by sample"})


def stays(layout: Layout, gradient: Tensor, senders: Tensor) -> bool:
    """Return whether a gradient is zero but for the senders, (n,) bool; NaN counts as zero, since 0 · NaN is NaN."""
    others = layout.samples_first(gradient, len(senders))[~senders]
    return not bool(others.any()) or not bool(others.nan_to_num(0.0).any())

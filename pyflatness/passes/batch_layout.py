"""Find which entries of a layer's input and output belong to which sample.

A measurement needs each sample's own positions. Most layers keep samples in dimension 0, but models flatten them
(n T, m), cut windows (n W, P, m), or go position first (T, n, m). A layout says how; it is found by sending cotangents
from some samples only: they must reach none of the others' rows.

Of a batch that is not cut, as one of graphs, a sample may have any rows. There the cotangents are sent from all samples
once as they are and once more multiplied by a power of two, which is a digit of the sample's number. Whatever is behind
a row, what arrives there is multiplied by exactly this power, if it comes from one sample.
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
    """Say where a layer keeps the samples: along ``dim``, as its outer or inner factor where that is longer than n."""

    dim: int = 0
    inner: bool = False

    def samples_first(self, tensor: Tensor, samples: int, memory: Memory | None = None) -> Tensor:
        """Return (n, q, …), q the other factor of the dimension; the dimensions in front of it follow q.

        What is copied for it goes into a ``memory``.
        """
        sizes = (-1, samples) if self.inner else (samples, -1)
        split = tensor.unflatten(self.dim, sizes)
        own = self.dim + self.inner
        first: Tensor = split.movedim((own, self.dim + 1 - self.inner), (0, 1))
        return first

    def entries(self, tensor: Tensor, samples: int) -> int:
        """Return how many entries a sample has where a tensor is laid out so."""
        return tensor.numel() // samples

    def fits(self, tensor: Tensor, samples: int) -> bool:
        """Return whether a tensor of a batch of so many samples can be laid out so."""
        return self.dim < tensor.ndim and tensor.shape[self.dim] % samples == 0


@dataclass(frozen=True)
class ByRow(Layout):
    """Say which sample each row of a layer's calls is of, rows being places in the first ``dims`` dimensions."""

    dims: int = 1
    rows: Mapping[int, SampleRows] = field(default_factory=dict)  # of the calls, by how many rows they have
    sure: bool = True  # whether every row answers to a sample

    def samples_first(self, tensor: Tensor, samples: int, memory: Memory | None = None) -> Tensor:
        """Return (n, P, …), a sample's rows one after another, padded with zeros."""
        flat = tensor.flatten(0, self.dims - 1)
        return self.rows[len(flat)].laid_out(flat, memory)

    def entries(self, tensor: Tensor, samples: int) -> int:
        """Return how many entries a sample has where a tensor is laid out so, padding included."""
        return self.present(tensor).shape[1] * math.prod(tensor.shape[self.dims :])

    def present(self, tensor: Tensor) -> Tensor:
        """Return which of the rows that are laid out for a tensor, (n, P), are no padding."""
        count = math.prod(tensor.shape[: self.dims])
        return self.rows[count].place < count

    def fits(self, tensor: Tensor, samples: int) -> bool:
        """Return whether it is known of which sample a tensor's rows are."""
        return math.prod(tensor.shape[: self.dims]) in self.rows


Sent = Callable[[Tensor], Mapping[str, Sequence[Tensor]]]
"""Send a cotangent of the outputs back, and return what arrives at the output of each call of some layers."""


def by_row(layouts: Mapping[str, ByRow], cotangent: Tensor, send: Sent) -> dict[str, tuple[ByRow, ...]]:
    """Return which sample each row is of; a layer has no layout if one of its rows answers to several.

    A row that nothing arrives at, as behind a ReLU that is off, is taken with the one in front of it.
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
    """Return a layout with the sample of each row, (r,) for each call; none if calls of a length have different ones.

    A row of no sample, −1, is taken with the one in front of it.
    """
    filled = [_filled(own, own >= 0) for own in owners]
    known = {len(own): own for own in filled}
    if not all(own.equal(known[len(own)]) and bool((own < samples).all()) for own in filled):
        return ()
    rows = {count: SampleRows.of(own, samples) for count, own in known.items()}
    return (ByRow(dims=layout.dims, rows=rows, sure=all(bool((own >= 0).all()) for own in owners)),)


_DIGITS, _FEW_DIGITS = 32, 4  # of a sample's number in one cotangent, as far as powers of two go in a dtype


def _flat(tensor: Tensor, dims: int) -> Tensor:
    """Return the rows that a gradient has in its first dimensions, (rows, entries); NaN is taken for 0."""
    return tensor.flatten(0, dims - 1).flatten(1).nan_to_num(0.0, 0.0, 0.0)


def _filled(owners: Tensor, known: Tensor) -> Tensor:
    """Return each row's number, that of the last known row in front of it (or the first one) where it has none."""
    places = torch.where(known, torch.arange(len(known), device=known.device), -1).cummax(dim=0).values
    return owners[torch.where(places < 0, known.int().argmax(), places)]


def _near(dtype: torch.dtype) -> float:
    """Return how far, relatively, two numbers may be apart that are the same but for rounding."""
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
    """Return the layouts in which gradients of a cotangent stay within the rows of its ``senders``, (n,) bool."""
    return tuple(
        layout
        for layout in layouts
        if all(layout.fits(gradient, samples) and stays(layout, gradient, senders) for gradient in gradients)
    )


def check_outputs(outputs: Tensor, samples: int) -> None:
    """Raise if the model's output is not of floating-point numbers, or cannot be told apart by sample."""
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
        "that a sample's loss depends on its batch, or it gathers them; batches of one sample can be measured"
    ).about({name: "its rows cannot be told apart by sample"})


def stays(layout: Layout, gradient: Tensor, senders: Tensor) -> bool:
    """Return whether nothing arrives but at the senders, (n,) bool; NaN is no sign of it, 0 · NaN is NaN too."""
    others = layout.samples_first(gradient, len(senders))[~senders]
    return not bool(others.any()) or not bool(others.nan_to_num(0.0).any())

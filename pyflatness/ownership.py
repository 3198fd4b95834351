"""Which entries of a layer's input and output belong to which sample.

A measurement needs each sample's own positions. Most layers keep samples in dimension 0, but models flatten them
(n T, m), cut windows (n W, P, m), or go position first (T, n, m). A layout says how; it is found by sending a signal
from some samples only: it must reach none of the others' rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .errors import InputError


@dataclass(frozen=True)
class Layout:
    """Where a layer keeps the samples: along ``dim``, as its outer or inner part where that is longer than n."""

    dim: int = 0
    inner: bool = False

    def samples_first(self, tensor: Tensor, samples: int) -> Tensor:
        """(n, q, …), q the other part of the dimension; the dimensions in front of it follow q."""
        sizes = (-1, samples) if self.inner else (samples, -1)
        split = tensor.unflatten(self.dim, sizes)
        own = self.dim + self.inner
        first: Tensor = split.movedim((own, self.dim + 1 - self.inner), (0, 1))
        return first

    def fits(self, tensor: Tensor, samples: int) -> bool:
        """Whether a tensor of a batch of so many samples can be laid out so."""
        return self.dim < tensor.ndim and tensor.shape[self.dim] % samples == 0


def candidates(shape: Sequence[int], samples: int, dims: int) -> Iterator[Layout]:
    """Layouts that a tensor may have, likely ones first; samples are in one of its first ``dims`` dimensions."""
    for dim, size in enumerate(shape[:dims]):
        if size and size % samples == 0:
            yield Layout(dim)
            if size > samples:
                yield Layout(dim, inner=True)


def find(name: str, from_first: Sequence[Tensor], from_others: Sequence[Tensor], samples: int, dims: int) -> Layout:
    """The layout in which the first sample's signal stays with it, and the others' away from it.

    Args:
        name: of the layer, for the error.
        from_first: gradients at the layer's calls of a signal sent from the first sample alone.
        from_others: the same from all other samples.
        samples: how many there are.
        dims: dimensions of a gradient that may hold samples.

    Raises:
        InputError: there is none; samples are mixed, or positions are gathered.
    """
    for layout in candidates(from_first[0].shape, samples, dims):
        if (
            all(layout.fits(call, samples) for call in from_first)
            and not any(reached(layout, call, samples)[1:].any() for call in from_first)
            and not any(reached(layout, call, samples)[0] for call in from_others)
        ):
            return layout
    raise mixed(name, from_first[0].shape, samples)


def mixed(name: str, shape: Sequence[int], samples: int) -> InputError:
    """The error for a layer whose rows cannot be told apart."""
    return InputError(
        f"layer {name!r}: its rows {tuple(shape)} cannot be told apart by the {samples} samples: what is sent back "
        "from one sample reaches rows of the others, however they are laid out. Either the model mixes samples, so "
        "that a sample's loss depends on its batch, or it gathers them; batches of one sample can be measured"
    )


def reached(layout: Layout, gradient: Tensor, samples: int) -> Tensor:
    """(n,), whether anything arrives at each sample; NaN is no sign of it, 0 · NaN is NaN too."""
    return (layout.samples_first(gradient, samples).nan_to_num(0.0) != 0).flatten(1).any(dim=1)

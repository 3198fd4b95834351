"""Find which entries of a layer's input and output belong to which sample.

A measurement needs each sample's own positions. Most layers keep samples in dimension 0, but models flatten them
(n T, m), cut windows (n W, P, m), or go position first (T, n, m). A layout says how; it is found by sending cotangents
from some samples only: they must reach none of the others' rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import InputError


@dataclass(frozen=True)
class Layout:
    """Say where a layer keeps the samples: along ``dim``, as its outer or inner factor where that is longer than n."""

    dim: int = 0
    inner: bool = False

    def samples_first(self, tensor: Tensor, samples: int) -> Tensor:
        """Return (n, q, …), q the other factor of the dimension; the dimensions in front of it follow q."""
        sizes = (-1, samples) if self.inner else (samples, -1)
        split = tensor.unflatten(self.dim, sizes)
        own = self.dim + self.inner
        first: Tensor = split.movedim((own, self.dim + 1 - self.inner), (0, 1))
        return first

    def fits(self, tensor: Tensor, samples: int) -> bool:
        """Return whether a tensor of a batch of so many samples can be laid out so."""
        return self.dim < tensor.ndim and tensor.shape[self.dim] % samples == 0


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
    if outputs.ndim == 0 or len(outputs) % samples:
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

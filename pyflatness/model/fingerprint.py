"""Tell whether two reads of the user's data gave the same samples, and whether two models have the same weights.

Every sample has a number: a hash of up to 64 entries of each of its tensors, with their bits as integers. The sum of
these numbers over a read depends neither on the order of the samples nor on the division into batches, and has no
rounding. A second sum mixes every number with the sample's place, and so depends on the order too.
"""

import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from .spread import is_spread

_ENTRIES = 64  # entries of a sample's tensor, spread evenly over it
_ODD = 0x2545F4914F6CDD1D  # an odd factor, so that multiplication modulo 2⁶⁴ is one to one
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


class Fingerprint:
    """Hold the hashes of one read of the data."""

    def __init__(self) -> None:
        self._samples = 0
        self._shapes: set[tuple[torch.Size, ...]] = set()  # of a sample's tensors
        self._sum: Tensor | int = 0
        self._in_order: Tensor | int = 0

    def add(self, tensors: Iterator[Tensor], samples: int, *, whole: bool = False) -> None:
        """Add a batch: its tensors with the samples in dimension 0, or with ``whole`` all its tensors as one row.

        For the latter, another order or division into batches looks like other samples, so that :meth:`same_samples`
        only compares the number of samples.
        """
        shapes, number = [], None
        for tensor in tensors:
            shapes.append(tensor.shape[1:])
            own = _numbers(tensor.detach())
            number = own if number is None else _mixed(number) + own
        if number is not None:
            number = _mixed(number)
            places = torch.arange(self._samples, self._samples + samples, device=number.device)
            self._sum = self._sum + number.sum()
            self._in_order = self._in_order + _mixed(number + _mixed(places)).sum()
        self._samples += samples
        self._shapes |= {tuple(shapes), ()} if whole else {tuple(shapes)}

    def __str__(self) -> str:
        """Return a text that is equal for two reads of the same samples, in any order."""
        return f"{self._samples} samples, {int(self._sum) & (2**64 - 1):x}"

    def same_order(self, other: "Fingerprint") -> bool:
        """Return whether the other read gave the same samples in the same order."""
        return self._samples == other._samples and int(self._in_order) == int(other._in_order)

    def same_samples(self, other: "Fingerprint") -> bool:
        """Return whether the other read gave the same samples, in any order; if padded, the same number."""
        if self._samples != other._samples:
            return False
        padded = len(self._shapes | other._shapes) > 1
        return padded or int(self._sum) == int(other._sum) or self.same_order(other)


def of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of named tensors: of names, shapes, and up to 64 entries of each that is not spread over ranks."""
    total = 0
    for name, tensor in tensors:
        shape = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # Accelerate keeps a tensor on the meta device elsewhere; ranks have different entries of one spread over them.
        empty = tensor.numel() == 0 or tensor.is_meta or is_spread(tensor)
        number = 0 if empty else int(_numbers(tensor.detach().unsqueeze(0)))
        total += zlib.crc32(f"{shape} {number}".encode())
    return f"{total:x}"


def of_buffers(model: nn.Module) -> str:
    """Return a hash of the buffers that are saved with a model, such as the statistics of BatchNorm."""
    return of_tensors(
        (f"{prefix}.{name}", buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )


def of_all_entries(tensors: Iterable[Tensor]) -> int:
    """Return a number below 2⁶² from every bit of some tensors.

    If an entry changes, the number changes, except in about one case of 2³².
    """
    total = 0
    for tensor in tensors:
        bits = tensor.detach().resolve_neg().view(_INTEGERS[tensor.element_size()])
        wide = bits.dtype if bits.element_size() >= 4 else torch.int64  # a sum in the same dtype is 50 times as fast
        total = _ODD * total + int(bits.sum(dtype=wide))
    return total % 2**62


def _numbers(tensor: Tensor) -> Tensor:
    """Return a number for each sample, (samples,) int64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    rows = tensor.reshape(len(tensor), -1)
    rows = rows[:, :: -(-rows.shape[1] // _ENTRIES)] if rows.shape[1] > _ENTRIES else rows
    if rows.is_floating_point():
        rows = rows.contiguous().view(_INTEGERS[rows.element_size()])
    factors = _mixed(torch.arange(1, rows.shape[1] + 1, device=rows.device))
    return (rows.long() * factors).sum(dim=1)


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ (numbers >> 29)) * _ODD
    return numbers ^ (numbers >> 32)

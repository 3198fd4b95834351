"""Reduce values over the samples of a data set: which samples count, and the normaliser.

    E = Σ_i t_i / Σ_i ω_i   (reduction "mean")        E = Σ_i t_i   (reduction "sum")

over all samples that count, whatever the batches, with t_i the contribution of sample i and ω_i its weight in the mean.
The divisor is the normaliser. Only this module decides what a ``nan_policy`` does about NaN and infinity:

    "raise"      an error says where they are
    "propagate"  the values of their samples are NaN, and so are the sums
    "omit"       their samples are left out of sums and normaliser, and counted

It does the same about a sum of squares that is 0, or loses digits, because its inputs' squares underflow.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import InputError, NonFiniteError
from .shard import WHOLE, Key, Shard, Summands

NAN_POLICIES = "raise", "propagate", "omit"
_SAMPLES = "samples"  # the key of numbers of samples among sums over ranks
_SMALL = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps

Error = Callable[[], NonFiniteError]
"""Return the error for "raise", or raise another if no sample is its cause, such as weights that are not finite."""
BySample = Callable[[Tensor], Tensor]  # whether rows are finite, (rows,) bool -> whether samples are, (n,) bool


def omits(policy: str) -> bool:
    """Return whether samples may be left out, so that values have to be known for each sample."""
    return policy == "omit"


def raises(policy: str) -> bool:
    """Return whether a value that is not finite is an error, so that all samples count."""
    return policy == "raise"


def non_finite(number: int, fine: Tensor, where: str, rows: str = "samples") -> NonFiniteError:
    """Return the error of a batch for "raise"; ``fine`` (rows,) is False for rows with NaN or infinity."""
    return NonFiniteError(
        f"batch {number}: {int((~fine).sum())} of {len(fine)} {rows} have NaN or infinity {where}; pass "
        "nan_policy='omit' or 'propagate' to go on"
    )


def underflow(
    policy: str, number: int, total: float, inputs: Iterable[Tensor], layer: str, rows: str = "samples"
) -> Tensor | None:
    """Return which rows of a batch have lost their values to underflow, (rows,) bool; None if none has.

    A sum of products with squared inputs is right up to rounding if it is far above the dtype's smallest normal number,
    or if the largest of these squares is above that. If all inputs are 0 it is a true 0. ``total`` is Σ |value|;
    ``inputs`` (rows, …) each, not yet normalised, are read only if it is nearly 0.
    """
    if not total < _SMALL:
        return None
    parts = [part for part in inputs if part.numel()]
    if not parts or not all(part.is_floating_point() for part in parts):  # a token counts as 1
        return None
    limits = torch.finfo(functools.reduce(torch.promote_types, [part.dtype for part in parts], torch.float32))
    largest = max(abs(float(end)) for part in parts for end in part.aminmax())
    if not (largest > 0 and largest**2 < limits.tiny and total < limits.tiny / limits.eps):
        return None
    lost = torch.stack([part.flatten(1).any(dim=1) for part in parts]).any(dim=0)
    if policy == "raise":
        where = f"layer {layer!r}" if layer else "the layer"
        raise NonFiniteError(
            f"batch {number}: {int(lost.sum())} of {len(lost)} {rows} have inputs of {where} whose squares underflow "
            f"(the largest is {largest:.2g}); rescale the inputs or compute in float64, or pass nan_policy='omit' or "
            "'propagate' to go on"
        )
    return lost


def kept(policy: str, fine: Tensor, error: Error, samples: BySample | None = None) -> Tensor | None:
    """Return which samples of a batch count, (n,) bool, if the rows that are ``fine`` are finite; None if all count."""
    if policy == "propagate" or bool(fine.all()):
        return None
    found = error()
    if policy == "raise":
        raise found
    return fine if samples is None else samples(fine)


def all_finite(values: Tensor) -> bool:
    """Return whether all values are finite; a sum shows that in a tenth of the time, unless it overflows."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def finite_samples(values: Tensor) -> Tensor:
    """Return which samples have only finite values among values (…, n), (n,) bool."""
    return values.isfinite().flatten(0, -2).all(dim=0)


def counting(policy: str, values: Tensor) -> Tensor:
    """Return which samples will count, (n,) bool, given their values (…, n)."""
    fine = finite_samples(values)
    return fine if omits(policy) else torch.ones_like(fine)


def masked(values: Tensor, kept: Tensor | None, fill: float = 0.0) -> Tensor:
    """Return values (…, n) with ``fill`` for samples that do not count."""
    return values if kept is None else values.masked_fill(~kept, fill)


def check_together(policy: str, fine: bool, error: Error) -> None:
    """Raise unless a value of all samples together is ``fine`` or may be NaN; it cannot leave out a sample."""
    if not fine and policy != "propagate":
        raise error()


def check_followed(policy: str, error: Exception) -> None:
    """Raise an error of NaN under "raise"; otherwise return, so that only the measure that cannot omit has it."""
    if policy == "raise" and isinstance(error, NonFiniteError):
        raise error


def normaliser(total_weight: float, reduction: str = "mean") -> float:
    """Return the normaliser: Σ_i ω_i for the reduction "mean", 1 for "sum"; NaN if the sum of weights is NaN."""
    if total_weight == 0:
        raise InputError("targets: every one is ignored (or has class weight 0), so the loss has no terms")
    return normaliser_or_nan(total_weight, reduction)


def normaliser_or_nan(total_weight: float, reduction: str) -> float:
    """Return the normaliser; it is NaN for a mean over no terms, as in torch's losses."""
    if reduction == "mean" or math.isnan(total_weight):
        return total_weight or math.nan
    return 1.0


class Accumulator:
    """Count samples and omitted samples, and add up the weights ω_i of those that count, batch by batch."""

    def __init__(self, policy: str, reduction: str = "mean") -> None:
        self._policy, self._reduction = policy, reduction
        self._seen = 0
        self._weight: Tensor | float = 0.0
        self.omitted = 0

    def kept(self, fine: Tensor, error: Error, samples: BySample | None = None) -> Tensor | None:
        """Return which samples of a batch count, see :func:`kept`, and count those that do not."""
        found = kept(self._policy, fine, error, samples)
        self.omitted += 0 if found is None else int((~found).sum())
        return found

    @property
    def weight(self) -> float:
        """Return Σ ω_i so far; the host waits for the device."""
        return float(self._weight)

    def add(self, samples: int, weight: Tensor | float = 0.0) -> None:
        """Add a batch: its number of samples, and the total weight of those that count if the mean is weighted."""
        self._seen, self._weight = self._seen + samples, self._weight + weight

    def together(self, shard: Shard, summands: Summands) -> dict[Key, Tensor]:
        """Add other ranks' samples at the end of a read of the data, and return the sums of values over all ranks."""
        if shard.ranks.alone:
            return dict(summands)
        own = torch.tensor([self._seen, self.weight, self.omitted], dtype=torch.float64, device="cpu")
        sums = shard.sum("the end of a read of the data", {**summands, _SAMPLES: own})
        seen, self._weight, omitted = sums.pop(_SAMPLES).tolist()
        self._seen, self.omitted = int(seen), int(omitted)
        return sums

    def check(self) -> None:
        """Raise if no sample counts."""
        if self.samples == 0:
            raise NonFiniteError(f"nan_policy='omit': all {self.omitted} samples have NaN or infinity")

    @property
    def samples(self) -> int:
        """Return the number of samples that count."""
        return self._seen - self.omitted

    @property
    def normaliser(self) -> float:
        """Return the divisor of sums."""
        self.check()
        return normaliser(self.weight, self._reduction)

    def per_sample(self, contributions: Sequence[Tensor], shard: Shard = WHOLE) -> Tensor:
        """Return n times each sample's contribution to the value, (…, n), whose mean is the value; NaN if left out."""
        rows = shard.rows("the values of samples", torch.cat([*contributions], dim=-1))
        return rows * (self.samples / self.normaliser)

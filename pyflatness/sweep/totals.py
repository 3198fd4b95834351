"""Sum values of samples to values of the data set, by the user's policy for NaN and infinity."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError
from ..interrupts import cached_property
from ..model import layers
from ..numerics.accumulate import Accumulator, finite_samples, masked, non_finite
from ..numerics.shard import WHOLE, Shard
from ..numerics.variances import Variances
from ..options import Options
from .layer_sweep import Values
from .subset import Subset

_VALUES, _SIZE = "values", "size"  # beside further sums, among sums over ranks

OR_OVERFLOW = "(or squares beyond the dtype's range)"


@dataclass(frozen=True)
class Sums:
    """Hold values of the data set: of each layer, and last of the network, the sum of its layers."""

    values: Tensor  # (layers + 1, quantities) float64 on the CPU
    errors: Tensor | None  # standard errors given the data; None if the values are exact
    dof: Tensor | None  # degrees of freedom of the errors, NaN if they are not known
    per_sample: Tensor | None  # (layers + 1, quantities, n)
    samples: int  # number of samples that count
    omitted: int  # number of samples that were left out
    normaliser: float  # the divisor of all sums
    further: Mapping[tuple[str, ...], Tensor]  # further sums over samples, divided too, by layer and quantity

    @cached_property
    def numbers(self) -> list[list[float]]:
        """Return the values as Python's numbers, converted once."""
        found: list[list[float]] = self.values.tolist()
        return found

    def uncertainty(self, row: int, column: int) -> tuple[float | None, float | None]:
        """Return the standard error of a value and its degrees of freedom, each None if there is none."""
        if self.errors is None or self.dof is None:
            return None, None
        dof = float(self.dof[row, column])
        return float(self.errors[row, column]), None if math.isnan(dof) else dof

    @property
    def relative_error(self) -> float:
        """Return the largest standard error relative to its value."""
        assert self.errors is not None
        return float((self.errors / self.values.abs()).nan_to_num(0.0).max())  # 0 / 0 counts as 0


class Totals:
    """Hold running sums over samples, for each layer and last for the network, the sum of its layers.

    ``over`` counts the samples so far; with a ``subset``, the samples are that part of the data.
    """

    def __init__(
        self,
        reduction: str,
        options: Options,
        error: Callable[[Values, Tensor], NonFiniteError],
        *,
        sampled: bool = False,
        shard: Shard = WHOLE,
        subset: Subset | None = None,
    ) -> None:
        self.over = Accumulator(options.nan_policy, reduction)
        self._per_sample, self._sampled, self._error, self._shard = options.per_sample, sampled, error, shard
        self._sums = torch.zeros((), dtype=torch.float64, device="cpu")
        self._subset, self._size = subset, torch.zeros_like(self._sums)
        self._variances = Variances()
        self._contributions: list[Tensor] = []
        self._further: dict[tuple[str, ...], Tensor] = {}

    def add(self, micro_batch: Values) -> None:
        """Add the values of some samples."""
        fine = finite_samples(micro_batch.values)
        kept = self.over.kept(fine, lambda: self._error(micro_batch, fine))
        self.over.add(len(fine), masked(micro_batch.sample_weights, kept).sum())
        values = micro_batch.values
        values = masked(values.where(values.isfinite(), torch.nan), kept)  # only layers with infinity become NaN
        probes = torch.cat([values, values.sum(dim=1, keepdim=True)], dim=1)
        sizes, chances = micro_batch.sizes, None
        if self._subset is not None and sizes is not None:
            chances = self._subset.chances(sizes)
            probes, sizes = probes / chances, sizes / chances
            self._size = self._size + sizes.sum().cpu()
        means = probes.mean(dim=0)
        self._sums = self._sums.to(means.device) + means.sum(dim=2)
        if micro_batch.variances is not None and chances is not None and sizes is not None:
            self._variances.add_groups(micro_batch.variances, means, kept, sizes, chances)
        elif micro_batch.variances is not None:
            self._variances.add(masked(micro_batch.variances, kept))
        elif self._sampled or chances is not None:
            self._variances.add_probes(probes, kept, sizes, chances, exact=not self._sampled)
        for key, summed in micro_batch.summands.items():
            self._further[key] = summed + self._further[key] if key in self._further else summed
        if self._per_sample:
            self._contributions.append(masked(means, kept, torch.nan))

    def sums(self) -> Sums:
        """Return the sums of all values, of all ranks, at the end of a read of the data."""
        sums = {_VALUES: self._sums, _SIZE: self._size} if self._sums.ndim else {}
        found = self.over.together(self._shard, {**sums, **self._further})
        over, scale = self.over, 1.0
        if self._subset is not None:
            over, scale = self._subset.over, self._subset.scale(found.pop(_SIZE))
        self._sums = found.pop(_VALUES)
        self._further = {key: total for key, total in found.items() if isinstance(key, tuple)}
        self._variances.together(self._shard)
        normaliser = over.normaliser / scale
        values = (self._sums / normaliser).cpu()
        errors = dof = None
        spread = self._variances.result()
        if spread is not None:
            variance, dof = (each.cpu() for each in spread)
            errors = (variance.sqrt() / normaliser).masked_fill(~values.isfinite(), torch.nan)
        return Sums(
            values=values,
            errors=errors,
            dof=dof,
            per_sample=self.over.per_sample(self._contributions, self._shard) if self._per_sample else None,
            samples=over.samples,
            omitted=over.omitted,
            normaliser=normaliser,
            further={key: (summed / normaliser).cpu() for key, summed in self._further.items()},
        )


def layer_error(modules: Mapping[str, nn.Module], micro_batch: Values, fine: Tensor) -> NonFiniteError:
    """Return the error for values of layers that are not finite, or raise if a layer's weights are not."""
    layers.check_finite(modules)
    finite = micro_batch.values.isfinite().all(dim=0).flatten(1).all(dim=1)
    where = [name for name, whole in zip(modules, finite, strict=True) if not bool(whole)]
    listed = ", ".join(map(repr, where[:4])) + (", …" if len(where) > 4 else "")
    what = (
        "inputs, gradients or second derivatives"
        if micro_batch.by_hessian.intersection(where)
        else "inputs or gradients"
    )
    what = f"in the {what} of layer {listed}"
    if micro_batch.lost is not None and bool(micro_batch.lost.any()):
        what = f"in their targets, outputs or loss, or {what}"
    return non_finite(micro_batch.number, fine, f"{OR_OVERFLOW} {what}")

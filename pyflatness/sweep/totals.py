"""From the values of samples to those of the data set, by the user's policy for NaN and infinity."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import InputError, NonFiniteError
from ..model import layers
from ..numerics.variances import Variances
from .layer_sweep import Values

_AGREEING = 1e-6  # of a value: by less than so much draws differ by chance or by rounding, which tells of no error


@dataclass(frozen=True)
class Sums:
    """Values of the data set: of each layer, and last of the network, the sum of its layers.

    Attributes:
        values: (layers + 1, quantities) float64 on the CPU.
        errors: of the same shape, standard errors given the data; None if the values are exact.
        dof: of the same shape, degrees of freedom of the errors, NaN where they are not known; None with ``errors``.
        per_sample: (layers + 1, quantities, n), n times each sample's share, NaN for one that was left out; or None.
        samples: how many counted.
        omitted: how many were left out.
        parts: by layer and quantity, the parts of a value; see :class:`.layer_sweep.Values`.
    """

    values: Tensor
    errors: Tensor | None
    dof: Tensor | None
    per_sample: Tensor | None
    samples: int
    omitted: int
    parts: Mapping[tuple[str, str], Tensor]

    def uncertainty(self, row: int, column: int) -> tuple[float | None, float | None]:
        """Return the standard error of a value and its degrees of freedom, each None where there is none."""
        if self.errors is None or self.dof is None:
            return None, None
        dof = float(self.dof[row, column])
        return float(self.errors[row, column]), None if math.isnan(dof) else dof

    def pooled(self, other: "Sums", weight: float) -> "Sums":
        """With independent values of the same data; ``weight`` is this one's.

        The degrees of freedom stay those of this one, whose errors said how many draws the other takes (Stein 1945).
        """
        assert self.errors is not None
        assert other.errors is not None
        shares = None
        if self.per_sample is not None and other.per_sample is not None:
            shares = weight * self.per_sample + (1 - weight) * other.per_sample
        return replace(
            self,
            values=weight * self.values + (1 - weight) * other.values,
            errors=torch.hypot(weight * self.errors, (1 - weight) * other.errors),
            per_sample=shares,
        )


class Totals:
    """Running sums over samples, for each layer and then for the network, the sum of its layers.

    Args:
        reduction: the loss's, ``"mean"`` or ``"sum"``.
        nan_policy: see :func:`pyflatness.relative_flatness`.
        per_sample: whether each sample's values are kept.
        sampled: whether values are means over random draws; for those sampled in groups their variances say so.
    """

    def __init__(self, reduction: str, nan_policy: str, *, per_sample: bool = False, sampled: bool = False) -> None:
        self._reduction, self._policy, self._per_sample, self._sampled = reduction, nan_policy, per_sample, sampled
        self._sums = torch.zeros((), dtype=torch.float64, device="cpu")
        self._variances = Variances()
        self._normaliser = 0.0
        self._shares: list[Tensor] = []
        self._parts: dict[tuple[str, str], Tensor] = {}
        self.samples = self.omitted = 0

    def add(self, part: Values, modules: dict[str, nn.Module]) -> None:
        """Take in the values of some samples.

        Raises:
            NonFiniteError: NaN or infinity, under the policy ``"raise"`` or in a layer's weights.
        """
        values, weights = part.values, part.sample_weights
        bad = ~values.isfinite().flatten(0, 2).all(dim=0)
        if bool(bad.any()) and self._policy == "propagate":
            values = values.where(values.isfinite(), torch.nan)  # never infinity, and a layer that is fine stays so
        if bool(bad.any()) and self._policy != "propagate":
            layers.check_finite(modules)
            if self._policy == "raise":
                raise _non_finite(part, bad, [*modules])
            values, weights = values.masked_fill(bad, 0.0), weights.masked_fill(bad, 0.0)
            self.omitted += int(bad.sum())
        else:
            bad = torch.zeros_like(bad)
        self.samples += int((~bad).sum())
        self._normaliser += float(weights.sum())
        draws = torch.cat([values, values.sum(dim=1, keepdim=True)], dim=1)
        means = draws.mean(dim=0)
        self._sums = self._sums.to(means.device) + means.sum(dim=2)
        if part.variances is not None:
            self._variances.add(part.variances.masked_fill(bad, 0.0))
        elif self._sampled:
            self._variances.add_draws(draws, ~bad)
        for key, summed in part.parts.items():
            self._parts[key] = summed + self._parts[key] if key in self._parts else summed
        if self._per_sample:
            self._shares.append(means.masked_fill(bad, torch.nan))

    @property
    def divisor(self) -> float:
        """Of the sums.

        Raises:
            NonFiniteError: every sample was left out.
            InputError: no target counts.
        """
        if self.samples == 0:
            raise NonFiniteError(f"nan_policy='omit': all {self.omitted} samples have NaN or infinity")
        if self._normaliser == 0:
            raise InputError("targets: every one is ignored (or has class weight 0), so the loss has no terms")
        return self._normaliser if self._reduction == "mean" else 1.0

    def sums(self) -> Sums:
        """Of all samples so far."""
        values = (self._sums / self.divisor).cpu()
        errors = dof = None
        found = self._variances.result()
        if found is not None:
            variance, dof = (part.cpu() for part in found)
            errors = (variance.sqrt() / self.divisor).masked_fill(~values.isfinite(), torch.nan)
            dof = dof.masked_fill(errors <= _AGREEING * values.abs(), torch.nan)
        return Sums(
            values=values,
            errors=errors,
            dof=dof,
            per_sample=torch.cat(self._shares, dim=2) * (self.samples / self.divisor) if self._per_sample else None,
            samples=self.samples,
            omitted=self.omitted,
            parts={key: (part / self.divisor).cpu() for key, part in self._parts.items()},
        )


def _non_finite(part: Values, bad: Tensor, names: Sequence[str]) -> NonFiniteError:
    finite = part.values.isfinite().all(dim=0).flatten(1).all(dim=1)
    where = [name for name, fine in zip(names, finite, strict=True) if not bool(fine)]
    listed = ", ".join(map(repr, where[:4])) + (", …" if len(where) > 4 else "")
    what = "inputs, signals or second derivatives" if part.by_hessian.intersection(where) else "inputs or signals"
    what = f"in the {what} of layer {listed}"
    if part.lost is not None and bool(part.lost.any()):
        what = f"in their targets, outputs or loss, or {what}"
    return NonFiniteError(
        f"batch {part.number}: {int(bad.sum())} of {len(bad)} samples have NaN or infinity (or squares beyond the "
        f"dtype's range) {what}; pass nan_policy='omit' or 'propagate' to go on"
    )

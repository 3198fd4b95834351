"""From the values of samples to those of the data set, by the user's policy for NaN and infinity."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import layers
from .errors import InputError, NonFiniteError
from .sweep import Values


class Totals:
    """Running sums over samples.

    Args:
        modules: the layers, in the order of the values; known once the first values are there.
        reduction: the loss's, ``"mean"`` or ``"sum"``.
        nan_policy: see :func:`pyflatness.relative_flatness`.
        per_sample: whether each sample's values are kept.
    """

    def __init__(self, reduction: str, nan_policy: str, *, per_sample: bool = False) -> None:
        self._reduction, self._policy, self._per_sample = reduction, nan_policy, per_sample
        self._sums: Tensor | None = None
        self._mass = 0.0
        self._shares: list[Tensor] = []
        self.samples = self.omitted = 0

    def add(self, part: Values, modules: dict[str, nn.Module]) -> None:
        """Take in the values of some samples.

        Raises:
            NonFiniteError: NaN or infinity, under the policy ``"raise"`` or in a layer's weights.
        """
        values, mass = part.values, part.mass
        bad = ~values.isfinite().flatten(0, 1).all(dim=0)
        if bool(bad.any()) and self._policy != "propagate":
            check_finite_weights(modules)
            if self._policy == "raise":
                raise _non_finite(part, bad, [*modules])
            values, mass = values.masked_fill(bad, 0.0), mass.masked_fill(bad, 0.0)
            self.omitted += int(bad.sum())
        else:
            bad = torch.zeros_like(bad)
        self.samples += int((~bad).sum())
        self._mass += float(mass.sum())
        sums = values.sum(dim=2)
        self._sums = sums if self._sums is None else self._sums + sums
        if self._per_sample:
            self._shares.append(values.masked_fill(bad, torch.nan))

    @property
    def divisor(self) -> float:
        """Of the sums.

        Raises:
            NonFiniteError: every sample was left out.
            InputError: no target counts.
        """
        if self.samples == 0:
            raise NonFiniteError(f"nan_policy='omit': all {self.omitted} samples have NaN or infinity")
        if self._mass == 0:
            raise InputError("targets: every one is ignored (or has class weight 0), so the loss has no terms")
        return self._mass if self._reduction == "mean" else 1.0

    def values(self) -> Tensor:
        """(layers, quantities) float64 on the CPU."""
        assert self._sums is not None, "data without samples is refused where it is read"
        return (self._sums / self.divisor).cpu()

    def per_sample(self) -> Tensor | None:
        """(layers, quantities, n): n times each sample's share, NaN for one that was left out."""
        return torch.cat(self._shares, dim=2) * (self.samples / self.divisor) if self._per_sample else None


def check_finite_weights(modules: dict[str, nn.Module]) -> None:
    """Raise if a layer's weight or bias has NaN or infinity in it."""
    for name, module in modules.items():
        for what, values in zip(("weight", "bias"), layers.matrix(module), strict=True):
            if values is not None and not bool(values.isfinite().all()):
                count = int((~values.isfinite()).sum())
                raise NonFiniteError(f"layer {name!r}: its {what} has {count} entries of NaN or infinity")


def _non_finite(part: Values, bad: Tensor, names: Sequence[str]) -> NonFiniteError:
    where = [name for name, values in zip(names, part.values, strict=True) if not bool(values.isfinite().all())]
    listed = ", ".join(map(repr, where[:4])) + (", …" if len(where) > 4 else "")
    return NonFiniteError(
        f"batch {part.number}: {int(bad.sum())} of {len(bad)} samples have NaN or infinity (or squares beyond the "
        f"dtype's range) in the inputs or signals of layer {listed}; pass nan_policy='omit' or 'propagate' to go on"
    )

"""What a measurement returns: a number with everything needed to read it."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, repr=False, eq=False)
class Estimate:
    """A measured value and how it came about. ``float(estimate)`` is the value.

    Attributes:
        value: the measure, in units of the loss (relative flatness has no other unit).
        stderr: standard error of ``value`` given the data; None when the value is exact.
        samples: samples (entries of dimension 0 of the batches) that the value is over.
        method: ``"head"``, ``"ggn"``, ``"hessian"``, ``"ggn-sampled"``, ``"hessian-sampled"`` or ``"definition"``.
        exact: True only if the value is that of the loss Hessian up to rounding.
        backend: ``"compiled"`` or ``"reference"``.
        per_sample: (n,) float64, ``n`` times each sample's share, so that the mean is ``value``; None unless asked
            for. Under ``nan_policy="omit"`` an omitted sample holds NaN, and the mean over the others is ``value``.
        layer: qualified name of the measured layer; empty for bare tensors.
        omitted: samples left out by ``nan_policy="omit"``.
        notes: what a reader of the value should know (tied weights, dropped features, …).
    """

    value: float
    stderr: float | None
    samples: int
    method: str
    exact: bool
    backend: str
    per_sample: Tensor | None = None
    layer: str = ""
    omitted: int = 0
    notes: tuple[str, ...] = field(default=())

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        number = f"{self.value:.6g}" if self.stderr is None else f"{self.value:.6g} ± {self.stderr:.2g}"
        facts = [
            "exact" if self.exact else "not exact",
            f"method {self.method}",
            f"layer {self.layer!r}" if self.layer else "",
            f"{self.samples} samples",
            f"{self.omitted} omitted" if self.omitted else "",
            f"{self.backend} backend",
            *self.notes,
        ]
        return f"Estimate({number}: {', '.join(filter(None, facts))})"

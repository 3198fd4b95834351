"""Compute feature robustness on average over orthogonal matrices, as a curve.

It is defined by Petzka et al. (2021), Definition 1 and Eq. 4.

    E_F(f, S, αA) = E(w + αwA) - E(w),   A Haar-distributed on O(m): features φ + αAφ, labels unchanged
    E_A E_F = α² κ / (2m) + O(α⁴)                                                               (Theorem 5)

for m columns of w, at any w: the terms of odd order vanish, since A and -A are equally likely; a minimum is not needed.
Every draw is taken with both signs, u_k(α) = (E(w + αwA_k) + E(w - αwA_k)) / 2 - E(w); the value is their mean and its
standard error std_k u_k / √K of K - 1 degrees of freedom, given the data. Each group of a convolution has a matrix of
its own, as it has in κ.

Theorem 5 is about twice differentiable models. Behind a ReLU the parabola holds as far as no sample crosses a kink,
which for many samples is not far: kinks that are crossed add a rise of order α² of their own, which no Hessian sees.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import head
from ..errors import InputError
from ..losses import Loss, risk
from ..measures import RELATIVE_FLATNESS
from ..model import calling
from ..model.data import Batches, size
from ..model.selectors import Selector
from ..numerics.accumulate import Accumulator, check_together, omits
from ..numerics.meeting import Group
from ..numerics.variances import standard_error
from ..options import Options, check_draws, check_number, check_numbers
from ..plan import of_layer
from ..report import Estimate, intervals, views
from ..session import public, session
from .perturbed import Perturbed, Turns, by_weight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
DRAWS = 16
_MEMORY = 2**28  # bytes of the turned weights that are kept for one read of the data


@dataclass(frozen=True, repr=False, eq=False)
class FeatureRobustness:
    """Hold how much the loss rises when rotated features, times α, are added to a layer's features.

    Attributes:
        alphas: α, (k,) float64.
        rises: E_A E_F(f, S, αA), (k,) float64, in units of the loss.
        stderr: standard errors of ``rises`` over the draws of A, given the data, (k,) float64, each of
            ``draws - 1`` degrees of freedom.
        parabola: α² κ / (2m), (k,) float64.
        kappa: κ.
        features: m.
        loss: E(w).
        draws: pairs ±A.
        samples: of the data.
        layer: its qualified name.
    """

    alphas: Tensor
    rises: Tensor
    stderr: Tensor
    parabola: Tensor
    kappa: float
    features: int
    loss: float
    draws: int
    samples: int
    layer: str

    def interval(self, level: float = 0.95) -> Tensor:
        """Return the ends of the intervals that hold E_A E_F, each with probability ``level``, (k, 2) float64.

        rises ± t ``stderr``, t the quantile of Student's t distribution; NaN where a rise is not finite.

        Args:
            level: in (0, 1).

        Raises:
            InputError: a level that is no probability.
        """
        half = intervals.student_t(level, self.draws - 1) * self.stderr
        return torch.stack([self.rises - half, self.rises + half], dim=1)

    def __repr__(self) -> str:
        facts = f"layer {self.layer!r}, κ = {self.kappa:.6g}, m = {self.features}, {self.draws} pairs of draws"
        columns = self.alphas, self.rises, self.interval(), self.parabola
        rows = zip(*(column.tolist() for column in columns), strict=True)
        lines = [f"  α = {a:g}: {intervals.shown(rise, ends)}, parabola {p:.4g}" for a, rise, ends, p in rows]
        return "\n".join([f"FeatureRobustness({facts}, {self.samples} samples, 95 % intervals:", *lines]) + ")"

    def plot(self, path: str | Path | None = None, *, axes: "Axes | None" = None) -> "tuple[Figure, Axes]":
        """Draw the curve with its 95 % intervals, and the parabola.

        Args:
            path: where the figure is written too; its ending is its format.
            axes: matplotlib's, to draw into; None: those of a new figure.

        Returns:
            Figure and axes of matplotlib, outside of pyplot.

        Raises:
            MissingExtraError: without matplotlib.
        """
        figure, axes = views.onto(axes)
        steps = torch.linspace(0, float(self.alphas.abs().max()), 101, dtype=torch.float64, device="cpu")
        parabola = steps.square() * self.kappa / (2 * self.features)
        axes.plot(steps.tolist(), parabola.tolist(), color="0.4", label="α² κ / 2m")
        half = (self.interval()[:, 1] - self.rises).tolist()
        columns = self.alphas.abs().tolist(), self.rises.tolist(), half
        axes.errorbar(*columns, fmt="o", markersize=4, capsize=2, label=f"mean of {self.draws} pairs ±A")
        axes.set_xlabel("α")
        axes.set_ylabel("rise of the loss, features φ + αAφ")
        axes.grid(alpha=0.3)
        axes.legend()
        views.save(figure, path)
        return figure, axes


@public
def feature_robustness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    layer: Selector | None = None,
    *,
    alphas: Iterable[float] = ALPHAS,
    draws: int = DRAWS,
    kappa: Estimate | float | None = None,
    seed: int = 0,
    nan_policy: str = "raise",
    reduction: str | None = None,
    forward: calling.Forward | None = None,
    progress: bool | None = None,
    process_group: Group = None,
) -> FeatureRobustness:
    """Return feature robustness of a layer, averaged over orthogonal matrices, beside the parabola that κ predicts.

    E_A[E(w + αwA) - E(w)], A Haar on O(m), in pairs ±A; α² κ/(2m)   (Petzka et al. 2021, Eq. 4 and Theorem 5).

    Args:
        model: in eval mode; left as it was found.
        loss: its options and reduction count.
        data: as for :func:`pyflatness.relative_flatness`; read twice or more.
        layer: a Linear layer or a convolution, whose rows are its filters; None takes the last Linear that ran.
        alphas: α of the curve.
        draws: pairs ±A, at least 2. At a head the model runs once a batch; elsewhere 2 · draws · alphas times.
        kappa: κ of the layer, if it is known or to be found with options; None: :func:`pyflatness.relative_flatness`.
        seed: of the draws.
        nan_policy: ``"raise"`` or ``"propagate"``; no sample can be left out.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        forward: ``(model, batch) -> (outputs, targets)``.
        progress: show a bar.
        process_group: as for :func:`pyflatness.relative_flatness`.

    Returns:
        The curve, its standard errors, and the parabola.

    Raises:
        FlatnessError: options that do not fit, or see :func:`pyflatness.relative_flatness`.
        NonFiniteError: a loss that is NaN or infinite, but under ``nan_policy="propagate"``.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double().eval()
        >>> data = torch.randn(100, 4).double(), torch.randint(3, (100,))
        >>> found = pf.feature_robustness(model, torch.nn.CrossEntropyLoss(), data, alphas=[0.1], draws=200)
        >>> (low, high), = found.interval(0.99).tolist()
        >>> low < float(found.parabola) < high
        True
    """
    steps = check_numbers("alphas", alphas)
    draws = check_draws("draws", draws, 2)
    kappa = None if kappa is None else check_number("kappa", kappa, "a number", math.isfinite)
    options = Options(nan_policy=nan_policy, seed=seed)
    if omits(options.nan_policy):
        raise InputError("nan_policy='omit': no sample can be left out of feature robustness; 'raise' or 'propagate'")
    with session(
        model,
        loss,
        data,
        options,
        reduction=reduction,
        forward=forward,
        reads=2,
        progress=progress,
        process_group=process_group,
    ) as task:
        name, source = head.find(task, layer)
        perturbed = Perturbed(task.model, name, task.forward, head=source is not None)
        turns = Turns(perturbed.layer, torch.Generator("cpu").manual_seed(options.seed))
        curve = _Curve(perturbed, task.loss, task.batches, steps, policy=nan_policy)
        for start in range(0, draws, curve.kept):
            curve.add([turns.draw() for _ in range(min(curve.kept, draws - start))])
        if kappa is None:
            measurement, _ = of_layer(RELATIVE_FLATNESS, task, name)
            kappa = measurement.estimates()[name, RELATIVE_FLATNESS.name]
    rises = torch.stack(curve.rises)
    grid = torch.tensor(steps, dtype=torch.float64, device="cpu")
    return FeatureRobustness(
        alphas=grid,
        rises=rises.mean(dim=0),
        stderr=standard_error(rises),
        parabola=grid.square() * float(kappa) / (2 * turns.features),
        kappa=float(kappa),
        features=turns.features,
        loss=curve.loss,
        draws=draws,
        samples=curve.samples,
        layer=name,
    )


class _Curve:
    """Hold the rises of the loss of each draw, (alphas,)."""

    def __init__(
        self, perturbed: Perturbed, loss: Loss, batches: Batches, alphas: Sequence[float], policy: str
    ) -> None:
        self._perturbed, self._loss, self._batches, self._policy = perturbed, loss, batches, policy
        self._scales = [sign * alpha for alpha in alphas for sign in (1.0, -1.0)]
        weight = perturbed.layer.weight
        assert isinstance(weight, Tensor)
        self.kept = max(1, _MEMORY // (4 * weight.numel()))  # draws in one read of the data
        self.rises: list[Tensor] = []

    def add(self, turned: Sequence[Tensor]) -> None:
        """Take in one read of the data."""
        values = torch.zeros(len(turned), len(self._scales), dtype=torch.float64, device="cpu")
        own, over = 0.0, Accumulator(self._policy, self._loss.reduction)
        for number, batch in enumerate(self._batches):
            outputs, targets = self._perturbed.outputs(batch)
            over.add(size(batch), risk.weight(outputs, targets, self._loss, number))
            own += self._checked(self._loss.value(outputs, targets), number, "")
            for row, weight in zip(values, turned, strict=True):
                displaced = self._perturbed.displaced(by_weight(self._perturbed.layer, weight), self._scales)
                for place, outputs in enumerate(displaced):
                    row[place] += self._checked(self._loss.value(outputs, targets), number, " with turned features")
        sums = {"rises": values, "own": torch.tensor(own, dtype=torch.float64, device="cpu")}
        sums = over.together(self._batches.shard, sums)
        values, own = sums["rises"], float(sums["own"])
        self.samples, self.loss = over.samples, own / over.normaliser
        self.rises.extend(values.view(len(turned), -1, 2).mean(dim=2) / over.normaliser - self.loss)

    def _checked(self, value: Tensor, number: int, where: str) -> float:
        found = float(value)
        error = partial(risk.not_finite, number, found, where)
        check_together(self._policy, math.isfinite(found), error)
        return found

"""Draw the loss along one or two directions; matplotlib is imported when a figure is asked for."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError
from ..report import views

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEVELS = 24
_WIDE = 100.0  # times the smallest loss: from here on levels are logarithmic


def drawn(
    coefficients: Sequence[Tensor],
    losses: Tensor,
    labels: Sequence[str],
    model: Tensor | None,
    path: str | Path | None,
    axes: "Axes | None",
) -> "tuple[Figure, Axes]":
    """Draw losses on a grid, and a quadratic ``model``'s values over them; see :meth:`.slices.Landscape.plot`."""
    finite = losses[losses.isfinite()]
    if not len(finite):
        raise InputError("plot: no loss of the slice is finite")
    figure, axes = views.onto(axes)
    draw = _curve if len(coefficients) == 1 else _contours
    draw(axes, coefficients, losses.where(losses.isfinite(), torch.nan), finite, model)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1] if len(labels) > 1 else "loss")
    views.save(figure, path)
    return figure, axes


def _curve(axes: Any, coefficients: Sequence[Tensor], losses: Tensor, finite: Tensor, model: Tensor | None) -> None:
    (along,) = coefficients
    axes.plot(along, losses, marker=".", label="loss")
    if model is not None:
        low, high = axes.get_ylim()
        axes.plot(along, model, "--", label="quadratic model")
        axes.set_ylim(low, high)
        axes.legend()


def _contours(axes: Any, coefficients: Sequence[Tensor], losses: Tensor, finite: Tensor, model: Tensor | None) -> None:
    from matplotlib.colors import LogNorm

    x, y = coefficients
    low, high = float(finite.min()), float(finite.max())
    if high == low:
        high = low + max(1e-12, abs(low) * 1e-12)
    wide = low > 0 and high > _WIDE * low
    ends = (math.log(low), math.log(high)) if wide else (low, high)
    levels = torch.linspace(*ends, _LEVELS, dtype=torch.float64, device="cpu")
    levels = levels.exp() if wide else levels
    levels[0], levels[-1] = low, high  # which the logarithm rounds
    filled = axes.contourf(
        *(x.numpy(), y.numpy(), losses.T.numpy()),
        levels=levels.numpy(),
        norm=LogNorm(low, high) if wide else None,
        cmap="viridis",
    )
    axes.get_figure().colorbar(filled, ax=axes, label="loss", ticks=levels[::3].tolist(), format="%.3g")
    if model is not None and bool(((model > low) & (model < high)).any()):
        values, lines = model.T.numpy(), levels[1:-1:3].numpy()
        axes.contour(x.numpy(), y.numpy(), values, levels=lines, colors="white", linestyles="dashed", linewidths=0.9)
    axes.plot(0, 0, "+", color="white")

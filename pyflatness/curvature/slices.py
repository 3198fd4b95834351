"""Hold a slice of the loss along one or two directions; write it to a file, and read it from there."""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..messages import check_path
from ..report import Result, arrays, views
from .quadratic import Quadratic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMAT = "pyflatness landscape 1"


@dataclass(frozen=True, repr=False)
class Landscape(Result):
    """Hold the loss at points θ + Σ_k c_k d_k on a grid of coefficients of one or two directions.

    Attributes:
        coefficients: of each direction, (points_k,) float64.
        losses: (points_1,), or (points_1, points_2), float64; NaN and infinity are what the loss is there, or NaN what
            was not evaluated yet, see ``done``.
        accuracy: the fraction of right predictions at the same points, or None.
        loss: E(θ), that of the model itself.
        quadratic: the quadratic model of the loss in these directions, or None.
        labels: of the directions.
        samples: of the data.
        done: how many points, in the order of ``losses.flatten()``, have been evaluated.
        key: of what model, data, directions and grid it is, by names; for a file that is gone on with.
        directions: changes by names of parameters, where a file has to have them: eigenvectors, which a call that goes
            on with it would have to compute again.
    """

    coefficients: tuple[Tensor, ...]
    losses: Tensor
    accuracy: Tensor | None
    loss: float
    quadratic: Quadratic | None
    labels: tuple[str, ...]
    samples: int
    done: int
    key: Mapping[str, str]
    directions: tuple[Mapping[str, Tensor], ...] = ()

    def to_npz(self, path: str | Path) -> None:
        """Write it as an ``.npz`` file, which appears under its name when it is whole.

        Its arrays are ``coefficients_0``, ``coefficients_1``, ``losses``, ``accuracy``, ``gradient``, ``hessian``,
        ``direction_0`` and ``direction_1`` with the name of a parameter behind a space, where it has directions, and
        ``about``, the rest as JSON; numpy reads them with ``allow_pickle=False``.
        """
        path = check_path("path", path)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_bytes(self.content())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def content(self) -> bytes:
        """Return what :meth:`to_npz` writes."""
        held: dict[str, Any] = {f"coefficients_{k}": each.numpy() for k, each in enumerate(self.coefficients)}
        held["losses"] = self.losses.numpy()
        if self.accuracy is not None:
            held["accuracy"] = self.accuracy.numpy()
        for place, direction in enumerate(self.directions):
            held |= {f"direction_{place} {name}": change.cpu().numpy() for name, change in direction.items()}
        about: dict[str, Any] = {
            "format": _FORMAT,
            "loss": self.loss,
            "labels": self.labels,
            "samples": self.samples,
            "done": self.done,
            "key": dict(self.key),
        }
        if self.quadratic is not None:
            about["value"] = self.quadratic.value
            held |= {"gradient": self.quadratic.gradient.numpy(), "hessian": self.quadratic.hessian.numpy()}
        buffer = io.BytesIO()
        np.savez(buffer, about=np.array(json.dumps(about)), **held)
        return buffer.getvalue()

    @classmethod
    def from_npz(cls, path: str | Path) -> "Landscape":
        """Return what :meth:`to_npz` wrote, or :func:`pyflatness.landscape` with ``out=``, finished or not.

        Raises:
            InputError: another file.
            FileNotFoundError: no file.
        """
        return cls.read(check_path("path", path).read_bytes(), str(path))

    @classmethod
    def read(cls, content: bytes, name: str) -> "Landscape":
        """Return what :meth:`to_npz` wrote, from the content of a file.

        Raises:
            InputError: it is that of another file.
        """
        try:
            found = arrays.read(io.BytesIO(content))
            about = json.loads(str(found.pop("about")))
            if about["format"] != _FORMAT:
                raise ValueError(f"its format is {about['format']!r}")
            tensors = {name: torch.from_numpy(array) for name, array in found.items()}
            quadratic = None
            if "hessian" in tensors:
                quadratic = Quadratic(about["value"], tensors["gradient"], tensors["hessian"])
            return cls(
                coefficients=tuple(tensors[f"coefficients_{k}"] for k in range(len(about["labels"]))),
                losses=tensors["losses"],
                accuracy=tensors.get("accuracy"),
                loss=about["loss"],
                quadratic=quadratic,
                labels=tuple(about["labels"]),
                samples=about["samples"],
                done=about["done"],
                key=about["key"],
                directions=_directions(tensors),
            )
        except Exception as error:
            raise InputError(f"{name}: no landscape that Landscape.to_npz wrote ({error})") from error

    def plot(
        self, path: "str | Path | None" = None, *, axes: "Axes | None" = None, quadratic: bool = True
    ) -> "tuple[Figure, Axes]":
        """Draw the loss as a curve, or of two directions as filled contours; where it is not finite there is a gap.

        The quadratic model is a dashed curve, or dashed contour lines of the same levels. Colours and levels are on a
        logarithmic scale where the loss is positive and its largest value a hundred times its smallest.

        Args:
            path: where the figure is written too.
            axes: to draw into; None: those of a new figure, outside of pyplot.
            quadratic: whether the quadratic model is drawn, where there is one.

        Returns:
            Figure and axes of matplotlib.

        Raises:
            MissingExtraError: without matplotlib.
            InputError: no loss is finite.
        """
        model = self.quadratic.at(*self.coefficients) if quadratic and self.quadratic is not None else None
        return _drawn(self.coefficients, self.losses, self.labels, model, path, axes)

    def __str__(self) -> str:
        grid = " × ".join(str(len(each)) for each in self.coefficients)
        finite = self.losses[self.losses.isfinite()]
        span = f"{float(finite.min()):.6g} to {float(finite.max()):.6g}" if len(finite) else "not finite"
        lines = [
            f"loss on {grid} points along {', '.join(self.labels)}: {span}; {self.loss:.6g} at the weights; "
            f"{self.samples} samples"
        ]
        if self.done < self.losses.numel():
            lines.append(f"{self.done} of {self.losses.numel()} points are evaluated")
        if self.quadratic is not None:
            slopes, curvatures = self.quadratic.gradient, self.quadratic.hessian.diagonal()
            lines += [
                f"{label}: gradient {float(slope):.4g}, curvature {float(curvature):.4g}"
                for label, slope, curvature in zip(self.labels, slopes, curvatures, strict=True)
            ]
        return "\n".join(lines)


def _directions(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """Return the directions among the arrays of a file."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, change in tensors.items():
        place, _, name = key.partition(" ")
        if place.startswith("direction_"):
            found.setdefault(place, {})[name] = change
    return tuple(found[place] for place in sorted(found))


_LEVELS = 24
_WIDE = 100.0  # times the smallest loss: from here on levels are logarithmic


def _drawn(
    coefficients: Sequence[Tensor],
    losses: Tensor,
    labels: Sequence[str],
    model: Tensor | None,
    path: str | Path | None,
    axes: "Axes | None",
) -> "tuple[Figure, Axes]":
    """Draw losses on a grid, and a quadratic ``model``'s values over them; see :meth:`Landscape.plot`."""
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

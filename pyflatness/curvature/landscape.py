"""Evaluate the loss on a line or a plane through a network's weights, with the quadratic model of the loss beside it.

    E(θ + Σ_k c_k d_k)   for one or two directions d_k and a grid of coefficients c_k

Directions are random and filter-normalised (Li et al. 2018, https://arxiv.org/abs/1712.09913), the Hessian's top
eigenvectors (Yao et al. 2020, https://arxiv.org/abs/1912.07145), those to other checkpoints, or the user's own.

On the line between two networks there is the barrier between them: linear mode connectivity.

    barrier = max_α E((1 - α) θ + α θ') - ((1 - α) E(θ) + α E(θ'))

over α from 0 to 1 (Frankle et al. 2020, https://arxiv.org/abs/1912.05671; Entezari et al. 2022,
https://arxiv.org/abs/2110.06296). Two minima without a barrier are connected. Between them the statistics of BatchNorm
that either was trained with are not those of its activations, and are computed anew at each point: means of those of
batches, as SWA takes them (Izmailov et al. 2018, https://arxiv.org/abs/1803.05407; ``swa_utils.update_bn`` of torch).
"""

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import private
from .. import progress as bars
from ..errors import InputError, NotYetError
from ..messages import check_choice, check_path, shown
from ..model import calling, fingerprint
from ..model import directions as making
from ..model.directions import NORMALIZATIONS, Direction
from ..model.parameters import Parameters
from ..model.selectors import Selector
from ..numerics.process_groups import joined
from ..numerics.ranks import Ranks
from ..options import CALL, How, Options, check_count, check_flag, check_progress
from ..passes.task import Task
from ..report import Result, arrays, views
from ..session import public, session
from .points import PointLosses, Points
from .quadratic import Quadratic
from .quadratic import quadratic as quadratic_model
from .spectra import Spectrum
from .spectrum import spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMAT = "pyflatness landscape 1"
_ABOUT = ("loss", "labels", "samples", "done", "key")  # what a file has as JSON
_SECONDS = 5.0  # between two times that a file is written, at least
_SHARE = 0.05  # of the time that writing may take: a file with eigenvectors may be large


@dataclass(frozen=True, repr=False)
class Landscape(Result):
    """Hold the loss at points θ + Σ_k c_k d_k on a grid of coefficients of one or two directions.

    Attributes:
        coefficients: of each direction, (points_k,) float64.
        losses: (points_1,), or (points_1, points_2), float64. NaN and infinity are kept; a point that was not evaluated
            yet is NaN, see ``done``.
        accuracy: the fraction of correct predictions at the same points, or None.
        loss: E(θ), that of the model itself.
        quadratic: the quadratic model of the loss in these directions, or None.
        labels: of the directions.
        samples: of the data.
        done: how many points, in the order of ``losses.flatten()``, have been evaluated.
        key: what identifies the model, data, directions and grid, by names; a call that continues a file compares it.
        directions: eigenvectors by names of parameters, in a file, so that a call that continues it need not compute
            them again; else empty.
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
        """Write the slice as an ``.npz`` file, which gets its name only when it is complete.

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
        """Return the bytes that :meth:`to_npz` writes."""
        held: dict[str, Any] = {f"coefficients_{k}": each.numpy() for k, each in enumerate(self.coefficients)}
        held["losses"] = self.losses.numpy()
        if self.accuracy is not None:
            held["accuracy"] = self.accuracy.numpy()
        for place, direction in enumerate(self.directions):
            held |= {f"direction_{place} {name}": change.cpu().numpy() for name, change in direction.items()}
        about: dict[str, Any] = {"format": _FORMAT, **{name: getattr(self, name) for name in _ABOUT}}
        if self.quadratic is not None:
            about["value"] = self.quadratic.value
            held |= {"gradient": self.quadratic.gradient.numpy(), "hessian": self.quadratic.hessian.numpy()}
        buffer = io.BytesIO()
        np.savez(buffer, about=np.array(json.dumps(about)), **held)
        return buffer.getvalue()

    @classmethod
    def from_npz(cls, path: str | Path) -> "Landscape":
        """Return the slice that :meth:`to_npz` wrote, or :func:`pyflatness.landscape` with ``out=``, finished or not.

        Raises:
            InputError: a file that was written by something else.
            FileNotFoundError: there is no such file.
        """
        return cls.read(check_path("path", path).read_bytes(), str(path))

    @classmethod
    def read(cls, content: bytes, name: str) -> "Landscape":
        """Return the slice that :meth:`to_npz` wrote, from the content of its file."""
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
                quadratic=quadratic,
                directions=_directions(tensors),
                **{name: about[name] for name in _ABOUT} | {"labels": tuple(about["labels"])},
            )
        except Exception as error:
            raise InputError(f"{name}: no landscape that Landscape.to_npz wrote ({error})") from error

    def plot(
        self, path: "str | Path | None" = None, *, axes: "Axes | None" = None, quadratic: bool = True
    ) -> "tuple[Figure, Axes]":
        """Draw the loss as a curve, or over two directions as filled contours, with a gap where it is not finite.

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
        finite = self.losses[self.losses.isfinite()]
        if not len(finite):
            raise InputError("plot: no loss of the slice is finite")
        figure, axes = views.onto(axes)
        draw = _curve if len(self.coefficients) == 1 else _contours
        draw(axes, self.coefficients, self.losses.where(self.losses.isfinite(), torch.nan), finite, model)
        axes.set_xlabel(self.labels[0])
        axes.set_ylabel(self.labels[1] if len(self.labels) > 1 else "loss")
        views.save(figure, path)
        return figure, axes

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
    prefixes = "direction_0 ", "direction_1 "
    found = ({key.removeprefix(p): held for key, held in tensors.items() if key.startswith(p)} for p in prefixes)
    return tuple(filter(None, found))


_LEVELS = 24
_WIDE = 100.0  # times the smallest loss: from here on levels are logarithmic


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


@public(*CALL, "seed", "memory")
def landscape(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    directions: Any = None,
    through: Any = None,
    dimensions: int | None = None,
    layers: Selector | Sequence[Selector] | None = None,
    normalization: str | None = "auto",
    points: Any = 21,
    span: Any = None,
    accuracy: bool | None = None,
    quadratic: bool | None = None,
    out: str | Path | None = None,
    **how: Unpack[How],
) -> Landscape:
    """Return the loss on a grid of points θ + Σ_k c_k d_k along one or two directions, with its quadratic model.

    Args:
        model: … A parameter that several modules share changes once.
        data: … They are read several times: one read serves up to 64 points.
        directions: ``"random"`` (the default): Gaussian in weights, filter-normalised, and zero in biases, scales of
            normalisations and other vectors; ``"eigenvectors"``: those of the Hessian's largest eigenvalues, which
            have norm 1, or a :class:`pyflatness.results.Spectrum` that has them; or directions of your own, a mapping
            from names of parameters, or of layers whose weight is meant, to tensors of their shapes, or two of these.
        through: in place of ``directions``, one or two other checkpoints, modules or state dicts: the line through the
            model's weights (0) and those of one (1), or the plane through all three, (0, 0), (1, 0) and (0, 1).
            Floating-point buffers, such as the statistics of BatchNorm, change with the weights.
        dimensions: the number of random directions or eigenvectors, 1 or 2 (the default).
        layers: selectors: only the parameters of these layers change, and eigenvectors are those of the block of their
            weights. Buffers stay. None: all parameters.
        normalization: ``"filter"`` for directions with the norm of the weights in each filter, a row of the layer's
            matrix; ``"layer"`` in each tensor; None for directions as they are; ``"auto"`` is ``"filter"`` for random
            ones and None for others.
        points: the number of points along each direction, or a pair of numbers.
        span: largest coefficient s, from -s; or the smallest and the largest; or such a pair for each direction. None:
            1, and -0.25 to 1.25 between checkpoints.
        accuracy: also evaluate the accuracy; None: where targets are classes.
        quadratic: also compute the quadratic model E + gᵀΔ + ½ ΔᵀHΔ, by a gradient and a Hessian product for each
            direction. None: unless buffers change too, of which it is no model.
        out: an ``.npz`` file that is written every few seconds and at the end, also where an error ends the call. A
            call with the same weights, data, loss, directions and grid continues it; any other call is refused. It
            keeps eigenvectors too, unless ``layers`` are modules.
        seed: of random directions, and of the vector that Lanczos starts from.
        process_group: as for :func:`pyflatness.relative_flatness`. The first rank reads and writes the file.

    Returns:
        Losses, accuracies and coefficients. NaN and infinity are kept. Small networks run at several points together by
        ``torch.func.vmap``; larger ones, and models that it cannot run, take one point after the other. The values are
        the same up to rounding.

    Raises:
        InputError: options that do not fit, or do not apply to these directions; another checkpoint or shape; a file
            of another slice; see :func:`pyflatness.relative_flatness`.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double().eval()
        >>> data = torch.randn(100, 4).double(), torch.randint(3, (100,))
        >>> found = pf.landscape(model, torch.nn.CrossEntropyLoss(), data, points=(5, 3), span=0.01)
        >>> found.losses.shape, bool((found.losses - found.quadratic.at(*found.coefficients)).abs().max() < 1e-5)
        (torch.Size([5, 3]), True)
    """
    wanted = SliceRequest.of(directions, through, dimensions, layers, normalization)
    grid = coefficients(wanted.count, points, (-0.25, 1.25) if wanted.through else (-1.0, 1.0), span)
    accuracy = None if accuracy is None else check_flag("accuracy", accuracy)
    quadratic = None if quadratic is None else check_flag("quadratic", quadratic)
    progress, options = check_progress(how), Options.of(how, nan_policy="propagate")
    path = None if out is None else check_path("out", out)
    with joined(how.get("process_group")) as ranks:
        how["process_group"] = ranks
        begun = _begun(path, ranks)
        made = _made(wanted, layers, how.get("seed", 0))
        has_them = begun is not None and begun.directions and begun.key.get("eigenvectors") == made
        if wanted.given == "eigenvectors" and not has_them:
            found = spectrum(model, loss, data, layers=layers, k=wanted.count, **how)
            wanted = replace(wanted, given=found, layers=None)
        with session(model, loss, data, options, {**how, "progress": False}, reads=3) as task:
            if wanted.given == "eigenvectors" and begun is not None:
                _check_same(begun, {"weights": _weights(task.model)}, path)
                pairs = zip(begun.directions, begun.labels, strict=True)
                along = [making.given(task.model, changes, "directions", label) for changes, label in pairs]
            else:
                along = wanted.made(task.model, options.seed)
            buffers = making.moves_buffers(task.model, along)
            if quadratic and buffers:
                raise InputError(
                    "quadratic=True: buffers go along between these checkpoints, and there is no such model"
                )
            slice_ = _Slice(task, along, grid, Points(task, accuracy), not buffers if quadratic is None else quadratic)
            return slice_.found(begun, made, path, progress)


def _begun(out: Path | None, ranks: Ranks) -> Landscape | None:
    """Return the slice in the file of the first rank, or None if there is no file."""
    content = b"" if out is None or ranks.rank or not out.exists() else out.read_bytes()
    if out is not None and not ranks.alone:
        content = ranks.first("the file", content)
    return Landscape.read(content, f"out={str(out)!r}") if content else None


def _made(wanted: "SliceRequest", layers: Any, seed: int) -> str:
    """Return a text that identifies the wanted eigenvectors; empty without such, or if layers are modules."""
    names = [*layers] if isinstance(layers, Sequence) and not isinstance(layers, str) else [layers]
    if wanted.given != "eigenvectors" or not all(name is None or isinstance(name, str) for name in names):
        return ""
    return f"{wanted.count} of {names!r}, seed {seed}, normalization {wanted.normalization!r}"


@dataclass(frozen=True)
class _Slice:
    """Evaluate the loss on a grid."""

    task: Task
    directions: Sequence[Direction]
    grid: tuple[Tensor, ...]  # the coefficients of each direction
    points: Points
    quadratic: bool  # whether the quadratic model is wanted

    def found(self, begun: Landscape | None, made: str, out: Path | None, progress: bool | None) -> Landscape:
        """Return the slice, which continues that of a file (``begun``).

        ``made`` identifies the eigenvectors that the file is to keep.
        """
        ranks, theta = self.task.batches.shard.ranks, making.origin(self.task.model, self.directions)
        if begun is not None:
            _check_same(begun, self._key(), out)
        found = self._empty(made) if begun is None else begun
        if self.quadratic and found.quadratic is None:
            found = replace(found, quadratic=quadratic_model(self.task, self.directions, found.loss))
        places = torch.cartesian_prod(*self.grid).view(-1, len(self.grid)).tolist()
        at_once, total = self.points.at_once(theta), len(places)
        written, pause = -1, _SECONDS
        try:
            with bars.bar("points", total, False if ranks.rank else progress) as advance:
                advance(found.done, "")
                last = -math.inf
                while found.done < total:
                    start = time.monotonic()
                    if out is not None and ranks.rank == 0 and start - last > pause:
                        found.to_npz(out)
                        written, last = found.done, time.monotonic()
                        pause = max(_SECONDS, (last - start) / _SHARE)
                    some = places[found.done : found.done + at_once]
                    networks = [making.moved(theta, self.directions, place) for place in some]
                    found = _with(found, self.points(networks))
                    advance(len(some), "")
        finally:
            if out is not None and ranks.rank == 0 and found.done > written:
                found.to_npz(out)
        return replace(found, directions=())

    def _empty(self, made: str) -> Landscape:
        own, shape = self.points.own, [len(each) for each in self.grid]
        empty = torch.full(shape, torch.nan, dtype=torch.float64, device="cpu")
        return Landscape(
            coefficients=self.grid,
            losses=empty,
            accuracy=None if own.accuracies is None else empty.clone(),
            loss=float(own.losses),
            quadratic=None,
            labels=tuple(direction.label for direction in self.directions),
            samples=self.points.samples,
            done=0,
            key=self._key() | ({"eigenvectors": made} if made else {}),
            directions=tuple(direction.values for direction in self.directions) if made else (),
        )

    def _key(self) -> dict[str, str]:
        """Return what the values depend on, by names; it is the same on all ranks."""
        task, own = self.task, self.points.own
        tensors = [
            (f"{place} {name}", change)
            for place, direction in enumerate(self.directions)
            for name, change in direction.values.items()
        ]
        ends = [f"{float(each[0])!r} to {float(each[-1])!r} by {len(each)}" for each in self.grid]
        return {
            "weights": _weights(task.model),
            "data": self.points.fingerprint,
            "loss": f"{type(task.loss).__name__}, {task.loss.reduction}, {float(own.losses):.6e}",
            "directions": fingerprint.of_tensors(tensors),
            "grid": ", ".join(ends),
            "accuracy": str(own.accuracies is not None),
            "quadratic": str(self.quadratic),
        }


def _weights(model: nn.Module) -> str:
    return f"{fingerprint.of_tensors(model.named_parameters())} {fingerprint.of_buffers(model)}"


def _check_same(begun: Landscape, key: Mapping[str, str], out: Path | None) -> None:
    """Raise an InputError if the key of a file's slice differs from a key, or from a part of one."""
    other = [name for name, value in key.items() if begun.key.get(name) != value]
    if other:
        raise InputError(
            f"out={str(out)!r} is a slice of other {', '.join(other)}; pass another file, or remove this one"
        )


def _with(found: Landscape, more: PointLosses) -> Landscape:
    """Return a slice with the values of the next points, which are written into its tensors."""
    done = found.done + len(more.losses)
    for values, of_points in ((found.losses, more.losses), (found.accuracy, more.accuracies)):
        if values is not None and of_points is not None:
            values.view(-1)[found.done : done] = of_points
    return replace(found, done=done)


_BY_NAME = ("random", "eigenvectors")


@dataclass(frozen=True)
class SliceRequest:
    """Hold which directions a user wants, with the options that apply to them."""

    given: Any  # ``"random"``, ``"eigenvectors"``, a Spectrum, or a list of mappings or checkpoints
    count: int  # of the directions
    through: bool  # whether they lead to checkpoints
    layers: Any  # whose parameters change
    normalization: str | None

    @classmethod
    def of(cls, directions: Any, through: Any, dimensions: Any, layers: Any, normalization: Any) -> "SliceRequest":
        """Return a request for the arguments of :func:`landscape`."""
        check_choice("normalization", normalization, NORMALIZATIONS)
        if through is not None:
            if directions is not None:
                raise InputError("directions= and through= both say where to; pass one of them")
            if normalization not in ("auto", None):
                raise InputError(f"normalization={normalization!r}: directions to checkpoints end there; pass None")
            given = [through] if isinstance(through, (nn.Module, Mapping)) else _several("through", through)
            return cls(given, _count(dimensions, len(given), "checkpoints"), True, layers, None)
        directions = "random" if directions is None else directions
        by = "filter" if normalization == "auto" and isinstance(directions, str) and directions == "random" else None
        by = by if normalization == "auto" else normalization
        if isinstance(directions, str):
            if directions not in _BY_NAME:
                raise InputError(
                    f"directions={shown(directions)} does not exist; choose one of {', '.join(map(repr, _BY_NAME))}, "
                    "or pass a Spectrum or mappings from names of parameters to tensors"
                )
            count = check_count("dimensions", 2 if dimensions is None else dimensions, 1, "1 or 2 directions", 2)
            return cls(directions, count, False, layers, by)
        if layers is not None:
            raise InputError("layers= is for directions='random' and 'eigenvectors', and for through=")
        if isinstance(directions, Spectrum):
            most = min(2, len(directions.eigenvalues))
            if not most:
                raise InputError("directions: a Spectrum with eigenvectors is wanted, and this has none (k=0)")
            wanted = f"1 or 2 directions, and the Spectrum has {len(directions.eigenvalues)},"
            count = most if dimensions is None else check_count("dimensions", dimensions, 1, wanted, most)
            return cls(directions, count, False, None, by)
        given = [directions] if isinstance(directions, Mapping) else _several("directions", directions)
        return cls(given, _count(dimensions, len(given), "directions of your own"), False, None, by)

    def made(self, model: nn.Module, seed: int) -> list[Direction]:
        """Return the directions for a model."""
        if self.through:
            names = None if self.layers is None else making.chosen(model, self.layers)
            return [
                making.to(model, other, names, "through", f"to checkpoint {place + 1}")
                for place, other in enumerate(self.given)
            ]
        if self.given == "random":
            names, generator = making.chosen(model, self.layers), torch.Generator().manual_seed(seed)
            labels = [f"random direction {place + 1}" for place in range(self.count)]
            return [making.random(model, names, generator, self.normalization, label) for label in labels]
        if isinstance(self.given, Spectrum):
            of = [{name: part[place] for name, part in self.given.eigenvectors.items()} for place in range(self.count)]
            labels = [f"eigenvector, λ = {value:.4g}" for value in self.given.eigenvalues.tolist()]
        else:
            of, labels = self.given, [f"direction {place + 1}" for place in range(self.count)]
        made = [making.given(model, changes, "directions", label) for changes, label in zip(of, labels, strict=False)]
        return [making.normalized(model, direction, self.normalization) for direction in made]


def _several(option: str, given: Any) -> list[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not 1 <= len(given) <= 2:
        raise InputError(f"{option}={shown(given)}: one or two are wanted")
    kinds = (nn.Module, Mapping) if option == "through" else (Mapping,)
    for each in given:
        if not isinstance(each, kinds):
            what = "modules or state dicts" if option == "through" else "mappings from names of parameters to tensors"
            raise InputError(f"{option}: {what} are wanted, got {shown(each)}")
    return [*given]


def _count(dimensions: Any, count: int, what: str) -> int:
    """Return the number of directions that were given, of which ``dimensions`` must not be."""
    if dimensions is not None:
        raise InputError(f"dimensions={shown(dimensions)} is for directions by name; of {what} there are {count}")
    return count


def coefficients(count: int, points: Any, ends: tuple[float, float], span: Any) -> tuple[Tensor, ...]:
    """Return the coefficients of each direction."""
    numbers = [*points] if isinstance(points, Sequence) and not isinstance(points, str) else [points] * count
    if len(numbers) != count:
        raise InputError(f"points={shown(points)}: a number of them, or one for each of {count} directions, is wanted")
    numbers = [check_count("points", each, 2) for each in numbers]
    pairs = [ends] * count if span is None else _spans(span, count)
    return tuple(
        torch.linspace(low, high, number, dtype=torch.float64, device="cpu")
        for (low, high), number in zip(pairs, numbers, strict=True)
    )


def _spans(span: Any, count: int) -> list[tuple[float, float]]:
    message = (
        f"span={shown(span)}: a positive number, the smallest and largest coefficient, or such a pair for each of "
        f"{count} directions is wanted"
    )
    try:
        given = span.tolist() if isinstance(span, (Tensor, np.ndarray)) else span
        if not isinstance(given, Sequence):
            given = (-float(given), float(given))
        pairs = [*given] if isinstance(given[0], Sequence) else [given] * count
        found = [(float(low), float(high)) for low, high in pairs]
    except (TypeError, ValueError, IndexError, NotImplementedError):  # the last of a tensor on the meta device
        raise InputError(message) from None
    if len(found) != count or not all(-math.inf < low < high < math.inf for low, high in found):
        raise InputError(message)
    return found


@dataclass(frozen=True, repr=False)
class LinearInterpolation(Result):
    """Hold the loss on the line between two networks.

    Attributes:
        coefficients: (points,) float64, α from 0, the model, to 1, the other.
        losses: (points,) float64, on the training data.
        accuracy: (points,), or None where targets are no classes.
        test_losses: on the test data, or None.
        test_accuracy: or None.
        samples: of the training data.
        refreshed: whether statistics of BatchNorm were computed anew at each point.
    """

    coefficients: Tensor
    losses: Tensor
    accuracy: Tensor | None
    test_losses: Tensor | None
    test_accuracy: Tensor | None
    samples: int
    refreshed: bool

    @property
    def barrier(self) -> float:
        """Return max_α E(α) - ((1 - α) E(0) + α E(1)) over the points; 0 without a barrier, NaN if a loss is."""
        return _barrier(self.coefficients, self.losses)

    @property
    def test_barrier(self) -> float | None:
        """Return the barrier on the test data; None without test data."""
        return None if self.test_losses is None else _barrier(self.coefficients, self.test_losses)

    @property
    def error_barrier(self) -> float | None:
        """Return the barrier of the error, 1 - accuracy, on the training data; None without accuracies."""
        return None if self.accuracy is None else _barrier(self.coefficients, 1 - self.accuracy)

    @property
    def test_error_barrier(self) -> float | None:
        """Return the barrier of the error on the test data; None without test data or accuracies."""
        return None if self.test_accuracy is None else _barrier(self.coefficients, 1 - self.test_accuracy)

    def plot(self, path: "str | Path | None" = None, *, axes: "Axes | None" = None) -> "tuple[Figure, Axes]":
        """Draw the losses on the line, with a dashed line between its ends and a gap where a loss is not finite.

        Args:
            path: where the figure is written too.
            axes: to draw into; None: those of a new figure, outside of pyplot.

        Returns:
            Figure and axes of matplotlib.

        Raises:
            MissingExtraError: without matplotlib.
        """
        figure, axes = views.onto(axes)
        for label, losses in (("training", self.losses), ("test", self.test_losses)):
            if losses is None:
                continue
            (line,) = axes.plot(
                self.coefficients, losses.where(losses.isfinite(), torch.nan), marker=".", label=f"{label} loss"
            )
            axes.plot([0, 1], losses[[0, -1]], "--", color=line.get_color(), linewidth=0.9)
        axes.set(xlabel="α, from one network to the other", ylabel="loss")
        axes.legend()
        views.save(figure, path)
        return figure, axes

    def __str__(self) -> str:
        lines = [
            f"{name} loss {float(losses[0]):.6g} at α = 0, {float(losses[-1]):.6g} at α = 1; barrier {barrier:.6g}"
            for name, losses, barrier in (
                ("training", self.losses, self.barrier),
                ("test", self.test_losses, self.test_barrier),
            )
            if losses is not None
        ]
        anew = ", statistics of BatchNorm computed anew" if self.refreshed else ""
        return "\n".join([*lines, f"{len(self.coefficients)} points, {self.samples} samples{anew}"])


@public(*CALL, "memory")
def linear_interpolation(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    other: nn.Module | Mapping[str, Tensor] = ...,  # type: ignore[assignment]
    *,
    test: Any = None,
    layers: Selector | Sequence[Selector] | None = None,
    points: int = 21,
    update_bn: bool | None = None,
    accuracy: bool | None = None,
    **how: Unpack[How],
) -> LinearInterpolation:
    """Return the loss on the line between two networks, E((1 - α) θ + α θ'), and the barrier between them.

    Args:
        data: … They are the training data, and are read several times.
        other: another module of the same structure, or a state dict.
        test: batches of other data, for the loss on these too.
        layers: selectors: only the parameters of these layers are interpolated. None: all parameters, and buffers of
            floating-point numbers.
        points: the number of points, with both ends.
        update_bn: compute the statistics of BatchNorm anew at each point, ends too, by a read of ``data`` with these
            layers, and no others, in training mode: means over batches of their means and variances, as
            ``torch.optim.swa_utils.update_bn`` takes them. None: where there is such a layer. False: statistics are
            linear in α, as other buffers are.
        accuracy: also evaluate the accuracy; None: where targets are classes.
        process_group: as for :func:`pyflatness.relative_flatness`. Statistics of BatchNorm are means over the batches
            of all ranks.

    Returns:
        Losses and accuracies, whose ``barrier`` is max_α E(α) - ((1 - α) E(0) + α E(1)). NaN and infinity are kept.

    Raises:
        InputError: a checkpoint of another model, or the model itself; ``update_bn=True`` without BatchNorm;
            batches of one sample, which have no variance; see :func:`pyflatness.relative_flatness`.

    Example:
        >>> import torch, pyflatness as pf
        >>> one, other = (torch.nn.Linear(1, 1, bias=False).double() for _ in range(2))
        >>> _ = one.weight.data.fill_(-1.0), other.weight.data.fill_(1.0)
        >>> data = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
        >>> found = pf.linear_interpolation(one, lambda f, y: -((f - y) ** 2).mean(), data, other, points=3)
        >>> found.losses.tolist(), found.barrier
        ([-1.0, 0.0, -1.0], 1.0)
    """
    points = check_count("points", points, 2)
    update_bn = None if update_bn is None else check_flag("update_bn", update_bn)
    accuracy = None if accuracy is None else check_flag("accuracy", accuracy)
    progress = check_progress(how)
    if not isinstance(other, (nn.Module, Mapping)):
        raise InputError(f"other={shown(other)}: a module or a state dict is wanted")
    options = Options.of(how, nan_policy="propagate")
    with session(model, loss, data, options, {**how, "progress": False}, reads=3) as task:
        there = bool(_norms(task.model))
        anew = there if update_bn is None else update_bn
        if anew and not there:
            raise InputError("update_bn=True: the model has no BatchNorm with running statistics")
        tasks = [task] if test is None else [task, task.on(test, reads=3)]
        names = None if layers is None else making.chosen(task.model, layers)
        direction = making.to(task.model, other, names, "other", "")
        theta = making.origin(task.model, [direction])
        evaluated = [Points(each, accuracy) for each in tasks]
        found: list[list[PointLosses]] = []
        coefficients = torch.linspace(0, 1, points, dtype=torch.float64, device="cpu")
        shown_here = False if task.batches.shard.ranks.rank else progress
        with bars.bar("points", points, shown_here) as advance:
            for some in coefficients.split(min(each.at_once(theta) for each in evaluated)):
                networks = [making.moved(theta, [direction], [alpha]) for alpha in some.tolist()]
                if anew:
                    networks = [values | _refreshed(task, values) for values in networks]
                found.append([each(networks) for each in evaluated])
                advance(len(some), "")
        train, *others = map(_joined, zip(*found, strict=True))
        on_test = others[0] if others else None
        return LinearInterpolation(
            coefficients=coefficients,
            losses=train.losses,
            accuracy=train.accuracies,
            test_losses=None if on_test is None else on_test.losses,
            test_accuracy=None if on_test is None else on_test.accuracies,
            samples=evaluated[0].samples,
            refreshed=anew,
        )


def _joined(parts: Sequence[PointLosses]) -> PointLosses:
    accuracies = [part.accuracies for part in parts if part.accuracies is not None]
    return PointLosses(torch.cat([part.losses for part in parts]), torch.cat(accuracies) if accuracies else None)


def _barrier(coefficients: Tensor, values: Tensor) -> float:
    return float((values - torch.lerp(values[0], values[-1], coefficients)).max())


_MEAN, _VARIANCE, _CALLS = "running_mean", "running_var", "num_batches_tracked"


def _norms(model: nn.Module) -> dict[str, private.BatchNorm]:
    """Return the BatchNorm layers with running statistics by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, private.BatchNorm)
        and module.running_mean is not None
        and module.num_batches_tracked is not None
    }


def _refreshed(task: Task, values: Parameters) -> Parameters:
    """Return new statistics of BatchNorm by name of buffer: means over the calls of a layer in one read of the data."""
    own, buffers = _norms(task.model), dict(task.model.named_buffers())
    synchronised = next((name for name, norm in own.items() if isinstance(norm, nn.SyncBatchNorm)), None)
    if synchronised is not None and not task.batches.shard.ranks.alone:
        raise NotYetError(f"{synchronised!r} (SyncBatchNorm): its statistics are not refreshed over several ranks")
    names = [(f"{name}.{_CALLS}", [f"{name}.{key}" for key in (_MEAN, _VARIANCE)]) for name in own]
    sums: dict[str, Tensor] = {}
    with _of_batches(own.values()), calling.dry_run():
        for batch in task.batches:
            fresh = {key: torch.zeros_like(buffers[key]) for calls, of in names for key in (calls, *of)}
            task.run(batch, {**values, **fresh})
            for calls, of in names:
                sums[calls] = sums.get(calls, 0) + fresh[calls].double()
                for key in of:
                    sums[key] = sums.get(key, 0) + fresh[calls] * fresh[key].double()
    sums = task.batches.shard.sum("the statistics of BatchNorm", sums)
    return {
        key: (sums[key] / sums[calls]).to(buffers[key].dtype) for calls, of in names if int(sums[calls]) for key in of
    }


@contextlib.contextmanager
def _of_batches(found: Iterable[private.BatchNorm]) -> Iterator[None]:
    """Put BatchNorm layers, and these alone, in training mode, and average their statistics over all calls."""
    before = [(norm, norm.training, norm.momentum) for norm in found]
    try:
        for norm, _, _ in before:
            norm.training, norm.momentum = True, None
        yield
    finally:
        for norm, training, momentum in before:
            norm.training, norm.momentum = training, momentum

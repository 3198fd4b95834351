"""Evaluate the loss on a line or a plane through a network's weights, with the quadratic model of the loss beside it.

    E(θ + Σ_k c_k d_k)   for one or two directions d_k and a grid of coefficients c_k

Directions are random and filter-normalised (Li et al. 2018, https://arxiv.org/abs/1712.09913), the Hessian's top
eigenvectors (Yao et al. 2020, https://arxiv.org/abs/1912.07145), those to other checkpoints, or the user's own.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import progress as bars
from ..errors import InputError
from ..messages import check_choice, check_path, shown
from ..model import fingerprint
from ..model.selectors import Selector
from ..numerics.meeting import joined
from ..numerics.ranks import Ranks
from ..options import CALL, How, Options, check_count, check_flag, check_progress
from ..passes.task import Task
from ..session import public, session
from . import directions as making
from .directions import NORMALIZATIONS, Direction
from .points import PointLosses, Points
from .quadratic import quadratic as quadratic_model
from .slices import Landscape
from .spectra import Spectrum
from .spectrum import spectrum

_SECONDS = 5.0  # between two times that a file is written, at least
_SHARE = 0.05  # of the time that writing may take: a file with eigenvectors may be large


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
        model: … A parameter that several modules share is moved once.
        data: … They are read again and again: once for up to 64 points.
        directions: ``"random"`` (the default): Gaussian in weights, filter-normalised, and zero in biases, scales of
            normalisations and other vectors; ``"eigenvectors"``: those of the Hessian's largest eigenvalues, which
            have norm 1, or a :class:`pyflatness.results.Spectrum` that has them; or directions of your own, a mapping
            from names of parameters, or of layers whose weight is meant, to tensors of their shapes, or two of these.
        through: in place of ``directions``, one or two other checkpoints, modules or state dicts: the line through the
            model's weights (0) and those of one (1), or the plane through all three, (0, 0), (1, 0) and (0, 1).
            Buffers of floating-point numbers, such as the statistics of BatchNorm, go along.
        dimensions: 1 or 2 (the default), of random directions and eigenvectors.
        layers: selectors: only the parameters of these layers move; of eigenvectors, those of the block of their
            weights. Buffers stay. None: all.
        normalization: ``"filter"`` for directions with the norm of the weights in each filter, a row of the layer's
            matrix; ``"layer"`` in each tensor; None for directions as they are; ``"auto"`` is ``"filter"`` for random
            ones and None for others.
        points: how many along each direction, or along one and the other.
        span: largest coefficient s, from -s; or the smallest and the largest; or such a pair for each direction. None:
            1, and -0.25 to 1.25 between checkpoints.
        accuracy: also evaluate the accuracy; None: where targets are classes.
        quadratic: also compute the quadratic model E + gᵀΔ + ½ ΔᵀHΔ, by a gradient and a Hessian product for each
            direction. None: unless buffers go along, which it is not of.
        out: a file, ``.npz``, that is written every few seconds and at the end, also by an error's. A call with the
            same weights, data, loss, directions and grid goes on with it; another one is refused. It has the
            eigenvectors too, which are computed once (again where ``layers`` are no names).
        seed: of random directions, and where Lanczos starts.
        process_group: as for :func:`pyflatness.relative_flatness`. The first rank reads and writes the file.

    Returns:
        Losses, accuracies and coefficients. NaN and infinity are kept. Small networks run at several points together,
        by ``torch.func.vmap``; others, and models that it does not take, at one after the other. The values are the
        same to rounding.

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
                along = [making.given(task.model, changes, label) for changes, label in pairs]
            else:
                along = wanted.made(task.model, options.seed)
            buffers = making.moves_buffers(task.model, along)
            if quadratic and buffers:
                raise InputError(
                    "quadratic=True: buffers go along between these checkpoints, and there is no such model"
                )
            slice_ = _Slice(task, along, grid, accuracy, quadratic=not buffers if quadratic is None else quadratic)
            return slice_.found(begun, made, path, progress)


def _begun(out: Path | None, ranks: Ranks) -> Landscape | None:
    """Return what the first rank's file has, or None if there is no file."""
    content = b"" if out is None or ranks.rank or not out.exists() else out.read_bytes()
    if out is not None and not ranks.alone:
        content = ranks.first("the file", content)
    return Landscape.read(content, f"out={str(out)!r}") if content else None


def _made(wanted: "SliceRequest", layers: Any, seed: int) -> str:
    """Return which eigenvectors of a model and its loss are wanted, where a text can say so; else an empty text."""
    names = (
        [layers] if layers is None or isinstance(layers, str) else [*layers] if isinstance(layers, Sequence) else [()]
    )
    if wanted.given != "eigenvectors" or not all(name is None or isinstance(name, str) for name in names):
        return ""
    return f"{wanted.count} of {names!r}, seed {seed}, normalization {wanted.normalization!r}"


class _Slice:
    """Evaluate the loss on a grid."""

    def __init__(
        self,
        task: Task,
        directions: Sequence[Direction],
        grid: tuple[Tensor, ...],
        accuracy: bool | None,
        *,
        quadratic: bool,
    ) -> None:
        self._task, self._directions, self._grid, self._quadratic = task, directions, grid, quadratic
        self._points = Points(task, accuracy)
        self._theta = making.origin(task.model, directions)

    def found(self, begun: Landscape | None, made: str, out: Path | None, progress: bool | None) -> Landscape:
        """Return the slice; what a file has (``begun``) is not evaluated again.

        ``made`` says what eigenvectors it is to have.
        """
        ranks = self._task.batches.shard.ranks
        if begun is not None:
            _check_same(begun, self._key(), out)
        found = self._empty(made) if begun is None else begun
        if self._quadratic and found.quadratic is None:
            found = replace(found, quadratic=quadratic_model(self._task, self._directions, found.loss))
        places = torch.cartesian_prod(*self._grid).view(-1, len(self._grid)).tolist()
        at_once, total = self._points.at_once(self._theta), len(places)
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
                    points = [making.moved(self._theta, self._directions, place) for place in some]
                    found = _with(found, self._points(points))
                    advance(len(some), "")
        finally:
            if out is not None and ranks.rank == 0 and found.done > written:
                found.to_npz(out)
        return replace(found, directions=())

    def _empty(self, made: str) -> Landscape:
        own, shape = self._points.own, [len(each) for each in self._grid]
        empty = torch.full(shape, torch.nan, dtype=torch.float64, device="cpu")
        return Landscape(
            coefficients=self._grid,
            losses=empty,
            accuracy=None if own.accuracies is None else empty,
            loss=float(own.losses),
            quadratic=None,
            labels=tuple(direction.label for direction in self._directions),
            samples=self._points.samples,
            done=0,
            key=self._key() | ({"eigenvectors": made} if made else {}),
            directions=tuple(direction.values for direction in self._directions) if made else (),
        )

    def _key(self) -> dict[str, str]:
        """Return what the values depend on, by names; the same on all ranks."""
        task, own = self._task, self._points.own
        tensors = [
            (f"{place} {name}", change)
            for place, direction in enumerate(self._directions)
            for name, change in direction.values.items()
        ]
        ends = [f"{float(each[0])!r} to {float(each[-1])!r} by {len(each)}" for each in self._grid]
        return {
            "weights": _weights(task.model),
            "data": self._points.fingerprint,
            "loss": f"{type(task.loss).__name__}, {task.loss.reduction}, {float(own.losses):.6e}",
            "directions": fingerprint.of_tensors(tensors),
            "grid": ", ".join(ends),
            "accuracy": str(own.accuracies is not None),
            "quadratic": str(self._quadratic),
        }


def _weights(model: nn.Module) -> str:
    return f"{fingerprint.of_tensors(model.named_parameters())} {fingerprint.of_buffers(model)}"


def _check_same(begun: Landscape, key: Mapping[str, str], out: Path | None) -> None:
    """Raise an InputError if a file is of another slice than a key, or a part of one, says."""
    other = [name for name, value in key.items() if begun.key.get(name) != value]
    if other:
        raise InputError(
            f"out={str(out)!r} is a slice of other {', '.join(other)}; pass another file, or remove this one"
        )


def _with(found: Landscape, more: PointLosses) -> Landscape:
    done = found.done + len(more.losses)

    def filled(before: Tensor, values: Tensor) -> Tensor:
        after = before.clone()
        after.view(-1)[found.done : done] = values
        return after

    accuracy = None if more.accuracies is None or found.accuracy is None else filled(found.accuracy, more.accuracies)
    return replace(found, losses=filled(found.losses, more.losses), accuracy=accuracy, done=done)


_BY_NAME = ("random", "eigenvectors")


@dataclass(frozen=True)
class SliceRequest:
    """Hold what directions a user wants, with options that apply to them."""

    given: Any  # the user's, or ``"random"``; checkpoints
    count: int  # of the directions
    through: bool  # whether they are to checkpoints
    layers: Any  # whose parameters move
    normalization: str | None

    @classmethod
    def of(cls, directions: Any, through: Any, dimensions: Any, layers: Any, normalization: Any) -> "SliceRequest":
        """Return what is asked for."""
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
        made = [making.given(model, changes, label) for changes, label in zip(of, labels, strict=False)]
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
    """Return how many directions were given, which ``dimensions`` does not change."""
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

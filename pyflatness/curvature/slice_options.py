"""Check once which directions and coefficients a user wants a slice of the loss along."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError
from ..messages import check_choice, shown
from ..options import check_count
from . import directions as making
from .directions import NORMALIZATIONS, Direction
from .spectra import Spectrum

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

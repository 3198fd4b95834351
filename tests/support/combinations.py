"""Combinations of choices: a few in which every pair of choices occurs, and tests that run with all in the soak run."""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

ENGINES = ["reference", *(f"compiled-{name}" for name in ("base", "avx2", "avx512"))]
GPU = "cuda"
AT_RANDOM = "emulated, threads at random"
EMULATED_ORDERS = ["emulated, threads in order", "emulated, threads in reverse", "emulated, odd threads first"]
CUDA_DEVICES = [GPU, "emulated", *EMULATED_ORDERS[1:]]
FIXTURES = ("engine", "cuda_device")

Row = tuple[str, ...]


def covering(choices: Mapping[str, Sequence[str]], together: int = 2, seed: int = 0) -> list[Row]:
    """Return rows of one choice each in which any choices of ``together`` columns occur together."""
    draw = random.Random(seed)
    columns = list(choices.values())
    missing = {
        tuple(zip(places, chosen, strict=True))
        for places in itertools.combinations(range(len(columns)), together)
        for chosen in itertools.product(*(columns[place] for place in places))
    }
    rows = []
    while missing:
        drawn = [tuple(draw.choice(column) for column in columns) for _ in range(60)]
        best = max(drawn, key=lambda row: len(_held(row, together) & missing))
        if held := _held(best, together) & missing:
            rows.append(best)
            missing -= held
    return rows


def _held(row: Row, together: int) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(enumerate(row), together))


def every(together: int = 2, **choices: Mapping[str, Any] | Iterable[Any]) -> pytest.MarkDecorator:
    """Return a mark that runs a test with every combination of its arguments' choices; most of them in the soak run.

    Outside of it stay as many in which any choices of ``together`` arguments occur together: all pairs by default,
    each choice with ``together=1``; and all with the ``cuda_device`` of a GPU, which has the time. Choices are values,
    or values by name.
    """
    tables = {
        name: dict(held) if isinstance(held, Mapping) else {_name(value): value for value in held}
        for name, held in choices.items()
    }
    kept = {*covering({name: [c for c in table if c != GPU] for name, table in tables.items()}, together)}
    parameters = [
        pytest.param(
            *(table[name] for table, name in zip(tables.values(), row, strict=True)),
            id="-".join(row),
            marks=() if row in kept or GPU in row else pytest.mark.soak,
        )
        for row in itertools.product(*tables.values())
    ]
    return pytest.mark.parametrize(tuple(tables), parameters, indirect=[name for name in tables if name in FIXTURES])


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def in_turn(every: int, names: str | tuple[str, ...], rows: Iterable[Any], first: int = 0) -> pytest.MarkDecorator:
    """Return a mark that runs a test with one in ``every`` rows of its arguments; with the others in the soak run."""
    parameters = [
        pytest.param(*(row if isinstance(names, tuple) else (row,)), marks=pytest.mark.soak if number % every else ())
        for number, row in enumerate(rows, first)
    ]
    return pytest.mark.parametrize(names, parameters)


def in_soak(*values: Any) -> list[Any]:
    """Return values of a test's argument with which it runs in the soak run alone."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]

"""The public functions, wherever they stand."""

import inspect
from collections.abc import Callable
from typing import Any

import pyflatness as pf

ROOMS = (pf, pf.measures, pf.statistics, pf.theory)
CALLS: dict[str, Callable[..., Any]] = {
    name: getattr(room, name) for room in ROOMS for name in room.__all__ if inspect.isfunction(getattr(room, name))
}
PATHS = {name: f"{room.__name__}.{name}" for room in ROOMS for name in room.__all__ if name in CALLS}

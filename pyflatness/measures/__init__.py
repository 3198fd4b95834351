"""Measures, one file per family: formula, source and code together; and the table of their names."""

from collections.abc import Sequence

from ..errors import InputError
from . import at_head
from .base import Measure, Task
from .lambda_max import LAMBDA_MAX
from .relative_flatness import RELATIVE_FLATNESS, RELATIVE_FLATNESS_STD
from .trace import TRACE

MEASURES = (RELATIVE_FLATNESS, RELATIVE_FLATNESS_STD, TRACE, LAMBDA_MAX)


def named(names: str | Sequence[str] | None) -> tuple[Measure, ...]:
    """Measures by their names; ``"all"``: every one; None: those that one sweep gives.

    Raises:
        InputError: a name that is not in the table.
    """
    if names is None:
        return tuple(measure for measure in MEASURES if measure.quantity and measure.normalize is None)
    if names == "all":
        return MEASURES
    table = {measure.name: measure for measure in MEASURES}
    wanted = dict.fromkeys([names] if isinstance(names, str) else names)
    for name in wanted:
        if name not in table:
            raise InputError(f"measures: {name!r} does not exist; choose among {', '.join(table)}, or 'all'")
    return tuple(table[name] for name in wanted)


__all__ = ["MEASURES", "RELATIVE_FLATNESS", "RELATIVE_FLATNESS_STD", "TRACE", "Measure", "Task", "at_head", "named"]

"""Refuse exact values that take more backward passes or Hessian products than ``max_passes=`` allows."""

import time
from collections.abc import Callable
from typing import Any

from ..errors import InputError
from ..messages import duration


def check_passes(
    needed: int, most: int, what: str, one: Callable[[], Any], samples: int, *, by_hessian: bool = False
) -> None:
    """Raise if an exact value takes more passes than the user allows, and say how long all of them would take.

    Args:
        needed: backward passes or Hessian products of a micro-batch.
        most: ``max_passes=`` of the user.
        what: takes them and how many they are, the beginning of the message.
        one: makes one of them; it is called, to see how long it takes, before the error is raised.
        samples: of the micro-batch.
        by_hessian: whether they are Hessian products, which the GGN value does without.

    Raises:
        InputError: they are more.
    """
    if needed <= most:
        return
    one()  # the first one has more to do
    start = time.perf_counter()
    one()
    seconds = time.perf_counter() - start
    ggn = "; or curvature='ggn' for the GGN value, another number" if by_hessian else ""
    raise InputError(
        f"{what}, more than max_passes={most}, and about {duration(needed * seconds)} for each {samples} samples by "
        f"the {seconds:.2g} s that one took; pass max_passes={needed} to take that time, or probes= for a value "
        f"sampled from fewer, with a standard error{ggn}"
    )

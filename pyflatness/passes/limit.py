"""Refuse exact values that take more backward passes than ``max_passes=`` allows; say how long many will take."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import private
from ..errors import PassesError
from ..messages import duration

MANY = 100  # backward passes of a micro-batch, or Hessian products of a layer
Tell = Callable[[Callable[[], str]], None]


def check_passes(
    needed: int,
    most: int,
    what: str,
    one: Callable[[], Any],
    samples: int,
    *,
    at_once: int = 1,
    by_hessian: bool = False,
    tell: Tell | None = None,
) -> None:
    """Raise if an exact value takes more passes of a micro-batch than the user allows, and say how long they take.

    ``what`` begins the message; ``one`` makes ``at_once`` of them, to see how long that takes. ``tell`` is told of as
    many as the user allows, where these are many, and of their time where two more of ``one`` are a small part of it.
    """

    def seconds_of_one() -> float:
        return _seconds(one) / at_once

    def told() -> str:
        timed = needed > MANY * at_once
        time_taken = f", about {duration(needed * seconds_of_one())} for each {samples} samples" if timed else ""
        return f"{what}{time_taken}; rtol=0.05 takes a fraction of that, with a standard error"

    if needed <= most:
        if tell is not None and needed > MANY:
            tell(told)
        return
    seconds = seconds_of_one()
    ggn = "; or curvature='ggn' for the GGN value, another number" if by_hessian else ""
    raise PassesError(
        f"{what}, more than max_passes={most}, and about {duration(needed * seconds)} for each {samples} samples by "
        f"the {seconds:.2g} s that one took; pass max_passes={needed} to take that time, or probes= for a value "
        f"sampled from fewer, with a standard error{ggn}"
    ).taking(what, needed)


def _seconds(one: Callable[[], Any]) -> float:
    _wait_for(one())  # the first call includes setup
    start = time.perf_counter()
    _wait_for(one())
    return time.perf_counter() - start


def _wait_for(made: Any) -> None:
    """Wait until these tensors are computed: a GPU runs behind the host."""
    for device in {leaf.device for leaf in private.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_cuda}:
        torch.cuda.synchronize(device)

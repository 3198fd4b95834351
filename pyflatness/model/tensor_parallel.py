"""Hold a tensor-parallel model (``parallelize_module``), of whose layers each rank computes a part.

All ranks have the same samples and take the same way, as each would alone. What a layer gets and gives, and what
arrives at it in backward passes, is a DTensor, and is made whole where it is recorded; so is a weight where it is
contracted. Of a head whose rows are spread only what :mod:`.at_head` sends goes over.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import NotYetError
from ..numerics.ranks import Ranks
from . import spread
from .spread import WHOLE, Part, full


@contextlib.contextmanager
def held(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Hold a model inside, if some of its parameters are spread over ranks.

    Args:
        model: not under FSDP2.
        ranks: which make the call.

    Raises:
        InputError: other ranks than those that have its parameters.
        NotYetError: a mesh of several dimensions.
    """
    parts = {}
    for name, parameter in model.named_parameters():
        held: Any = parameter
        if not spread.is_spread(parameter):
            continue
        if len(held.placements) != 1:
            raise NotYetError(
                f"model: its parameter {name!r} is spread over {held.device_mesh}, of several dimensions; {WHOLE}"
            )
        spread.check_processes(name, held, ranks, "the same data")
        parts[id(parameter)] = Part(parameter, partial(_whole, parameter))
    if not parts:
        yield
        return
    with spread.held(model, parts, ranks):
        yield


def _whole(parameter: Tensor) -> Tensor:
    return full(parameter.detach())

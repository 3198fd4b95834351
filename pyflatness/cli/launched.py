"""Let processes that torchrun, or ``accelerate launch``, has started do a command together."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..numerics.meeting import joined
from ..numerics.ranks import ALONE, Ranks, is_known

_OF_A_LAUNCHER = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    """Hold the ranks of a launcher's processes together, of which the first one alone prints; else this process alone.

    Raises:
        SystemExit: an error of which the first rank has told.
    """
    if any(name not in os.environ for name in _OF_A_LAUNCHER) or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("gloo")  # for what is exchanged, which is on the CPU; a model is on one rank's device
    try:
        with contextlib.ExitStack() as stack:
            if dist.get_rank() > 0:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))  # noqa: PTH123
            yield stack.enter_context(joined(None))
    except Exception as error:
        if dist.get_rank() > 0 and is_known(error):
            raise SystemExit(2) from error
        raise
    finally:
        dist.destroy_process_group()

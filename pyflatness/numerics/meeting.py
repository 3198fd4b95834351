"""Let the ranks of a process group meet at the beginning of a call, and leave it together."""

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from .. import interrupts
from ..errors import InputError, RankError
from .ranks import ALONE, MEANT_ALONE, Ranks, refusal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Group = ProcessGroup | Literal[False] | None
else:
    Group = Any  # torch may have been built without it

_IS_AVAILABLE = dist.is_available()
_NOT_JOINED = contextlib.nullcontext(ALONE)
_PATIENCE = 30.0  # seconds until a rank that waits for others to come says so


def refuse(process_group: Group, what: str, instead: str = "") -> None:
    """Raise, without waiting for others, if a call would be made together; see :meth:`Ranks.refuse`."""
    group = _group(process_group)
    if group is not None:
        raise refusal(what, dist.get_world_size(group), instead)


def joined(process_group: Group) -> contextlib.AbstractContextManager[Ranks]:
    """Return a context in which a call is made together with the other ranks of a process group.

    Args:
        process_group: the user's; None: all processes, where ``torch.distributed`` is initialised; False: this process.

    Raises:
        InputError: not a group, or one that this process is not in.
        RankError: other ranks do not come.
    """
    group = _group(process_group)
    return _NOT_JOINED if group is None else _joined(group)


@contextlib.contextmanager
def _joined(group: Any) -> Iterator[Ranks]:
    """Meet the other ranks of a group, and leave together with them."""
    device = torch.device("cpu")
    if "cpu:" not in dist.get_backend_config(group):
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = Ranks(group, device)
    _meet(ranks, group)
    with ranks.agreed("the call"):
        yield ranks


def _group(process_group: Group) -> Any:
    """Return the group to agree with; None for none, or one of this process alone."""
    if process_group is False or (process_group is None and not _is_initialized()):
        return None
    if not _is_initialized():
        raise InputError("process_group: torch.distributed is not initialised; call init_process_group() first")
    group = dist.group.WORLD if process_group is None else process_group
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise InputError(f"process_group: this process is not in it; {MEANT_ALONE}")
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"process_group={process_group!r}: a torch.distributed.ProcessGroup, None (all ranks) or False (this "
            "process alone) is wanted"
        )
    return group if dist.get_world_size(group) > 1 else None


def _is_initialized() -> bool:
    return _IS_AVAILABLE and dist.is_initialized()


def _meet(ranks: Ranks, group: Any) -> None:
    """Wait until all ranks are here, by the group's store: no message of a backend can go astray meanwhile.

    A call on one rank alone, while others go on with training, would else be answered by what these send each other.

    Raises:
        RankError: some have not come within the timeout of the store, which is that of ``init_process_group``.
    """
    store = dist.distributed_c10d._get_process_group_store(group)
    count = store.add(f"pyflatness/{ranks.rank}", 1)
    missing = {rank: f"pyflatness/{count}/{rank}" for rank in range(ranks.size)}
    own = missing.pop(ranks.rank)
    store.set(own, "")
    with contextlib.suppress(RuntimeError):  # a store that cannot
        store.delete_key(f"pyflatness/{count - 1}/{ranks.rank}")  # all have met there, and gone on
    start, told, limit = time.monotonic(), False, store.timeout.total_seconds()  # type: ignore[attr-defined]
    try:
        while missing:
            with contextlib.suppress(RuntimeError):
                store.wait([*missing.values()], timedelta(seconds=1))
                break
            interrupts.check()
            missing = {rank: key for rank, key in missing.items() if not store.check([key])}
            waited = time.monotonic() - start
            if missing and waited > limit:
                raise RankError(f"{_missing(ranks, missing)} within {waited:.0f} s")
            if missing and waited > _PATIENCE and not told:
                told = True
                warnings.warn(f"{_missing(ranks, missing)} after {waited:.0f} s", stacklevel=2)
    except BaseException:
        store.add(f"pyflatness/{ranks.rank}", -1)
        with contextlib.suppress(RuntimeError):
            store.delete_key(own)
        raise


def _missing(ranks: Ranks, missing: Mapping[int, str]) -> str:
    listed = ", ".join(map(str, [*missing][:8])) + (", …" if len(missing) > 8 else "")
    return (
        f"rank {ranks.rank} of {ranks.size} is in a call of pyflatness, which all ranks of the process group make "
        f"together, each with its part of the data; {MEANT_ALONE}. Rank {listed} did not come"
    )

"""Make the ranks of a process group begin a call together, and leave it together."""

import contextlib
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from .. import interrupts, private
from ..errors import FlatnessError, InputError, RankError
from .ranks import ALONE, MEANT_ALONE, Ranks, refusal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Group = ProcessGroup | Ranks | Literal[False] | None
else:
    Group = Any  # torch may have been built without it

_IS_AVAILABLE = dist.is_available()
_NOT_JOINED = contextlib.nullcontext(ALONE)
_COMPLETE, _GIVEN_UP = b"complete", b"given up"
_PATIENCE = 30.0  # seconds after which a rank that waits for others warns


def refuse(process_group: Group, what: str, instead: str = "") -> None:
    """Raise, without waiting for others, if several ranks would make the call; see :meth:`Ranks.refuse`."""
    if isinstance(process_group, Ranks):
        process_group.refuse(what, instead)
        return
    group = _group(process_group)
    if group is not None:
        raise refusal(what, dist.get_world_size(group), instead)


def joined(process_group: Group) -> contextlib.AbstractContextManager[Ranks]:
    """Return a context for a call that all ranks of a process group make together.

    ``process_group`` None stands for all processes if ``torch.distributed`` is initialised, and False for this process
    alone. :class:`Ranks` are those of a call that this one is a part of: they have met, and agree on errors around it.
    """
    if isinstance(process_group, Ranks):
        return contextlib.nullcontext(process_group)
    group = _group(process_group)
    return _NOT_JOINED if group is None else _joined(group)


@contextlib.contextmanager
def _joined(group: Any) -> Iterator[Ranks]:
    """Meet the other ranks of a group, and leave together with them."""
    device = torch.device("cpu")
    if "cpu:" not in dist.get_backend_config(group):
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = Ranks(group, device)
    with interrupts.shielded():  # so that an interrupt does not cut off a message
        interrupt = _rendezvous(ranks, group)
        with ranks.agreed("the call"):
            if interrupt is not None:
                raise interrupt
            yield ranks


def _group(process_group: Group) -> Any:
    """Return the group of ranks, or None if there is none or it has this process alone."""
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


def _rendezvous(ranks: Ranks, group: Any) -> BaseException | None:
    """Wait until all ranks are here, by the group's store, which sends no message of the backend.

    With messages of the backend, a call on one rank alone, while others go on with training, would receive theirs. An
    interrupt after all ranks have arrived is returned, since the others have to be told of it.
    """
    store = private.store_of(group)
    try:
        rendezvous = _Rendezvous(ranks, store)
        try:
            rendezvous.wait()
        except BaseException as error:
            if rendezvous.give_up():
                raise
            if not isinstance(error, RankError):
                return error
        return None
    except FlatnessError:
        raise
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise RankError(
            f"rank {ranks.rank}: the store of the process group does not answer, as when the process that holds it, "
            f"rank 0 as a rule, has ended ({reason})"
        ) from error


class _Rendezvous:
    """Represent the rendezvous of the ranks at the beginning of a call.

    Each rank increments a counter in the store. The last one to arrive writes a note that they met, unless a rank that
    gave up has written its own. The first note counts, so that all ranks reach the same conclusion. After one has given
    up, they meet again under another name.
    """

    def __init__(self, ranks: Ranks, store: Any) -> None:
        self._ranks, self._store = ranks, store
        self._calls = f"pyflatness/{ranks.rank}"
        self._number, self._attempt = store.add(self._calls, 1), 0
        self._came = time.monotonic()

    @property
    def _name(self) -> str:
        return f"pyflatness/{self._number}/{self._attempt}"

    def _noted(self, note: bytes) -> bool:
        """Write the note of the rendezvous unless there is one, and return whether the note is now this one."""
        return bool(self._store.compare_set(f"{self._name}/note", "", note.decode()) == note)

    def wait(self) -> None:
        """Wait until all are here."""
        while not self._are_here():
            self._attempt += 1
        with contextlib.suppress(RuntimeError):  # of a store that cannot delete keys
            before = f"pyflatness/{self._number - 1}/0"  # the previous rendezvous, which all ranks have left
            for key in (f"{before}/{self._ranks.rank}", *([before, f"{before}/note"] if self._ranks.rank == 0 else [])):
                self._store.delete_key(key)

    def _are_here(self) -> bool:
        """Arrive, wait for the others, and return True when all have arrived, or False if one gave up."""
        self._store.set(f"{self._name}/{self._ranks.rank}", "")
        if self._store.add(self._name, 1) == self._ranks.size:
            return self._noted(_COMPLETE)
        warned = False
        while True:
            try:
                self._store.wait([f"{self._name}/note"], timedelta(seconds=1))
                return bool(self._store.get(f"{self._name}/note") == _COMPLETE)
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # not yet
                pass
            interrupts.check()
            waited = time.monotonic() - self._came
            if waited > self._store.timeout.total_seconds():
                raise RankError(f"{self._missing()} within {waited:.0f} s")
            if waited > _PATIENCE and not warned:
                warned = True
                warnings.warn(f"{self._missing()} after {waited:.0f} s", stacklevel=2)

    def give_up(self) -> bool:
        """Write that this rank gives up, and return whether it may leave; it may not if all have arrived."""
        if self._noted(_GIVEN_UP):
            self._store.add(self._calls, -1)
            return True
        return False

    def _missing(self) -> str:
        size = self._ranks.size
        others = [rank for rank in range(size) if not self._store.check([f"{self._name}/{rank}"])]
        listed = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
        return (
            f"rank {self._ranks.rank} of {size} is in a call of pyflatness, which all ranks of the process group make "
            f"together, each with its part of the data; {MEANT_ALONE}. Rank {listed} did not come"
        )

"""Let the processes of a ``torch.distributed`` group agree in one call: on sums, rows of samples, facts and errors.

Every rank makes the same call on its own data. At the end of a read of the data, the ranks add up their results, so
that from there on all hold the same numbers. Sums are in float64 and in the order of the ranks for every backend, so
that they have the same bits on every rank and in every run. Facts are exchanged by ``all_gather_object``, sums of many
numbers and parts of tensors by ``all_gather``.

A rank that fails takes part in one more exchange, with its error. The others, which wait for it at their next exchange,
raise that error too (:meth:`Ranks.agreed`). Before tensors are sent, all ranks confirm that they have the memory
(:meth:`Ranks.gathered`). If a caller, such as the user's code, catches an error of another rank, the next exchange
raises it again.

At any time a rank may ask for the whole of a tensor whose parts are spread over the ranks (:meth:`Ranks.whole`). The
others send their parts wherever they wait, so that ranks need not make the same passes, nor the same number.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import interrupts
from ..errors import FlatnessError, NotYetError, RankError

_AGREED = "_pyflatness_agreed"  # an attribute of errors that all ranks know of: one of the next three
_LOST, _OF_ALL, _OF_ONE = "lost", "of all", "of one"
_ALIKE = (
    "all ranks of a process group measure one model together. Where the statistics of BatchNorm differ, as after "
    "training by DistributedDataParallel, send one rank's: torch.distributed.broadcast(buffer, 0) for each of "
    "model.buffers(); to measure in this process alone pass process_group=False"
)
MEANT_ALONE = "process_group=False measures in this process alone"


class Ranks:
    """Represent the processes that make a call together; without a group, this process alone."""

    def __init__(self, group: Any = None, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self._group, self._device = group, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.processes = [0] if group is None else dist.get_process_group_ranks(group)
        self._parts: Mapping[str, Callable[[], Tensor]] = {}
        self._error: BaseException | None = None  # an error of all ranks, until this one has left agreed() with it

    @property
    def alone(self) -> bool:
        """Return whether there are no other ranks."""
        return self.size == 1

    def refuse(self, what: str, instead: str = "") -> None:
        """Raise if there are other ranks; ``what`` begins the sentence, ``instead`` ends in a comma and a space."""
        if not self.alone:
            raise refusal(what, self.size, instead)

    def exchange(self, step: str, fact: Any) -> list[Any]:
        """Return every rank's fact at a step of the call, in the order of the ranks.

        It raises the error of a rank that has failed. It is an error if ranks are at different steps. A fact can be
        pickled and has no tensors of a GPU.
        """
        if self.alone:
            return [fact]
        return self._exchanged({"step": step, "fact": fact})

    def first(self, step: str, fact: Any) -> Any:
        """Return the first rank's fact at a step; what the others pass does not count."""
        return self.exchange(step, fact if self.rank == 0 else None)[0]

    def check_alike(self, step: str, facts: Mapping[str, Any]) -> None:
        """Raise unless all ranks have the same facts; the message names the first fact that differs, and a rank."""
        if self.alone:
            return
        found = self.exchange(step, dict(facts))
        for what, first in found[0].items():
            rank = next((rank for rank, each in enumerate(found) if each[what] != first), None)
            if rank is not None:
                raise RankError(f"rank {rank} has other {what} than rank 0 ({found[rank][what]}; {first}): {_ALIKE}")

    def hand_over(self, parts: Mapping[str, Callable[[], Tensor]]) -> None:
        """Register functions that return this rank's parts of tensors, for when a rank asks for the whole.

        The parts of all ranks have the same size.
        """
        self._parts = parts

    def whole(self, name: str, into: Tensor | None = None) -> Tensor:
        """Return all ranks' parts of a tensor registered by :meth:`hand_over`, (ranks, entries of a part)."""
        self._heard({"wanted": name})
        return self._sent(name, into)

    def _exchanged(self, told: Mapping[str, Any], own: BaseException | None = None) -> list[Any]:
        found = self._heard(told, own)
        steps = [each["step"] for each in found]
        if len(set(steps)) > 1:
            rank = next(rank for rank, step in enumerate(steps) if step != steps[0])
            raise _marked(
                RankError(
                    f"ranks have lost each other in this call: rank 0 is at {steps[0]}, rank {rank} at {steps[rank]}; "
                    "every rank has to make the same call, with the same model, loss and options"
                ),
                _LOST,
            )
        return [each["fact"] for each in found]

    def _heard(self, told: Mapping[str, Any], own: BaseException | None = None) -> list[dict[str, Any]]:
        """Return the messages of all ranks, after this one has sent all parts of tensors that others asked for before.

        If ranks ask for different tensors, those of the first of them are sent first. The others wait until it has
        caught up, and from there on one message serves all.
        """
        while self._error is None:
            interrupts.check()
            found = self._told(dict(told))
            errors = {rank: each["error"] for rank, each in enumerate(found) if "error" in each}
            if errors:
                self._error = _together(errors, self.size, own)
                break
            wanted = next((each["wanted"] for each in found if "wanted" in each), None)
            if wanted == told.get("wanted"):
                return found
            self._sent(str(wanted))
        if self._error is own:
            raise self._error
        raise self._error from own

    def _sent(self, name: str, into: Tensor | None = None) -> Tensor:
        """Send this rank's part of a tensor, as all ranks do now; return all parts, (ranks, entries of a part)."""
        part = self._parts[name]()
        whole = part.new_empty(self.size * part.numel()) if into is None else into
        sent, received = part, whole
        if part.device.type != "cpu" and self._device.type == "cpu":
            sent, received = part.cpu(), torch.empty_like(whole, device="cpu")
        self._ready("a part of a tensor")
        self._collective(dist.all_gather, [*received.chunk(self.size)], sent)
        if received is not whole:
            whole.copy_(received)
        return whole.view(self.size, -1)

    def _told(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a message to all ranks, and return the messages of all."""
        found: list[Any] = [None] * self.size
        self._collective(dist.all_gather_object, found, told)
        return found

    def gathered(self, tensor: Tensor, step: str = "") -> list[Tensor]:
        """Return every rank's tensor, of the same shape and dtype, on the CPU.

        With a ``step`` all ranks first confirm that they have such a tensor, since one may have failed meanwhile.
        """
        held = tensor.to(self._device).contiguous()
        room = self._room(held)
        if step:
            self._ready(step)
        self._collective(dist.all_gather, room, held)
        return [each.to("cpu") for each in room]

    def _ready(self, step: str) -> None:
        """Wait until all ranks are about to send tensors; from here on nothing may fail."""
        self.exchange(f"{step}, about to be sent", None)

    def _room(self, tensor: Tensor) -> list[Tensor]:
        """Return buffers for every rank's tensor."""
        return [torch.empty_like(tensor) for _ in range(self.size)]

    def _collective(self, call: Callable[..., Any], *held: Any) -> None:
        """Make a call of ``torch.distributed`` in which all ranks take part."""
        try:
            call(*held, group=self._group)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise _marked(
                RankError(
                    f"rank {self.rank}: another of the {self.size} ranks ended, or does not answer within the timeout "
                    f"of the process group ({reason})"
                ),
                _LOST,
            ) from error

    @contextlib.contextmanager
    def agreed(self, step: str) -> Iterator[None]:
        """Let all ranks leave the context together, with the error of one raised on all.

        On other ranks it is a :class:`RankError` unless it is an error of this library. Code whose errors are caught
        has to be inside such a context, so that no rank goes on while another waits.
        """
        if self.alone:
            yield
            return
        try:
            yield
            self.exchange(f"the end of {step}", None)
        except BaseException as error:
            if _mark(error) is not None:
                raise
            self._exchanged({"step": "an error", "error": _ToldError.of(error)}, error)
            raise  # not reached: the exchange raises
        finally:
            self._error = None


ALONE = Ranks()


class _ToldError(NamedTuple):
    """Hold a rank's error as it tells it: class, message, and whether the ranks can go on to other work after it."""

    kind: type[FlatnessError] | None  # None for an error that is not this library's
    name: str
    text: str
    passes: bool

    @classmethod
    def of(cls, error: BaseException) -> "_ToldError":
        """Return an error as a rank tells it; after an interrupt or a disagreement the ranks cannot go on."""
        kind = type(error) if isinstance(error, FlatnessError) else None
        passes = isinstance(error, Exception) and not isinstance(error, RankError)
        return cls(kind, type(error).__name__, str(error), passes)


def _together(errors: Mapping[int, _ToldError], size: int, own: BaseException | None) -> BaseException:
    """Return the error to raise given those of some ranks: this rank's own if all have it, or else the first."""
    rank, first = next(iter(errors.items()))
    how = _OF_ONE if all(error.passes for error in errors.values()) else _OF_ALL
    of_all = len(errors) == size and {*errors.values()} == {first}
    if own is not None and (of_all or not isinstance(own, FlatnessError)):
        return _marked(own, how)
    text = f"rank {rank}: {first.text}" if first.kind else f"rank {rank}: {first.name}: {first.text}"
    return _marked((first.kind or RankError)(text), how)


def _marked(error: BaseException, how: str) -> BaseException:
    setattr(error, _AGREED, how)
    return error


def is_known(error: BaseException) -> bool:
    """Return whether all ranks raise this error, so that the first of them can report it."""
    return _mark(error) in (_OF_ALL, _OF_ONE)


def is_the_end(error: BaseException) -> bool:
    """Return whether an error ends the call: a disagreement of the ranks, or one raised by a signal's handler."""
    return interrupts.is_raised(error) or (isinstance(error, RankError) and _mark(error) != _OF_ONE)


def _mark(error: BaseException | None) -> str | None:
    return None if error is None else getattr(error, _AGREED, None) or _mark(error.__cause__)


def refusal(what: str, size: int, instead: str) -> NotYetError:
    """Return the error for an operation that does not exist over several ranks yet; see :meth:`Ranks.refuse`."""
    return NotYetError(
        f"{what} is not there over the {size} ranks of a process group yet; {instead}or take all data to one rank, "
        f"where {MEANT_ALONE}"
    )

"""Let the processes of a ``torch.distributed`` group agree in one call: on sums, rows of samples, facts and errors.

Every rank makes the same call on its own data. Where a read of the data ends, each adds what the others found to what
it found itself, so that from there on all hold the same numbers. Sums are taken in float64 and in the order of the
ranks, whatever the backend does: so they have the same bits on every rank and in every run. What is exchanged is JSON
and numbers in tensors, by ``all_gather``; nothing is unpickled.

A rank that fails takes part in one more exchange, with its error. The others, who wait for it where they will meet
next, raise that error too (:meth:`Ranks.agreed`).

Of a tensor whose parts are spread over the ranks, one may ask for the whole at any time (:meth:`Ranks.whole`). The
others hand over their parts wherever they wait: so ranks need not make the same passes, nor as many.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import interrupts
from ..errors import FlatnessError, NotYetError, RankError

_PACKET = 4096  # bytes of an exchange that goes in one message
_POLLS = 0.0, 1e-5, 1e-4, 1e-3  # seconds between looks at a message on its way; the last one stays
_AGREED = "_pyflatness_agreed"  # an attribute of an error that all ranks know of
_ALIKE = (
    "all ranks of a process group measure one model together. Where the statistics of BatchNorm differ, as after "
    "training by DistributedDataParallel, send one rank's: torch.distributed.broadcast(buffer, 0) for each of "
    "model.buffers(); to measure in this process alone pass process_group=False"
)
MEANT_ALONE = "process_group=False measures in this process alone"


class Ranks:
    """Represent the processes that make a call together; without a group, this process alone.

    Args:
        group: of more than one process, which this one is in.
        device: of the tensors that the group's backend sends.

    Attributes:
        rank: of this process in the group.
        size: how many there are.
        processes: their numbers among all processes, in the order of ranks.
    """

    def __init__(self, group: Any = None, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self._group, self._device = group, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.processes = [0] if group is None else dist.get_process_group_ranks(group)
        self._parts: Mapping[str, Callable[[], Tensor]] = {}

    @property
    def alone(self) -> bool:
        """Return whether there are no others."""
        return self.size == 1

    def refuse(self, what: str, instead: str = "") -> None:
        """Raise if there are others.

        Args:
            what: cannot be had of data that are spread over ranks; the beginning of a sentence.
            instead: what to do, as a clause with a comma and a space behind it.

        Raises:
            NotYetError: there are.
        """
        if not self.alone:
            raise refusal(what, self.size, instead)

    def exchange(self, step: str, fact: Any) -> list[Any]:
        """Return what every rank has to say at a step of the call, in their order.

        Args:
            step: the same for all ranks, or they have lost each other.
            fact: anything that JSON takes.

        Raises:
            FlatnessError: of a rank that failed before it came here.
            RankError: ranks are at different steps, or do not answer.
        """
        if self.alone:
            return [fact]
        return self._exchanged({"step": step, "fact": fact})

    def check_alike(self, step: str, facts: Mapping[str, Any]) -> None:
        """Raise unless all ranks have the same facts.

        Raises:
            RankError: they do not; the message names the first fact that differs, and a rank.
        """
        if self.alone:
            return
        found = self.exchange(step, dict(facts))
        for what, first in found[0].items():
            rank = next((rank for rank, each in enumerate(found) if each[what] != first), None)
            if rank is not None:
                raise RankError(f"rank {rank} has other {what} than rank 0 ({found[rank][what]}; {first}): {_ALIKE}")

    def hand_over(self, parts: Mapping[str, Callable[[], Tensor]]) -> None:
        """Hand over this rank's parts of some tensors from now on, whenever another rank asks for the whole.

        Args:
            parts: what makes a part, by name; of one name those of all ranks have the same size.
        """
        self._parts = parts

    def whole(self, name: str, into: Tensor | None = None) -> Tensor:
        """Return all ranks' parts of a tensor, (ranks, entries of a part).

        Args:
            name: of what :meth:`hand_over` was given.
            into: memory for it.

        Raises:
            FlatnessError: of a rank that failed, or that does not answer.
        """
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
                )
            )
        return [each["fact"] for each in found]

    def _heard(self, told: Mapping[str, Any], own: BaseException | None = None) -> list[dict[str, Any]]:
        """Return what all ranks tell, when this one has been asked for all parts that it was to be asked for first.

        Of ranks that ask for parts of different tensors the first is served first. So the others wait for it to come to
        where they are, and from there on one message serves all.
        """
        while True:
            found = [json.loads(text) for text in self._messages(json.dumps(told).encode())]
            errors = {rank: each["error"] for rank, each in enumerate(found) if "error" in each}
            if errors:
                error = _together(errors, self.size, own)
                if error is own:
                    raise error
                raise error from own
            wanted = next((each["wanted"] for each in found if "wanted" in each), None)
            if wanted == told.get("wanted"):
                return found
            self._sent(str(wanted))

    def _sent(self, name: str, into: Tensor | None = None) -> Tensor:
        """Send this rank's part of a tensor, which all send now; return all parts, (ranks, entries of a part)."""
        part = self._parts[name]()
        whole = part.new_empty(self.size * part.numel()) if into is None else into
        sent, received = part, whole
        if part.device.type != "cpu" and self._device.type == "cpu":
            sent, received = part.cpu(), torch.empty_like(whole, device="cpu")
        self._wait(lambda: dist.all_gather([*received.chunk(self.size)], sent, group=self._group, async_op=True))
        if received is not whole:
            whole.copy_(received)
        return whole.view(self.size, -1)

    def _messages(self, message: bytes) -> list[bytes]:
        """Return every rank's message."""
        packet = torch.zeros(_PACKET, dtype=torch.uint8, device="cpu")
        packet[:8] = torch.tensor([len(message)], dtype=torch.int64, device="cpu").view(torch.uint8)
        packet[8 : 8 + len(message)] = _bytes(message[: _PACKET - 8])
        found = self.gathered(packet)
        lengths = [int(each[:8].clone().view(torch.int64)) for each in found]
        rest = max(lengths) - (_PACKET - 8)
        if rest > 0:
            longer = torch.zeros(rest, dtype=torch.uint8, device="cpu")
            left = message[_PACKET - 8 :]
            longer[: len(left)] = _bytes(left)
            found = [torch.cat(pair) for pair in zip(found, self.gathered(longer), strict=True)]
        return [each[8 : 8 + n].numpy().tobytes() for each, n in zip(found, lengths, strict=True)]

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, of the same shape and dtype, on the CPU."""
        held = tensor.to(self._device).contiguous()
        found = [torch.empty_like(held) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(found, held, group=self._group, async_op=True))
        return [each.to("cpu") for each in found]

    def broadcast(self, message: bytes, source: int) -> bytes:
        """Return the message of one rank; what the others pass does not count."""
        length = self.exchange("a message", len(message))[source]
        held = torch.zeros(length, dtype=torch.uint8, device="cpu")
        if self.rank == source:
            held[:] = _bytes(message)
        held = held.to(self._device)
        root = dist.get_global_rank(self._group, source)
        self._wait(lambda: dist.broadcast(held, root, group=self._group, async_op=True))
        return held.cpu().numpy().tobytes()

    def _wait(self, begun: Any) -> None:
        """Wait for a message on its way; an interrupt is raised meanwhile.

        Raises:
            RankError: it does not arrive.
        """
        try:
            work, looks = begun(), 0
            while not work.is_completed():
                interrupts.check()
                time.sleep(_POLLS[min(looks // 50, len(_POLLS) - 1)])
                looks += 1
            work.wait()
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise _marked(
                RankError(
                    f"rank {self.rank}: another of the {self.size} ranks ended, or does not answer within the timeout "
                    f"of the process group ({reason})"
                )
            ) from error

    @contextlib.contextmanager
    def agreed(self, step: str) -> Iterator[None]:
        """Leave together, inside: an error of one rank is one of all.

        It belongs around what may raise an error that is caught outside, so that no rank goes on while another waits.

        Args:
            step: what is done inside.

        Raises:
            FlatnessError: of the first rank that failed, named unless all ranks have the same.
            RankError: another error of such a rank, on the others.
        """
        if self.alone:
            yield
            return
        try:
            yield
            self.exchange(f"the end of {step}", None)
        except BaseException as error:
            if _is_agreed(error):
                raise
            self._exchanged({"step": "an error", "error": [type(error).__name__, str(error)]}, error)
            raise  # not reached: the exchange raises


ALONE = Ranks()


def _together(errors: Mapping[int, Sequence[str]], size: int, own: BaseException | None) -> BaseException:
    """Return the error to raise for those that ranks had: one that all have, or else the first rank's."""
    of_all = len(errors) == size and len({tuple(error) for error in errors.values()}) == 1
    if own is not None and (of_all or not isinstance(own, FlatnessError)):
        return _marked(own)
    rank, (name, text) = next(iter(errors.items()))
    kind = _kinds().get(name)
    return _marked(RankError(f"rank {rank}: {name}: {text}") if kind is None else kind(f"rank {rank}: {text}"))


def _kinds() -> dict[str, type[FlatnessError]]:
    """Return the classes of our own errors by their names."""
    kinds: dict[str, type[FlatnessError]] = {}
    left: list[type[FlatnessError]] = [FlatnessError]
    while left:
        kind = left.pop()
        kinds[kind.__name__] = kind
        left += kind.__subclasses__()
    return kinds


def _marked(error: BaseException) -> BaseException:
    setattr(error, _AGREED, True)
    return error


def _is_agreed(error: BaseException | None) -> bool:
    """Return whether all ranks know of an error, or of one that it was made of."""
    return error is not None and (hasattr(error, _AGREED) or _is_agreed(error.__cause__))


def _bytes(message: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def refusal(what: str, size: int, instead: str) -> NotYetError:
    """Return the error for what is not there over so many ranks; see :meth:`Ranks.refuse`."""
    return NotYetError(
        f"{what} is not there over the {size} ranks of a process group yet; {instead}or take all data to one rank, "
        f"where {MEANT_ALONE}"
    )

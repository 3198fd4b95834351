"""Let the processes of a ``torch.distributed`` group agree in one call: on sums, rows of samples, facts and errors.

Every rank makes the same call on its own data. Where a read of the data ends, each adds what the others found to what
it found itself, so that from there on all hold the same numbers. Sums are taken in float64 and in the order of the
ranks, whatever the backend does: so they have the same bits on every rank and in every run. What is exchanged is JSON
and numbers in tensors, by ``all_gather``; nothing is unpickled.

A rank that fails takes part in one more exchange, with its error. The others, who wait for it where they will meet
next, raise that error too (:meth:`Ranks.agreed`).
"""

import contextlib
import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .. import interrupts
from ..errors import FlatnessError, InputError, NotYetError, RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Group = ProcessGroup | Literal[False] | None
else:
    Group = Any  # torch may have been built without it

Key = Any
"""A string, or a tuple of strings."""
Parts = Mapping[Key, Tensor]

_IS_AVAILABLE = dist.is_available()
_PACKET = 4096  # bytes of an exchange that goes in one message
_CHUNK = 2**21  # numbers of each rank that are summed at a time
_PATIENCE = 30.0  # seconds until a rank that waits for others to come says so
_POLLS = 0.0, 1e-5, 1e-4, 1e-3  # seconds between looks at a message on its way; the last one stays
_AGREED = "_pyflatness_agreed"  # an attribute of an error that all ranks know of
_ALIKE = (
    "all ranks of a process group measure one model together. Where the statistics of BatchNorm differ, as after "
    "training by DistributedDataParallel, send one rank's: torch.distributed.broadcast(buffer, 0) for each of "
    "model.buffers(); to measure in this process alone pass process_group=False"
)
_ALONE = "process_group=False measures in this process alone"


class Ranks:
    """Represent the processes that make a call together; without a group, this process alone.

    Args:
        group: of more than one process, which this one is in.
        device: of the tensors that the group's backend sends.

    Attributes:
        rank: of this process in the group.
        size: how many there are.
    """

    def __init__(self, group: Any = None, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self._group, self._device = group, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

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
            raise _refusal(what, self.size, instead)

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

    def _exchanged(self, told: Mapping[str, Any], own: BaseException | None = None) -> list[Any]:
        found = [json.loads(text) for text in self._messages(json.dumps(told).encode())]
        errors = {rank: each["error"] for rank, each in enumerate(found) if "error" in each}
        if errors:
            error = _together(errors, self.size, own)
            if error is own:
                raise error
            raise error from own
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

    def _messages(self, message: bytes) -> list[bytes]:
        """Return every rank's message."""
        packet = torch.zeros(_PACKET, dtype=torch.uint8, device="cpu")
        packet[:8] = torch.tensor([len(message)], dtype=torch.int64, device="cpu").view(torch.uint8)
        packet[8 : 8 + len(message)] = _bytes(message[: _PACKET - 8])
        found = self._gathered(packet)
        lengths = [int(each[:8].clone().view(torch.int64)) for each in found]
        rest = max(lengths) - (_PACKET - 8)
        if rest > 0:
            longer = torch.zeros(rest, dtype=torch.uint8, device="cpu")
            left = message[_PACKET - 8 :]
            longer[: len(left)] = _bytes(left)
            found = [torch.cat(pair) for pair in zip(found, self._gathered(longer), strict=True)]
        return [each[8 : 8 + n].numpy().tobytes() for each, n in zip(found, lengths, strict=True)]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
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
_NOT_JOINED = contextlib.nullcontext(ALONE)


@dataclass(frozen=True)
class Shard:
    """Represent this rank's part of a data set.

    Attributes:
        ranks: that have the parts.
        counts: whether this rank has samples of its own. One that has none runs on a batch that it was lent, and adds
            nothing.
        start: the place in all data of its first sample.
        step: between the places of two of its samples.
        notes: what a reader of a value should know of how the data are spread.
    """

    ranks: Ranks = ALONE
    counts: bool = True
    start: int = 0
    step: int = 1
    notes: tuple[str, ...] = ()

    def numbers(self, done: int, samples: int) -> Tensor:
        """Return the places (samples,) int64 in all data of the next samples, after so many."""
        if self.start == 0 and self.step == 1:
            return torch.arange(done, done + samples, device="cpu")
        return self.start + self.step * torch.arange(done, done + samples, device="cpu")

    def every(self, step: str, fact: Any) -> list[Any]:
        """Return what the ranks that have samples have to say at a step, in their order; see :meth:`Ranks.exchange`."""
        if self.ranks.alone:
            return [fact]
        found = self.ranks.exchange(step, [self.counts, fact])
        return [each for counts, each in found if counts]

    def united(self, step: str, facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the entries of all ranks' mappings, of each that of the first rank that has it."""
        united: dict[str, dict[str, Any]] = {name: {} for name in facts}
        for each in self.every(step, facts):
            for name, entries in each.items():
                united[name] = {**entries, **united[name]}
        return united

    def sum(self, step: str, parts: Parts) -> dict[Key, Tensor]:
        """Return sums over the ranks, in float64; a rank that lacks a part adds nothing to it.

        Args:
            step: of the call.
            parts: tensors by name, of the same shape on all ranks that have them.

        Raises:
            RankError: other shapes on other ranks.
        """
        if self.ranks.alone:
            return dict(parts)
        shapes = self._shapes(step, parts)
        sizes = [math.prod(shape) for shape in shapes.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
        for key, place in zip(shapes, flat.split(sizes), strict=True):
            if self.counts and key in parts:
                place.copy_(parts[key].detach().flatten())
        pieces = torch.cat([self._summed(chunk) for chunk in flat.split(_CHUNK)]).split(sizes)
        return {
            key: piece.view(shape).to(parts[key].device if key in parts else piece.device)
            for (key, shape), piece in zip(shapes.items(), pieces, strict=True)
        }

    def _summed(self, chunk: Tensor) -> Tensor:
        first, *others = self.ranks._gathered(chunk)
        for other in others:
            first = first + other
        return first

    def _shapes(self, step: str, parts: Parts) -> dict[Key, tuple[int, ...]]:
        """Return the shapes of all ranks' parts."""
        shapes: dict[Key, tuple[int, ...]] = {}
        for each in self.every(step, _told(parts)):
            for key, shape in _heard(each).items():
                if shapes.setdefault(key, shape) != shape:
                    raise _marked(
                        RankError(
                            f"ranks have values of different shapes, {shapes[key]} and {shape}, of {key} at {step}; "
                            "every rank has to have the same model"
                        )
                    )
        return shapes

    def each(self, step: str, parts: Parts) -> list[dict[Key, Tensor]]:
        """Return the parts of every rank that has samples, in float64 on the CPU, in the order of the ranks."""
        if self.ranks.alone:
            return [dict(parts)]
        told = self.ranks.exchange(step, [self.counts, _told(parts)])
        shapes = [_heard(each) for _, each in told]
        flat = torch.zeros(max(map(_numel, shapes)), dtype=torch.float64, device="cpu")
        own = [part.numel() for part in parts.values()]
        for part, place in zip(parts.values(), flat[: sum(own)].split(own), strict=True):
            place.copy_(part.detach().flatten())
        found = []
        for (counts, _), held, numbers in zip(told, shapes, self.ranks._gathered(flat), strict=True):
            if counts:
                pieces = numbers[: _numel(held)].split([math.prod(shape) for shape in held.values()])
                found.append({key: piece.view(held[key]) for key, piece in zip(held, pieces, strict=True)})
        return found

    def rows(self, step: str, rows: Tensor) -> Tensor:
        """Return the numbers (…, n) of the samples of all ranks, by their places in all data, on the CPU."""
        if self.ranks.alone:
            return rows
        found = self.each(step, {"rows": rows, "places": self.numbers(0, rows.shape[-1])})
        whole = torch.cat([each["rows"] for each in found], dim=-1)
        if self.step == 1:  # one shard after another, also where it is not known how many samples are in front
            return whole
        return whole[..., torch.cat([each["places"] for each in found]).argsort(stable=True)]


WHOLE = Shard()


def refuse(process_group: Group, what: str, instead: str = "") -> None:
    """Raise, without waiting for others, if a call would be made together; see :meth:`Ranks.refuse`."""
    group = _group(process_group)
    if group is not None:
        raise _refusal(what, dist.get_world_size(group), instead)


def _refusal(what: str, size: int, instead: str) -> NotYetError:
    return NotYetError(
        f"{what} is not there over the {size} ranks of a process group yet; {instead}or take all data to one rank, "
        f"where {_ALONE}"
    )


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
        raise InputError(f"process_group: this process is not in it; {_ALONE}")
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
        f"together, each with its part of the data; {_ALONE}. Rank {listed} did not come"
    )


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


def _told(parts: Parts) -> list[Any]:
    """Return names and shapes of tensors as JSON has them."""
    return [[[*key] if isinstance(key, tuple) else key, [*part.shape]] for key, part in parts.items()]


def _heard(told: Sequence[Any]) -> dict[Key, tuple[int, ...]]:
    """Return what :func:`_told` was made of."""
    return {tuple(key) if isinstance(key, list) else key: tuple(shape) for key, shape in told}


def _numel(shapes: Mapping[Key, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _bytes(message: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )

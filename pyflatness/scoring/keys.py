"""Identify what a value depends on by content, so that a value that is there already is not computed again.

Paths and times are no part of it: a file that was moved or touched is the same file, and one whose bytes changed is
another. The user's code is its source files (:mod:`.user_files`) and the names of what is used of them; objects are
what they hold. Where code has no such name, as in a notebook, values are computed anew by each run. Hashes are SHA-256.
"""

import hashlib
import io
import json
import pickle
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .. import losses
from ..losses import auto
from ..model.data import Batches, leaves, size
from ..model.layers import unwrap
from ..options import Options
from . import checkpoints, user_files
from .user_files import NotFoundAgainError, in_closure, is_own_module, name_of

Facts = dict[str, Any]

VALUES_VERSION = 1
"""Raised by a release in which a value changes by more than rounding; then all values are computed again."""

UNREADABLE = "unreadable: "  # begins the key of a file that cannot be read

_NOT_IN_VALUES = (
    "memory",
    "per_sample",
    "max_passes",
)  # options of how a value is computed, and of what is kept beside it
_CHUNK = 2**20  # bytes of a file that are read at a time


def of_file(path: Path) -> str:
    """Return the hash of a checkpoint: of a file's bytes, with those of its shards if it is an index of shards.

    What cannot be read has a key too, made of what is wrong, so that its error is kept like a value.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return f"{UNREADABLE}no regular file"
        found = hashlib.sha256()
        with path.open("rb") as file:
            while content := file.read(_CHUNK):
                found.update(content)
        shards = (
            [path.with_name(name) for name in checkpoints.shards(path)] if path.name.endswith(checkpoints.INDEX) else []
        )
        return of_json([found.hexdigest(), *map(of_file, shards)]) if shards else found.hexdigest()
    except (OSError, ValueError) as error:  # ValueError: no such name can be
        return f"{UNREADABLE}{getattr(error, 'strerror', error)}"


def of_state(module: nn.Module) -> str:
    """Return the hash of a module's weights and buffers: names, shapes, dtypes and values."""
    return of_json([(name, described(value)) for name, value in module.state_dict().items()])


def of_json(facts: Any) -> str:
    """Return the hash of what JSON can hold; the order of a mapping's keys does not matter."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def described(
    held: Any, version: str | None = None, known: Iterable[Tensor] = (), modules: set[str] | None = None
) -> str:
    """Return the hash of what an object holds: as pickle writes it, but for tensors, networks, functions and classes.

    Args:
        held: the object.
        version: stands for the user's code: then whatever has a name is taken for what had it before.
        known: tensors that are told from others by their places here, whatever is in them.
        modules: those of the functions and classes in the object are added to it.

    Raises:
        NotFoundAgainError: there is something in it that another run cannot be told to be the same.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, version, [*known], set() if modules is None else modules)
    try:
        pickler.dump(held)
    except NotFoundAgainError:
        raise
    except Exception as error:  # of the user's objects: they nest too deep, say, or pickle refuses them
        raise NotFoundAgainError(f"{pickler.last} ({type(error).__name__}: {error})") from error
    return hashlib.sha256(file.getbuffer()).hexdigest()


class _Pickler(pickle.Pickler):
    """Write objects as :func:`described` says; ``last`` is the name of what was written last."""

    def __init__(self, file: io.BytesIO, version: str | None, known: list[Tensor], modules: set[str]) -> None:
        super().__init__(file, protocol=4)
        self._how, self._places = (version, known, modules), {id(tensor): place for place, tensor in enumerate(known)}
        self.last = ""

    def persistent_id(self, held: Any) -> Any:
        """Return what stands for an object, or None: then it is written as pickle does it."""
        version, _, modules = self._how
        self.last = getattr(held, "__qualname__", type(held).__qualname__)
        if id(held) in self._places:
            return self._places[id(held)]
        if isinstance(held, Tensor):
            return [*kind(held), hashlib.sha256(content(held).numpy().data).hexdigest()]
        if callable(held) and hasattr(held, "__qualname__") and not hasattr(held, "__self__"):  # a function or class
            name = name_of(held) if version is None else [held.__qualname__]
            modules.add(held.__module__)
            return [*name, *in_closure(held)]
        if type(held) is str:  # whether two equal ones are one is the compiler's choice, as of tuples
            return held.encode(errors="surrogatepass")
        if type(held) is tuple:
            return ["tuple", *held]
        if type(held) in (set, frozenset):
            return ["set", *sorted(described(each, *self._how) for each in held)]
        return None

    def reducer_override(self, held: Any) -> Any:
        """Return what networks, weak references and objects of the user's classes are made of."""
        if isinstance(held, weakref.ref):  # of torch's recurrences to their weights
            return weakref.ref, (held(),)
        if not isinstance(held, nn.Module):
            own = is_own_module(type(held).__module__)  # may leave attributes out of what pickle writes
            return (type(held), (), (getattr(held, "__dict__", {}), held.__reduce_ex__(4))) if own else NotImplemented
        # The keys of hooks are numbers that no other process has.
        hooks = {name: [*inside.values()] for name, inside in vars(held).items() if "_hooks" in name and inside}
        return type(held), (), {name: inside for name, inside in vars(held).items() if "_hooks" not in name} | hooks


def kind(value: Any) -> Any:
    """Return the dtype and shape of a tensor, and of anything else what it is."""
    return [str(value.dtype), [*value.shape]] if isinstance(value, Tensor) else described(value)


def content(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Described:
    """Hold what a network or a loss is besides its weights, for keys.

    Attributes:
        facts: as JSON.
        modules: of its functions and classes.
        unknown: what in it no other run would find again, in words; empty if there is nothing.
    """

    facts: Facts
    modules: frozenset[str] = frozenset()
    unknown: str = ""

    @classmethod
    def network(cls, network: nn.Module, made: Any = None, version: str | None = None) -> "Described":
        """Return what a network is: by what makes it, a callable and its arguments, or else by its attributes."""
        network = unwrap(network)
        state = network.state_dict(keep_vars=True)
        # The file's weights, wherever else the network holds them.
        buffers = (held for name, held in network.named_buffers() if name in state)
        hooks = [held for name, held in vars(nn.modules.module).items() if "_hooks" in name and isinstance(held, dict)]
        facts: Facts = {"entries": [(name, kind(value)) for name, value in state.items()]}
        held = [made or network, [[*each.values()] for each in hooks]]
        return cls._of(facts, held, version, network, (*network.parameters(), *buffers))

    @classmethod
    def loss(cls, loss: Any, version: str | None = None) -> "Described":
        """Return what a loss is; a name, its function and its module with the same options are the same."""
        if auto.is_auto(loss):  # what it is follows from the model and the data
            return cls({"name": auto.AUTO})
        resolved = losses.resolve(loss)
        if resolved.known:
            options = {name: described(held) for name, held in vars(resolved).items() if not name.startswith("_")}
            return cls({"name": type(resolved).__name__, **options})
        name = getattr(loss, "__qualname__", type(loss).__qualname__)
        return cls._of({"name": name, "reduction": resolved.reduction}, loss, version)

    @classmethod
    def _of(
        cls,
        facts: Facts,
        held: Any,
        version: str | None,
        network: nn.Module | None = None,
        known: Iterable[Tensor] = (),
    ) -> "Described":
        parts = [] if network is None else [*network.modules()]
        modules, unknown = {base.__module__ for part in parts for base in type(part).__mro__}, ""
        try:
            facts = {**facts, "held": described(held, version, known, modules)}
            if version is None:
                user_files.check_libraries(parts)
        except NotFoundAgainError as error:
            unknown = str(error)
        return cls(facts, frozenset(modules), unknown)


@dataclass(frozen=True)
class Code:
    """Hold what the user's code is for values."""

    model: Facts | None  # of the network that checkpoints are of
    loss: Facts
    files: Mapping[str, str]  # hashes of source files, by their paths; or the version that stands for them
    unknown: tuple[str, ...]  # what no other run would find again, in words; values that depend on it are not reused

    @classmethod
    def of(cls, network: nn.Module | None, made: Any, loss: Any, version: str | None) -> "Code":
        """Return the code of a run: of the network, with the callable and arguments that make it, and of the loss."""
        model = None if network is None else Described.network(network, made, version)
        found = Described.loss(loss, version)
        both = [found] if model is None else [model, found]
        places = {module for each in both for module in each.modules}
        files = {"": version} if version is not None else user_files.hashes(places)
        unknown = tuple(each.unknown for each in both if each.unknown)
        return cls(None if model is None else model.facts, found.facts, files, unknown)


def of_options(options: Options) -> Facts:
    """Return the options that values depend on."""
    return {name: value for name, value in asdict(options).items() if name not in _NOT_IN_VALUES}


def of_data(data: Any, *, ordered: bool, ends: bool = False) -> Facts:
    """Return a fingerprint of data, which does not depend on how they are cut into batches.

    ``ordered``: values depend on the order of the samples, as random draws do. ``ends``: take the first and last batch
    only, where the data can give them without the rest.
    """
    if ends:
        data = _ends(data)
    samples, total, in_order = 0, 0, hashlib.sha256()
    beside: set[str] = set()  # what is in a batch besides its samples
    for batch in Batches(data, torch.device("cpu"), shown=False):
        count = size(batch)
        parts = [*leaves(batch)]
        own = [tensor for tensor in parts if isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == count]
        beside.update(_known(other) for other in parts if not any(other is tensor for tensor in own))
        for digest in _digests(own, count):
            in_order.update(digest)
            total += int.from_bytes(digest, "little")
        samples += count
    facts: Facts = {"samples": samples, "content": f"{total % 2**256:064x}", "beside": sorted(beside)}
    return facts | ({"order": in_order.hexdigest()} if ordered else {}) | ({"ends": True} if ends else {})


def _known(beside: Any) -> str:
    try:
        return of_json(described(beside))
    except NotFoundAgainError:
        return type(beside).__qualname__


def _ends(data: Any) -> Any:
    if isinstance(data, tuple) and data and isinstance(data[0], Tensor):
        return tuple(torch.cat([tensor[:256], tensor[-256:]]) for tensor in data)
    if isinstance(data, (list, tuple)) and data:
        return [data[0], data[-1]]
    if isinstance(data, DataLoader) and data.batch_sampler is not None and hasattr(data.dataset, "__getitem__"):
        places = [*data.batch_sampler]
        return [data.collate_fn([data.dataset[place] for place in places[end]]) for end in (0, -1)]
    return data


def _digests(tensors: list[Tensor], count: int) -> Iterator[bytes]:
    rows = [(f"{kind(tensor[:1])}".encode(), content(tensor).reshape(count, -1).numpy()) for tensor in tensors]
    for place in range(count):
        digest = hashlib.sha256()
        for what, row in rows:
            digest.update(what)
            digest.update(row[place])
        yield digest.digest()

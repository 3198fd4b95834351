"""Identify what a value depends on by content, so that a value that is there already is not computed again.

Paths and times are no part of it: a file that was moved or touched is the same file, and one whose bytes changed is
another. The user's code is its source files (:mod:`.user_files`), with what the names of their modules hold now;
objects are what they hold. Where code has no such name, as in a notebook, values are computed anew by each run. Hashes
are SHA-256.
"""

import copyreg
import hashlib
import json
import stat
import sys
import uuid
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FunctionType, ModuleType
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
from .user_files import NotFoundAgainError, is_own_module

Facts = dict[str, Any]
Files = Mapping[str, tuple[str, str]]  # by path: the hash of a file, and that of what the names of its module hold

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
        shards = checkpoints.shards(path)
        return of_json([found.hexdigest(), *map(of_file, shards)]) if shards else found.hexdigest()
    except (OSError, ValueError) as error:  # ValueError: no such name can be
        return f"{UNREADABLE}{getattr(error, 'strerror', error)}"


def of_state(module: nn.Module) -> str:
    """Return the hash of a module's weights and buffers: names, shapes, dtypes and values, and which are frozen."""
    # Measures over all parameters, such as sharpness, leave out frozen ones.
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return of_json([*((name, described(value)) for name, value in module.state_dict().items()), *frozen])


def of_json(facts: Any) -> str:
    """Return the hash of what JSON can hold; the order of a mapping's keys does not matter."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def described(held: Any) -> str:
    """Return the hash of what an object holds, of functions and classes their names in the user's files.

    Raises:
        NotFoundAgainError: there is something in it that another run cannot be told to be the same.
    """
    content = _Content(given=True)
    unknown = content.unknown(content.add, held)
    if unknown:
        raise NotFoundAgainError(unknown)
    return content.hash.hexdigest()


def files_of(modules: Iterable[str]) -> tuple[Files, tuple[str, ...], tuple[str, ...]]:
    """Return the user's files that modules are in, with all that these import, and what no other run would find again.

    Of each there is the hash of the file, and of what the names of its module hold if that is loaded. That of what runs
    (``__main__``) does not count. In between are the names of the modules that are loaded.
    """
    files, met, waiting = dict[str, Path](), set[str](), {*modules}
    states, unknown = dict[str, str](), set[str]()
    while waiting:
        while waiting := waiting - met:
            met.add(name := min(waiting))
            path = user_files.file_of(name)
            if path is not None:
                files[name] = path
                waiting.update(user_files.imported_by(name, path))
        used = {each for path in files.values() for each in user_files.used_by(path)}
        for name in files.keys() & sys.modules.keys():
            content = _Content()
            why = content.unknown(content.add_names, vars(sys.modules[name]), name, used)
            unknown.update([f"{why} ({files[name]})"] if why else [])
            states[name] = content.hash.hexdigest()
            waiting |= content.modules - met
    held: dict[Path, list[str]] = {path: [] for path in files.values()}  # a file may be loaded by several names
    for name, state in states.items():
        held[files[name]].append(state)
    found = {str(path): (user_files.hash_of(path), "".join(sorted(of))) for path, of in held.items()}
    return found, tuple(states), tuple(sorted(unknown))


_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device)
_NO_FILE = ("<string>", "<attrs")  # code that Python's and attrs' dataclasses make of a class
_OF_A_PROCESS = {"_original_object_hash"}  # of transformers' GenerationConfig, by Python's hash, which is seeded


class _Content:
    """Hash what objects hold: what was ``given`` with a call, or what the names of a module hold.

    A function or class that was given has to be what a file has by its name. One of a module is described by its place
    in the file and by what it holds, and what Python cannot take apart by its class. ``known`` tensors are told from
    others by their places there, whatever is in them. With a ``version``, which stands for the user's code, whatever
    has a name is taken for what had it before. ``modules`` are those of the user's functions and classes.
    """

    def __init__(self, known: Iterable[Tensor] = (), version: str | None = None, *, given: bool = False) -> None:
        self.hash, self.modules, self.last = hashlib.sha256(), set[str](), ""
        self._given, self._version = given and version is None, version
        self._met: dict[int, tuple[int, Any]] = {id(tensor): (place, tensor) for place, tensor in enumerate(known)}

    def unknown(self, add: Callable[..., None], *what: Any) -> str:
        """Add something, and return what of it no other run would find again, in words; "" if there is nothing."""
        try:
            add(*what)
        except NotFoundAgainError as error:
            return str(error)
        except Exception as error:  # of the user's objects: they nest too deep, say
            return f"{self.last} ({type(error).__name__}: {error})"
        return ""

    def note(self, *facts: Any) -> None:
        self.hash.update(f"{facts!r}\n".encode())

    def add(self, *held: Any) -> None:
        """Add objects, the same one once."""
        for each in held:
            self._add(each)

    def add_names(self, names: Mapping[str, Any], module: str = "", used: Container[str] | None = None) -> None:
        """Add what the names of a module or a class hold, but for what Python itself sets there.

        Of a module data count that are ``used`` by a function; None: all.
        """
        for name, held in sorted(names.items()):
            if used is not None and name not in used and not isinstance(held, (type, FunctionType)):
                continue
            made = getattr(getattr(held, "__code__", None), "co_filename", _NO_FILE[0]).startswith(_NO_FILE)
            inside = isinstance(held, ModuleType) and held.__name__ == f"{module}.{name}"  # once that is imported
            if not (inside or (made and name.startswith("__") and name.endswith("__"))):
                self.note(name)
                self.add(held)

    def _add(self, held: Any) -> None:
        made_of = type(held)
        if made_of in _PLAIN:
            self.note(made_of.__name__, held)
        elif made_of is tuple:  # whether two equal ones are one is the compiler's choice
            self.note("tuple", len(held))
            self.add(*held)
        elif made_of in (set, frozenset):
            self.note("set", *sorted(self._alone(each) for each in held))
        elif id(held) in self._met:
            self.note("again", self._met[id(held)][0])
        else:
            self._met[id(held)] = len(self._met), held
            self.last = getattr(held, "__qualname__", made_of.__qualname__)
            self._add_new(held)

    def _alone(self, held: Any) -> str:
        content = _Content(version=self._version, given=self._given)
        content.add(held)
        self.modules |= content.modules
        return content.hash.hexdigest()

    def _add_new(self, held: Any) -> None:
        if isinstance(held, Tensor):
            self.note(*kind(held), hashlib.sha256(content(held).numpy().data).hexdigest())
        elif isinstance(held, ModuleType):
            file = user_files.file_of(held.__name__)  # of the user; it may be loaded by another name elsewhere
            self.modules |= {held.__name__} if file else set()
            self.note("module", file.name if file else held.__name__)
        elif isinstance(held, nn.Module):
            held = unwrap(held)
            self.add(type(held))
            for name, inside in vars(held).items():  # the keys of hooks are numbers that no other process has
                self.add(*((name, inside) if "_hooks" not in name else (name, *inside.values()) if inside else ()))
        elif type(held) is list:
            self.note("list", len(held))
            self.add(*held)
        elif type(held) is dict:
            held = {name: inside for name, inside in held.items() if name not in _OF_A_PROCESS}
            self.note("dict", len(held))
            self.add(*held, *held.values())
        elif isinstance(held, (staticmethod, classmethod, property)):
            self.add(*(getattr(held, part, None) for part in ("__func__", "fget", "fset", "fdel")))
        elif isinstance(held, weakref.ref):  # of torch's recurrences to their weights
            self.add(held())
        elif isinstance(held, type) or (
            callable(held) and hasattr(held, "__qualname__") and not hasattr(held, "__self__")
        ):
            self._add_named(held)
        else:
            self._add_reduced(held)

    def _add_named(self, held: Any) -> None:
        """Add a function, a class, or what is like a function."""
        name, function = held.__qualname__, isinstance(held, FunctionType)
        of = held if isinstance(held, type) else getattr(held, "__objclass__", held)  # as methods in C have
        module = str(getattr(of, "__module__", ""))
        if function and not self._given:  # decorators take over the name of the module
            module = held.__globals__.get("__name__", "")
        if self._version is not None or not is_own_module(module):
            self.note(name, *(() if self._version is not None else (module, user_files.hash_of_module(module))))
            self.add(*(base for base in getattr(held, "__bases__", ()) if is_own_module(base.__module__)))
            self.add(*user_files.in_closure(held))
            return
        self.modules.add(module)
        if function and not self._given:
            self.note(user_files.hash_of_module(module), *user_files.place(held))
            self.add(held.__defaults__, held.__kwdefaults__, *user_files.in_closure(held))
            return
        user_files.check_name(held, exactly=self._given)
        self.note(user_files.hash_of_module(module), name)
        if not self._given and isinstance(held, type):
            self.add(*held.__bases__)
            self.add_names(vars(held))
        elif not self._given:
            self.add(getattr(held, "__wrapped__", None))  # of functools.cache

    def _add_reduced(self, held: Any) -> None:
        """Add what pickle would write of an object; one of a class of the user's may leave attributes out of that."""
        self.add(type(held), vars(held) if is_own_module(type(held).__module__) and hasattr(held, "__dict__") else None)
        try:
            reduced = copyreg.dispatch_table.get(type(held), lambda held: held.__reduce_ex__(4))(held)
            parts = [reduced] if isinstance(reduced, str) else [*reduced[:3], *map(list, filter(None, reduced[3:5]))]
        except Exception:
            if self._given:
                raise
            return
        self.add(*parts, getattr(held, "__wrapped__", None) if isinstance(reduced, str) else None)


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
        modules: of the user's functions and classes in it.
        unknown: what in it no other run would find again, in words; empty if there is nothing.
    """

    facts: Facts
    modules: frozenset[str] = frozenset()
    unknown: str = ""

    @classmethod
    def network(cls, network: nn.Module, made: Any = None, version: str | None = None) -> "Described":
        """Return what a network is, by its attributes and by what makes it, a callable and its arguments."""
        network = unwrap(network)
        state = network.state_dict(keep_vars=True)
        # The file's weights, wherever else the network holds them.
        buffers = (held for name, held in network.named_buffers() if name in state)
        hooks = [held for name, held in vars(nn.modules.module).items() if "_hooks" in name and isinstance(held, dict)]
        facts: Facts = {"entries": [(name, kind(value)) for name, value in state.items()]}
        held = [made, network, [[*each.values()] for each in hooks]]
        return cls._of(facts, held, version, network.modules(), (*network.parameters(), *buffers))

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
        cls, facts: Facts, held: Any, version: str | None, parts: Iterable[nn.Module] = (), known: Iterable[Tensor] = ()
    ) -> "Described":
        content = _Content(known, version, given=True)
        unknown = content.unknown(content.add, held) or (user_files.set_in_libraries(parts) if version is None else "")
        if unknown:
            return cls(facts, unknown=unknown)
        return cls({**facts, "held": content.hash.hexdigest()}, frozenset(content.modules))


@dataclass(frozen=True)
class Code:
    """Hold what the user's code is for values."""

    model: Facts | None  # of the network that checkpoints are of
    loss: Facts
    files: Files  # of the user, or the version that stands for them
    unknown: tuple[str, ...]  # what no other run would find again, in words; values that depend on it are not reused
    loaded: tuple[str, ...] = field(default=(), compare=False)  # modules of which it is known what they hold

    @classmethod
    def of(cls, network: nn.Module | None, made: Any, loss: Any, version: str | None) -> "Code":
        """Return the code of a run: of the network, with the callable and arguments that make it, and of the loss."""
        model = None if network is None else Described.network(network, made, version)
        found = Described.loss(loss, version)
        both = [found] if model is None else [model, found]
        unknown = tuple(each.unknown for each in both if each.unknown)
        facts = None if model is None else model.facts
        if version is not None:
            return cls(facts, found.facts, {"": (version, "")}, unknown)
        files, loaded, others = files_of(module for each in both for module in each.modules)
        return cls(facts, found.facts, files, unknown + others, loaded)

    def but_for_attributes(self) -> "Code":
        """Return this code, without what the network holds besides its weights."""
        return replace(self, model=self.model and {**self.model, "held": ""})

    def as_loaded_in(self, other: "Code") -> "Code":
        """Return this code, without what modules hold that are not loaded in another."""
        held = {
            path: (file, state if other.files.get(path, ("", ""))[1] else "")
            for path, (file, state) in self.files.items()
        }
        return replace(self, files=held)


def once(unknown: Collection[str] = ("all",)) -> Facts:
    """Return what makes a key that no other run has, if there is anything unknown."""
    return {"once": uuid.uuid4().hex} if unknown else {}


def measured_anew(unknown: str) -> str:
    """Return what is said to the user of what no other run would find again."""
    return (
        f"{unknown}: values that depend on it are computed anew by each run; put it into a file that is imported, or "
        "pass a version (version=, --version) that stands for your code"
    )


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

"""Describe code and objects as JSON for a store's keys: whatever changes a value changes what is said here.

Code counts as it is in memory: functions by their code objects, defaults and closures and, recursively, by the globals
that they name; classes by what they hold, set in their bodies or later; objects by their class and what they hold, and
modules by their hooks too. Of installed packages the names count, with whatever of the user's is put into them. Beside
this the source files of the user's own modules count as a whole (:func:`files`), which is generous: the price is a
value that is computed once more. What cannot be described is named, so that its value is not taken for another's.
"""

import ast
import copy
import functools
import hashlib
import json
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError

Facts = dict[str, Any]

_PLAIN = (type(None), bool, int, float, str)
_OF_MODULES = {*vars(ModuleType("")), "__file__", "__path__", "__cached__", "__builtins__"}  # which Python sets
_PACKAGE = Path(__file__).parents[1]


def of_json(facts: Any) -> str:
    """Return the hash of what JSON can hold; the order of a mapping's keys does not matter."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def kind(value: Any) -> Any:
    """Return the dtype and shape of a tensor, and of anything else what it is."""
    return [str(value.dtype), [*value.shape]] if isinstance(value, Tensor) else plain(value)


def content(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1).view(torch.uint8)


def plain(value: Any) -> Any:
    """Return a value as JSON, such as an argument."""
    return Description().of(value)


class Description:
    """Describe things that may hold each other: the second time a thing is met its number is enough.

    ``version`` stands for the user's code, which then is not looked at. ``unknown`` is what cannot be described, in
    words; ``folders`` are of the source files of functions that were met.
    """

    def __init__(self, version: str | None = None) -> None:
        self._met: dict[Any, tuple[int, Any]] = {}
        self._way: list[str] = []
        self._version = version
        self.unknown: list[str] = []
        self.folders: set[Path] = set()

    def meet(self, value: Any) -> None:
        """Take a thing as known, as what is described elsewhere is, such as the network's weights."""
        self._met[id(value)] = len(self._met), value  # it stays in memory, so that its id is no other's

    def of(self, value: Any, name: str = "") -> Any:
        """Return what is known of a value, which has this name where it was found."""
        if type(value) in _PLAIN:
            return value
        if type(value) in (bytes, complex):
            return repr(value)
        if id(value) in self._met:
            return {"again": self._met[id(value)][0]}
        self._way.append(name or getattr(value, "__qualname__", ""))
        try:
            if type(value) is tuple:  # whether two equal ones are one is the compiler's choice
                return ["tuple", *map(self.of, value)]
            self.meet(value)
            return self._of(value)
        except Exception as error:  # of the user's objects: they nest too deep, say, or pickle refuses them
            way = " of ".join(filter(None, reversed(self._way)))
            self.unknown.append(f"{way or 'an object'} ({type(value).__name__}: {error})")
            return {"unknown": type(value).__qualname__}
        finally:
            self._way.pop()

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return [*kind(value), hashlib.sha256(content(value).numpy().data).hexdigest()]
        if hasattr(value, "dtype") and hasattr(value, "tobytes"):  # of numpy, where objects' bytes are addresses
            held = self.of(value.tolist()) if value.dtype.hasobject else hashlib.sha256(value.tobytes()).hexdigest()
            return [str(value.dtype), [*value.shape], held]
        if isinstance(value, ModuleType):
            return self._of_module(value, frozenset())
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, MethodType):
            return [self.of(value.__self__), self.of(value.__func__)]
        if isinstance(value, property):
            return ["property", *map(self.of, (value.fget, value.fset, value.fdel))]
        if isinstance(value, (staticmethod, classmethod)):
            return [type(value).__name__, self.of(value.__func__)]
        if isinstance(value, weakref.ref):
            return ["reference", self.of(value())]
        if type(value) in (list, dict, MappingProxyType):
            items = [*map(self.of, value)] if isinstance(value, list) else [[*map(self.of, kv)] for kv in value.items()]
            return [type(value).__name__, *items]
        if type(value) in (set, frozenset):
            return ["set", *sorted(json.dumps(self._apart(held), sort_keys=True) for held in value)]
        return self._of_object(value)

    def _apart(self, held: Any) -> Any:
        """Return what is known of one of several things that have no order."""
        if type(held) in _PLAIN:
            return held
        other = copy.copy(self)
        other._met = {**self._met}
        return other.of(held)

    def _of_object(self, value: Any) -> Any:
        """Return what an object holds: the attributes of the user's objects and of modules, else what pickle takes."""
        facts = [self.of(type(value))]
        if isinstance(value, nn.Module):
            return [*facts, self._held(value)]
        if _is_own_module(type(value).__module__):
            facts.append(self._held(value))
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):  # the name of a global
            return [*facts, reduced, self.of(getattr(value, "__wrapped__", None))]
        return [*facts, *(self.of([*part] if hasattr(part, "__next__") else part) for part in reduced)]

    def _held(self, value: Any) -> Facts:
        slots = [name for base in type(value).__mro__ for name in _names(getattr(base, "__slots__", ()))]
        found = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
        if isinstance(value, nn.Module):  # the keys of hooks are numbers that no other process has
            hooks = {name: [*held.values()] for name, held in found.items() if "hooks" in name and held}
            found = {name: held for name, held in found.items() if "hooks" not in name} | hooks
        return {name: self.of(held, name) for name, held in found.items()}

    def _of_function(self, function: FunctionType) -> Any:
        code = function.__code__
        held = [self.of([*map(_in_cell, function.__closure__ or ())])]
        if _is_installed(code.co_filename):
            return [*_installed(function.__module__, function.__qualname__), *held]
        held += map(self.of, (function.__defaults__, function.__kwdefaults__, vars(function)))
        if self._version is not None:
            return [function.__qualname__, *held]
        self.folders |= folder(function)
        names = frozenset(_named(code)) - _OF_MODULES
        variables = {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
        used = {name: self._variable(held, names, name) for name, held in variables.items()}
        return [function.__qualname__, _of_code(code), used, *held]

    def _variable(self, value: Any, names: frozenset[str], name: str) -> Any:
        return self._of_module(value, names) if isinstance(value, ModuleType) else self.of(value, name)

    def _of_module(self, module: ModuleType, names: frozenset[str]) -> Any:
        """Return what is known of a module of which a function has these names, among others."""
        own = _is_own_module(module.__name__)
        if (id(module), names) in self._met or self._version is not None:
            return module.__name__
        self._met[id(module), names] = len(self._met), module
        held = {name: vars(module)[name] for name in sorted(names & vars(module).keys())}
        used = {name: each for name, each in held.items() if own or isinstance(each, ModuleType) or _is_put_in(each)}
        return [module.__name__, {name: self._variable(each, names, name) for name, each in used.items()}]

    def _of_class(self, cls: type) -> Any:
        own = _is_own_module(cls.__module__)
        facts = [cls.__qualname__] if own else _installed(cls.__module__, cls.__qualname__)
        facts += [self.of([*cls.__bases__])]
        if self._version is not None:
            return facts
        found = {
            name: self.of(held, name)
            for name, held in vars(cls).items()
            if (own or _is_put_in(held)) and not _is_of_python(name, held)
        }
        return [*facts, found]


def _is_of_python(name: str, held: Any) -> bool:
    """Return whether Python puts an attribute into every class: names, annotations, slots."""
    special = name.startswith("__") and not isinstance(held, (FunctionType, classmethod, staticmethod))
    return special or name == "_abc_impl" or isinstance(held, (MemberDescriptorType, GetSetDescriptorType))


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _in_cell(cell: CellType) -> Any:
    """Return what a cell of a closure holds; it is empty while the function around it runs."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _of_code(code: CodeType) -> Any:
    """Return what code does, wherever it stands."""
    table = getattr(code, "co_exceptiontable", b"")
    return [code.co_code.hex(), table.hex(), code.co_names, code.co_varnames, [*map(_constant, code.co_consts)]]


def _constant(held: Any) -> Any:
    if isinstance(held, CodeType):
        return _of_code(held)
    if isinstance(held, tuple):
        return [*map(_constant, held)]
    return sorted(map(repr, held)) if isinstance(held, frozenset) else repr(held)


def _inside(code: CodeType) -> Iterator[CodeType]:
    """Yield code and what is defined in it."""
    yield code
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _inside(held)


def _named(code: CodeType) -> Iterator[str]:
    """Yield the names that code has for globals and attributes, and the texts that may name them."""
    for each in _inside(code):
        yield from each.co_names
        yield from (held for held in each.co_consts if isinstance(held, str))


@functools.cache
def _is_installed(path: str) -> bool:
    """Return whether a file is of Python, of an installed package, or of this one."""
    places = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(_PACKAGE)}
    if path.startswith("<frozen ") or {"site-packages", "dist-packages"} & {*Path(path).parts}:
        return True
    return any(Path(path).is_relative_to(place) for place in places)


def _is_own_module(name: Any) -> bool:
    """Return whether a module is the user's own: a file that is not installed, a notebook, or what has no file."""
    if name in ("__main__", "__mp_main__"):
        return True
    top = str(name).partition(".")[0]
    for each in (name, top):
        path = getattr(sys.modules.get(each), "__file__", None)
        if isinstance(path, str) and Path(path).is_absolute():
            return not _is_installed(path)
    return top not in sys.stdlib_module_names


def _is_put_in(held: Any) -> bool:
    """Return whether a function is the user's own, wherever it was put."""
    return isinstance(held, FunctionType) and not _is_installed(held.__code__.co_filename)


def _installed(module: str, name: str) -> list[str]:
    """Return the name of something installed and, but of Python's and torch's, the hash of its file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    told = not isinstance(path, str) or "-packages" not in path or module.partition(".")[0] == "torch"
    return [f"{module}.{name}", "" if told else _hash(str(path))]


@functools.cache
def _hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


_noted: dict[str, tuple[Any, str]] = {}  # by a module's name: with what it was imported, and the hash of its code


def folder(made: Any) -> set[Path]:
    """Return the folder of the source file of a function or class, if it has one of the user's own."""
    path = _file(sys.modules.get(getattr(made, "__module__", None) or ""))
    return set() if path is None else {path.parent}


def files(folders: Iterable[Path]) -> dict[str, str]:
    """Return the hashes of the code in the user's own source files, by their paths.

    They are the files of all modules that are loaded and lie below one of some folders or the working directory, and
    those that these import inside of functions. A script that is run has its code described where it is used. A file
    that was edited after it was imported is an error. That is seen if the module was met here before the edit, or by
    any of its functions; what a module does besides defining functions and classes is not kept by Python.
    """
    places = [Path.cwd(), *(folder.resolve() for folder in folders)]
    found: dict[str, str] = {}
    waiting: list[Path] = []
    for name, module in [*sys.modules.items()]:
        path = _file(module)
        if path is None or not any(map(path.is_relative_to, places)):
            continue
        if name not in ("__main__", "__mp_main__"):
            found[str(path)] = _as_imported(name, module, path)
        waiting.append(path)
    while waiting:
        for path in _imported_by(waiting.pop()):
            if str(path) not in found and not _is_installed(str(path)):
                found[str(path)] = _compiled(path.read_bytes())[0]
                waiting.append(path)
    return found


def _file(module: Any) -> Path | None:
    """Return the source file of a module, if it has one of the user's own."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or _is_installed(path) or not Path(path).is_file():
        return None
    found = _resolved(Path(path))
    return None if _is_installed(str(found)) else found


def _as_imported(name: str, module: ModuleType, path: Path) -> str:
    """Return the hash of a module's code as it was imported."""
    found, inside = _compiled(path.read_bytes())
    spec, noted = _noted.get(name, (None, ""))
    if spec is not module.__spec__ or spec is None:  # a new one, or one that was reloaded
        classes = (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name)
        held = [each for space in (module, *classes) for each in vars(space).values()]
        held += [_in_cell(cell) for each in held for cell in getattr(each, "__closure__", None) or ()]  # decorated ones
        codes = [each.__code__ for each in held if isinstance(each, FunctionType)]
        own = [_of_code(code) for code in codes if code.co_filename == module.__file__]
        rewritten = type(getattr(module.__spec__, "loader", None)).__name__ != "SourceFileLoader"  # as pytest's are
        noted = found if rewritten or inside >= {*map(of_json, own)} else ""
    if noted != found:
        raise InputError(
            f"{path} was edited after it was imported, and what would be measured is what was imported; restart Python "
            "(the notebook's kernel) so that both are the same"
        )
    _noted[name] = module.__spec__, noted
    return found


@functools.lru_cache(maxsize=1024)
def _compiled(source: bytes) -> tuple[str, frozenset[str]]:
    """Return the hash of a file's code, whatever its comments, and those of all that is defined in it."""
    try:
        code = compile(source, "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # a compiled library
        return hashlib.sha256(source).hexdigest(), frozenset()
    return of_json(_of_code(code)), frozenset(of_json(_of_code(each)) for each in _inside(code))


def _imported_by(path: Path) -> Iterator[Path]:
    """Yield the files that a source file imports anywhere in it, and that are not loaded as installed ones are."""
    for level, name in _imports(path.read_bytes()):
        if not level and (name in sys.modules or not _is_own_module(name)):
            continue
        above, _, last = name.rpartition(".")
        loaded = None if level else sys.modules.get(above)
        if loaded is None:
            places, last = [path.parents[level - 1]] if level else [*map(Path, sys.path)], name.replace(".", "/")
        else:  # what a module without files of its own has by this name is no module
            places = [*map(Path, getattr(loaded, "__path__", ()))]
        for place in places:
            stem = _resolved(place) / last
            yield from filter(Path.is_file, (stem.with_suffix(".py"), stem / "__init__.py"))


@functools.lru_cache(maxsize=1024)
def _resolved(place: Path) -> Path:
    return place.resolve()


@functools.lru_cache(maxsize=1024)
def _imports(source: bytes) -> list[tuple[int, str]]:
    """Return the modules that a source file may import, with the dots in front of a relative one counted."""
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError):
        return []
    found = [(0, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [(node.level, f"{module}.{name}".strip(".")) for name in ("", *(a.name for a in node.names))]
    return [(level, name) for level, name in found if name]

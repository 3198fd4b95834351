"""Hash the user's own source files, and find functions and classes again by their names in them.

A file counts by what its code does: comments, blank lines and the folder that it is in do not matter. Code that no file
has under a name (a cell of a notebook, the script that runs, a lambda, a closure) cannot be found again.
"""

import ast
import contextlib
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import InputError

_PACKAGE = Path(__file__).parents[1]
_RUN = ("__main__", "__mp_main__")  # modules whose names mean other code in another run


class NotFoundAgainError(Exception):
    """Say what has no name by which another run would find the same code."""


def name_of(made: Any) -> list[str]:
    """Return the name of a function or class in its file, and of installed ones the hash of the file.

    Raises:
        NotFoundAgainError: it has no such name, or another object has it.
    """
    module = sys.modules.get(getattr(made, "__module__", None) or "")
    path, name = getattr(module, "__file__", None), made.__qualname__
    if not is_own_module(made.__module__):
        told = not isinstance(path, str) or "-packages" not in path or made.__module__.partition(".")[0] == "torch"
        return [f"{made.__module__}.{name}", "" if told else _hash_of_bytes(str(path))]
    if path is None or made.__module__ in _RUN:
        raise NotFoundAgainError(f"{name} is in no file that can be imported")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if getattr(found, "__wrapped__", found) is not made and found is not made:
        raise NotFoundAgainError(f"{name} is not what {path} has by that name")
    return [name]


def put_into_libraries(network: nn.Module | None) -> Iterator[str]:
    """Yield the names of functions that a program has put into classes of a network, or into torch."""
    modules = () if network is None else network.modules()
    classes = {base: None for module in modules for base in type(module).__mro__}
    holders: list[Any] = [*classes, torch, torch.Tensor, nn.functional]
    for holder in holders:
        installed = not is_own_module(getattr(holder, "__module__", "torch"))  # modules have no such attribute
        for name, held in vars(holder).items():
            theirs = isinstance(held, FunctionType) and not _is_installed(held.__code__.co_filename)
            if theirs and (installed or held.__module__ in _RUN):
                yield f"{name} of {holder.__name__}"


def folder(made: Any) -> set[Path]:
    """Return the folder of the source file of a function or class, if it has one of the user's own."""
    path = _file(sys.modules.get(getattr(made, "__module__", None) or ""))
    return set() if path is None else {path.parent}


@functools.cache
def _is_installed(path: str) -> bool:
    """Return whether a file is of Python, of an installed package, or of this one."""
    places = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(_PACKAGE)}
    if path.startswith("<frozen ") or {"site-packages", "dist-packages"} & {*Path(path).parts}:
        return True
    return any(Path(path).is_relative_to(place) for place in places)


def is_own_module(name: Any) -> bool:
    """Return whether a module is the user's own: a file that is not installed, a notebook, or what has no file."""
    if name in _RUN:
        return True
    top = str(name).partition(".")[0]
    for each in (name, top):
        path = getattr(sys.modules.get(each), "__file__", None)
        if isinstance(path, str) and Path(path).is_absolute():
            return not _is_installed(path)
    return top not in sys.stdlib_module_names


@functools.cache
def _hash_of_bytes(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


_as_imported: dict[str, tuple[Any, str]] = {}  # by a module's name: with what it was imported, and its file's hash


def hashes(folders: Iterable[Path]) -> dict[str, str]:
    """Return the hashes of the user's own source files, by their paths.

    They are the files of all modules that are loaded and lie below one of some folders or the working directory, and
    those that these import inside of functions; not the script that runs, whose code cannot be found again. A file that
    was edited after it was imported is an error. That is seen if the module was met here before the edit, or by any of
    its functions; what a module does besides defining functions and classes is not kept by Python.
    """
    places = [Path.cwd(), *(folder.resolve() for folder in folders)]
    found: dict[str, str] = {}
    waiting: list[Path] = []
    for name, module in [*sys.modules.items()]:
        path = _file(module)
        if path is not None and any(map(path.is_relative_to, places)):
            if name not in _RUN:
                found[str(path)] = _unedited(name, module, path)
            waiting.append(path)
    while waiting:
        for path in _imported_by(waiting.pop()):
            if str(path) not in found and not _is_installed(str(path)):
                found[str(path)] = _parsed(path.read_bytes())[0]
                waiting.append(path)
    return found


def _file(module: Any) -> Path | None:
    """Return the source file of a module, if it has one of the user's own."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or _is_installed(path) or not Path(path).is_file():
        return None
    found = _resolved(Path(path))
    return None if _is_installed(str(found)) else found


def _unedited(name: str, module: ModuleType, path: Path) -> str:
    """Return the hash of a module's file, which is what was imported."""
    found = _parsed(path.read_bytes())[0]
    spec, imported = _as_imported.get(name, (None, ""))
    if spec is not module.__spec__ or spec is None:  # a new module, or one that was reloaded
        classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
        functions = [each for space in (module, *classes) for each in vars(space).values()]
        functions += [held for each in functions for held in in_closure(each)]  # decorated ones
        own = {_code(f.__code__) for f in functions if isinstance(f, FunctionType) and _is_of(f, module)}
        rewritten = type(getattr(module.__spec__, "loader", None)).__name__ != "SourceFileLoader"  # as pytest's are
        imported = found if rewritten or own <= _codes(path.read_bytes()) else ""
    if imported != found:
        raise InputError(
            f"{path} was edited after it was imported, and what would be measured is what was imported; restart Python "
            "(the notebook's kernel) so that both are the same"
        )
    _as_imported[name] = module.__spec__, imported
    return found


def _is_of(function: FunctionType, module: ModuleType) -> bool:
    return function.__code__.co_filename == module.__file__


def in_closure(function: Any) -> Iterator[Any]:
    """Yield what the cells of a function's closure hold; one is empty while the function around it runs."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


@functools.lru_cache(maxsize=1024)
def _codes(source: bytes) -> frozenset[Any]:
    """Return what each function and class of a source file does."""
    waiting, found = [compile(source, "", "exec", dont_inherit=True)], []
    while waiting:
        found.append(code := waiting.pop())
        waiting += [held for held in code.co_consts if isinstance(held, CodeType)]
    return frozenset(map(_code, found))


def _code(code: CodeType) -> tuple[Any, ...]:
    """Return what code does, wherever it stands."""
    return code.co_code, code.co_names, code.co_varnames, *map(_constant, code.co_consts)


def _constant(held: Any) -> Any:
    if isinstance(held, CodeType):
        return _code(held)
    return tuple(sorted(map(repr, held))) if isinstance(held, frozenset) else repr(held)


def _imported_by(path: Path) -> Iterator[Path]:
    """Yield the files that a source file imports anywhere in it, and that are not loaded as installed ones are."""
    for level, name in _parsed(path.read_bytes())[1]:
        if not level and (name in sys.modules or not is_own_module(name)):
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
def _parsed(source: bytes) -> tuple[str, list[tuple[int, str]]]:
    """Return the hash of a file's code, and the modules that it may import, each with the dots in front of its name."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a compiled library
        return hashlib.sha256(source).hexdigest(), []
    nodes = [*ast.walk(tree)]
    found = [(0, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [(node.level, f"{module}.{name}".strip(".")) for name in ("", *(a.name for a in node.names))]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), [(level, name) for level, name in found if name]

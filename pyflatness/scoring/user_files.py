"""Find functions and classes of the user's again by their names in source files, and hash what these files say.

A file counts by what its code does: comments, blank lines and the folder that it is in do not matter. Code that no file
has under a name (a cell of a notebook, the script that runs, a lambda, a closure) cannot be found again.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from ..errors import InputError

_PACKAGE = Path(__file__).parents[1]
_RUN = ("__main__", "__mp_main__")  # modules whose names mean other code in another run


class NotFoundAgainError(Exception):
    """Say what has no name by which another run would find the same code."""


def name_of(made: Any) -> list[Any]:
    """Return the name of a function or class, with the hash of its file unless that is Python's or torch's.

    Raises:
        NotFoundAgainError: it has no such name, or another object has it.
    """
    name = made.__qualname__
    path: Any = getattr(sys.modules.get(made.__module__ or ""), "__file__", None)
    if not is_own_module(made.__module__):
        bases = [name_of(base) for base in getattr(made, "__mro__", ())[1:] if is_own_module(base.__module__)]
        of_library = "-packages" in str(path) and made.__module__.partition(".")[0] != "torch"
        return [f"{made.__module__}.{name}", _parsed(Path(path).read_bytes())[0] if of_library else "", *bases]
    if path is None or made.__module__ in _RUN:
        raise NotFoundAgainError(f"{name} is in no file that can be imported")
    found: Any = sys.modules[made.__module__]
    for part in name.split("."):
        found = getattr(found, part, None)
    if getattr(found, "__wrapped__", found) is not made and found is not made:
        raise NotFoundAgainError(f"{name} is not what {path} has by that name")
    return [name, _parsed(Path(path).read_bytes())[0]]


def check_libraries(modules: Iterable[nn.Module]) -> None:
    """Raise if a program has put functions into the classes of modules, or into torch."""
    classes = {base: None for module in modules for base in type(module).__mro__}
    holders: list[Any] = [*classes, torch, torch.Tensor, nn.functional]
    for holder in holders:
        installed = not is_own_module(getattr(holder, "__module__", "torch"))  # modules have no such attribute
        for name, held in vars(holder).items():
            theirs = isinstance(held, FunctionType) and not _is_installed(held.__code__.co_filename)
            if theirs and (installed or held.__module__ in _RUN):
                raise NotFoundAgainError(f"{name} of {holder.__name__}, which was set by a program")


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


_as_imported: dict[str, tuple[Any, str]] = {}  # by a module's name: with what it was imported, and its file's hash


def hashes(modules: Iterable[str]) -> dict[str, str]:
    """Return the hashes of the user's own source files of modules and of all that these import, by their paths.

    Imports inside of functions count; the script that runs does not, whose code cannot be found again. A file that was
    edited after it was imported is an error. That is seen if the module was met here before the edit, or by any of its
    functions; what a module does besides defining functions and classes is not kept by Python.
    """
    found: dict[str, str] = {}
    waiting, met = [*modules], {"", *_RUN}
    while waiting:
        name = waiting.pop()
        path = None if name in met else _file(name)
        met.add(name)
        if path is not None and str(path) not in found:
            held, imported = _parsed(path.read_bytes())
            found[str(path)] = _unedited(name, path, held) if name in sys.modules else held
            above = name.rpartition(".")[0]
            waiting.append(above)
            for other in imported:
                with contextlib.suppress(ImportError):  # more dots than there are packages
                    waiting.append(importlib.util.resolve_name(other, name if path.stem == "__init__" else above))
    return found


def _file(name: str) -> Path | None:
    """Return the source file of a module, loaded or not, if it has one of the user's own."""
    module, (above, _, last) = sys.modules.get(name), name.rpartition(".")
    if module is not None:
        files = [Path(getattr(module, "__file__", None) or "")]
    else:  # what a module without files of its own has by this name is no module
        inside = above in sys.modules
        places = getattr(sys.modules[above], "__path__", ()) if inside else sys.path
        stems = [Path(place, last if inside else name.replace(".", "/")) for place in places]
        files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py")]
    own = (file.resolve() for file in files if file.is_file() and not _is_installed(str(file)))
    return next((file for file in own if not _is_installed(str(file))), None)


def _unedited(name: str, path: Path, found: str) -> str:
    """Return the hash of a module's file, which is what was imported."""
    module: Any = sys.modules[name]
    spec, imported = _as_imported.get(name, (None, ""))
    if spec is not module.__spec__ or spec is None:  # a new module, or one that was reloaded
        classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
        functions = [each for space in (module, *classes) for each in vars(space).values()]
        functions += [held for each in functions for held in in_closure(each)]  # decorated ones
        codes = [each.__code__ for each in functions if isinstance(each, FunctionType)]
        own = {_bare(code) for code in codes if code.co_filename == module.__file__}
        rewritten = type(getattr(module.__spec__, "loader", None)).__name__ != "SourceFileLoader"  # as pytest's are
        imported = found if rewritten or own <= _codes(path.read_bytes()) else ""
    if imported != found:
        raise InputError(
            f"{path} was edited after it was imported, and what would be measured is what was imported; restart Python "
            "(the notebook's kernel) so that both are the same"
        )
    _as_imported[name] = module.__spec__, imported
    return found


def in_closure(function: Any) -> Iterator[Any]:
    """Yield what the cells of a function's closure hold; one is empty while the function around it runs."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _codes(source: bytes) -> set[CodeType]:
    """Return the code of each function and class of a source file."""
    waiting, found = [compile(source, "", "exec", dont_inherit=True)], set()
    while waiting:
        code = waiting.pop()
        found.add(_bare(code))
        waiting += [held for held in code.co_consts if isinstance(held, CodeType)]
    return found


def _bare(code: CodeType) -> CodeType:
    """Return code without where it stands."""
    constants = tuple(_bare(held) if isinstance(held, CodeType) else held for held in code.co_consts)
    return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=constants)


@functools.lru_cache(maxsize=1024)
def _parsed(source: bytes) -> tuple[str, list[str]]:
    """Return the hash of a file's code, and the modules that it may import, relative ones with dots in front."""
    try:
        nodes = [*ast.walk(tree := ast.parse(source))]
    except (SyntaxError, ValueError):  # a compiled library
        return hashlib.sha256(source).hexdigest(), []
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            found += [
                origin,
                *(f"{origin}.{alias.name}" if node.module else origin + alias.name for alias in node.names),
            ]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), found

"""Find the user's code: the files that it is in, what these import, and where in its file a function is.

Code that is in no file which can be imported (a cell of a notebook, the script that runs) cannot be found again.
"""

import contextlib
import dis
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

_PACKAGE = Path(__file__).parents[1]
_RUN = ("__main__", "__mp_main__")  # modules whose names mean other code in another run


class NotFoundAgainError(Exception):
    """Say what no other run would find again."""


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


def file_of(name: str) -> Path | None:
    """Return the file of a module of the user's, loaded or not; None of others, and of what runs."""
    module, (above, _, last) = sys.modules.get(name), name.rpartition(".")
    if name in ("", *_RUN):
        return None
    if module is not None:
        files = [Path(getattr(module, "__file__", None) or "")]
    else:  # what a module without files of its own has by this name is no module
        inside = above in sys.modules
        places = getattr(sys.modules[above], "__path__", ()) if inside else sys.path
        stems = [Path(place, last if inside else name.replace(".", "/")) for place in places]
        files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py")]
    own = (file for file in files if file.is_file() and not _is_installed(str(file)))
    return next((file for file in own if not _is_installed(str(file.resolve()))), None)


def hash_of(path: Path) -> str:
    """Return the hash of a source file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hash_of_module(name: str) -> str:
    """Return the hash of the file of a module, or "" of Python's, torch's and this package's, and of what has none."""
    path = getattr(sys.modules.get(name), "__file__", None)
    ours = name.partition(".")[0] in ("torch", "pyflatness", *sys.stdlib_module_names)
    return "" if path is None or ours else hash_of(Path(path))


def check_name(made: Any, *, exactly: bool) -> None:
    """Raise unless a function or class of the user's is in a file; and, ``exactly``, is what that has by its name."""
    name, module = made.__qualname__, sys.modules.get(made.__module__)
    path = getattr(module, "__file__", None)
    if made.__module__ in _RUN or path is None:
        raise NotFoundAgainError(f"{name} is in no file that can be imported")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if exactly and found is not made and getattr(found, "__wrapped__", None) is not made:
        raise NotFoundAgainError(f"{name} is not what {path} has by that name")


def place(function: FunctionType) -> list[Any]:
    """Return where in the file of its module a function is.

    Raises:
        NotFoundAgainError: the file does not have it: a program has set it, or the file was edited after its import.
    """
    code, module = function.__code__, sys.modules.get(function.__globals__.get("__name__", ""))
    path = getattr(module, "__file__", None)
    if module is None or module.__name__ in _RUN or path is None or vars(module) is not function.__globals__:
        raise NotFoundAgainError(f"{function.__qualname__} is in no file that can be imported")
    if type(getattr(module.__spec__, "loader", None)) is not SourceFileLoader:  # pytest, say, has rewritten it
        return [function.__qualname__, code.co_firstlineno]
    every = _codes(Path(path).read_bytes())
    if code.co_filename != path or code not in every:
        raise NotFoundAgainError(
            f"{function.__qualname__} is not what {path} has: that was edited after its import, or a program has set it"
        )
    return [every[code]]


@functools.lru_cache(maxsize=1024)
def _codes(source: bytes) -> dict[CodeType, int]:
    """Return the code of a source file, and of all functions and classes in it, numbered."""
    try:
        found = [compile(source, "", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):  # a compiled library
        return {}
    for code in found:
        found += [held for held in code.co_consts if isinstance(held, CodeType)]
    return {code: number for number, code in enumerate(found)}


def in_closure(function: Any) -> Iterator[Any]:
    """Yield what the cells of a function's closure hold; one is empty while the function around it runs."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def imported_by(name: str, path: Path) -> Iterator[str]:
    """Yield the modules that a module may import, at any time, and the packages that it is in."""
    above = name.rpartition(".")[0]
    yield above
    for code in _codes(path.read_bytes()):
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE")]
        for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                origin = "." * level.argval + step.argval
                inside = origin + "." * bool(step.argval)
                for other in (origin, *(inside + each for each in names.argval or ())):
                    with contextlib.suppress(ImportError):  # more dots than there are packages
                        yield importlib.util.resolve_name(other, name if path.stem == "__init__" else above)


def used_by(path: Path) -> Iterator[str]:
    """Yield the names, and the texts, that functions of a source file use."""
    for code in [*_codes(path.read_bytes())][1:]:
        yield from (*code.co_names, *(held for held in code.co_consts if isinstance(held, str)))


def set_in_libraries(modules: Iterable[nn.Module]) -> str:
    """Return which function a program has put into torch, or into a class of a module's library; "" if none was."""
    classes = {base: None for module in modules for base in type(module).__mro__ if not is_own_module(base.__module__)}
    holders: list[Any] = [*classes, torch, torch.Tensor, nn.functional]
    for holder in holders:
        for name, held in vars(holder).items():
            if isinstance(held, FunctionType) and not _is_installed(held.__code__.co_filename):
                return f"{name} of {holder.__name__}, which was set by a program"
    return ""


_watched = threading.local()  # where files are opened: .codes of a model and a loss, .paths
_LOADERS = ("importlib", "_frozen_importlib", "_frozen_importlib_external", "triton")  # read code, and what they keep


@contextlib.contextmanager
def opened(loss: Any) -> Iterator[set[str]]:
    """Collect the names of files that the user's code opens for reading while a model or a loss is called here."""
    _listen(_hear)
    own = (getattr(each, "__code__", None) for each in (loss, vars(type(loss)).get("__call__")))
    _watched.codes, _watched.paths = {nn.Module.__call__.__code__, *filter(None, own)}, set()
    try:
        yield _watched.paths
    finally:
        del _watched.codes


_listen = functools.cache(sys.addaudithook)  # Python cannot stop what it begins


def _hear(event: str, facts: tuple[Any, ...]) -> None:
    if event != "open" or not hasattr(_watched, "codes"):
        return
    path, mode, flags = facts
    writes = set(mode or "") & set("wax") or (mode is None and flags & (os.O_WRONLY | os.O_RDWR))
    if writes or not isinstance(path, str) or path.endswith(".py"):  # as warnings show a line of
        return
    frame: FrameType | None = sys._getframe(1)
    by_user = False
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] not in _LOADERS:
        by_user = by_user or not _is_installed(frame.f_code.co_filename)
        if frame.f_code in _watched.codes:
            if by_user:
                _watched.paths.add(path)
            return
        frame = frame.f_back

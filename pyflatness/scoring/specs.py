"""Find what makes the user's model and data: ``file.py:callable``, ``package.module:callable``, ``hf:folder``, …."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import InputError
from ..messages import near, reason
from . import pretrained

Function = Callable[..., Any]


def resolve(spec: str) -> Function:
    """Return the callable that a SPEC names; its file or module is imported.

    A file is imported as Python would run it: its own folder is where it finds its neighbours. Names of networks that
    libraries have are those of :func:`.pretrained.resolve`.
    """
    if pretrained.is_named(spec):
        return pretrained.resolve(spec)
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise InputError(
            f"{spec!r}: file.py:callable or package.module:callable is wanted, or for a model hf:FOLDER and the like"
        )
    try:
        if source.endswith(".py"):
            module = _import_file(Path(source))
        else:
            if str(Path.cwd()) not in sys.path and "" not in sys.path:  # as with `python -m`, also for the script
                sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(source)
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec!r}: importing {source} failed: {reason(error)}") from None
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
            listed = near(part, own) or "another file"
            raise InputError(f"{spec!r}: there is no {part!r} in {source}; did you mean {listed}?")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, nn.Module):  # a module can be called, but that runs it
        raise InputError(f"{spec!r} is a {type(found).__name__}; a callable that returns the model or data is wanted")
    function: Function = found
    return function


def check_arguments(function: Function, arguments: Mapping[str, Any]) -> None:
    """Raise unless a callable takes these arguments, by its signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in callables need not have one
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InputError(f"{error}; the callable takes {signature}") from None


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    # Under its bare name the worker processes of a DataLoader can import it too. A name that is taken stays taken.
    for name in (path.stem, str(path)):
        module = sys.modules.get(name)
        if module is None:
            break
        if getattr(module, "__file__", None) == str(path):
            return module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the ending .py has a loader"
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

"""Describe functions, modules and other objects as JSON that is the same in every process, by what they hold.

What is not told apart here makes two different things one, so that one gets the other's numbers. Where it cannot be
known whether something matters it is taken in: the price is a value that is computed once more.
"""

import functools
import hashlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Facts = dict[str, Any]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_INNER = frozenset(vars(nn.Module())) - {"training"}  # hooks, and what the state dict and the structure have


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
    """Return a value as JSON: hashes of tensors and arrays, the class of objects with its source and what they hold."""
    return _Description().of(value)


def of_callable(function: Any, arguments: Mapping[str, Any] | None = None) -> Facts:
    """Return what a function does, as far as that can be told, and its arguments.

    That is its name and source file, with those that this imports from, and what it holds: defaults, closure, the
    numbers, texts and tensors among the global variables that it names, the object that a method is bound to, the
    attributes of an object that is called.
    """
    return _Description().of_callable(function) | {
        "imported": imported([function]),
        "arguments": plain(arguments or {}),
    }


def attributes(module: nn.Module, known: Iterable[Any] = ()) -> Facts:
    """Return what a module holds besides weights, buffers, modules and hooks.

    Args:
        module: of a network.
        known: objects that are described elsewhere, such as the network's weights.
    """
    return _Description(known).held(module)


def without_addresses(value: Any) -> str:
    """Return the text of a value, without where in memory things are."""
    return _ADDRESS.sub("", repr(value))


def source(held: Any) -> str:
    """Return the hash of the file that a class or function is written in; of torch's and built-in ones nothing."""
    if str(getattr(held, "__module__", "")).partition(".")[0] in ("torch", "builtins"):
        return ""
    try:
        path = inspect.getsourcefile(held)
        if path is not None and Path(path).is_file():
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return of_json(inspect.getsource(held))
    except (OSError, TypeError):  # written in C, or in a notebook's cell that is gone
        return ""


def imported(held: Iterable[Any]) -> list[str]:
    """Return the hashes of the files that those of classes or functions import from, but of installed packages."""
    waiting: list[Any] = [getattr(one, "__module__", None) for one in held]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name) if isinstance(name, str) else None
        path = getattr(module, "__file__", None)
        if module is None or name in found or not isinstance(path, str) or _is_installed(name, path):
            continue
        found[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for value in [*vars(module).values()]:
            waiting.append(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None))
    return sorted({*found.values()})


def _is_installed(name: str, path: str) -> bool:
    """Return whether a module is no source file of the user's own."""
    places = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = path.endswith(".py") and Path(path).is_file() and not any(Path(path).is_relative_to(one) for one in places)
    return not own or name.partition(".")[0] == __name__.partition(".")[0]


class _Description:
    """Describe things that may hold each other: the second time a thing is met its number is enough."""

    def __init__(self, known: Iterable[Any] = ()) -> None:
        self._met: dict[int, tuple[int, Any]] = {}
        for held in known:
            self._meet(held)

    def _meet(self, value: Any) -> None:
        self._met[id(value)] = len(self._met), value  # it stays in memory, so that its id is no other's

    def of(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, int, float)):
            return value
        if id(value) in self._met:
            return {"again": self._met[id(value)][0]}
        if isinstance(value, Tensor):
            return [*kind(value), hashlib.sha256(content(value).numpy().data).hexdigest()]
        if hasattr(value, "dtype") and hasattr(value, "tobytes"):  # of numpy
            return [str(value.dtype), [*value.shape], hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, (list, tuple)):
            return [self.of(held) for held in value]
        if isinstance(value, (set, frozenset)):
            return sorted(json.dumps(self.of(held), sort_keys=True) for held in value)
        if isinstance(value, (ModuleType, type)):
            return [value.__name__, source(value)]
        self._meet(value)
        if isinstance(value, Mapping):
            return {str(key): self.of(held) for key, held in value.items()}
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if callable(value) and not isinstance(value, BuiltinFunctionType):
            return self.of_callable(value)
        if hasattr(value, "__dict__"):
            return [type(value).__qualname__, source(type(value)), self.held(value)]
        return without_addresses(value)

    def of_callable(self, function: Any) -> Facts:
        written = function if isinstance(function, (type, FunctionType, MethodType)) else type(function)
        return {
            "name": getattr(function, "__qualname__", type(function).__qualname__),
            "source": source(written),
            "bound": self._bound(function),
        }

    def _bound(self, function: Any) -> Any:
        """Return what a function has besides its source file."""
        if isinstance(function, functools.partial):
            return [self.of_callable(function.func), self.of(function.args), self.of(function.keywords)]
        if isinstance(function, MethodType):
            return [self.of(function.__self__), self._bound(function.__func__)]
        if isinstance(function, FunctionType):
            return self._of_function(function)
        if isinstance(function, nn.Module):
            return self._of_module(function)
        return [] if isinstance(function, type) else self.held(function)

    def _of_module(self, module: nn.Module) -> Any:
        parts = {name: [source(type(part)), self.held(part)] for name, part in module.named_modules()}
        return [without_addresses(module), self.of(module.state_dict()), parts]

    def _of_function(self, function: FunctionType) -> Any:
        code = function.__code__
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        simple = (bool, int, float, str, Tensor)
        named = {name: function.__globals__.get(name) for name in code.co_names}
        variables = {name: value for name, value in named.items() if isinstance(value, simple)}
        found = [code.co_firstlineno, *map(self.of, (cells, function.__defaults__, function.__kwdefaults__, variables))]
        # Of functions that their file, name and line do not tell apart; byte code is another in each version of Python.
        return [*found, self._of_code(code)] if "<lambda>" in function.__qualname__ or not source(function) else found

    def _of_code(self, code: CodeType) -> Any:
        constants = [self._of_code(held) if isinstance(held, CodeType) else self.of(held) for held in code.co_consts]
        return [code.co_code.hex(), [*code.co_names], constants]

    def held(self, value: Any) -> Facts:
        """Return what an object holds, but for the inner matters of a module."""
        inner = _INNER if isinstance(value, nn.Module) else ()
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        found = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
        return {name: self.of(held) for name, held in found.items() if name not in inner}


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False

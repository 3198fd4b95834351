"""Read pickled checkpoints as data: torch's weights-only unpickler, after a look at what a file claims to be.

That unpickler calls nothing but what makes tensors and plain containers. What is left are files that would take all
memory or time, or more stack than there is: parts that claim sizes, and pickles that hold one thing many times. Both
are added up before anything is made.
"""

import argparse
import io
import json
import pathlib
import pickle
import pickletools
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import InputError

HOLDERS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights")
_SETTINGS = ("hyper_parameters", "hparams", "args", "config", "cfg")
_MORE = 2**26  # what a file may claim beside its own size: bytes of its parts, objects of its pickles
_DEPTH = 200  # of containers in each other
_PICKLES = 5  # at the beginning of a file of torch before 1.6; the fourth has the tensors
_FILLING = ("bytearray", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy")

_EFFECTS = {  # of an operation: how much it takes from the stack, whether also all down to a mark, how much it puts
    operation.name: (
        len([thing for thing in before if thing not in (pickletools.markobject, pickletools.stackslice)]),
        pickletools.markobject in before,
        len(operation.stack_after),
    )
    for operation in pickletools.opcodes
    for before in [operation.stack_before]
}


class _Placeholder:
    """Stand for an object that is no weight, whatever it was made of."""

    def __new__(cls, *parts: Any) -> "_Placeholder":
        return super().__new__(cls)

    def __init__(self, *parts: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# What training scripts keep beside the weights. None of these names is looked up: each stands for what is before it.
_KNOWN: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (argparse.Namespace, "argparse.Namespace"),
    (str, "torch.torch_version.TorchVersion"),
    *((pathlib.PurePosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
    *((pathlib.PureWindowsPath, f"{module}.WindowsPath") for module in ("pathlib", "pathlib._local")),
    *((_Placeholder, f"numpy.{module}.multiarray.scalar") for module in ("core", "_core")),
    (_Placeholder, "numpy.dtype"),
]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """Return a pickled checkpoint's tensors by name, the settings beside them, and notes.

    Raises:
        InputError: damaged, with more than data in it, without weights, or beyond the limits.
    """
    try:
        is_archive = _check(path)
        with torch.serialization.safe_globals(_KNOWN), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = _loaded(path, mmap=is_archive)
    except InputError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(_explained(error, path)) from None
    if not isinstance(content, dict):
        raise InputError(f"no state dict but a {type(content).__name__}")
    if _is_state(content):
        return _dense(content), {}, ()
    holder = next((key for key in HOLDERS if _is_state(content.get(key))), None)
    if holder is None:
        keys = ", ".join(repr(key) for key in [*content][:8] if isinstance(key, str)) or "no names"
        raise InputError(f"no state dict, alone or under {', '.join(map(repr, HOLDERS))}; there are {keys}")
    others = [repr(key) for key, value in content.items() if key != holder and _is_state(value)]
    notes = (f"the weights under {holder!r} were taken, not those under {' or '.join(others)}",) if others else ()
    return _dense(content[holder]), dict(_scalars(content)), notes


def _loaded(path: Path, *, mmap: bool) -> Any:
    """Return what is in a checkpoint; torch maps no file whose name is not UTF-8."""
    with path.open("rb") as file:
        mmap = mmap and max(str(path), default="") < "\udc80"
        return torch.load(str(path) if mmap else file, weights_only=True, map_location="cpu", mmap=mmap)


def _check(path: Path) -> bool:
    """Raise if a file claims to be more than it is, or is damaged; return whether it is an archive.

    torch reads past the checksums of archives. Files of torch before 1.6 are no archives and have none, and archives
    saved with ``torch.serialization.set_crc32_options(False)`` have zeros for them.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.peek(4)[:4] != b"PK\x03\x04":
            for _ in range(_PICKLES):
                if file.tell() < size or not size:
                    _check_pickle(file, size)
            return False
        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile:
            raise InputError("a damaged torch checkpoint: the archive's end, with its directory, is missing") from None
        parts = archive.infolist()
        claimed = sum(part.file_size for part in parts)
        if claimed > size + _MORE:
            raise InputError(f"a damaged torch checkpoint: its parts claim {claimed} bytes in a file of {size}")
        if any(part.CRC for part in parts):
            damaged = archive.testzip()
            if damaged is not None:
                raise InputError(f"no torch checkpoint, or a damaged one: the checksum of {damaged} is wrong")
        else:
            for part in parts:
                del part.CRC  # or it would be looked at
        for part in parts:
            if part.filename.lower().endswith(".pkl"):
                _check_pickle(io.BytesIO(archive.read(part)), part.file_size)
    return True


def _check_pickle(file: IO[bytes], size: int) -> None:
    """Raise if a pickle makes what is far larger than itself, or deep.

    Its operations are followed without making anything: of each thing on the stack the depth and the size are known.
    What is held several times counts as often, for so it is hashed, printed and written.
    """
    stack: list[tuple[int, int] | None] = []  # None is a mark
    memo: dict[int, tuple[int, int]] = {}
    argument: Any
    for operation, argument, _ in pickletools.genops(file):
        name = operation.name
        if name == "MARK":
            stack.append(None)
        elif name.endswith("PUT"):
            memo[int(argument)] = stack[-1] or (0, 0)
        elif name.endswith("GET"):
            stack.append(memo[int(argument)])
        else:
            pops, to_mark, pushes = _EFFECTS[name]
            depth, held = 0, len(argument) if isinstance(argument, str | bytes) else 1
            while pops or to_mark:
                thing = stack.pop()
                if thing is not None:
                    depth, held = max(depth, thing[0]), held + thing[1]
                if to_mark:
                    to_mark = thing is not None
                else:
                    pops -= 1
            if name == "GLOBAL" and argument.endswith(_FILLING):
                raise InputError(f"refused: not only tensors and plain containers but {argument.replace(' ', '.')}")
            if depth > _DEPTH or held > size + _MORE:
                raise InputError(
                    "no torch checkpoint, or a damaged one: its pickle claims more than a file of its size has"
                )
            stack += [(depth + 1, held)] * pushes


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and len(content) > 0
        and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items())
    )


def _dense(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights.

    Raises:
        InputError: one has no numbers, or more than are in the file.
    """
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            raise InputError(f"{name} is no dense tensor of numbers")
        if tensor.nbytes > tensor.untyped_storage().nbytes() + _MORE:
            raise InputError(f"{name} claims {tensor.nbytes} bytes and has {tensor.untyped_storage().nbytes()}")
    return {name: tensor.detach() for name, tensor in state.items()}


def _scalars(content: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers and texts beside the weights, and those among the settings, as text."""
    for key, value in content.items():
        inner = vars(value) if isinstance(value, argparse.Namespace) else value
        if key in _SETTINGS and isinstance(inner, dict):
            yield from _scalars({name: one for name, one in inner.items() if name not in _SETTINGS})
        elif isinstance(key, str) and isinstance(value, str | int | float | bool):
            yield key, value if isinstance(value, str) else json.dumps(value)


def _explained(error: Exception, path: Path) -> str:
    """Return in one line why torch could not read a file."""
    message = " ".join(str(error).split())
    if "TorchScript" in message:
        return "a TorchScript archive, which is a program; save the model's state_dict()"
    if isinstance(error, pickle.UnpicklingError):
        # torch's own message goes on to recommend weights_only=False.
        named = re.search(r"GLOBAL (\S+)", message)
        if named is not None:
            refused = f"refused, or damaged: not only tensors and plain containers but {named[1]}"
            return refused + (_converted(path) if _may_be_a_model(named[1]) else "")
        found = re.search(r"WeightsUnpickler error: (.+?)(?:\. | Check the documentation|$)", message)
        message = found[1] if found is not None else ""
    return f"no torch checkpoint, or a damaged one: {type(error).__name__}: {message}"


def _may_be_a_model(name: str) -> bool:
    """Return whether a class in a pickle may be a model's: of torch.nn, or of no library."""
    top, dot, _ = name.partition(".")
    others = "torch", "numpy", "__builtin__"
    return name.startswith("torch.nn.modules.") or bool(dot and top not in (*sys.stdlib_module_names, *others))


def _converted(path: Path) -> str:
    """Return what makes a file of weights of a whole model, as the end of a message."""
    weights = path.with_name(f"{path.stem}-weights.pt").name
    load = f"torch.load({path.name!r}, weights_only=False)"
    return (
        f"; if it is a whole model that you saved yourself, where its class can be imported run "
        f"torch.save({load}.state_dict(), {weights!r}), which runs code in the file"
    )

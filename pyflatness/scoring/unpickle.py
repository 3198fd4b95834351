"""Read pickled checkpoints in a process of its own: the program that :mod:`.pickles` starts.

It is run as a script and knows nothing of the package. Each line of its input is a request for one file, in JSON. The
tensors go to a file of plain numbers, everything else to a file of JSON, and an empty line says that they are there.
torch's weights-only unpickler, which calls nothing but what makes tensors and plain containers, reads the files. The
process is there for what is left: files that claim sizes, nest deeply or hit a fault in the reader itself.
"""

import argparse
import contextlib
import errno
import json
import os
import pathlib
import pickle
import re
import resource
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

HOLDERS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights")
_SETTINGS = ("hyper_parameters", "hparams", "args", "config", "cfg")
_OWN_SHARE = 2**26  # bytes by which an archive's parts may be more than the archive
_ALIGNMENT = 64
_PAGE = 2**20


class Placeholder:
    """Stand for an object that is no weight, whatever it was made of."""

    def __new__(cls, *parts: Any) -> "Placeholder":
        """Return one, and forget the parts."""
        return super().__new__(cls)

    def __init__(self, *parts: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Forget the state."""


# What training scripts keep beside the weights. None of these names is looked up: each stands for what is before it.
_KNOWN: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (argparse.Namespace, "argparse.Namespace"),
    (str, "torch.torch_version.TorchVersion"),
    *((pathlib.PurePosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
    *((pathlib.PureWindowsPath, f"{module}.WindowsPath") for module in ("pathlib", "pathlib._local")),
    *((Placeholder, f"numpy.{module}.multiarray.scalar") for module in ("core", "_core")),
    (Placeholder, "numpy.dtype"),
]


def main() -> None:
    """Answer requests until there are none."""
    torch.serialization.add_safe_globals(_KNOWN)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    os.write(answers, b"\n")
    for line in sys.stdin:
        request = json.loads(line)
        _limit(request["memory"], request["seconds"])
        try:
            content = read(request["path"])
            answer = write(*content, request["tensors"])
        except BaseException as error:  # a damaged pickle can raise anything
            answer = {"error": explained(error, request["memory"])}
        with open(request["answer"], "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(answer, file)
        os.write(answers, b"\n")


def _limit(memory: int, seconds: int) -> None:
    """Limit what this process may still take: address space and files in bytes, and time of a processor."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + seconds, resource.RLIMIT_FSIZE: memory}
    with contextlib.suppress(OSError):  # only Linux has the file, and keeps the limit
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for kind, soft in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


class RefusedError(Exception):
    """Say why a file is not read."""


def read(path: str) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Return a file's tensors by name, what it says of its training, and notes.

    Raises:
        RefusedError: damaged, or without weights.
        Exception: whatever torch's reader raises.
    """
    _check_bytes(path)
    content = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(content, dict):
        raise RefusedError(f"no state dict but a {type(content).__name__}")
    if _is_state(content):
        return dict(content), {}, []
    holder = next((key for key in HOLDERS if _is_state(content.get(key))), None)
    if holder is None:
        keys = ", ".join(repr(key) for key in [*content][:8]) or "no keys"
        raise RefusedError(f"no state dict, alone or under {', '.join(map(repr, HOLDERS))}; there are {keys}")
    others = [repr(key) for key, value in content.items() if key != holder and _is_state(value)]
    notes = [f"the weights under {holder!r} were taken, not those under {' or '.join(others)}"] if others else []
    return dict(content[holder]), dict(_scalars(content)), notes


def write(state: dict[str, Tensor], metadata: dict[str, str], notes: list[str], path: str) -> dict[str, Any]:
    """Write the tensors' numbers to a file, and return where each is there, with the rest of the answer."""
    written: dict[tuple[Any, ...], int] = {}
    places = []
    with open(path, "wb") as file:  # noqa: PTH123
        for name, tensor in state.items():
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
                raise RefusedError(f"{name} is no dense tensor of numbers")
            values = tensor.detach().resolve_conj().resolve_neg()
            key = values.data_ptr(), values.dtype, values.shape, values.stride()
            if key not in written:  # weights that are one in the model need not be there twice
                file.write(bytes(-file.tell() % _ALIGNMENT))
                written[key] = file.tell()
                file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            places.append((name, str(values.dtype).removeprefix("torch."), list(values.shape), written[key]))
    return {"tensors": places, "metadata": metadata, "notes": notes}


def explained(error: BaseException, memory: int) -> str:
    """Return in one line why a file could not be read."""
    message = " ".join(str(error).split())
    if isinstance(error, RefusedError):
        return message
    if isinstance(error, MemoryError) or "can't allocate memory" in message or "not enough memory" in message:
        return f"it takes more than {memory / 2**20:.0f} MiB to read, which no file of its size should"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space to unpack its numbers in the folder for temporary files; TMPDIR says which that is"
    if "TorchScript" in message:
        return "a TorchScript archive, which is a program; save the model's state_dict()"
    if "legacy .tar" in message:
        return "a tar archive of torch 0.1, which cannot be read as data only; save it anew"
    if isinstance(error, pickle.UnpicklingError):
        # torch's own message goes on to recommend weights_only=False.
        named = re.search(r"GLOBAL (\S+)", message)
        if named is not None:
            return f"refused, or damaged: not only tensors and plain containers but {named[1]}"
        found = re.search(r"WeightsUnpickler error: (.+?)(?:\. | Check the documentation|$)", message)
        message = found[1] if found is not None else ""
    return f"no torch checkpoint, or a damaged one: {type(error).__name__}: {message}"


def _check_bytes(path: str) -> None:
    """Raise if an archive is cut off, claims to be more than it is, or has a part that is not what was saved.

    torch reads past the checksums. Files of torch before 1.6 are no archives and have no checksums. Archives saved with
    ``torch.serialization.set_crc32_options(False)`` have zeros for them.
    """
    size = os.path.getsize(path)  # noqa: PTH202
    with open(path, "rb") as file:  # noqa: PTH123
        if not size:
            raise RefusedError("no torch checkpoint, or a damaged one: the file is empty")
        start = file.read(4)
        if not any(start) and _zeros_at_end(file, size) == size:  # which torch takes for an empty tar archive
            raise RefusedError("no torch checkpoint, or a damaged one: there are only zeros in it")
        if start != b"PK\x03\x04":
            return
        if not zipfile.is_zipfile(file):
            zeros = _zeros_at_end(file, size)
            tail = f"its last {zeros} bytes are zeros" if zeros > 64 else "its end is missing"
            raise RefusedError(f"a damaged torch checkpoint: the archive has no directory at its end; {tail}")
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            claimed = sum(part.file_size for part in parts)
            if claimed > size + _OWN_SHARE:
                raise RefusedError(f"a damaged torch checkpoint: its parts claim {claimed} bytes in a file of {size}")
            damaged = archive.testzip() if any(part.CRC for part in parts) else None
    if damaged is not None:
        raise RefusedError(f"no torch checkpoint, or a damaged one: the checksum of {damaged} is wrong")


def _zeros_at_end(file: Any, size: int) -> int:
    end = size
    while end:
        start = max(0, end - _PAGE)
        file.seek(start)
        block = file.read(end - start).rstrip(b"\0")
        if block:
            return size - start - len(block)
        end = start
    return size


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and len(content) > 0
        and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items())
    )


def _scalars(content: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers and texts beside the weights, and those among the settings, as text."""
    for key, value in content.items():
        inner = vars(value) if isinstance(value, argparse.Namespace) else value
        if key in _SETTINGS and isinstance(inner, dict):
            yield from _scalars({name: one for name, one in inner.items() if name not in _SETTINGS})
        elif isinstance(key, str) and isinstance(value, str | int | float | bool):
            yield key, value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    main()

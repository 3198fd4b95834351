"""Pickled files that would run something, or take all memory or time, if they were read as pickles are."""

import _codecs
import contextlib
import functools
import io
import os
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Audit events of Python's that a program cannot do without if it is to run another one or to reach out.
_EVENTS = "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.", "socket.", "ctypes.", "pickle."
_reports: list[list[str]] = []  # of those who listen


def _watch(event: str, parts: Any) -> None:
    if _reports and event.startswith(_EVENTS):
        _reports[-1].append(f"{event} {str(parts)[:200]}")


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Collect what this process does inside that reading a file needs not."""
    _hooked()
    _reports.append([])
    try:
        yield _reports[-1]
    finally:
        _reports.pop()


@functools.cache
def _hooked() -> None:
    sys.addaudithook(_watch)  # for ever: hooks cannot be removed


class Reduces:
    """Pickle as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


def torch_file(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def archive(pickled: bytes, compression: int = zipfile.ZIP_STORED, **parts: bytes) -> bytes:
    """Return an archive as torch writes it, around a pickle and other parts."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as opened:
        for name, part in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **parts}.items():
            opened.writestr(f"x/{name}", part)
    return file.getvalue()


def tensor(elements: str, offset: str = "K\x00", sizes: str = "K\x02\x85", strides: str = "K\x01\x85") -> bytes:
    """Return a pickle of a state dict with one tensor, of a storage with so many elements (as opcodes)."""
    storage = f"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu{elements}tQ"
    call = f"ctorch._utils\n_rebuild_tensor_v2\n{storage}{offset}{sizes}{strides}\x89ccollections\nOrderedDict\n)RtR"
    return f"\x80\x02}}X\x01\x00\x00\x00a{call}s.".encode("latin1")


def _tar(marker: Path) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:", format=tarfile.PAX_FORMAT) as opened:
        for name in ("storages", "tensors", "pickle"):
            content = pickle.dumps(Reduces(os.mkdir, str(marker)), protocol=2)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
    return file.getvalue()


def calls(marker: Path) -> dict[str, bytes]:
    """Return files that would make the marker's folder."""
    target, length = str(marker), len(str(marker))
    text = f"X{chr(length & 255)}{chr(length >> 8)}\x00\x00{target}"
    inner = pickle.dumps(Reduces(os.mkdir, target), protocol=2)
    state = {"a": torch.ones(2)}
    rebuilt = torch._tensor._rebuild_from_type_v2
    opcodes = {
        "getattr of builtins": f"\x80\x02cbuiltins\ngetattr\ncos\npath\nX\x05\x00\x00\x00mkdir\x86R{text}\x85R.",
        "__import__": "\x80\x02cbuiltins\n__import__\nX\x02\x00\x00\x00os\x85R.",
        "names with dots": f"\x80\x04\x8c\x02os\x8c\x05mkdir\x93{text}\x85R.",
        "instance": f"\x80\x02(S'{target}'\nios\nmkdir\n.",
        "object": f"\x80\x02(cos\nmkdir\n{text}o.",
        "an extension": f"\x80\x02\x82\x01{text}\x85R.",
        "class of another name": f"\x80\x02cposix\nmkdir\n{text}\x85\x81.",
        "a method of what is allowed": "\x80\x02ctorch\nTensor.__class__\n)R.",
        "a module": "\x80\x02ctorch.storage\nos\n.",
        "protocol 0": f"cos\nmkdir\n(S'{target}'\ntR.",
        "a persistent call": f"\x80\x02cos\nmkdir\n{text}\x85RQ.",
    }
    files = {name: archive(code.encode("latin1")) for name, code in opcodes.items()}
    files |= {f"{name}, no archive": code.encode("latin1") for name, code in opcodes.items()}
    scalar = Reduces(np.float64(1).__reduce__()[0], Reduces(np.dtype, "O8", False, True), inner)
    shadowed = Reduces(rebuilt, torch._utils._rebuild_parameter, torch.Tensor, (state["a"], False, {}), {"view": len})
    evaluated = {
        "a call": Reduces(os.mkdir, target),
        "a call among the weights": {"state_dict": state, "x": Reduces(os.mkdir, target)},
        "eval": Reduces(eval, f"__import__('os').mkdir({target!r})"),
        "a pickle in a pickle": Reduces(pickle.loads, inner),
        "a checkpoint in a checkpoint": Reduces(torch.load, target),
        "a rebuilt tensor": {"a": Reduces(rebuilt, os.mkdir, torch.Tensor, (target,), {})},
        "attributes of a tensor": {"a": shadowed},
        "a codec": {"a": Reduces(_codecs.encode, target, "os.mkdir"), "state_dict": state},
        "a pickle in a scalar of numpy": {"x": scalar, "model": state},
        "a whole model": torch.nn.Linear(2, 2),
    }
    for name, content in evaluated.items():
        files[name] = torch_file(content)
        files[f"{name}, no archive"] = torch_file(content, _use_new_zipfile_serialization=False)
    code = {"constants.pkl": inner, "code/__torch__.py": b"def forward(): ..."}
    files["a TorchScript archive"] = archive(inner, **code)
    files["a tar of torch 0.1"] = _tar(marker)
    files["an archive behind a pickle"] = inner + archive(inner)
    return files


def many_dimensions(count: int, tensors: int) -> bytes:
    """Return a pickle of tensors of one element and so many dimensions, which are held once."""
    begin = b"\x80\x02(" + b"K\x01" * count + b"tq\x00((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    storage = b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQq\x01t0}"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(h\x01K\x00h\x00h\x00\x89ccollections\nOrderedDict\n)RtRs"
    return begin + storage + b"".join(b"X\x06\x00\x00\x00%06d" % n + call for n in range(tensors)) + b"."


def bombs() -> dict[str, bytes]:
    """Return files that claim far more than there is."""
    zeros = bytes(2**26)
    doubled = b"\x80\x02)" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(200)) + b"."
    many = "M\x00\x10"
    return {
        "a compressed part": archive(tensor("J\x00\x00\x00\x10"), zipfile.ZIP_DEFLATED, **{"data/0": zeros * 8}),
        "elements that are not there": archive(
            tensor("\x8a\x06\x00\x00\x00\x00\x00\x01", sizes="M\x00\x10\x85"), **{"data/0": b"12345678"}
        ),
        "sizes beyond the storage": archive(tensor("K\x02", sizes="J\xff\xff\xff\x7f\x85"), **{"data/0": b"12345678"}),
        "an offset beyond the storage": archive(tensor("K\x02", offset="J\xff\xff\xff\x7f"), **{"data/0": b"12345678"}),
        "a negative offset": archive(tensor("K\x02", offset="J\xff\xff\xff\xff"), **{"data/0": b"12345678"}),
        "strides of zero": archive(
            tensor("K\x02", sizes=f"J\x00\x00\x00\x40{many}\x86", strides="K\x00K\x00\x86"), **{"data/0": b"12345678"}
        ),
        "a huge tensor": torch_file(Reduces(torch.Tensor, 2**40)),
        "a huge storage": torch_file(Reduces(torch.UntypedStorage, 2**40)),
        "huge bytes": torch_file(Reduces(bytearray, 2**40)),
        "bytes that fill all memory": torch_file(Reduces(bytearray, 2**36)),
        "many dimensions of many tensors": archive(many_dimensions(10**5, 2000), **{"data/0": b"1234"}),
        "deep tuples": archive(b"\x80\x02)" + b"\x85" * 10**6 + b"."),
        "doubled": archive(doubled),
        "a text that is not there": archive(b"\x80\x02X\xff\xff\xff\x7fabc."),
        "no stop": archive(b"\x80\x02" + b"N" * 10**5),
    }

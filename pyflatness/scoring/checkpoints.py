"""Read checkpoints as people have them, as data only: nothing in a checkpoint's file is ever executed."""

import importlib.util
import json
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, MissingExtraError
from ..messages import shown
from . import pickles
from .listing import ENDINGS, INDEX, is_checkpoint
from .loading import State

_SAFE = ".safetensors"
_LONGEST_HEADER = 100_000_000  # bytes, of safetensors' own reader
_SUSPICIOUS_ZEROS = 32  # bytes


@dataclass(frozen=True)
class Checkpoint:
    """Hold what a checkpoint has: weights by name on the CPU, settings of its training as texts, notes on its reading.

    The weights may be views of a file that is read when they are used: they are to be copied, not written to.
    """

    state: State
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()


def check_readers(paths: Iterable[Path]) -> None:
    """Raise if a file is of a kind whose reader is not installed.

    Raises:
        MissingExtraError: safetensors.
    """
    safe = any(path.name.endswith((_SAFE, _SAFE + INDEX)) for path in paths)
    if safe and importlib.util.find_spec("safetensors") is None:
        raise MissingExtraError("safetensors files need safetensors: pip install 'pyflatness[cli]'")


def read(path: Path) -> Checkpoint:
    """Return the weights of a checkpoint, with the settings that are kept in its file.

    Args:
        path: a ``.safetensors`` file; a ``.pt``, ``.pth``, ``.pth.tar``, ``.ckpt`` or ``.bin`` file with a state dict
            alone or under the key of a training script, which is unpickled as data only, in a process with limits on
            memory and time; or an index of shards of either kind, such as ``model.safetensors.index.json``.

    Raises:
        InputError: missing, damaged, of another kind, or with more than data in it.
    """
    check_readers([path])
    return _read_index(path) if path.name.endswith(INDEX) else _read_file(path)


def _read_file(path: Path) -> Checkpoint:
    if not is_checkpoint(path):
        _check_file(path)
        raise InputError(f"{path.suffix or 'no'!r} is no known ending; {', '.join(ENDINGS)} files are read")
    _check_file(path)
    return _read_safetensors(path) if path.name.endswith(_SAFE) else Checkpoint(*pickles.read(path))


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise InputError("there is no such file") from None
    except OSError as error:  # a link to itself, a folder that may not be entered
        raise InputError(f"it cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(mode):
        raise InputError("it is a folder, without a checkpoint" if stat.S_ISDIR(mode) else "it is no regular file")
    try:
        with path.open("rb") as file:
            start = file.read(40)
    except OSError as error:
        raise InputError(f"it cannot be read ({error.strerror})") from None
    if start.startswith(b"version https://git-lfs"):
        raise InputError("it is Git LFS's note of where the file is; git lfs pull brings the file")


def _read_safetensors(path: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError, UnicodeError) as error:
        raise InputError(f"no safetensors file, or a damaged one: {error}{_missing(path)}") from None
    _check_end(state, _in_order(_header(path)))
    return Checkpoint(state, metadata)


def _header(path: Path) -> dict[str, Any]:
    """Return a safetensors file's header, as far as there is one."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            content = json.loads(file.read(length)) if length <= _LONGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _in_order(header: dict[str, Any]) -> list[str]:
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return sorted(places, key=lambda name: places[name])


def _missing(path: Path) -> str:
    """Return how much of a safetensors file is there, if that is not all."""
    try:
        size, header = path.stat().st_size, _header(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            return ""
        whole = 8 + length + max((header[name]["data_offsets"][1] for name in _in_order(header)), default=0)
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return ""
    return f"; {size} of {whole} bytes are there" if size < whole else ""


def _check_end(state: State, names: Sequence[str]) -> None:
    """Raise if a file seems to have been cut off and filled up with zeros, as a crash of a machine can leave it.

    The format has no checksums. What gives such a file away is a weight that breaks off in the middle of a row, and
    zeros from there to the file's end, more than twice as many as follow each other anywhere else in that weight.

    Raises:
        InputError: it seems so.
    """
    for name in reversed(names):
        tensor = state[name]
        if not tensor.numel():
            continue
        size = tensor.element_size()
        filled = tensor.contiguous().reshape(-1).view(torch.uint8).view(-1, size)
        if filled[-1].any():
            return
        places = filled.any(dim=1).nonzero().squeeze(1)
        if not len(places):
            continue  # zeros throughout: biases often are
        first = int(places[-1]) + 1
        zeros = tensor.numel() - first
        elsewhere = int(places.diff(prepend=places.new_tensor([-1])).max()) - 1
        if first % tensor.shape[-1] and zeros * size >= _SUSPICIOUS_ZEROS and zeros > 2 * elsewhere:
            raise InputError(f"damaged: {name} breaks off at number {first} of {tensor.numel()}, with zeros to the end")
        return


def _read_index(path: Path) -> Checkpoint:
    """Return the weights of all shards."""
    _check_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        shard_of: dict[str, str] = content["weight_map"]
        named = list(dict.fromkeys(shard_of.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError("no index of shards, or a damaged one: a 'weight_map' of names to files is wanted") from None
    odd = [name for name in named if not isinstance(name, str) or Path(name).name != name or name.endswith(INDEX)]
    if odd or not named:
        raise InputError(f"a damaged index of shards: {shown(odd[0]) if odd else 'nothing'} is no file beside it")
    lost = [name for name in named if not path.with_name(name).exists()]
    if lost:
        raise InputError(f"{len(lost)} of {len(named)} shards are missing: {', '.join(lost[:4])}")
    state: dict[str, Tensor] = {}
    settings = content.get("metadata")
    metadata = {key: str(value) for key, value in settings.items()} if isinstance(settings, dict) else {}
    notes: list[str] = []
    for shard in named:
        try:
            part = _read_file(path.with_name(shard))
        except InputError as error:
            raise InputError(f"shard {shard}: {error}") from None
        names = [name for name, held in shard_of.items() if held == shard]
        absent = [name for name in names if name not in part.state]
        if absent:
            raise InputError(f"shard {shard} lacks {', '.join(absent[:4])}, which the index says are in it")
        state |= {name: part.state[name] for name in names}
        metadata |= part.metadata
        notes += [f"shard {shard}: {note}" for note in part.notes]
    return Checkpoint(state, metadata, tuple(notes))

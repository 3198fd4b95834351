"""Read checkpoints as people have them, as data only: nothing in a checkpoint's file is ever executed."""

import importlib.util
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import InputError, MissingExtraError
from . import pickles
from .listing import ENDINGS, INDEX, index, is_checkpoint
from .loading import State

_SAFE = ".safetensors"


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
            alone or under the key of a training script, which is unpickled as data only; or an index of shards of
            either kind, such as ``model.safetensors.index.json``.

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
        raise InputError(f"no safetensors file, or a damaged one: {error}") from None
    return Checkpoint(state, metadata)


def _read_index(path: Path) -> Checkpoint:
    """Return the weights of all shards."""
    _check_file(path)
    shard_of, metadata = index(path)
    named = list(dict.fromkeys(shard_of.values()))
    lost = [name for name in named if not path.with_name(name).exists()]
    if lost:
        raise InputError(f"{len(lost)} of {len(named)} shards are missing: {', '.join(lost[:4])}")
    state: dict[str, Tensor] = {}
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

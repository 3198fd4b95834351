"""Read checkpoints as weights, as data only: nothing in a checkpoint's file is ever executed."""

import importlib.util
import pickle
import re
import stat
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, MissingExtraError

State = dict[str, Tensor]

PICKLE_FLAG = "--allow-pickle-weights-only"
_PICKLES = (".pt", ".pth")
_HOLDERS = ("state_dict", "model")  # where training scripts keep the weights beside other things
_SHOWN_LINES, _SHOWN_LENGTH = 4, 160


def check_readers(paths: Iterable[Path]) -> None:
    """Raise if a file is of a kind whose reader is not installed.

    Raises:
        MissingExtraError: safetensors.
    """
    if any(path.suffix == ".safetensors" for path in paths) and importlib.util.find_spec("safetensors") is None:
        raise MissingExtraError("safetensors files need safetensors: pip install 'pyflatness[cli]'")


def load(path: Path, *, allow_pickle: bool) -> State:
    """Return the tensors of a checkpoint, by name, on the CPU.

    Args:
        path: a ``.safetensors`` file, or a ``.pt`` or ``.pth`` file of tensors and plain containers.
        allow_pickle: whether the second kind may be read, by torch's unpickler that executes nothing.

    Raises:
        InputError: missing, damaged, of another kind, or with more than data in it.
    """
    if path.suffix not in (".safetensors", *_PICKLES):
        raise InputError(f"{path.suffix or 'no'!r} is no known ending; .safetensors, .pt and .pth files are read")
    if path.suffix in _PICKLES and not allow_pickle:
        raise InputError(f"a {path.suffix} file is a pickle, which can hold code; {PICKLE_FLAG} reads its tensors only")
    _check_file(path)
    return _load_pickle(path) if path.suffix in _PICKLES else _load_safetensors(path)


def fit(model: nn.Module, state: State) -> None:
    """Put the weights into the model, all of them and nothing else; their precision becomes the model's.

    A file may hold any of the names of weights that are one parameter in the model (tied).

    Raises:
        InputError: names, shapes or kinds of numbers that are not the model's, or tied weights that differ. The model
            is then left with a part of the weights.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name in own:
        if name in state and _kind(own[name]) != _kind(state[name]):
            raise InputError(f"does not fit the model: {name} is {state[name].dtype}, in the model {own[name].dtype}")
    try:
        model.load_state_dict({**state, **_tied(own, state)})
    except RuntimeError as error:
        raise InputError(f"does not fit the model: {_shortened(str(error))}") from None


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise InputError("there is no such file") from None
    except OSError as error:  # a link to itself, a folder that may not be entered
        raise InputError(f"it cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(mode):
        raise InputError("it is a folder" if stat.S_ISDIR(mode) else "it is no regular file")


def _load_safetensors(path: Path) -> State:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"no safetensors file, or a damaged one: {error}") from None


def _load_pickle(path: Path) -> State:
    try:
        _check_sums(path)
        content = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        # torch's own message goes on to recommend weights_only=False.
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise InputError(
            f"refused, or damaged: not only tensors and plain containers{f' but {found[1]}' if found else ''}"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"no torch checkpoint, or a damaged one: {type(error).__name__}: {error}") from None
    inner = [content.get(key) for key in _HOLDERS] if isinstance(content, dict) else []
    for candidate in (content, *inner):
        if _is_state(candidate):
            return dict(candidate)
    raise InputError(f"no state dict, alone or under {' or '.join(map(repr, _HOLDERS))}")


def _check_sums(path: Path) -> None:
    """Raise if a part of a zip archive is not what was saved: torch reads past the checksums.

    Files of torch before 1.6 are no archives and have no checksums. Archives saved with
    ``torch.serialization.set_crc32_options(False)`` have zeros for them.

    Raises:
        zipfile.BadZipFile: a part does not have its checksum, or the archive's own records contradict each other.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip() if any(part.CRC for part in archive.infolist()) else None
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and len(content) > 0
        and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items())
    )


def _tied(own: State, state: State) -> State:
    """Return what is missing in ``state`` but shares its parameter with a weight that is there."""
    groups = defaultdict(list)
    for name, tensor in own.items():
        if not nn.parameter.is_lazy(tensor):
            groups[tensor.data_ptr(), tensor.shape, tensor.stride()].append(name)
    found = {}
    for names in groups.values():
        present = [name for name in names if name in state]
        for name in present[1:]:
            if own[name].numel() and not torch.equal(state[name], state[present[0]]):
                raise InputError(f"does not fit the model: {present[0]} and {name}, one weight in the model, differ")
        if present:
            found.update({name: state[present[0]] for name in names if name not in state})
    return found


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point() or tensor.is_complex():
        return "complex" if tensor.is_complex() else "floating-point"
    return "boolean" if tensor.dtype == torch.bool else "integer"


def _shortened(message: str) -> str:
    """Return what torch says of missing and unexpected names on one line each, of wrong shapes on one per name."""
    lines = [line.strip() for line in message.splitlines()[1:]]
    shown = [line if len(line) <= _SHOWN_LENGTH else line[:_SHOWN_LENGTH] + " …" for line in lines[:_SHOWN_LINES]]
    more = len(lines) - len(shown)
    return " ".join(shown) + (f" And {more} more." if more else "")

"""List checkpoints, read them as people have them, and put their weights into a model.

They are read as data only: nothing in a checkpoint's file is ever executed. Torch's weights-only unpickler calls
nothing but what makes tensors and plain containers. The sizes that parts of a file claim are added up before any is
read.
"""

import argparse
import glob
import importlib.util
import json
import os
import pathlib
import pickle
import re
import stat
import sys
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, MissingExtraError
from ..messages import shown
from ..model import layers
from . import pretrained

State = dict[str, Tensor]

ENDINGS = (".safetensors", ".pt", ".pth", ".pth.tar", ".ckpt", ".bin")
INDEX = ".index.json"
_LONGEST_INDEX = 2**27  # bytes
_BESIDE = re.compile(
    r"(optimizer|scheduler|scaler|random_states|rng_state|training_args|trainer_state)"
    r"|(criterion\.pt|(sampler|dl_state_dict)(_\d+)?\.bin)$"  # skorch's and accelerate's
)
_ADAPTER = "adapter_config.json"


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Return the checkpoints that paths name, each once: in the paths' order, and within each by their names.

    Numbers in names count as numbers, so that ``epoch_2`` is before ``epoch_10``. Of folders, with all below them, and
    of patterns (``**`` stands for folders of any depth) these are the files that have the ending of a checkpoint. An
    index of shards is one checkpoint. Left out are hidden files, what trainers save beside the weights
    (``optimizer.pt``, ``rng_state.pth``, …), and ``pytorch_model.bin`` beside ``model.safetensors``. A file that is not
    there, a folder without checkpoints and a pattern that matches nothing stay in the list: reading them says what is
    wrong.
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        for checkpoint in sorted(_checkpoints(_files(path)), key=natural) or [path]:
            found.setdefault(os.path.abspath(checkpoint), checkpoint)  # noqa: PTH100 (`a/../b` is not resolved)
    return [*found.values()]


def is_checkpoint(path: Path) -> bool:
    """Return whether the file's name is that of a checkpoint or of an index of one."""
    return path.name.endswith((*ENDINGS, *(ending + INDEX for ending in ENDINGS)))


def natural(path: Path) -> list[tuple[float, str]]:
    """Return a key that sorts paths by their names, with the numbers in them as numbers."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(path))
    return [(float(part) if number % 2 else 0.0, part) for number, part in enumerate(parts)]


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a folder or pattern, but for hidden ones; none of what is neither."""
    if path.is_dir():
        for place, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (Path(place, name) for name in names if not name.startswith("."))
    elif not path.exists() and glob.has_magic(str(path)):
        for match in map(Path, glob.glob(str(path), recursive=True)):  # noqa: PTH207 (Path takes no absolute pattern)
            yield from _files(match) if match.is_dir() else [match]


def _checkpoints(files: Iterable[Path]) -> set[Path]:
    """Return the files that are checkpoints, without parts and copies of others among them."""
    every = {path for path in files if is_checkpoint(path) and not _BESIDE.match(path.name)}
    parts = {part for path in every for part in shards(path)}
    safe = {path.parent for path in every if path.name in ("model.safetensors", f"model.safetensors{INDEX}")}
    copies = {path for path in every if path.parent in safe and path.name.startswith("pytorch_model.bin")}
    return every - parts - copies


def index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the shard of each weight, as an index names them, and the settings beside these."""
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST_INDEX:
            raise ValueError("no regular file, or too long")
        content = json.loads(path.read_bytes())
        shard_of, settings = dict(content["weight_map"]), content.get("metadata")
        odd = [name for name in shard_of.values() if Path(name).name != name or not name or name.endswith(INDEX)]
        metadata = {key: str(value) for key, value in settings.items()} if isinstance(settings, dict) else {}
    except Exception:  # of a file that may hold anything: nested brackets raise a RecursionError
        raise InputError("no index of shards, or a damaged one: a 'weight_map' of names to files is wanted") from None
    if odd or not shard_of:
        raise InputError(f"a damaged index of shards: {shown(odd[0]) if odd else 'nothing'} is no file beside it")
    return shard_of, metadata


def shards(path: Path) -> list[Path]:
    """Return the files that an index names, as far as it can be read; none of a file that is no index."""
    try:
        names = {*index(path)[0].values()} if path.name.endswith(INDEX) else set[str]()
    except InputError:
        return []
    return [path.with_name(name) for name in sorted(names)]


_SAFE = ".safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Hold what a checkpoint has: weights by name on the CPU, views of a file maybe, settings as texts, notes."""

    state: State
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()


def check_readers(paths: Iterable[Path]) -> None:
    """Raise if a file is of a kind whose reader is not installed."""
    safe = any(path.name.endswith((_SAFE, _SAFE + INDEX)) for path in paths)
    if safe and importlib.util.find_spec("safetensors") is None:
        raise MissingExtraError("safetensors files need safetensors: pip install 'pyflatness[cli]'")


def read(path: Path) -> Checkpoint:
    """Return the weights of a checkpoint, with the settings that are kept in its file.

    It is a ``.safetensors`` file; a ``.pt``, ``.pth``, ``.pth.tar``, ``.ckpt`` or ``.bin`` file with a state dict alone
    or under the key of a training script, which is unpickled as data only; or an index of shards of either kind, such
    as ``model.safetensors.index.json``.
    """
    check_readers([path])
    return _read_index(path) if path.name.endswith(INDEX) else _read_file(path)


def _read_file(path: Path) -> Checkpoint:
    _check_file(path)
    if not is_checkpoint(path):
        raise InputError(f"{path.suffix or 'no'!r} is no known ending; {', '.join(ENDINGS)} files are read")
    if path.name.startswith("adapter_model.") and path.with_name(_ADAPTER).exists():
        raise InputError(f"it is {pretrained.AN_ADAPTER}")
    return _read_safetensors(path) if path.name.endswith(_SAFE) else unpickled(path)


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise InputError(_what_folder(path) if stat.S_ISDIR(mode) else "it is no regular file")
        with path.open("rb") as file:
            if file.read(40).startswith(b"version https://git-lfs"):
                raise InputError("it is Git LFS's note of where the file is; git lfs pull brings the file")
    except FileNotFoundError:
        raise InputError("there is no such file") from None
    except OSError as error:  # a link to itself, a folder that may not be entered
        raise InputError(f"it cannot be read ({error.strerror})") from None


def _what_folder(path: Path) -> str:
    """Return what a folder without checkpoints is."""
    parts = next((file.parent for file in _files(path) if file.suffix == ".distcp"), None)
    if parts is None:
        return "it is a folder, without a checkpoint"
    return (
        f"{'it' if parts == path else parts} is a folder of torch.distributed.checkpoint, whose parts are no "
        "checkpoints; torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, file) makes one file of them"
    )


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


_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")  # wherever torch.compile was
_SHOWN_LINES, _SHOWN_LENGTH = 4, 160


def load(model: nn.Module, state: State) -> tuple[str, ...]:
    """Put the weights into the model, all of them and nothing else; their precision becomes the model's.

    A file may hold any of the names of weights that are one parameter in the model (tied). Where the names are those of
    the model but for one prefix in front of all, as ``module.`` or ``net.``, or ``_orig_mod.`` in between, these are
    taken off; one that all of the model's names have is put in front: notes say so. Of an average that is kept beside
    what it is made of, the average is taken. Where a model of transformers has other names and shapes than those it
    saves, as fused experts, its own conversion makes them. After an error the model is left with a part of the weights.
    """
    model = layers.unwrap(model)
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    state, notes = _averaged(own, state)
    notes += _unscaled(own, state)
    try:
        return notes + _put(model, own, state)
    except InputError:
        converted = pretrained.converted(model, state)
        if converted is None:
            raise
        return (*notes, "transformers' own conversion named the weights", *_put(model, own, converted))


def _put(model: nn.Module, own: State, state: State) -> tuple[str, ...]:
    note, fitting = next(
        ((note, names) for note, names in _renamed([*state], [*own]) if own.keys() >= {*names}), ("", [*state])
    )
    renamed = dict(zip(fitting, state.values(), strict=True))
    for name in own:
        if name in renamed and _kind(own[name]) != _kind(renamed[name]):
            raise InputError(f"does not fit the model: {name} is {renamed[name].dtype}, in the model {own[name].dtype}")
    try:
        model.load_state_dict({**renamed, **_tied(own, renamed)})
    except RuntimeError as error:
        raise InputError(f"does not fit the model: {_shortened(str(error))}{_nearest(own, state)}") from None
    return (note,) if note else ()


_AVERAGES = {"n_averaged": "module.", "initted": "ema_model."}  # torch's AveragedModel, ema-pytorch's EMA


def _averaged(own: State, state: State) -> tuple[State, tuple[str, ...]]:
    """Return the weights of an average without what is kept beside it, and a note on that."""
    for mark, prefix in _AVERAGES.items():
        average = {name: tensor for name, tensor in state.items() if name.startswith(prefix)}
        if average and mark in state and mark not in own:
            others = dict.fromkeys(name.partition(".")[0] for name in state if name not in average)
            return average, (f"the average under {prefix!r} was taken, not {', '.join(map(repr, others))} beside it",)
    return state, ()


def _unscaled(own: State, state: State) -> tuple[str, ...]:
    """Return a note on 8-bit floats in a file, which mostly want a scale; raise where there is one."""
    small = [name for name, tensor in state.items() if tensor.is_floating_point() and tensor.itemsize == 1]
    small = [name for name in small if name not in own or own[name].itemsize > 1]
    if not small:
        return ()
    listed = ", ".join(small[:3]) + (", …" if small[3:] else "")
    scales = [name for name in state if name not in own and "scale" in name.rpartition(".")[2]]
    if scales:
        raise InputError(
            f"{listed} are 8-bit floats with scales beside them ({scales[0]}); multiply these out, and save the "
            "weights that they stand for"
        )
    return (f"{listed} are 8-bit floats without a scale, by which a quantised weight is multiplied: taken as they are",)


def _renamed(names: list[str], own: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield names without what wrappers put into them, less and less, then with the model's prefixes, and notes."""
    yield "", names
    bare = [_COMPILED.sub("", name) for name in names]
    for taken, current in (("", names), ("_orig_mod.", bare)):
        for prefix in ("", *_prefixes(current)):
            renamed = [name.removeprefix(prefix) for name in current]
            if taken + prefix and len({*renamed}) == len(names):
                yield f"{taken + prefix!r} was taken off the names", renamed
    for prefix in _prefixes(own):
        yield f"{prefix!r} was put in front of the names", [prefix + name for name in names]


def _prefixes(names: list[str]) -> list[str]:
    """Return what ends in a point and stands in front of all names, the shortest first."""
    first = names[0] if names else ""
    ends = (first[: point.end()] for point in re.finditer(r"\.", first))
    return [prefix for prefix in ends if all(name.startswith(prefix) for name in names)]


def _nearest(own: Mapping[str, Tensor], state: State) -> str:
    """Return what prefix, taken off or put in front, makes most names those of weights of the same shape."""

    def shared(outer: Mapping[str, Tensor], inner: Mapping[str, Tensor]) -> tuple[str, int]:
        counts: Counter[str] = Counter()
        for name, tensor in outer.items():
            for dot in re.finditer(r"\.", name):
                rest = inner.get(name[dot.end() :])
                if rest is not None and rest.shape == tensor.shape:
                    counts[name[: dot.end()]] += 1
        return max(counts.items(), key=lambda item: item[1], default=("", 0))

    as_they_are = sum(name in own and own[name].shape == state[name].shape for name in state)
    (off, without), (on, with_it) = shared(state, own), shared(own, state)
    if max(without, with_it) <= as_they_are:
        return ""
    if without < with_it:
        return f" With {on!r} in front, {with_it} of the model's {len(own)} would fit."
    others = [name for name in state if not name.startswith(off)]
    rest = f"; {', '.join(others[:3])}{' …' if others[3:] else ''} would be left over" if others else ""
    return f" Without {off!r} in front, {without} of the model's {len(own)} would fit{rest}."


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


HOLDERS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights")
_SETTINGS = ("hyper_parameters", "hparams", "args", "config", "cfg")
_MORE = 2**26  # bytes that parts of a file may claim beside its own size
_OLDEST = "2.10"  # torch in which CVE-2026-24747 is mended


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


def unpickled(path: Path) -> Checkpoint:
    """Return what a pickled checkpoint has."""
    content = loaded(path)
    if not isinstance(content, dict):
        raise InputError(f"no state dict but a {type(content).__name__}")
    if _is_state(content):
        return Checkpoint(_dense(content), {})
    inner = [value for value in content.values() if isinstance(value, dict)]  # as of torch.distributed.checkpoint
    held, holder = next(
        ((held, key) for held in (content, *inner) for key in HOLDERS if _is_state(held.get(key))), (content, None)
    )
    if holder is None:
        if _has_list(content):
            raise InputError(
                "averages of weights in a list, shadow_params, without names; put them into the model by the average's "
                "own copy_to(model.parameters()), and save the model's state_dict()"
            )
        keys = ", ".join(repr(key) for key in [*content][:8] if isinstance(key, str)) or "no names"
        raise InputError(f"no state dict, alone or under {', '.join(map(repr, HOLDERS))}; there are {keys}")
    others = [repr(key) for key, value in held.items() if key != holder and (_is_state(value) or _has_list(value))]
    notes = (f"the weights under {holder!r} were taken, not those under {' or '.join(others)}",) if others else ()
    return Checkpoint(_dense(held[holder]), dict(_scalars(content)), notes)


def loaded(path: Path) -> Any:
    """Return what is in a file of ``torch.save``, read as data alone: tensors and plain containers."""
    try:
        is_archive = _check(path)
        if torch.__version__ < _OLDEST:
            raise InputError(
                f"torch {torch.__version__}: a pickled checkpoint can make releases before 2.10 run code of its own, "
                "even read as weights alone (CVE-2026-24747); save it as .safetensors, or pip install --upgrade torch"
            )
        mmap = is_archive and max(str(path), default="") < "\udc80"  # torch maps no file whose name is not UTF-8
        with torch.serialization.safe_globals(_KNOWN), warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")
            return torch.load(str(path) if mmap else file, weights_only=True, map_location="cpu", mmap=mmap)
    except InputError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(_explained(error, path)) from None


def _check(path: Path) -> bool:
    """Raise if a file claims to be more than it is, or is damaged; return whether it is an archive.

    torch reads past the checksums of archives. Files of torch before 1.6 are no archives and have none, and archives
    saved with ``torch.serialization.set_crc32_options(False)`` have zeros for them.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.peek(4)[:4] != b"PK\x03\x04":
            return False
        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile:
            raise InputError("a damaged torch checkpoint: the archive's end, with its directory, is missing") from None
        parts = archive.infolist()
        if any(part.filename.endswith("/archive_format") for part in parts):
            raise InputError(
                "a program of torch.export (.pt2), which is no file of weights; save the model's state_dict(), or "
                "torch.export.load(…).state_dict"
            )
        claimed = sum(part.file_size for part in parts)
        if claimed > size + _MORE:
            raise InputError(f"a damaged torch checkpoint: its parts claim {claimed} bytes in a file of {size}")
        if any(part.CRC for part in parts):
            damaged = archive.testzip()
            if damaged is not None:
                raise InputError(f"no torch checkpoint, or a damaged one: the checksum of {damaged} is wrong")
    return True


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and len(content) > 0
        and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items())
    )


def _has_list(content: Any) -> bool:
    """Return whether an optimiser's or a trainer's averages of weights are in it, as a list."""
    return isinstance(content, dict) and isinstance(content.get("shadow_params"), list)


def _dense(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, tensor in state.items():
        if type(tensor) not in (Tensor, nn.Parameter):  # whose class a library has let torch read
            raise InputError(_of_subclass(f"{name} is a {type(tensor).__module__}.{type(tensor).__name__}"))
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            raise InputError(f"{name} is no dense tensor of numbers")
        if tensor.nbytes > tensor.untyped_storage().nbytes() + _MORE:
            raise InputError(f"{name} claims {tensor.nbytes} bytes and has {tensor.untyped_storage().nbytes()}")
    return {name: tensor.detach() for name, tensor in state.items()}


def _of_subclass(what: str) -> str:
    return (
        f"{what}, no plain tensor: a weight that is quantised or spread over processes; where its library is "
        "installed, save weights that are dequantised (w.dequantize()) or whole (w.full_tensor())"
    )


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
    if "legacy .tar" in message:
        return "a .tar file of torch 0.1, which cannot be read as data alone; save it anew by a later release"
    if isinstance(error, pickle.UnpicklingError):
        # torch's own message goes on to recommend weights_only=False.
        named = re.search(r"GLOBAL (\S+)", message)
        if named is not None:
            refused = f"refused, or damaged: not only tensors and plain containers but {named[1]}"
            if named[1].startswith(_TENSORS):
                return _of_subclass(refused)
            return refused + (_converted(path) if _may_be_a_model(named[1]) else "")
        found = re.search(r"WeightsUnpickler error: (.+?)(?:\. | Check the documentation|$)", message)
        message = found[1] if found is not None else ""
    says_nothing = not message or isinstance(error, LookupError)  # as of an operation that no pickle has
    why = "it cannot be unpickled" if says_nothing else f"{type(error).__name__}: {message}"
    return f"no torch checkpoint, or a damaged one: {why if path.stat().st_size else 'it is empty'}"


_TENSORS = ("torchao.", "optimum.quanto.", "torch.distributed.tensor.")  # modules of subclasses of tensors


def _may_be_a_model(name: str) -> bool:
    """Return whether a class in a pickle may be a model's: of torch.nn, or of no library."""
    top, dot, _ = name.partition(".")
    others = "torch", "numpy", "__builtin__"
    return name.startswith("torch.nn.modules.") or bool(dot and top not in (*sys.stdlib_module_names, *others))


def _converted(path: Path) -> str:
    """Return what makes a file of weights of a whole model, as the end of a message."""
    weights = str(path.with_name(f"{path.stem}-weights.pt"))
    load = f"torch.load({str(path)!r}, weights_only=False)"
    return (
        f"; if it is a whole model that you saved yourself, where its class can be imported run "
        f"torch.save({load}.state_dict(), {weights!r}), which runs code in the file"
    )

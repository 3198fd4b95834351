"""List the checkpoints that files, folders and patterns name."""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import InputError
from ..messages import shown

ENDINGS = (".safetensors", ".pt", ".pth", ".pth.tar", ".ckpt", ".bin")
INDEX = ".index.json"
_LONGEST_INDEX = 2**27  # bytes
_BESIDE = re.compile(r"(optimizer|scheduler|scaler|random_states|rng_state|training_args|trainer_state)")


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Return the checkpoints that paths name, each once: in the paths' order, and within each by their names.

    Numbers in names count as numbers, so that ``epoch_2`` is before ``epoch_10``. Of folders, with all below them, and
    of patterns these are the files that have the ending of a checkpoint. An index of shards is one checkpoint. Left out
    are hidden files, what trainers save beside the weights (``optimizer.pt``, ``rng_state.pth``, …), and
    ``pytorch_model.bin`` beside ``model.safetensors``.

    Args:
        paths: files, folders, and patterns such as ``runs/*/epoch_*.pt`` (``**`` stands for folders of any depth).

    Returns:
        The paths. A file that is not there, a folder without checkpoints and a pattern that matches nothing stay in the
        list as they are: reading them says what is wrong.
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
    parts = {path.with_name(name) for path in every if path.name.endswith(INDEX) for name in shards(path)}
    safe = {path.parent for path in every if path.name in ("model.safetensors", f"model.safetensors{INDEX}")}
    copies = {path for path in every if path.parent in safe and path.name.startswith("pytorch_model.bin")}
    return every - parts - copies


def index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the shard of each weight, as an index names them, and the settings beside these.

    Raises:
        InputError: no index, or a damaged one.
    """
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


def shards(path: Path) -> list[str]:
    """Return the names of the files that an index names, as far as it can be read."""
    try:
        return sorted({*index(path)[0].values()})
    except InputError:
        return []

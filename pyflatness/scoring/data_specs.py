"""Read data sets that need no code of the user's: arrays, folders of images, tables, data sets of Hugging Face.

Each function's keyword arguments are those of ``--data-args``. Floating-point numbers become float32, or what ``dtype``
says, and whole numbers int64. Nothing is shuffled or drawn.
"""

import functools
import importlib.util
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import InputError, MissingExtraError
from ..messages import shown
from . import images, specs

INPUTS = ("inputs", "x", "images", "image", "img", "features")
TARGETS = ("targets", "target", "y", "labels", "label")
_ON_DISK = ("dataset_dict.json", "dataset_info.json")  # what save_to_disk of Hugging Face's writes


def resolve(spec: str) -> specs.Function:
    """Return the callable that a SPEC of data names: a reader of a file or folder, or a callable of the user's.

    Args:
        spec: an ``.npz`` or ``.parquet`` file, a folder of images or one of a Hugging Face data set, or what
            :func:`.specs.resolve` takes.

    Raises:
        InputError: there is no such file, module or attribute, or an exception in the import.
        MissingExtraError: what reads files of that kind is not installed.
    """
    path = Path(spec)
    if path.suffix in (".npz", ".parquet") and not path.is_file():
        raise InputError(f"{spec!r}: there is no such file")
    if path.suffix == ".npz":
        return functools.partial(read_npz, path)
    if path.suffix == ".parquet":
        return functools.partial(_with("pyarrow", read_parquet), path)
    if not path.is_dir():
        return specs.resolve(spec)
    if any((path / name).is_file() for name in _ON_DISK):
        return functools.partial(_with("datasets", read_hugging_face), path)
    return functools.partial(_with("PIL", images.read_images), path)


def read_npz(
    path: Path,
    *,
    inputs: str | None = None,
    targets: str | None = None,
    count: int | None = None,
    dtype: str = "float32",
) -> tuple[Tensor, Tensor]:
    """Return the arrays of inputs and targets in an ``.npz`` file.

    Args:
        path: of the file.
        inputs: name of an array; by default that of :data:`INPUTS` which is there.
        targets: the same for :data:`TARGETS`.
        count: take so many samples, from the first on.
        dtype: what floating-point numbers become.

    Raises:
        InputError: a damaged file, one with objects in it, or no array of that name.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            names = _chosen(file.files, inputs, INPUTS, "inputs"), _chosen(file.files, targets, TARGETS, "targets")
            found = [file[name] for name in names]
    except InputError:
        raise
    except Exception as error:  # of zip, of zlib, of numpy's header
        raise InputError(f"{path}: no file of arrays, or a damaged one: {error}") from None
    first, second = (_tensor(array[:count], dtype, f"{path}: {name}") for array, name in zip(found, names, strict=True))
    if len(first) != len(second):
        raise InputError(f"{path}: {len(first)} samples in {names[0]!r} and {len(second)} in {names[1]!r}")
    return first, second


def read_parquet(
    path: Path,
    *,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    count: int | None = None,
    dtype: str = "float32",
) -> tuple[Tensor, Tensor]:
    """Return columns of a Parquet file as inputs (n, columns), and one as targets (n,).

    Args:
        path: of the file.
        inputs: names of columns of numbers, or of one column of lists of one length; by default all but the targets.
        targets: name of a column; by default that of :data:`TARGETS` which is there.
        count: take so many rows, from the first on.
        dtype: what floating-point numbers become.

    Raises:
        InputError: a damaged file, no column of that name, or one that has no numbers or lists of several lengths.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        target = _chosen(file.schema_arrow.names, targets, TARGETS, "targets")
        rest = [name for name in file.schema_arrow.names if name != target]
        names = rest if inputs is None else [inputs] if isinstance(inputs, str) else [*inputs]
        for name in names:
            _chosen(rest, name, (), "inputs")
        table = file.read(columns=[*names, target]).slice(0, count)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: no Parquet file, or a damaged one: {error}") from None
    columns = {name: _column(table[name].to_pylist(), f"{path}: {name}") for name in [*names, target]}
    rows = np.stack([columns[name] for name in names], axis=1) if len(names) > 1 else columns[names[0]]
    return _tensor(rows, dtype, str(path)), _tensor(columns[target], dtype, f"{path}: {target}")


def read_hugging_face(
    path: Path,
    *,
    split: str | None = None,
    inputs: str | None = None,
    targets: str | None = None,
    count: int | None = None,
    dtype: str = "float32",
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    batch_size: int = 256,
) -> Any:
    """Return batches of a data set that ``save_to_disk`` of Hugging Face's datasets has written.

    Rows with ``input_ids`` become mappings of all columns of numbers. Of other data sets a batch is a pair of inputs
    and targets; images are treated as those of :func:`.images.read_images`.

    Args:
        path: of the folder.
        split: for data sets that have several.
        inputs: name of a column; by default that of :data:`INPUTS` which is there.
        targets: the same for :data:`TARGETS`.
        count: take so many rows, from the first on.
        dtype: what floating-point numbers become; images are float32.
        size: of images, as in :func:`.images.read_images`, and so are the other options.
        channels: of images.
        mean: of images.
        std: of images.
        batch_size: of the batches.

    Raises:
        InputError: a damaged data set, no split or column of that name, or options that do not fit each other.
    """
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # of pyarrow, of JSON, of the library's own
        raise InputError(f"{path}: no data set of Hugging Face, or a damaged one: {error}") from None
    if isinstance(found, datasets.DatasetDict):
        found = found[_chosen([*found], split, [*found] if len(found) == 1 else (), "split")]
    if count is not None:
        found = found.select(range(min(count, len(found))))
    if "input_ids" in found.column_names and inputs is None:
        numbers = [name for name, feature in found.features.items() if not _is_text(feature)]
        return DataLoader(found.select_columns(numbers).with_format("torch"), batch_size=batch_size)
    first = _chosen(found.column_names, inputs, INPUTS, "inputs")
    second = _chosen(found.column_names, targets, TARGETS, "targets")
    if isinstance(found.features[first], datasets.Image):
        _with("PIL", images.read_images)
        rows, labels = found.select_columns([first]), found[second][:]

        def opened(number: int) -> tuple[str, Any, int]:
            return f"row {number}", rows[number][first], labels[number]

        return images.batches(len(found), opened, images.Transform(size, channels, mean, std), batch_size)
    columns = (_column(found[name][:], f"{path}: {name}") for name in (first, second))
    values, aims = (_tensor(column, dtype, str(path)) for column in columns)
    return values, aims


def _with(module: str, function: specs.Function) -> specs.Function:
    """Return the function, if what it needs is installed."""
    if importlib.util.find_spec(module) is None:
        wanted = {"PIL": "Pillow"}.get(module, module)
        raise MissingExtraError(f"data of this kind need {wanted}: pip install 'pyflatness[data]'")
    return function


def _chosen(there: Collection[str], given: str | None, usual: Collection[str], option: str) -> str:
    """Return the name that was given, or else the usual one which is there.

    Raises:
        InputError: it is not there, or none or several of the usual ones are.
    """
    names = ", ".join(map(repr, there)) or "none"
    if given is not None:
        if given not in there:
            raise InputError(f"{option}: there is no {given!r}; there are {names}")
        return given
    found = [name for name in usual if name in there]
    if len(found) != 1:
        example = json.dumps({option: "NAME"})
        raise InputError(f"{option}: say which it is, as --data-args '{example}'; there are {names}")
    return found[0]


def _column(values: Sequence[Any], name: str) -> np.ndarray[Any, Any]:
    try:
        return np.array(values)
    except ValueError:
        raise InputError(f"{name}: lists of several lengths") from None


def _tensor(array: np.ndarray[Any, Any], dtype: str, name: str) -> Tensor:
    """Return an array as a tensor, floating-point numbers in the given precision.

    Raises:
        InputError: it holds no numbers, or the precision is none.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise InputError(f"dtype: float32 or another type of floating-point numbers is wanted, got {shown(dtype)}")
    if array.dtype.kind not in "fiub" or array.ndim == 0:
        raise InputError(f"{name}: an array of numbers is wanted, got {array.dtype} of shape {array.shape}")
    found = torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    return found.to(kind) if found.is_floating_point() else found if found.dtype == torch.bool else found.long()


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")

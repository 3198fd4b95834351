"""Read data sets that need no code of the user's: arrays, texts, folders of images, tables, data sets of Hugging Face.

Each function's keyword arguments are those of ``--data-args``. Floating-point numbers become float32, or what ``dtype``
says, which makes floating-point numbers of whole ones in the inputs too. Other whole numbers become int64. Nothing is
shuffled or drawn. Images are read in the one way that is documented: resized as a whole, and as numbers from 0 to 1.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import InputError, MissingExtraError
from ..messages import shown
from ..options import check_count, check_dtype
from ..report import arrays
from . import checkpoints, pretrained, specs, text_data

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".pbm")
_MODES = {1: "L", 3: "RGB"}


class Transform:
    """Turn an image of Pillow's into a float32 tensor (channels, height, width).

    It is resized to ``size``, height and width or one number for both (bilinear, with antialiasing). Of each channel,
    whose whole numbers up to 255 became numbers from 0 to 1, ``mean`` is subtracted, and it is divided by ``std``.
    """

    def __init__(
        self,
        size: int | Sequence[int] | None = None,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        if channels not in _MODES:
            raise InputError(f"channels: 1 or 3 are wanted, got {shown(channels)}")
        sides = [size, size] if isinstance(size, int) else None if size is None else [*size]
        if sides is not None and (len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides)):
            raise InputError(f"size: a number or [height, width] is wanted, got {shown(size)}")
        for name, given in (("mean", mean), ("std", std)):
            if given is not None and len(given) != channels:
                raise InputError(f"{name}: {channels} numbers are wanted, one for each channel, got {shown(given)}")
        if std is not None and not all(std):
            raise InputError(f"std: numbers other than 0 are wanted, got {shown(std)}")
        self._sides, self._mode = sides, _MODES[channels]
        self._mean = torch.tensor(mean or [0.0] * channels, dtype=torch.float32, device="cpu")[:, None, None]
        self._std = torch.tensor(std or [1.0] * channels, dtype=torch.float32, device="cpu")[:, None, None]

    def __call__(self, image: "Image") -> Tensor:
        """Return the image's numbers."""
        from PIL.Image import Resampling

        image = image.convert(self._mode)
        if self._sides is not None:
            height, width = self._sides
            image = image.resize((width, height), Resampling.BILINEAR)
        values = torch.from_numpy(np.array(image)).float() / 255
        values = values[None] if values.dim() == 2 else values.permute(2, 0, 1)
        return ((values - self._mean) / self._std).contiguous()


@text_data.taking(Transform)
def read_images(path: Path, *, batch_size: int = 256, **form: Any) -> "DataLoader[tuple[Tensor, int]]":
    """Return batches of the images in a folder that has a folder for each class.

    Classes are numbered in the order of their folders' names, sorted as text, and images come class by class, sorted by
    their paths.
    """
    check_count("batch_size", batch_size, 1, "a number of samples")
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = [
        (file, number)
        for number, name in enumerate(classes)
        for file in sorted((path / name).rglob("*"))
        if file.suffix.lower() in IMAGES and not file.name.startswith(".")
    ]
    if not found:
        raise InputError(f"{path}: no images; a folder for each class is wanted, with {', '.join(IMAGES)} files in it")

    def opened(number: int) -> "tuple[str, Image, int]":
        from PIL import Image

        file, label = found[number]
        return str(file), Image.open(file), label

    return DataLoader(_Images(len(found), opened, Transform(**form)), batch_size=batch_size)


class _Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int, opened: "Callable[[int], tuple[str, Image, int]]", transform: Transform) -> None:
        self._count, self._opened, self._transform = count, opened, transform
        self._shape: torch.Size | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        name = f"image {number}"
        try:
            name, image, label = self._opened(number)
            with contextlib.closing(image):
                values = self._transform(image)
        except Exception as error:  # of Pillow's many readers
            raise InputError(f"{name}: no image, or a damaged one: {error}") from None
        self._shape = self._shape or values.shape
        if values.shape != self._shape:
            sizes = " and ".join(f"{h} × {w}" for _, h, w in (self._shape, values.shape))
            raise InputError(f"{name}: images of several sizes, {sizes}; pass size= to resize them to one")
        return values, label


INPUTS = ("inputs", "x", "images", "image", "img", "features")
TARGETS = ("targets", "target", "y", "labels", "label")
TOKENS = ("input_ids", "attention_mask", "token_type_ids", "labels")
_ON_DISK = ("dataset_dict.json", "dataset_info.json")  # what save_to_disk of Hugging Face's writes


def resolve(spec: str) -> specs.Function:
    """Return the callable that a SPEC of data names: a reader of a file or folder, or a :func:`.specs.resolve` one."""
    path = Path(spec)
    kind = path.suffix
    if path.is_dir():
        kind = "saved" if any((path / name).is_file() for name in _ON_DISK) else "images"
    if kind not in _READERS or pretrained.is_named(spec):  # hf:FOLDER.pt is no file
        if ":" not in spec:
            files = ", ".join(name for name in _READERS if name.startswith("."))
            raise InputError(
                f"{spec!r}: a file ({files}), a folder of images or of a saved data set, or what returns batches, "
                "file.py:callable or package.module:callable, is wanted"
            )
        return specs.resolve(spec)
    if not path.exists():
        raise InputError(f"{spec!r}: there is no such file")
    reader, library = _READERS[kind]
    _check_installed(library)
    return functools.partial(reader, path)


def with_tokenizer(data: Any, arguments: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return the arguments of a SPEC of data, with the tokenizer of ``hf:…`` where it takes one and none is given."""
    if not isinstance(data, str) or not pretrained.is_named(model) or not model.startswith("hf:"):
        return arguments
    if "tokenizer" in arguments or "tokenizer" not in inspect.signature(resolve(data)).parameters:
        return arguments
    return {**arguments, "tokenizer": model}


def read_npz(
    path: Path,
    *,
    inputs: str | None = None,
    targets: str | None = None,
    count: int | None = None,
    dtype: str | None = None,
    batch_size: int = 256,
) -> Any:
    """Return the arrays of inputs and targets in an ``.npz`` file, or batches of tokens, if it has ``input_ids``.

    Names are by default those of :data:`INPUTS` and :data:`TARGETS` that are there, or of :data:`TOKENS` together.
    """
    text_data.check_sizes(count, batch_size)

    def wanted(there: Collection[str]) -> list[str]:
        if inputs is None and "input_ids" in there:
            return [name for name in TOKENS if name in there]
        return [_chosen(there, inputs, INPUTS, "inputs"), _chosen(there, targets, TARGETS, "targets")]

    try:
        with path.open("rb") as file:
            found = arrays.read(file, wanted)
    except InputError:
        raise
    except Exception as error:  # of zip, of zlib, of numpy's header
        raise InputError(f"{path}: no file of arrays, or a damaged one: {error}") from None
    first, *_ = found
    tokens = first == TOKENS[0] and inputs is None
    tensors = {
        name: _tensor(array[:count], dtype, f"{path}: {name}", inputs=name == first and not tokens)
        for name, array in found.items()
    }
    for name, tensor in tensors.items():
        if len(tensor) != len(tensors[first]):
            raise InputError(f"{path}: {len(tensors[first])} samples in {first!r} and {len(tensor)} in {name!r}")
    return text_data.cut(tensors, batch_size) if tokens else tuple(tensors.values())


def read_torch(
    path: Path, *, inputs: str | None = None, targets: str | None = None, count: int | None = None
) -> tuple[Tensor, ...]:
    """Return the inputs and targets in a file of ``torch.save``: a pair of tensors, or a dict of tensors by name.

    It is read as data alone. Names are by default those of :data:`INPUTS` and :data:`TARGETS` that are there.
    """
    text_data.check_sizes(count, 1)
    try:
        found = checkpoints.loaded(path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if isinstance(found, (tuple, list)) and len(found) == 2:
        found = dict(zip((INPUTS[0], TARGETS[0]), found, strict=True))
    if not isinstance(found, dict) or not all(isinstance(part, Tensor) for part in found.values()):
        raise InputError(f"{path}: a pair of tensors, or a dict of tensors by name, is wanted; got {shown(found)}")
    names = _chosen(found, inputs, INPUTS, "inputs"), _chosen(found, targets, TARGETS, "targets")
    return tuple(found[name][:count] for name in names)


@text_data.taking(text_data.batches)
def read_parquet(
    path: Path,
    *,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    count: int | None = None,
    dtype: str | None = None,
    text: str | None = None,
    batch_size: int = 8,
    **tokens: Any,
) -> Any:
    """Return columns of a Parquet file as inputs (n, columns), and one as targets (n,); or batches of its texts.

    Inputs are columns of numbers, or one of lists of one length; by default all but the targets, the column of
    :data:`TARGETS` that is there. Texts are of the column ``text`` if it is there and no inputs are named, without
    targets by default; for further options see :func:`.text_data.batches`.
    """
    import pyarrow
    from pyarrow import parquet

    text_data.check_sizes(count, batch_size)
    try:
        file = parquet.ParquetFile(path)
        wanted = _of_text(file.schema_arrow.names, text, inputs, targets)
        if wanted:
            table = file.read(columns=wanted).slice(0, count)
            words, *labels = (table[name].to_pylist() for name in wanted)
            return text_data.batches(words, *(labels or [None]), **tokens, batch_size=batch_size)
        target = _chosen(file.schema_arrow.names, targets, TARGETS, "targets")
        rest = [name for name in file.schema_arrow.names if name != target]
        names = rest if inputs is None else [inputs] if isinstance(inputs, str) else [*inputs]
        for name in names:
            _chosen(rest, name, (), "inputs")
        table = file.read(columns=[*names, target]).slice(0, count)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: no Parquet file, or a damaged one: {error}") from None
    columns = [table[name].to_pylist() for name in names]
    values = columns[0] if len(names) == 1 else [*zip(*columns, strict=True)]
    aims = _tensor(table[target].to_pylist(), dtype, f"{path}: {target}")
    return _tensor(values, dtype, f"{path}: {', '.join(names)}", inputs=True), aims


@text_data.taking(Transform, text_data.batches)
def read_hugging_face(
    path: Path,
    *,
    split: str | None = None,
    inputs: str | None = None,
    targets: str | None = None,
    count: int | None = None,
    dtype: str | None = None,
    text: str | None = None,
    batch_size: int = 256,
    **more: Any,
) -> Any:
    """Return batches of a data set that ``save_to_disk`` of Hugging Face's datasets has written.

    Rows with ``input_ids`` become mappings of all columns of numbers, and texts those of tokens. Of other data sets a
    batch is a pair of inputs and targets, by default of the columns of :data:`INPUTS` and :data:`TARGETS`; images are
    treated as those of :func:`read_images`, and are float32 whatever ``dtype`` is.
    """
    import datasets

    text_data.check_sizes(count, batch_size)
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # of pyarrow, of JSON, of the library's own
        raise InputError(f"{path}: no data set of Hugging Face, or a damaged one: {error}") from None
    if isinstance(found, datasets.DatasetDict):
        found = found[_chosen([*found], split, [*found] if len(found) == 1 else (), "split")]
    if count is not None:
        found = found.select(range(min(count, len(found))))
    if "input_ids" in found.column_names and inputs is None:
        kinds = {name: getattr(feature, "dtype", None) for name, feature in found.features.items()}
        numbers = [name for name, kind in kinds.items() if kind not in ("string", "large_string")]
        return DataLoader(found.select_columns(numbers).with_format("torch"), batch_size=batch_size)
    wanted = _of_text(found.column_names, text, inputs, targets)
    if wanted:
        words, *labels = (found[name][:] for name in wanted)
        return text_data.batches(words, *(labels or [None]), **_of(text_data.batches, more), batch_size=batch_size)
    first = _chosen(found.column_names, inputs, INPUTS, "inputs")
    second = _chosen(found.column_names, targets, TARGETS, "targets")
    if isinstance(found.features[first], datasets.Image):
        _check_installed("Pillow")
        rows, labels = found.select_columns([first]), found[second][:]

        def opened(number: int) -> tuple[str, Any, int]:
            return f"row {number}", rows[number][first], labels[number]

        return DataLoader(_Images(len(found), opened, Transform(**_of(Transform, more))), batch_size=batch_size)
    return tuple(_tensor(found[name][:], dtype, f"{path}: {name}", inputs=name == first) for name in (first, second))


def _of(function: specs.Function, options: dict[str, Any]) -> dict[str, Any]:
    return {name: held for name, held in options.items() if name in inspect.signature(function).parameters}


def _of_text(there: Collection[str], text: str | None, inputs: Any, targets: str | None) -> list[str]:
    """Return the columns of texts and of their labels, if they are to be taken; empty if no texts are."""
    text = text or ("text" if inputs is None and "text" in there else None)
    wanted = {"text": text, "targets": targets} if text else {}
    return [_chosen(there, name, (), option) for option, name in wanted.items() if name is not None]


def _check_installed(library: str) -> None:
    if library and importlib.util.find_spec({"Pillow": "PIL"}.get(library, library)) is None:
        raise MissingExtraError(f"data of this kind need {library}: pip install 'pyflatness[data]'")


def _chosen(there: Collection[str], given: str | None, usual: Collection[str], option: str) -> str:
    """Return the name that was given, or else the usual one which is there."""
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


def _tensor(values: Any, dtype: str | None, name: str, *, inputs: bool = False) -> Tensor:
    """Return an array, or lists, as a tensor, floating-point numbers in the given precision, or float32."""
    kind = check_dtype("dtype", "float32" if dtype is None else dtype)
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(f"{name}: lists of several lengths") from None
    if array.dtype.kind not in "fiub" or array.ndim == 0:
        raise InputError(f"{name}: an array of numbers is wanted, got {array.dtype} of shape {array.shape}")
    if inputs and dtype is None and array.dtype == np.uint8 and array.ndim > 2:  # images, which are no indices
        raise InputError(
            f"{name}: uint8 of shape {array.shape}; --data-args dtype=float32 makes floats from 0 to 255 of them; "
            "indices are to be saved as int64"
        )
    found = torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    if found.is_floating_point() or (inputs and dtype is not None):
        return found.to(kind)
    return found if found.dtype == torch.bool else found.long()


_READERS: dict[str, tuple[specs.Function, str]] = {  # by a file's ending, or what a folder holds; with what they need
    ".txt": (text_data.read_file, ""),
    ".jsonl": (text_data.read_file, ""),
    ".npz": (read_npz, ""),
    ".pt": (read_torch, ""),
    ".pth": (read_torch, ""),
    ".parquet": (read_parquet, "pyarrow"),
    "saved": (read_hugging_face, "datasets"),
    "images": (read_images, "Pillow"),
}

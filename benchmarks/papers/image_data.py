"""Read the image data sets of the papers as people have them on disk: torchvision's files, Hugging Face's, ``.npz``.

All give images (n, channels, height, width) uint8 and labels (n,) int64. Pickled files are read as data: of all names
that a pickle can call those of NumPy's arrays alone are known.
"""

import codecs
import gzip
import io
import itertools
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyflatness.errors import InputError, MissingExtraError

Labelled = tuple[Tensor, Tensor]
"""Images (n, channels, height, width) and labels (n,)."""

_MNIST = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}
_CIFAR = {
    "cifar10": ("cifar-10-batches-py", [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"], "labels"),
    "cifar100": ("cifar-100-python", ["train"], ["test"], "fine_labels"),
}
_SIDE = 32  # of CIFAR's images
_IMAGES, _LABELS = ("image", "img"), ("label", "fine_label", "labels")  # Hugging Face's columns


def read(folder: Path | None, name: str) -> tuple[Labelled, Labelled]:
    """Return training and test data of a data set, pixels from 0 to 255.

    Args:
        folder: where data sets are: torchvision's ``root``, a folder with Hugging Face's folder of that name, or one
            with ``name.npz``.
        name: ``mnist``, ``fashion_mnist``, ``cifar10``, ``cifar100``, or that of an ``.npz`` file.

    Raises:
        InputError: it is not there, or damaged.
        MissingExtraError: what reads such files is not installed.
    """
    if folder is None:
        raise InputError(f"data: {name} is wanted; say with --data-dir in which folder it is")
    for reader in (_of_torchvision, _of_hugging_face, _of_npz):
        try:
            train, test = (reader(folder, name, split) for split in ("train", "test"))
        except ImportError as error:
            needed = f"{folder}: to read it needs {error.name}: pip install 'pyflatness[data]'"
            raise MissingExtraError(needed) from None
        if train is None or test is None:
            continue
        for images, labels in (train, test):
            if len(images) != len(labels):
                raise InputError(f"{folder}: {len(images)} images and {len(labels)} labels of {name}")
        return train, test
    place = _MNIST.get(name) or _CIFAR.get(name, ("",))[0]
    places = [*([f"{place}/ of torchvision"] if place else []), f"{name}/ of Hugging Face", f"{name}.npz"]
    raise InputError(f"data: {name} is not in {folder}; looked for {', '.join(places)}")


def scaled(labelled: Labelled, count: int | None = None) -> Labelled:
    """Return the first so many images with pixels from -1 to 1, and their labels."""
    images, labels = labelled
    return images[:count].float().div(127.5).sub(1).contiguous(), labels[:count]


def digits(train: int, seed: int = 0) -> tuple[Labelled, Labelled]:
    """Return scikit-learn's 1797 digits of 8×8 pixels from 0 to 1, split at random: ``train`` images and the rest.

    Raises:
        MissingExtraError: without scikit-learn.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise MissingExtraError("the digits need scikit-learn: pip install 'pyflatness[demo]'") from None
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    here, there = order[:train], order[train:]
    return (images[here], labels[here]), (images[there], labels[there])


def _of_torchvision(folder: Path, name: str, split: str) -> Labelled | None:
    """Return a split of what torchvision downloads, IDX files or pickled batches; None if its folder is not there."""
    if name in _MNIST and (folder / _MNIST[name]).is_dir():
        stem = folder / _MNIST[name] / ("train" if split == "train" else "t10k")
        images, labels = _idx(Path(f"{stem}-images-idx3-ubyte"), 3), _idx(Path(f"{stem}-labels-idx1-ubyte"), 1)
        return images[:, None], labels.long()
    if name in _CIFAR and (folder / _CIFAR[name][0]).is_dir():
        place, train, test, key = _CIFAR[name]
        parts = [_batch(folder / place / file, key) for file in (train if split == "train" else test)]
        images, labels = (torch.cat(halves) for halves in zip(*parts, strict=True))
        return images, labels
    return None


def _idx(path: Path, dimensions: int) -> Tensor:
    """Return an IDX file's array of bytes, of the file or of the same with ``.gz``."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    header = 4 * (1 + dimensions)
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header:
        raise InputError(f"{path}: no IDX file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    values = np.frombuffer(content, dtype=np.uint8, offset=header)
    if values.size != int(np.prod(shape, dtype=np.int64)):
        raise InputError(f"{path}: {values.size} bytes for an array of shape {shape}")
    return torch.from_numpy(values.reshape(shape).copy())


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what NumPy's arrays and their bytes are made by; a pickle can call whatever it names."""
        known = {
            **{(f"numpy.{core}.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0] for core in ("core", "_core")},
            **{("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype, ("_codecs", "encode"): codecs.encode},
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an array of numbers")
        return known[module, name]


def _batch(path: Path, key: str) -> Labelled:
    """Return the images and labels of a pickled batch of CIFAR."""
    try:
        with path.open("rb") as file:
            content = _Arrays(file, encoding="latin1").load()
        pixels, labels = (content.get(name, content.get(name.encode())) for name in ("data", key))
        if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3 * _SIDE**2:
            raise TypeError(f"images of {3 * _SIDE**2} bytes are wanted, got {pixels.dtype} of shape {pixels.shape}")
        if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
            raise TypeError(f"{key} are no whole numbers")
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"{path}: no batch of images, or a damaged one: {error}") from None
    return torch.from_numpy(pixels.reshape(-1, 3, _SIDE, _SIDE).copy()), torch.tensor(labels)


def _of_hugging_face(folder: Path, name: str, split: str) -> Labelled | None:
    """Return a split of a data set of Hugging Face's hub, without its library; None if there are no files of it.

    Files are searched in ``folder/name`` and below it: ``train-00000-of-00001.parquet`` and the like, also in a folder
    ``data`` or of a configuration, or ``train/data-00000-of-00001.arrow`` of ``save_to_disk``.
    """
    root = folder / name
    files = sorted(root.rglob(f"{split}-*.parquet")) or sorted(root.rglob(f"{split}/*.arrow"))
    if not files:
        return None
    from pyarrow import ArrowException, ipc, parquet

    images: list[bytes] = []
    labels: list[int] = []
    for path in files:
        try:
            table = (
                parquet.read_table(path) if path.suffix == ".parquet" else ipc.open_stream(path.read_bytes()).read_all()
            )
        except (ArrowException, OSError) as error:
            raise InputError(f"{path}: no table, or a damaged one: {error}") from None
        names = table.column_names
        image, label = (next((key for key in keys if key in names), None) for keys in (_IMAGES, _LABELS))
        if image is None or label is None:
            raise InputError(f"{path}: columns {_IMAGES[0]!r} and {_LABELS[0]!r} are wanted; there are {names}")
        rows = table[image].to_pylist()
        if not all(isinstance(row, dict) and isinstance(row.get("bytes"), bytes) for row in rows):
            raise InputError(f"{path}: {image!r} has no bytes of images")
        images += [row["bytes"] for row in rows]
        labels += table[label].to_pylist()
    return _decoded(images, str(root)), torch.tensor(labels)


def _of_npz(folder: Path, name: str, split: str) -> Labelled | None:
    """Return a split of ``name.npz``; None if it is not there.

    It has ``train_labels`` and ``train_images``, (n, height, width[, channels]) uint8, or under any other name the
    bytes of image files end to end, with ``train_offsets``, where each begins and the last ends.
    """
    path = folder / f"{name}.npz"
    if not path.is_file():
        return None
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files if key.startswith(f"{split}_")}
    except Exception as error:  # of zip, of zlib, of numpy's header
        raise InputError(f"{path}: no file of arrays, or a damaged one: {error}") from None
    labels, offsets = arrays.pop(f"{split}_labels", None), arrays.pop(f"{split}_offsets", None)
    if labels is None or len(arrays) != 1:
        wanted = f"{split}_labels and {split}_images are wanted, or encoded images with {split}_offsets"
        raise InputError(f"{path}: {wanted}")
    ((key, content),) = arrays.items()
    where = f"{path}: {key}"
    if offsets is not None:
        raw = content.tobytes()
        images = _decoded([raw[start:end] for start, end in itertools.pairwise(offsets)], where)
    elif content.dtype == np.uint8 and content.ndim in (3, 4):
        images = _channels_first(content)
    else:
        wanted = "images (n, height, width[, channels]) uint8 are wanted"
        raise InputError(f"{where}: {wanted}, got {content.dtype} of shape {content.shape}")
    return images, torch.from_numpy(labels.astype(np.int64))


def _decoded(files: Sequence[bytes], name: str) -> Tensor:
    """Return images of one size, (n, channels, height, width) uint8, from the bytes of their files."""
    from PIL import Image

    found: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = []
    for number, content in enumerate(files):
        try:
            with Image.open(io.BytesIO(content)) as image:
                pixels = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        except Exception as error:  # of Pillow's many readers
            raise InputError(f"{name}: image {number} cannot be read: {error}") from None
        found.append(pixels)
        if pixels.shape != found[0].shape:
            raise InputError(f"{name}: image {number} has shape {pixels.shape}, and the first {found[0].shape}")
    if not found:
        raise InputError(f"{name}: no images")
    return _channels_first(np.stack(found))


def _channels_first(pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> Tensor:
    images = torch.from_numpy(pixels)
    return images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()

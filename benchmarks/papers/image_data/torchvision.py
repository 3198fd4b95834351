"""Read the files that torchvision downloads: IDX files of MNIST and FashionMNIST, pickled batches of CIFAR."""

import gzip
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyflatness.errors import InputError

from .pickled import Array, load

_MNIST = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}
_CIFAR = {
    "cifar10": ("cifar-10-batches-py", [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"], b"labels"),
    "cifar100": ("cifar-100-python", ["train"], ["test"], b"fine_labels"),
}
_SIDE = 32  # of CIFAR's images


def places(name: str) -> list[str]:
    """Return the folders in which torchvision has a data set."""
    found = _MNIST.get(name) or _CIFAR.get(name, (None,))[0]
    return [f"{found}/ of torchvision"] if found else []


def read(folder: Path, name: str, split: str) -> tuple[Tensor, Tensor] | None:
    """Return a split of a data set; None if torchvision's folder is not there.

    Raises:
        InputError: files that are missing or damaged.
    """
    if name in _MNIST and (folder / _MNIST[name]).is_dir():
        stem = folder / _MNIST[name] / ("train" if split == "train" else "t10k")
        images, labels = _idx(Path(f"{stem}-images-idx3-ubyte"), 3), _idx(Path(f"{stem}-labels-idx1-ubyte"), 1)
        images = images[:, None]
    elif name in _CIFAR and (folder / _CIFAR[name][0]).is_dir():
        place, train, test, key = _CIFAR[name]
        parts = [_batch(folder / place / file, key) for file in (train if split == "train" else test)]
        images, labels = (torch.cat(halves) for halves in zip(*parts, strict=True))
    else:
        return None
    if len(images) != len(labels):
        raise InputError(f"{folder}: {len(images)} images and {len(labels)} labels of {name}")
    return images, labels.long()


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


def _batch(path: Path, key: bytes) -> tuple[Tensor, Tensor]:
    """Return the images and labels of a pickled batch."""
    content = load(path)
    data, labels = (content.get(name, content.get(name.decode())) for name in (b"data", key))
    if not isinstance(data, Array) or not isinstance(labels, list):
        raise InputError(f"{path}: no batch of CIFAR with data and {key.decode()}")
    pixels = data.numbers(path)
    if pixels.ndim != 2 or pixels.shape[1] != 3 * _SIDE**2 or not all(isinstance(label, int) for label in labels):
        raise InputError(f"{path}: images of {3 * _SIDE**2} bytes and whole numbers are wanted, got {pixels.shape}")
    return torch.from_numpy(pixels.reshape(-1, 3, _SIDE, _SIDE).copy()), torch.tensor(labels)

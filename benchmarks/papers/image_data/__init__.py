"""Read the image data sets of the papers as people have them on disk: torchvision's files, Hugging Face's, ``.npz``.

All give images (n, channels, height, width) uint8 and labels (n,) int64. Pickled files are read as data: nothing that
they name is looked up or called.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pyflatness.errors import InputError, MissingExtraError

from . import hugging_face, npz, torchvision

Labelled = tuple[Tensor, Tensor]
"""Images (n, channels, height, width) and labels (n,)."""

NAMES = ("mnist", "fashion_mnist", "cifar10", "cifar100")

_READERS: tuple[Callable[[Path, str, str], Labelled | None], ...] = (torchvision.read, hugging_face.read, npz.read)


def read(folder: Path | None, name: str) -> tuple[Labelled, Labelled]:
    """Return training and test data of a data set, pixels from 0 to 255.

    Args:
        folder: where data sets are: torchvision's ``root``, a folder with Hugging Face's folder of that name, or one
            with ``name.npz``.
        name: one of :data:`NAMES`, or of an ``.npz`` file.

    Raises:
        InputError: it is not there, or damaged.
        MissingExtraError: what reads such files is not installed.
    """
    if folder is None:
        raise InputError(f"data: {name} is wanted; say with --data-dir in which folder it is")
    for reader in _READERS:
        try:
            train, test = (reader(folder, name, split) for split in ("train", "test"))
        except ImportError as error:
            raise MissingExtraError(
                f"{folder}: to read it needs {error.name}: pip install 'pyflatness[data]'"
            ) from None
        if train is not None and test is not None:
            return train, test
    places = ", ".join([*torchvision.places(name), f"{name}/ of Hugging Face", f"{name}.npz"])
    raise InputError(f"data: {name} is not in {folder}; looked for {places}")


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

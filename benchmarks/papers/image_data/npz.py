"""Read ``name.npz``: arrays ``train_images`` and ``train_labels``, or files' bytes end to end with their offsets."""

import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyflatness.errors import InputError

from .encoded import decoded


def read(folder: Path, name: str, split: str) -> tuple[Tensor, Tensor] | None:
    """Return a split; None if there is no such file.

    Images are ``SPLIT_images``, (n, height, width) or (n, height, width, channels) uint8; or, with ``SPLIT_offsets``
    (n + 1,), the bytes of encoded images in the one other array of that split.

    Raises:
        InputError: other arrays, or a damaged file.
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
        raise InputError(
            f"{path}: {split}_labels and {split}_images are wanted, or encoded images with {split}_offsets"
        )
    ((key, content),) = arrays.items()
    if offsets is None:
        images = _pixels(content, f"{path}: {key}")
    else:
        raw = content.tobytes()
        images = decoded([raw[start:end] for start, end in itertools.pairwise(offsets)], f"{path}: {key}")
    if len(images) != len(labels):
        raise InputError(f"{path}: {len(images)} images and {len(labels)} labels in {split}")
    return images, torch.from_numpy(labels.astype(np.int64))


def _pixels(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", name: str) -> Tensor:
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise InputError(f"{name}: images (n, height, width[, channels]) uint8 are wanted, got {array.dtype} of "
                         f"shape {array.shape}")  # fmt: skip
    images = torch.from_numpy(array)
    return images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()

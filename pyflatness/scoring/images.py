"""Read images, in the one way that is documented: resized as a whole, and as numbers from 0 to 1."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import InputError
from ..messages import shown
from ..options import check_count

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".pbm")
_MODES = {1: "L", 3: "RGB"}


class Transform:
    """Turn an image of Pillow's into a float32 tensor (channels, height, width).

    Args:
        size: height and width, or one number for both, that images are resized to (bilinear, with antialiasing); None
            leaves them as they are.
        channels: 3 for colours, 1 for grey.
        mean: what is subtracted from each channel, after whole numbers up to 255 became numbers from 0 to 1.
        std: what each channel is divided by after that.

    Raises:
        InputError: numbers that make no sense, or not one for each channel.
    """

    def __init__(
        self,
        size: int | Sequence[int] | None,
        channels: int,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
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


def read_images(
    path: Path,
    *,
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    batch_size: int = 256,
) -> "DataLoader[tuple[Tensor, int]]":
    """Return batches of the images in a folder that has a folder for each class.

    Classes are numbered in the order of their folders' names, sorted as text, and images come class by class, sorted by
    their paths.

    Args:
        path: of the folder.
        size: height and width of the images, see :class:`Transform`; by default they are to be of one size.
        channels: 3 for colours, 1 for grey.
        mean: what is subtracted from each channel.
        std: what each channel is divided by after that.
        batch_size: of the batches.

    Raises:
        InputError: no images, or options that make no sense. When a batch is read: a damaged image, or one of another
            size.
    """
    check_count("batch_size", batch_size, 1, "a number of samples")
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = [
        (file, number)
        for number, name in enumerate(classes)
        for file in sorted((path / name).rglob("*"))
        if file.suffix.lower() in ENDINGS and not file.name.startswith(".")
    ]
    if not found:
        raise InputError(f"{path}: no images; a folder for each class is wanted, with {', '.join(ENDINGS)} files in it")

    def opened(number: int) -> "tuple[str, Image, int]":
        from PIL import Image

        file, label = found[number]
        return str(file), Image.open(file), label

    return batches(len(found), opened, Transform(size, channels, mean, std), batch_size)


def batches(
    count: int, opened: "Callable[[int], tuple[str, Image, int]]", transform: Transform, batch_size: int
) -> "DataLoader[tuple[Tensor, int]]":
    """Return batches of images that are read when they are used.

    Args:
        count: of images.
        opened: returns an image's name, the image, and the number of its class.
        transform: what makes a tensor of it.
        batch_size: of the batches.
    """
    return DataLoader(_Images(count, opened, transform), batch_size=batch_size)


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

"""Decode images that are kept as files' bytes."""

import io
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyflatness.errors import InputError


def decoded(files: Sequence[bytes], name: str) -> Tensor:
    """Return images of one size as (n, channels, height, width) uint8.

    Args:
        files: PNG, JPEG, WebP, ….
        name: what messages call them.

    Raises:
        InputError: one that is damaged or of another size.
    """
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
    images = torch.from_numpy(np.stack(found))
    return images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()

"""Read NumPy's archives of arrays, after a look at what they claim to hold."""

import zipfile
from collections.abc import Callable, Collection, Iterable
from typing import IO, Any

import numpy as np

_MORE, _FOLD = 2**30, 20  # bytes that an archive's arrays may take, and so many times its own size beside them


def read(
    file: IO[bytes], chosen: Callable[[Collection[str]], Iterable[str]] = lambda names: names
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an ``.npz`` file that are ``chosen`` among all names.

    Those that claim far more memory than the file has bytes, as one of zeros does that was compressed, are a
    ValueError. Of a damaged file zip, zlib and NumPy raise what they do.
    """
    with np.load(file, allow_pickle=False) as held:
        names = [*chosen(held.files)]
        archive: zipfile.ZipFile = held.zip
        parts = {part.filename.removesuffix(".npy"): part for part in archive.infolist()}
        claimed, size = sum(parts[name].file_size for name in names), file.seek(0, 2)
        if claimed > _MORE + _FOLD * size:
            raise ValueError(
                f"the arrays claim {claimed} bytes in a file of {size}; if that is right, write them by np.savez, "
                "without compression"
            )
        return {name: held[name] for name in names}

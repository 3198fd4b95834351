"""Where results go: tried before any work is done for them."""

import tempfile
from pathlib import Path

from ..errors import InputError


def prepare_folder(path: Path) -> None:
    """Make the folder and try that files can be written there.

    Raises:
        InputError: it cannot be made, or not be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"--out {path}: no folder to write to ({error.strerror})") from None


def prepare_file(path: Path) -> None:
    """Make the file's folder and try that the file can be written; what it holds stays as it is.

    Raises:
        InputError: the folder cannot be made, or the file not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("a"):  # to append: an older result is lost only when there is a new one
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written ({error.strerror})") from None

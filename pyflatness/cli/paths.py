"""Prepare the places of results before any work is done for them; write files whole or not at all."""

import contextlib
import tempfile
from io import FileIO
from pathlib import Path

from ..errors import InputError


def prepare_folder(path: Path, option: str = "--out") -> None:
    """Make the folder that an option gave and try that files can be written there.

    Raises:
        InputError: it cannot be made, or not be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"{option} {path}: no folder to write to ({error.strerror})") from None


def is_same_file(a: Path, b: Path) -> bool:
    """Return whether both are one file: by device and inode, so also through links or on a file system without case."""
    try:
        return a.samefile(b)
    except OSError:  # one of them is not there yet, or cannot be looked at
        return a.absolute() == b.absolute()


def append_whole(file: FileIO, content: bytes) -> None:
    """Append all of the content or, if that fails, nothing of it: a full disk must leave no torn line.

    Args:
        file: opened without a buffer, which would try again later.
        content: what to write.

    Raises:
        OSError: it does not fit, say; the file ends where it ended before.
    """
    end = file.tell() if file.seekable() else None
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:
        with contextlib.suppress(OSError):  # devices have no end to cut
            file.truncate(end)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of results, in place of an older one only when all of it is written.

    Raises:
        InputError: it cannot be written; what was there is as it was.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"--out: {path} cannot be written ({error.strerror})") from None


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

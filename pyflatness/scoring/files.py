"""Tell what a store's file stands on, keep a second writer away from it, and hold folders for temporary files."""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import StoreError
from ..messages import shown

_MOUNTS = Path("/proc/self/mountinfo")
_OF_NETWORKS = (
    "nfs",
    "cifs",
    "smb",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "9p",
    "ncpfs",
    "fuse.sshfs",
)
_FOLDERS = "pyflatness-tmp-"
_NEW = 60.0  # seconds for which a folder without a lock may be one that is being made


def resolved(path: Path) -> Path:
    """Return a store's own path, whatever links lead to it.

    Raises:
        StoreError: no file can have that name.
    """
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # with NUL, or a surrogate; links in a circle
        raise StoreError(f"store: no file can be called {shown(str(path))} ({error})") from None


def check_local(path: Path, mounts: Path = _MOUNTS) -> None:
    """Raise if a file is, or would be, on a network file system: its locks and its order of writes cannot be relied on.

    On systems that do not list their mounts as Linux does nothing is known, and nothing raised.

    Raises:
        StoreError: with what to do.
    """
    kind = _file_system(path, mounts)
    if kind.startswith(_OF_NETWORKS):
        raise StoreError(
            f"store: {path} is on a network file system ({kind}), whose locks a store cannot rely on; put it on a "
            "local disk. For several machines give each a store of its own with --shard i/N, and unite these with "
            "`pyflatness store merge`"
        )


def _file_system(path: Path, mounts: Path) -> str:
    """Return the kind of file system that a file is on; empty if that is not known."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found = Path("/"), ""
    for line in lines:
        before, _, after = line.partition(" - ")
        place = Path(before.split()[4].encode().decode("unicode_escape"))
        if path.resolve().is_relative_to(place) and len(place.parts) >= len(found[0].parts):
            found = place, after.split()[0]
    return found[1]


def _lock(handle: int) -> None:
    """Lock a file until its handle is closed.

    Raises:
        OSError: another process has locked it.
    """
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold the right to write a store, which ends with the process however it ends.

    It is a lock on a file beside the store's: SQLite's own locks on the store are the process's, and would be lost
    when any other handle on it is closed.

    Raises:
        StoreError: another process has it, the folder cannot be written to, or the file has other names.
    """
    try:
        handle = os.open(path.with_name(f"{path.name}-lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(f"store: {path} cannot be written ({error.strerror})") from None
    try:
        try:
            _lock(handle)
        except OSError:
            raise StoreError(
                f"store: another process is writing {path}; wait for it, or give this one a store of its own with "
                "--shard i/N"
            ) from None
        if path.is_file() and path.stat().st_nlink > 1:
            raise StoreError(
                f"store: {path} has {path.stat().st_nlink} names (hard links), by which others may write it; copy it "
                "(cp), and write the copy"
            )
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Hold a folder that is gone afterwards; those of processes that were killed are removed first.

    A folder is locked while its process lives.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with contextlib.suppress(OSError):  # another's, in use, or gone meanwhile
            if time.time() - left.stat().st_mtime > _NEW:
                with _locked(left):
                    shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_FOLDERS) as folder, _locked(Path(folder)):
        yield Path(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file or folder.

    Raises:
        OSError: another process has it, or it cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)

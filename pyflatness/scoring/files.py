"""Tell what a store's file stands on, and keep a second writer away from it."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import StoreError

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
            "`pyflatness merge`"
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
        StoreError: another process has it, or the folder cannot be written to.
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
        yield
    finally:
        os.close(handle)

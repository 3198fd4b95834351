"""Have pickled checkpoints read by a child process with limits, so that no file can harm this one.

The child (:mod:`.unpickle`) serves one file after the other, as its start takes seconds. A file that makes it crash, or
hit a limit, is that file's error, and the next file has a new child.
"""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

MEMORY, FOLD = 2**30, 4  # bytes that reading a file may take, and so many times its size beside them
SECONDS, RATE = 20, 20 * 2**20  # time of a processor that it may take, and a second for so many bytes beside it
_WAITING = 10  # how much longer the file system may take

_PROGRAM = Path(__file__).with_name("unpickle.py")
# The first entry of the path is the working directory: modules that lie beside checkpoints are not to be imported.
_START = "import sys; sys.path.pop(0); import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0",
}


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """Return a pickled checkpoint's tensors by name, the settings beside them, and notes.

    Raises:
        InputError: damaged, with more than data in it, or beyond the limits.
    """
    return _reader(os.getpid()).read(path)


@functools.cache
def _reader(process: int) -> "Reader":
    """Return the reader of this process: a forked one must not talk to its parent's child."""
    reader = Reader()

    def close() -> None:
        if process == os.getpid():
            reader.close()

    atexit.register(close)
    return reader


class Reader:
    """Hold the child process, which is started when the first file is read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
        """See :func:`read`."""
        size = path.stat().st_size
        seconds = SECONDS + size // RATE
        request = {"path": str(path.absolute()), "memory": MEMORY + FOLD * size, "seconds": seconds}
        with self._lock, tempfile.TemporaryDirectory(prefix="pyflatness-") as folder:
            tensors, answer = Path(folder, "tensors"), Path(folder, "answer")
            try:
                self._ask({**request, "tensors": str(tensors), "answer": str(answer)}, _WAITING * seconds)
            except BaseException:  # also an interrupt: what the child says afterwards would be of the wrong file
                self.close()
                raise
            found = json.loads(answer.read_text(encoding="utf-8"))
            if "error" in found:
                raise InputError(found["error"])
            return _tensors(tensors, found["tensors"]), found["metadata"], tuple(found["notes"])

    def close(self) -> None:
        """End the child process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _ask(self, request: dict[str, Any], seconds: int) -> None:
        """Return when the answer to a request is there."""
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _START, str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # Ctrl-C is for this process
            )
            if not self._answered(_WAITING * SECONDS):
                raise InputError(f"no process to read it: {sys.executable} could not import torch")
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request).encode() + b"\n")
        self._child.stdin.flush()
        if not self._answered(seconds):
            raise InputError(f"the process that read it {_end(self._child.wait())}")

    def _answered(self, seconds: int) -> bool:
        """Return whether the child says that it is done, and not that it has ended."""
        assert self._child is not None
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], seconds)[0]:
            raise InputError(f"it could not be read in {seconds} s")
        return bool(os.read(self._child.stdout.fileno(), 1))


def _end(status: int) -> str:
    if status == -signal.SIGXCPU:
        return "took more time than a file of its size should"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _tensors(path: Path, places: list[tuple[str, str, list[int], int]]) -> dict[str, Tensor]:
    """Return views of the file's numbers, which is read where it is and may be removed."""
    size = path.stat().st_size
    held = (
        torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        if size
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    found = {}
    for name, kind, shape, start in places:
        dtype = getattr(torch, kind)
        count = torch.Size(shape).numel() * dtype.itemsize
        found[name] = held[start : start + count].view(dtype).view(shape)
    return found

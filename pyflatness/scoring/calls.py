"""Send a call to another machine's Python: with what the sender has around it, which the call may need."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Packed = tuple[bytes, int, tuple[str, ...], str]  # the call, threads of torch, folders of modules, working directory


def packed(dumps: Callable[[Any], bytes], threads: int, *call: Any) -> Packed:
    """Return a function, its arguments by position and those by name as a call like one here, but for the threads."""
    return dumps(call), threads, tuple(sys.path), str(Path.cwd())


def made(content: bytes, threads: int, path: tuple[str, ...], folder: str) -> Any:
    """Make a call in this process, which is there for such calls, and return its result."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if Path(folder).is_dir():
        os.chdir(folder)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    function, args, kwargs = pickle.loads(content)
    return function(*args, **kwargs)

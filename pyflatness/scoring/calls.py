"""Send a call to another machine's Python: with what the sender has around it, which the call may need."""

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class RemoteCall:
    """Hold a call, pickled, and what to find where it is made."""

    content: bytes  # the function, its arguments by position and those by name, which are unpickled last
    threads: int  # of torch
    path: tuple[str, ...]  # folders of modules
    folder: str  # that relative paths begin at

    @classmethod
    def of(cls, dumps: Callable[[Any], bytes], threads: int, *call: Any) -> "RemoteCall":
        """Return a call as it would be made here, but for the threads."""
        return cls(dumps(call), threads, tuple(sys.path), str(Path.cwd()))

    def made(self) -> Any:
        """Make the call in this process, which is there for such calls, and return its result."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        sys.path.extend(entry for entry in self.path if entry not in sys.path)
        function, args, kwargs = pickle.loads(self.content)
        return function(*args, **kwargs)

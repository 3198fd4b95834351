"""Folders of processes that were killed are removed by the next one that needs a folder."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pyflatness.scoring import store

KILLED = """
import os, signal
from pyflatness.scoring import store
with store.temporary_folder() as folder:
    (folder / "model.pt").write_bytes(b"0" * 100)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = tmp_path / "of_another_program"
    others.mkdir()
    ended = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    (left,) = {*tmp_path.iterdir()} - {others}
    assert ended.returncode == -signal.SIGKILL
    assert (left / "model.pt").is_file()

    with store.temporary_folder() as held:
        assert left.is_dir(), "one that was made this minute may not be locked yet"
        for folder in (left, held, others):
            os.utime(folder, (long_ago := time.time() - 86_400, long_ago))
        with store.temporary_folder() as second:
            assert {*tmp_path.iterdir()} == {others, held, second}
    assert {*tmp_path.iterdir()} == {others}

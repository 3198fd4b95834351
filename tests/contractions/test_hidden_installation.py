"""Sources in front of an installed package with kernels: one warning that names both folders."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyflatness
from pyflatness.contractions.compiled import hidden

SOURCES = Path(pyflatness.__file__).parent
# Without the finder of this environment's own editable installation, which is asked before the path is.
SCRIPT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
from pyflatness.contractions.backends import compiled
print(not compiled.missing)
"""


def test_sources_that_hide_kernels_say_so_once(tmp_path):
    clone, packages = tmp_path / "clone", tmp_path / "packages"
    ignored = shutil.ignore_patterns("__pycache__", "_C.*", "_cuda.*")
    shutil.copytree(SOURCES, clone / "pyflatness", ignore=ignored)
    (packages / "pyflatness").mkdir(parents=True)
    (packages / "pyflatness" / "_C.some.so").touch()
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (clone, packages)))}
    run = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", SCRIPT], **run)
    assert done.stdout == "False\n"
    assert done.stderr.count("RuntimeWarning") == 1
    assert f"the sources of pyflatness in {clone} in front of the package installed in {packages}" in done.stderr


def test_only_another_folder_with_kernels_is_hidden(tmp_path, monkeypatch):
    (tmp_path / "pyflatness").mkdir()
    monkeypatch.setattr(sys, "path", [str(SOURCES.parent), str(tmp_path), str(tmp_path / "nowhere")])
    assert hidden() is None
    (tmp_path / "pyflatness" / "_C.some.so").touch()
    assert hidden() == tmp_path / "pyflatness"

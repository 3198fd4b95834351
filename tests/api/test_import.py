"""`import pyflatness` takes no time, and the public names are found when they are asked for."""

import subprocess
import sys


def printed(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_the_package_alone_is_imported():
    script = "import sys, torch, pyflatness; print(*(name for name in sys.modules if name.startswith('pyflatness')))"
    assert printed(script) == "pyflatness"


def test_every_name_is_found_by_a_star_without_a_file_lock_or_the_compiler():
    """Windows has no fcntl; and what has a module's name must not become that module."""
    script = """
import sys, types
sys.modules["fcntl"] = None
from pyflatness import *
import pyflatness
assert set(pyflatness.__all__) <= {*globals()} & {*dir(pyflatness)}
assert "torch._dynamo" not in sys.modules
print(*(name for name in pyflatness.__all__ if isinstance(getattr(pyflatness, name), types.ModuleType)))
"""
    assert printed(script) == "changes errors measures results statistics theory"


def test_a_name_that_does_not_exist_is_no_attribute():
    script = "import pyflatness; print(hasattr(pyflatness, 'flatnes'), hasattr(pyflatness, '__path__'))"
    assert printed(script) == "False True"

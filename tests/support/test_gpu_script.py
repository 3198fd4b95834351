"""What ``tests/gpu.py`` makes of the tests that it runs: counted by kernels, cut into shares, ended in time.

There is no GPU here: its tests are stood in for by emulated ones, and compute-sanitizer by a script.
"""

import importlib.util
import os
import shutil
import sys

import pytest

from support import ROOT

SANITIZER = """#!{python}
import os, sys
if "--help" in sys.argv:
    print("--kernel-name --report-api-errors")
else:
    command = sys.argv[sys.argv.index("--error-exitcode") + 2:]
    os.execv(command[0], command)
"""


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    specification = importlib.util.spec_from_file_location("gpu_script", ROOT / "tests" / "gpu.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "gpu_script", module)
    specification.loader.exec_module(module)
    selected = [*module.SELECTED]
    selected[selected.index("-k") + 1] = "sigmoid and emulated or stand_in"
    monkeypatch.setattr(module, "SELECTED", selected)
    monkeypatch.setattr(module, "BUILD", tmp_path)
    monkeypatch.setattr(module, "WORKERS", 2)
    right = module.environ
    monkeypatch.setattr(module, "environ", lambda **more: {**right(**more), "PYFLATNESS_TESTS": ""})
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(SANITIZER.format(python=sys.executable))
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return module


def only(gpu, monkeypatch, *names):
    monkeypatch.setattr(gpu, "files", lambda pattern: [*names])


def stand_in(tmp_path, body):
    path = tmp_path / "test_stand_in.py"
    path.write_text(f"import pytest, time\n{body}\n")
    return str(path)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulated kernels need a compiler")
def test_kernels_of_tests_that_passed_are_counted(gpu, monkeypatch, emulated_cuda):
    only(gpu, monkeypatch, "tests/cuda/test_cuda_rows.py")
    found = gpu.sanitized("memcheck", 600.0)
    assert not found.failed, found.said
    passed = [found.kernels[f"sigmoid_curvature_{dtype}"] for dtype in ("f32", "f64")]
    assert min(passed) >= 1
    assert found.said == f"passed: {sum(passed)} passed"
    rows = [line.split("|")[1:-1] for line in gpu.table({"memcheck": found}).splitlines() if line]
    assert [cell.strip() for cell in rows[-1]] == ["`sigmoid_curvature`", "f64", str(passed[1])]


@pytest.mark.soak
def test_a_test_that_fails_and_a_process_that_dies(gpu, monkeypatch, tmp_path):
    only(gpu, monkeypatch, stand_in(tmp_path, "def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pass"))
    found = gpu.sanitized("racecheck", 600.0)
    assert found.failed
    assert found.said.startswith("FAILED: ")
    assert {"2 passed", "1 failed"} == {*found.said.removeprefix("FAILED: ").split(", ")}
    only(gpu, monkeypatch, stand_in(tmp_path, "import os\ndef test_a(): os._exit(3)\ndef test_b(): os._exit(3)"))
    assert gpu.sanitized("racecheck", 600.0).said == "FAILED: 2 processes without a report"


@pytest.mark.soak
def test_what_time_does_not_allow_is_not_reached(gpu, monkeypatch, tmp_path):
    only(gpu, monkeypatch, stand_in(tmp_path, "def test_a(): pass\ndef test_b(): pass"))
    assert gpu.sanitized("memcheck", -1.0).said == "FAILED: 2 not reached"
    monkeypatch.setattr(gpu, "GRACE", 6.0 - 600.0)
    only(gpu, monkeypatch, stand_in(tmp_path, "def test_a(): time.sleep(600)\ndef test_b(): time.sleep(600)"))
    assert gpu.sanitized("memcheck", 600.0).said == "FAILED: 2 processes without a report"

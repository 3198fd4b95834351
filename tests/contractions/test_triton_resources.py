"""Triton's kernels compiled for processors that are not here: they fit, and keep what they compute in registers."""

import os
import subprocess
import sys

import pytest

from support import ROOT
from support.combinations import in_soak

pytest.importorskip("triton", reason="Triton is not installed")
SHARED = {"sm_90": 227 * 1024, "sm_80": 99 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that a block of threads can have; of sm_80 and its kin the least."""


@pytest.mark.parametrize("target", ["sm_90", *in_soak("gfx942", "sm_80")])
def test_kernels_fit(tmp_path, target):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = ROOT / "tests" / "support" / "triton_resources.py"
    printed = subprocess.run(
        [sys.executable, script, target], env=environment, capture_output=True, text=True, check=True
    )
    rows = [line.strip("|").split("|") for line in printed.stdout.splitlines()[2:]]
    assert len(rows) == 8
    for _, kernel, _, stack, shared in rows:
        assert int(shared.replace(",", "")) <= SHARED[target], kernel
        assert int(stack) == 0 or target == "sm_80", kernel

"""The notebook of two networks runs from top to bottom, and what it prints is what its text says."""

import re
import runpy

import pytest

from support import ROOT


def test_clean_against_noisy(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "docs" / "examples" / "clean_against_noisy.py"))
    out = capsys.readouterr().out
    clean, noisy = (float(value.split()[1]) for value in re.findall(r"^ network .*$", out, re.MULTILINE))
    assert noisy > 10 * clean
    intervals = re.findall(r"^\w+: \d+, between (\d+) and (\d+)$", out, re.MULTILINE)
    assert len(intervals) == 2
    for value, (low, high) in zip((clean, noisy), intervals, strict=True):
        assert float(low) - 1 <= value <= float(high) + 1
    (kept, trace), (other, larger) = re.findall(r"κ ([\d.]+), trace ([\d.]+)", out)
    assert kept == other
    assert float(larger) > 10 * float(trace)

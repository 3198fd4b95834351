"""What the tests share: truth by nested autograd, networks with losses and data, and scripts for developers."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the checkout


def known_stderr(estimate: Any) -> float:
    """Return the standard error of an estimate; 0 where it is exact, and where its probes agree so that it has none."""
    return estimate.stderr if estimate.stderr and estimate.stderr > 0 else 0.0

"""What the tests share: truth by nested autograd, networks with losses and data, and scripts for developers."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the checkout

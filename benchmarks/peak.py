"""Peak memory of measuring :func:`networks.plain`, or a head by itself, in a process of its own.

``python benchmarks/peak.py (pyflatness|sweep) N CLASSES WIDTH DEPTH PART``, PART samples at once in the bare sweep; and
``python benchmarks/peak.py (head|products) ROWS VOCABULARY FEATURES PART``, PART rows at once in :func:`bare.products`.
Prints the bytes by which the largest resident size (VmHWM, Linux only) grows beyond what the imports, the data and a
call on two samples (which loads code) took.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import bare
import torch
from networks import images, measurable, plain
from torch import nn

import pyflatness as pf


def resident() -> int:
    """Return the largest number of bytes so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def of_network(what: str, n: int, classes: int, width: int, depth: int, part: int) -> None:
    """Measure a network once and print the peak."""
    torch.manual_seed(0)
    model = plain(width, depth, classes)
    x, y = images(n), torch.arange(n) % classes
    sweep = bare.Sweep(model, measurable(model))

    def work(samples: int) -> None:
        if what == "sweep":
            sweep.run(x[:samples].split(part))
        else:
            batch = (x[:samples], y[:samples])
            pf.measure(model, nn.CrossEntropyLoss(), batch, measures="relative_flatness", progress=False)

    _print_peak(work, n)


def of_head(what: str, n: int, vocabulary: int, features: int, part: int) -> None:
    """Measure a head once and print the peak."""
    x, w = torch.randn(n, features), torch.randn(vocabulary, features)

    def work(rows: int) -> None:
        if what == "products":
            bare.products(x[:rows], w, part)
        else:
            pf.head_flatness(x[:rows], w)

    _print_peak(work, n)


def _print_peak(work: Callable[[int], None], n: int) -> None:
    work(2)
    before = resident()
    work(n)
    print(resident() - before)


if __name__ == "__main__":
    (of_head if sys.argv[1] in ("head", "products") else of_network)(sys.argv[1], *map(int, sys.argv[2:]))

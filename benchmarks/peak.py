"""Peak memory of measuring :func:`networks.plain` in a process of its own.

``python benchmarks/peak.py (pyflatness|sweep) N CLASSES WIDTH DEPTH PART``, PART samples at once in the bare sweep.
Prints the bytes by which the largest resident size (VmHWM, Linux only) grows beyond what the imports, the data and a
call on two samples (which loads code) took.
"""

import sys
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


def main(what: str, n: int, classes: int, width: int, depth: int, part: int) -> None:
    """Do the work once and print its peak."""
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

    work(2)
    before = resident()
    work(n)
    print(resident() - before)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

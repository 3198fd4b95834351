"""How time and peak memory grow with threads, samples, classes, width and depth.

Run from the project's root: ``python benchmarks/growth.py [threads] [n] [classes] [width] [depth] [--full]``; all axes
unless some are named. Each axis is varied alone around one point: :func:`networks.plain` with 32 channels and 4 layers,
256 samples, 10 classes, and as many threads as torch has. The largest sizes of n and classes come with ``--full``: each
of them takes a minute or two. Needs rich, and Linux for the memory.

``pyflatness`` is the whole call of ``pf.measure`` for relative flatness of all layers, ``sweep`` the bare sweep over
parts of the same sizes (:mod:`bare`); all sizes of an axis are timed in turn. Peak memory is of fresh processes
(:mod:`peak`). The last line of an axis has the exponents: the slope of a least-squares line through the logarithms of
size and figure.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from statistics import linear_regression

import bare
import torch
from layers import Work
from networks import images, plain
from rich.console import Console
from rich.table import Table
from timing import in_turn

AXES = {
    "threads": (1, 2),
    "n": (256, 1000, 4000, 16_000),
    "classes": (2, 10, 50, 250),
    "width": (8, 16, 32, 64, 128),
    "depth": (2, 4, 8, 16),
}
LARGE = {"n": (64_000,), "classes": (1000,)}


@dataclass(frozen=True)
class Point:
    """What is measured."""

    threads: int
    n: int = 256
    classes: int = 10
    width: int = 32
    depth: int = 4


@dataclass(frozen=True)
class Figures:
    """Seconds and MiB of pyflatness and of the bare sweep, the ratio of their times, and the largest part."""

    seconds: float
    sweep_seconds: float
    mib: float
    sweep_mib: float
    ratio: float
    part: int

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        times = (f"{self.seconds * 1e3:.1f}", f"{self.sweep_seconds * 1e3:.1f}", f"{self.ratio:.2f}")
        return [str(self.part), *times, f"{self.mib:.0f}", f"{self.sweep_mib:.0f}", f"{self.mib / self.sweep_mib:.2f}"]


def figures(points: Sequence[Point], rounds: int) -> list[Figures]:
    """Time pyflatness and the sweep at all points in turn, and measure the memory of each."""
    works = {
        point: Work("", plain(point.width, point.depth, point.classes), images(point.n), point.classes)
        for point in points
    }
    ways: dict[tuple[Point, str], Callable[[], object]] = {}
    for point, work in works.items():
        sweep = bare.Sweep(work.model, work.names)
        ways[point, "pyflatness"] = partial(_threaded, point.threads, work.measure)
        ways[point, "sweep"] = partial(_threaded, point.threads, partial(sweep.run, work.inputs()))
    timings = in_turn(ways, rounds, repeats=1)
    found = []
    for point, work in works.items():
        ours, floor, part = timings[point, "pyflatness"], timings[point, "sweep"], max(work.parts)
        mib, sweep_mib = (_peak(what, point, part) / 2**20 for what in ("pyflatness", "sweep"))
        found.append(Figures(ours.median, floor.median, mib, sweep_mib, ours.ratio(floor), part))
    return found


def rows(axis: str, sizes: Sequence[int], base: Point, rounds: int) -> Iterator[list[str]]:
    """Yield a row for each size along an axis, and one of the exponents."""
    found = figures([replace(base, **{axis: size}) for size in sizes], rounds)
    for size, row in zip(sizes, found, strict=True):
        yield [axis, f"{size:,}", *row.cells()]
    exponents = {
        what: linear_regression([log(size) for size in sizes], [log(getattr(row, what)) for row in found]).slope
        for what in ("seconds", "sweep_seconds", "mib", "sweep_mib")
    }
    shown = {what: f"{exponent:.2f}" for what, exponent in exponents.items()}
    yield ["", "exponent", "", shown["seconds"], shown["sweep_seconds"], "", shown["mib"], shown["sweep_mib"], ""]


def main() -> None:
    """Print a table with a section for each axis."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", help=f"of {', '.join(AXES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="the largest sizes too")
    arguments = parser.parse_args()
    unknown = set(arguments.axes) - set(AXES)
    if unknown:
        parser.error(f"no axes {', '.join(sorted(unknown))}; there are {', '.join(AXES)}")
    torch.manual_seed(0)
    base = Point(torch.get_num_threads())
    table = Table(
        *("axis", "size", "part", "median ms", "sweep", "ratio", "peak MiB", "sweep", "ratio"),
        title=f"Growth around {', '.join(f'{name} {size}' for name, size in asdict(base).items())}",
    )
    try:
        for axis in [name for name in AXES if name in (arguments.axes or AXES)]:
            table.add_section()
            sizes = AXES[axis] + (LARGE.get(axis, ()) if arguments.full else ())
            for row in rows(axis, sizes, base, arguments.rounds):
                print(*row, file=sys.stderr)
                table.add_row(*row)
    finally:  # an interrupted run shows what it has
        Console(width=120).print(table)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


def _threaded(threads: int, function: Callable[[], object]) -> None:
    """Call a function with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        function()
    finally:
        torch.set_num_threads(before)


def _peak(what: str, point: Point, part: int) -> int:
    """Return the bytes that one call takes in a process of its own."""
    sizes = (point.n, point.classes, point.width, point.depth, part)
    command = [sys.executable, str(Path(__file__).with_name("peak.py")), what, *map(str, sizes)]
    env = {**os.environ, "OMP_NUM_THREADS": str(point.threads)}
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout)


if __name__ == "__main__":
    main()

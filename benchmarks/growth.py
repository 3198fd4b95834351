"""How time and peak memory grow with threads, samples, classes, width and depth, and a head's with its sizes.

Run from the project's root: ``python benchmarks/growth.py [threads] [n] [classes] [width] [depth] [vocabulary]
[features] [--full]``; all axes unless some are named. Each axis is varied alone around one point. That of a network is
:func:`networks.plain` with 32 channels and 4 layers, 256 samples, 10 classes, and as many threads as torch has. That of
a head, for ``vocabulary`` and ``features``, is 1,024 rows of 256 features and 16,000 classes. The largest sizes of n
and classes come with ``--full``: each of them takes a minute or two. Needs rich, and Linux for the memory.

``pyflatness`` is the whole call of ``pf.measure`` for relative flatness of all layers, ``floor`` the bare sweep over
parts of the same sizes (:mod:`bare`); of a head it is ``pf.head_flatness``, against the two products of its formula by
128 rows. All sizes of an axis are timed in turn. Peak memory is of fresh processes (:mod:`peak`). The last line of an
axis has the exponents: the slope of a least-squares line through the logarithms of size and figure.
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

import pyflatness as pf

AXES = {
    "threads": (1, 2),
    "n": (256, 1000, 4000, 16_000),
    "classes": (2, 10, 50, 250),
    "width": (8, 16, 32, 64, 128),
    "depth": (2, 4, 8, 16),
    "vocabulary": (1000, 4000, 16_000, 64_000),
    "features": (64, 128, 256, 512, 1024),
}
LARGE = {"n": (64_000,), "classes": (1000,)}


PART = 128  # rows of features at a time, of a head's two products


@dataclass(frozen=True)
class Setting:
    """What is timed at a point, pyflatness and its floor over parts of so many samples, and what peak.py is told."""

    ours: Callable[[], object]
    floor: Callable[[], object]
    part: int
    names: tuple[str, str]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """Sizes of a network and its data."""

    threads: int
    n: int = 256
    classes: int = 10
    width: int = 32
    depth: int = 4

    def setting(self) -> Setting:
        """Return what is timed."""
        work = Work("", plain(self.width, self.depth, self.classes), images(self.n), self.classes)
        sweep = bare.Sweep(work.model, work.names)
        sizes = (self.n, self.classes, self.width, self.depth)
        run = partial(sweep.run, work.inputs())
        return Setting(work.measure, run, max(work.parts), ("pyflatness", "sweep"), sizes)


@dataclass(frozen=True)
class Head:
    """Sizes of a head and its features."""

    threads: int
    n: int = 1024
    vocabulary: int = 16_000
    features: int = 256

    def setting(self) -> Setting:
        """Return what is timed."""
        x, w = torch.randn(self.n, self.features), torch.randn(self.vocabulary, self.features)
        sizes = (self.n, self.vocabulary, self.features)
        floor = partial(bare.products, x, w, PART)
        return Setting(partial(pf.head_flatness, x, w), floor, PART, ("head", "products"), sizes)


Point = Network | Head


@dataclass(frozen=True)
class Figures:
    """Seconds and MiB of pyflatness and of its floor, the ratio of their times, and the largest part."""

    seconds: float
    floor_seconds: float
    mib: float
    floor_mib: float
    ratio: float
    part: int

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        times = (f"{self.seconds * 1e3:.1f}", f"{self.floor_seconds * 1e3:.1f}", f"{self.ratio:.2f}")
        return [str(self.part), *times, f"{self.mib:.0f}", f"{self.floor_mib:.0f}", f"{self.mib / self.floor_mib:.2f}"]


def figures(points: Sequence[Point], rounds: int) -> list[Figures]:
    """Time pyflatness and the floor at all points in turn, and measure the memory of each."""
    settings = {point: point.setting() for point in points}
    ways: dict[tuple[Point, str], Callable[[], object]] = {}
    for point, setting in settings.items():
        ways[point, "ours"] = partial(_threaded, point.threads, setting.ours)
        ways[point, "floor"] = partial(_threaded, point.threads, setting.floor)
    timings = in_turn(ways, rounds, repeats=1)
    found = []
    for point, setting in settings.items():
        ours, floor = timings[point, "ours"], timings[point, "floor"]
        mib, floor_mib = (_peak(name, setting, point.threads) / 2**20 for name in setting.names)
        found.append(Figures(ours.median, floor.median, mib, floor_mib, ours.ratio(floor), setting.part))
    return found


def rows(axis: str, sizes: Sequence[int], base: Point, rounds: int) -> Iterator[list[str]]:
    """Yield a row for each size along an axis, and one of the exponents."""
    found = figures([replace(base, **{axis: size}) for size in sizes], rounds)
    for size, row in zip(sizes, found, strict=True):
        yield [axis, f"{size:,}", *row.cells()]
    exponents = {
        what: linear_regression([log(size) for size in sizes], [log(getattr(row, what)) for row in found]).slope
        for what in ("seconds", "floor_seconds", "mib", "floor_mib")
    }
    shown = {what: f"{exponent:.2f}" for what, exponent in exponents.items()}
    yield ["", "exponent", "", shown["seconds"], shown["floor_seconds"], "", shown["mib"], shown["floor_mib"], ""]


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
    bases: tuple[Point, ...] = (Network(torch.get_num_threads()), Head(torch.get_num_threads()))
    around = [", ".join(f"{name} {size}" for name, size in asdict(base).items()) for base in bases]
    table = Table(
        *("axis", "size", "part", "median ms", "floor", "ratio", "peak MiB", "floor", "ratio"),
        title=f"Growth of a network around {around[0]};\nof a head around {around[1]}",
    )
    try:
        for axis in [name for name in AXES if name in (arguments.axes or AXES)]:
            table.add_section()
            sizes = AXES[axis] + (LARGE.get(axis, ()) if arguments.full else ())
            base = next(base for base in bases if hasattr(base, axis))
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


def _peak(name: str, setting: Setting, threads: int) -> int:
    """Return the bytes that one call takes in a process of its own."""
    sizes = (*setting.sizes, setting.part)
    command = [sys.executable, str(Path(__file__).with_name("peak.py")), name, *map(str, sizes)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout)


if __name__ == "__main__":
    main()

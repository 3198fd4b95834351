"""Measures of any layer: pyflatness against the bare sweep, composed torch, and other libraries.

Run from the project's root: ``python benchmarks/layers.py [resnet] [resnet128] [resnet20] [lenet] [alone] [peers]``;
all of them unless some are named. Every figure is a ratio within one run, alternatives in turn; nothing is
asserted but that all ways give the same value. Needs rich; rows of libraries that are not installed say so.

``pyflatness`` is the whole call of ``pf.measure`` for relative flatness, its certificate of linearity included;
``sweep`` the bare sweep over parts of the same sizes, ``composed`` the same with contractions in torch (:mod:`bare`),
``forward`` its forward pass without gradients. ``contraction`` is what pyflatness takes beyond the sweep, and
``multiply-adds`` what their multiply-adds would take at the rate of a 1024 × 1024 product: those of relative flatness
alone, by the cheapest route for each layer. ``as a head`` is ``pf.relative_flatness``, which sends nothing backward.

Notes, experiments that lost:
- Signals of layers with few rows copied into one matrix (LeNet5: 9 × 6 rows, n = 5,000): 0.60 s to 0.39 s in the
  kernel, and 0.57 s to copy them row by row. Their places are listed instead.
- Every signal's own nonzero places, kernel rows in registers: 4.7 to 3.9 ms for conv1 of LeNet5 (256 samples, one
  thread), 2.0 to 2.3 ms for conv2; half of either is the scan for the zeros and what is done with M. Nine signals
  together, which share the scan and the patches, take about 1.0 and 0.7 ms each.
- Patches written out whole for that: 15.5 ms for nine signals of conv1; as pieces of lines, which patches below one
  another share, 11.2 ms.
- Signals held back as the tensors that backward passes give: 250,000 page faults a call (LeNet5, n = 5,000) and a fifth
  of its time, for the C library gives their pages back to the system whenever all of them are free. One block of 32 MiB
  allocated and freed raises its limits and ends that, for the whole process and for good; buffers that the signals are
  copied to end it too, and take as long as the tensors with that block.
- Twice as much held back: the same time, 20 MiB more.
- The triangle of R in two or four blocks: 0.86 to 1.0 of the time of R δ and what follows at n = 32, 1.06 to 1.7 at 8.
- R as the factor of a thin QR of wᵀ: 0.19 s for ResNet-18's layers against 0.09 s by Cholesky of w wᵀ in float64, and
  up to 15 s where another process holds a core.
- Several cotangents in one backward pass by vmap (`torch.func.vmap` over `autograd.grad`, or `is_grads_batched`, which
  takes convolutions and BatchNorm one after the other all the same), all nine against one after the other: LeNet5 0.9
  of the time at n = 8, 1.2 at 64, 2.4 at 256; ResNet-18 0.66 at n = 2, 1.2 at 8, 1.85 at 32.
- R δ in memory that is kept over layers and micro-batches, for its page faults: 1.01 and 1.00 of the time (ResNet-18,
  n = 8 and 32, in turn with new memory).
- R δ as one product over all samples' rows: the copy costs more than it saves (ResNet-18, P = 256: 3.0 ms, by batched
  products 2.0 ms).
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import bare
import peers
import torch
from networks import images, lenet5, measurable, resnet18, resnet20, settled
from rich.console import Console
from rich.table import Table
from timing import in_turn
from torch import Tensor, nn

import pyflatness as pf
from pyflatness.model import calling

LOSS = nn.CrossEntropyLoss()
EXPENSIVE = 2.0  # seconds; peers that take more get three rounds at most


@dataclass
class Work:
    """A model, data, and the layers to be measured."""

    title: str
    model: nn.Module
    x: Tensor
    classes: int = 10
    layers: list[str] | None = None
    curvature: str = "auto"
    y: Tensor = field(init=False)
    names: list[str] = field(init=False)
    parts: list[int] = field(init=False)
    report: pf.results.Report = field(init=False)

    def __post_init__(self) -> None:
        self.y = torch.arange(len(self.x)) % self.classes
        self.names = self.layers or measurable(self.model)
        self.report, self.parts = self._first()

    def measure(self, **options: object) -> pf.results.Report:
        """Return the call that is timed."""
        return pf.measure(
            self.model,
            LOSS,
            (self.x, self.y),
            layers=self.layers,
            measures="relative_flatness",
            curvature=self.curvature,
            progress=False,
            **options,
        )

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the data in the parts that pyflatness cuts it to."""
        return list(zip(self.x.split(self.parts), self.y.split(self.parts), strict=True))

    def inputs(self) -> list[Tensor]:
        """Return the same without targets."""
        return [x for x, _ in self.batches()]

    def kappa(self) -> float:
        """Return relative flatness of the first layer."""
        return self.report[self.names[0], "relative_flatness"].value

    def _first(self) -> tuple[pf.results.Report, list[int]]:
        seen: list[int] = []

        def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            if not calling.now.dry:
                seen.append(len(batch[0]))
            return model(batch[0]), batch[1]

        report = self.measure(forward=forward)
        assert sum(seen) == len(self.x), f"the parts {seen} are not those of a sweep without retries"
        return report, seen


@dataclass(frozen=True)
class Line:
    """A line of the table; ratios are shown where there are any, ``limit`` is for one of them."""

    what: str
    seconds: float | None = None
    of_sweep: float | None = None
    ours_over_it: float | None = None
    limit: float | None = None

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        held = self.ours_over_it if self.ours_over_it is not None else self.of_sweep
        target = ["", ""]
        if self.limit is not None and held is not None:
            target = [f"≤ {self.limit:.2f}", "yes" if held <= self.limit else "NO"]
        milliseconds = "" if self.seconds is None else f"{self.seconds * 1e3:.2f}"
        return [self.what, milliseconds, _shown(self.of_sweep), _shown(self.ours_over_it), *target]


def swept(work: Work, rounds: int, whole: float | None = None, contraction: float | None = None) -> Iterator[Line]:
    """Time pyflatness, the sweep and composed torch; the targets are shares of the sweep."""
    sweep = bare.Sweep(work.model, work.names)
    _check_composed(work, sweep)
    timings = in_turn(
        {
            "pyflatness": work.measure,
            "sweep": lambda: sweep.run(work.inputs()),
            "composed": lambda: bare.composed(sweep, work.inputs()),
            "forward": lambda: _forward(work),
        },
        rounds,
        repeats=1,
    )
    ours, floor, composed, forward = timings.values()
    products = bare.multiply_adds(sweep, work.x, work.classes - 1) * (work.classes - 1) * len(work.x) / product_rate()
    share = ours.ratio(floor)
    yield Line("pyflatness", ours.median, share, limit=whole)
    yield Line("sweep", floor.median, 1.0, share)
    yield Line("contraction", ours.median - floor.median, share - 1, limit=contraction)
    yield Line("composed", composed.median, composed.ratio(floor), ours.ratio(composed))
    yield Line("forward", forward.median, forward.ratio(floor), ours.ratio(forward))
    yield Line("multiply-adds", products, products / floor.median)


def beside(work: Work, others: dict[str, Callable[[], Any]], rounds: int, limit: float | None) -> Iterator[Line]:
    """Time other ways to the value of one layer; those that give another value are not timed."""
    timed: dict[str, Callable[[], Any]] = {}
    for name, function in others.items():
        start = time.perf_counter()
        value = float(function())
        if abs(value - work.kappa()) > 1e-3 * abs(work.kappa()):
            yield Line(f"{name}: {value:.6g}, not {work.kappa():.6g}")
            continue
        timed[name] = function
        if time.perf_counter() - start > EXPENSIVE:
            rounds = min(rounds, 3)
    timings = in_turn({"": work.measure, **timed}, rounds, repeats=1)
    ours = timings.pop("")
    yield from (Line(name, timing.median, None, ours.ratio(timing), limit) for name, timing in timings.items())


def resnet(rounds: int) -> Iterator[tuple[str, Iterator[Line]]]:
    """All layers of ResNet-18, on few images."""
    yield from _resnet18(rounds, (8, 1.35), (32, 1.3))


def resnet128(rounds: int) -> Iterator[tuple[str, Iterator[Line]]]:
    """All layers of ResNet-18, on more."""
    yield from _resnet18(rounds, (128, 1.25))


def _resnet18(rounds: int, *sizes: tuple[int, float]) -> Iterator[tuple[str, Iterator[Line]]]:
    model = settled(resnet18())
    for n, limit in sizes:
        work = Work("ResNet-18, 21 layers", model, images(n))
        yield titled(work), swept(work, min(rounds, 5), limit)


def published(rounds: int) -> Iterator[tuple[str, Iterator[Line]]]:
    """All layers of ResNet-20, with published weights."""
    work = Work("ResNet-20, 20 layers", resnet20(), images(1000))
    yield titled(work), swept(work, min(rounds, 5), 1.3)


def lenet(rounds: int) -> Iterator[tuple[str, Iterator[Line]]]:
    """All layers of LeNet5."""
    work = Work("LeNet5, 5 layers", lenet5().eval(), images(5000))
    yield titled(work), swept(work, rounds, 1.2)


def alone(rounds: int) -> Iterator[tuple[str, Iterator[Line]]]:
    """One linear layer of LeNet5 by the sweep, and the head as a head."""
    for name in ("fc1", "fc2", "fc3"):
        work = Work(f"LeNet5 {name}", lenet5().eval(), images(5000), layers=[name], curvature="ggn")
        others: dict[str, Callable[[], Any]] = {}
        if name == "fc3":
            others["as a head"] = lambda work=work: pf.relative_flatness(
                work.model, LOSS, (work.x, work.y), progress=False
            )
        yield (
            titled(work),
            itertools.chain(swept(work, rounds), beside(work, others, rounds, None), backpack(work, rounds)),
        )


def others(rounds: int) -> Iterator[tuple[str, Iterator[Line]]]:
    """The head of LeNet5 on few samples, against everything there is."""
    model = lenet5().eval()
    work = Work("LeNet5 fc3", model, images(500), layers=["fc3"], curvature="ggn")
    around = peers.Around(model, "fc3")
    whole = [(work.x, work.y)]
    ways: dict[str, Callable[[], Any]] = {
        "a pass for every weight": lambda: peers.nested_autograd(around, whole),
        "torch.func.hessian": lambda: peers.functional_hessian(around, whole),
    }
    missing = []
    try:
        operator = peers.curvlinops_hessian(peers.Around(model, "fc3"))
        ways["curvlinops Hessian"] = lambda: operator(whole)
    except ImportError as error:
        missing = [Line(f"curvlinops: {error}")]
    yield titled(work), itertools.chain(beside(work, ways, min(rounds, 3), None), missing, backpack(work, rounds, None))


def backpack(work: Work, rounds: int, limit: float | None = 1 / 1.5) -> Iterator[Line]:
    """BackPACK, over all samples at once and over the parts of the sweep, whichever it likes better."""
    try:
        measured = peers.backpack_identity(peers.Around(work.model, work.names[0]))
    except ImportError as error:
        return iter([Line(f"BackPACK: {error}")])
    ways: dict[str, Callable[[], Any]] = {
        "BackPACK": lambda: measured([(work.x, work.y)]),
        "BackPACK, in parts": lambda: measured(work.batches()),
    }
    return beside(work, ways, rounds, limit)


def product_rate() -> float:
    """Return multiply-adds a second of a product of 1024 × 1024 matrices."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 1024**3 / in_turn({"": lambda: torch.mm(a, b)}, 5)[""].median


def titled(work: Work) -> str:
    """Return what is measured, and the parts that the data is cut to."""
    parts = [f"{len(list(group))} × {size}" for size, group in itertools.groupby(work.parts)]
    return f"{work.title}\nn = {len(work.x):,}\nparts {', '.join(parts)}"


GROUPS = {
    "resnet": resnet,
    "resnet128": resnet128,
    "resnet20": published,
    "lenet": lenet,
    "alone": alone,
    "peers": others,
}


def main() -> None:
    """Print a table of times and ratios with the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    unknown = set(arguments.rows) - set(GROUPS)
    if unknown:
        parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    wanted = arguments.rows or list(GROUPS)
    torch.manual_seed(0)
    table = Table(
        *("work", "what", "median ms", "it / sweep", "pyflatness / it", "to reach", "reached"),
        title="float32, times in turn",
    )
    show(table, [group for name, group in GROUPS.items() if name in wanted], arguments.rounds)


def show(table: Table, groups: Iterable[Callable[[int], Iterator[tuple[str, Iterator[Line]]]]], rounds: int) -> None:
    """Measure groups of lines and print them as one table."""
    try:
        for group in groups:
            for title, lines in group(rounds):
                add(table, title, lines)
    finally:  # an interrupted run shows what it has
        if table.row_count:
            Console(width=120).print(table)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


def add(table: Table, title: str, lines: Iterator[Line]) -> None:
    """Add a section of lines, with the title beside the first ones."""
    print(", ".join(title.splitlines()), file=sys.stderr)
    table.add_section()
    for part, line in zip(itertools.chain(title.splitlines(), itertools.repeat("")), lines, strict=False):
        table.add_row(part, *line.cells())


@torch.no_grad()
def _forward(work: Work) -> None:
    for x in work.inputs():
        work.model(x)


def _check_composed(work: Work, sweep: bare.Sweep) -> None:
    for name, values in bare.composed(sweep, work.inputs()).items():
        expected = work.report[name, "relative_flatness"].value
        torch.testing.assert_close(values.double(), torch.tensor(expected).double(), rtol=1e-3, atol=0)


def _shown(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}" if ratio < 0.1 else f"{ratio:.2f}"


if __name__ == "__main__":
    main()

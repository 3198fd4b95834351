"""Relative flatness of a head: pyflatness against its floors and against what a user would compose in torch.

Run from the project's root: ``python benchmarks/head.py``, with parts of rows' names for some of them (``50000``,
``"(1,"``, ``LeNet5``). Every figure is a ratio within one run, alternatives in turn; nothing is asserted. Needs rich.
Rows named AVX2 are timed in a process of their own that is held to AVX2, torch and MKL too.

Floors: ``read`` is one pass over the features, ``product`` one bare product φ wᵀ, ``products`` all matrix products of
the cheaper route (n d m + d² m + n d² multiply-adds by w wᵀ), ``forward`` the model over the data without gradients.

Notes, experiments that lost:
- Logits with lanes along the classes (broadcast features, padded weight panel) instead of along the features: 1.45 ×
  the time at (50000, 10, 84), 1.6 × at (50000, 10, 512); ten classes waste six lanes of sixteen, norms and softmax need
  sums across lanes.
- Features transposed a slice at a time, lanes along the rows from the start: 1.0 × at (50000, 10, 84), 1.25 × at
  (50000, 10, 512), with AVX2 1.2 × and 1.5 ×. Transposed in registers, 16 × 16 at a time, products and norms of
  (50000, 10, 84) take 0.93 × the time over memory and 1.00 × in cache, with AVX2 0.81 × and 1.15 × (medians of 41, one
  thread): 768 shuffles for 32 rows in the place of 990 operations that fold.
- Without prefetching the rows of a later block: 1.3 × the time at (50000, 10, 512).
- Prefetches past the second cache, so that the Python around the kernel finds its own in there: 0.98 to 1.00 × the call
  at (50000, 10, 84), 1.00 × at (50000, 10, 512), with AVX2 1.00 × both.
- The sum over rows by adding numbers one after another, and labels compared one by one: 0.08 ms of 0.75 at
  (50000, 10, 84); now both are done in vectors.
- A weight packed so that its rows begin at whole vectors: 0.97 × the kernel's time at (50000, 10, 84), kept. What costs
  there is that the features' rows do not: 80 features take 0.87 × the time of 84, 96 take 0.93 ×.
- E|w|² - |Ew|² after a shift by the most probable row: as fast as pairwise distances, wrong where p is flat.
"""

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch
from networks import images, lenet5
from rich.console import Console
from rich.table import Table
from timing import Timing, in_turn
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf


def composed_rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return E|w|² - |E w|² in torch, by two products with w."""
    p = torch.softmax(torch.addmm(b, x, w.t()), 1)
    variance = p @ w.square().sum(1) - (p @ w).square().sum(1)
    return (x.square().sum(1) * variance).mean()


def composed_gram(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return the same as :func:`composed_rows`, by the Gram matrix w wᵀ."""
    p = torch.softmax(torch.addmm(b, x, w.t()), 1)
    gram = w @ w.t()
    return (x.square().sum(1) * (p @ gram.diagonal() - ((p @ gram) * p).sum(1))).mean()


def nested_autograd(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return the value by the definition: one backward pass for every weight."""
    w = w.clone().requires_grad_()
    y = torch.zeros(len(x), dtype=torch.int64)
    (gradient,) = torch.autograd.grad(F.cross_entropy(torch.addmm(b, x, w.t()), y), w, create_graph=True)
    gram, total = (w @ w.t()).detach(), torch.zeros(())
    for s in range(len(w)):
        for j in range(w.shape[1]):
            (row,) = torch.autograd.grad(gradient[s, j], w, retain_graph=True)
            total = total + gram[s] @ row[:, j]
    return total


def head(n: int, d: int, m: int, rounds: int) -> dict[str, Timing]:
    """Time one head on random features."""
    x, w, b, y = torch.randn(n, m), torch.randn(d, m) / m**0.5, torch.randn(d), torch.randint(d, (n,))
    slice_ = x[:200]
    alternatives: dict[str, Callable[[], object]] = {
        "pyflatness": lambda: pf.head_flatness(x, w, b, y),
        "read": lambda: x.sum(),
        "product": lambda: x @ w.t(),
        "products": lambda: (x @ w.t()) @ (w @ w.t()),
        "composed, rows": lambda: composed_rows(x, w, b),
        "composed, Gram": lambda: composed_gram(x, w, b),
    }
    timings = in_turn(alternatives, rounds)
    if d * m <= 1000:
        (timings["nested autograd, 200 rows"],) = in_turn({"": lambda: nested_autograd(slice_, w, b)}, 1).values()
    return timings


def head_by_avx2(n: int, d: int, m: int, rounds: int) -> dict[str, Timing]:
    """Time one head in a process in which pyflatness, torch and MKL have no wider vectors than AVX2's."""
    before = dict(os.environ)
    os.environ.update(PYFLATNESS_ISA="avx2", ATEN_CPU_CAPABILITY="avx2", MKL_ENABLE_INSTRUCTIONS="AVX2")
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            return process.submit(head, n, d, m, rounds).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def wide(n: int, d: int, m: int, rounds: int) -> dict[str, Timing]:
    """Time a vocabulary-size head, against its two products over all rows at once and by chunks of rows."""
    x, w, y = torch.randn(n, m), torch.randn(d, m).div_(m**0.5), torch.randint(d, (n,))
    alternatives: dict[str, Callable[[], object]] = {
        "pyflatness": lambda: pf.head_flatness(x, w, None, y),
        "two products": lambda: (x @ w.t()) @ w,
        "two products, 512 rows": lambda: [(part @ w.t()) @ w for part in x.split(512)],
        "composed, 512 rows": lambda: [composed_rows(part, w, x.new_zeros(d)) for part in x.split(512)],
    }
    return in_turn(alternatives, rounds)


def network(n: int, rounds: int) -> dict[str, Timing]:
    """Time the head of LeNet5 on a data set, against the bare forward passes."""
    model = lenet5().eval()
    batches = list(zip(images(n).split(1000), torch.randint(10, (n,)).split(1000), strict=True))

    def forward() -> None:
        with torch.no_grad():
            for x, _ in batches:
                model(x)

    def measure() -> pf.results.Estimate:
        return pf.relative_flatness(model, nn.CrossEntropyLoss(), batches, progress=False)

    return in_turn({"pyflatness": measure, "forward": forward}, rounds)


# work, what is timed, (floor, most it may take of it; without a floor, most milliseconds), least factor over the best
# composed torch
TARGETS: list[tuple[str, Callable[[int], dict[str, Timing]], tuple[str, float], float | None]] = [
    ("head (1, 10, 84), n = 1", lambda rounds: head(1, 10, 84, 20 * rounds), ("", 0.060), None),
    ("head (50000, 10, 84)", lambda rounds: head(50_000, 10, 84, rounds), ("product", 1.2), 4.0),
    ("head (50000, 10, 84), AVX2", lambda rounds: head_by_avx2(50_000, 10, 84, rounds), ("product", 1.2), 4.0),
    ("head (50000, 10, 512)", lambda rounds: head(50_000, 10, 512, rounds), ("product", 0.7), 5.0),
    ("head (50000, 10, 512), AVX2", lambda rounds: head_by_avx2(50_000, 10, 512, rounds), ("product", 0.7), 5.0),
    ("head (10000, 1000, 2048)", lambda rounds: head(10_000, 1000, 2048, max(3, rounds // 5)), ("products", 1.1), None),
    (
        "head (2048, 32000, 512)",
        lambda rounds: wide(2048, 32_000, 512, max(3, rounds // 5)),
        ("two products", 1.15),
        None,
    ),
    ("head (4096, 128256, 512)", lambda rounds: wide(4096, 128_256, 512, 3), ("two products", 1.25), None),
    ("LeNet5, n = 10,000", lambda rounds: network(10_000, max(3, rounds // 3)), ("forward", 1.03), None),
]


def rows_of(
    work: str, timings: dict[str, Timing], floor: str, limit: float, factor: float | None
) -> Iterator[list[str]]:
    """Table rows of one work; the targets stand beside the floor and beside the best composed torch."""
    ours = timings["pyflatness"]
    composed = [name for name in timings if name.startswith("composed")]
    floors = [name for name in timings if floor and (name == floor or name.startswith(f"{floor},"))]
    limits = dict.fromkeys(sorted(floors, key=lambda name: timings[name].median)[:1], limit)  # the faster way
    if factor:
        limits[min(composed, key=lambda name: timings[name].median)] = 1 / factor
    for name, timing in timings.items():
        comparable = len(timing.seconds) == len(ours.seconds)
        ratio = ours.ratio(timing) if comparable else float("nan")
        target = [f"≤ {limits[name]:.2f}", "yes" if ratio <= limits[name] else "NO"] if name in limits else ["", ""]
        if not floor and timing is ours:
            target = [f"≤ {limit:.3f} ms", "yes" if timing.median * 1e3 <= limit else "NO"]
        shown = f"{ratio:.2f}" if comparable else ""
        yield [work if name == "pyflatness" else "", name, f"{timing.median * 1e3:.3f}", shown, *target]


def main() -> None:
    """Print a table of times and ratios, and the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("rows", nargs="*", help="parts of the names of rows; all without")
    options = parser.parse_args()
    torch.manual_seed(0)
    table = Table("work", "what", "median ms", "pyflatness / it", "to reach", "reached", title="float32, times in turn")
    for work, timed, (floor, limit), factor in TARGETS:
        if options.rows and not any(part in work for part in options.rows):
            continue
        table.add_section()
        for row in rows_of(work, timed(options.rounds), floor, limit, factor):
            table.add_row(*row)
    Console(width=110).print(table)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()

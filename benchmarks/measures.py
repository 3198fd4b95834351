"""Measures of one sweep together, against relative flatness alone.

Run from the project's root: ``python benchmarks/measures.py [lenet] [resnet]``; both unless one is named. Whole calls
of ``pf.measure`` over all layers, alternatives in turn; every figure is a ratio within one run. ``together`` is
``measures="sweep"``; normalised sharpness, for which weight gradients are made and squared entry by entry, has a line
of its own.

Notes, what lost:
- By multiply-adds, not run: |w ∘ M|² with pairs of positions first, Σ_s δ_ps δ_p's (Σ_j w_sj² φ_pj φ_p'j), shared by
  K = 9 signals: as many as M takes at P = 16; and the columns' sums need M, or a pass back through the layer alone,
  which takes as many again.
- One accumulator for each of the sums in the product's inner loop, or halves of them chosen at run time: 5 to 15 %
  slower than sums that each tile keeps for itself.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from networks import images, lenet5, resnet18, settled
from rich.console import Console
from rich.table import Table
from timing import in_turn
from torch import nn

import pyflatness as pf

ALONE = "relative_flatness"
BESIDE = {
    "trace": ["trace"],
    "matrix-normalised": ["matrix_normalized_sharpness", "matrix_normalized_sharpness_frobenius"],
    "neurons, columns": ["neuron_flatness", "neuron_flatness_max"],
    "neurons, rows": ["neuron_flatness_rows", "neuron_flatness_rows_max"],
}
LIMIT = 1.3  # of the measures together, over relative flatness alone


def lenet(n: int = 1000) -> tuple[str, nn.Module, torch.Tensor]:
    """Five layers."""
    return f"LeNet5, 5 layers, n = {n}", lenet5().eval(), images(n)


def resnet(n: int = 32) -> tuple[str, nn.Module, torch.Tensor]:
    """Twenty-one layers."""
    return f"ResNet-18, 21 layers, n = {n}", settled(resnet18()), images(n)


NETWORKS: dict[str, Callable[[], tuple[str, nn.Module, torch.Tensor]]] = {"lenet": lenet, "resnet": resnet}


def ratios(make: Callable[[], tuple[str, nn.Module, torch.Tensor]], rounds: int, clock: Callable[[], float]) -> Table:
    """Return relative flatness alone, with each family beside it, and with all of them."""
    title, model, x = make()
    data, loss = (x, torch.arange(len(x)) % 10), nn.CrossEntropyLoss()
    calls: dict[str, list[str] | None] = {
        "relative flatness alone": [ALONE],
        **{f"+ {what}": [ALONE, *names] for what, names in BESIDE.items()},
        "together": None,
        "relative flatness + normalised sharpness": [ALONE, "normalized_sharpness"],
    }
    timings = in_turn(
        {what: partial(pf.measure, model, loss, data, measures=names, progress=False) for what, names in calls.items()},
        rounds,
        repeats=1,
        clock=clock,
    )
    alone = timings["relative flatness alone"]
    table = Table("measures", "median ms", "it / alone", "to reach", "reached", title=title)
    for what, timing in timings.items():
        ratio = timing.ratio(alone)
        goal = (f"≤ {LIMIT}", "yes" if ratio <= LIMIT else "NO") if what == "together" else ("", "")
        table.add_row(what, f"{1e3 * timing.median:.0f}", f"{ratio:.2f}", *goal)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu", action="store_true", help="one thread, and its time on the processor: if others use it"
    )
    options = parser.parse_args(arguments)
    if options.cpu:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console()
    for name, make in NETWORKS.items():
        if not options.names or name in options.names:
            console.print(ratios(make, options.rounds, time.process_time if options.cpu else time.perf_counter))
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()

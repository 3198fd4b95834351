"""Representativeness of a head against a double loop over samples and draws, in one run.

Run from the project's root: ``python benchmarks/representativeness.py``. n = 600 samples of m = 8 features, 3 folds, 32
pairs of draws, squared error, one thread: the size of the 2021 paper's synthetic experiment. Every figure is a ratio
within one run; nothing is asserted. The loop is Eq. 3 as it stands, fold by fold, a loss at a time; one that kept its
values from fold to fold would take half as long. ``authors`` is what the authors' code calls representativeness,
against their double loop over pairs of samples. Needs rich.
"""

import argparse
import math

import torch
from rich.console import Console
from rich.table import Table
from timing import in_turn
from torch import Tensor
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.theory.sampling import assigned

N, M, FOLDS, DRAWS = 600, 8, 3, 32


def loop(phi: Tensor, w: Tensor, y: Tensor, delta: float) -> float:
    """Return Σ over folds, samples and draws, a loss at a time."""
    noise = pf.theory.truncated_normal_noise(phi, delta, probes=DRAWS)
    places, total = assigned(N, FOLDS, 0), 0.0
    for k in range(FOLDS):
        held_out, sample = (places == k).nonzero()[:, 0].tolist(), (places != k).nonzero()[:, 0].tolist()
        total += sum(float(F.mse_loss(w @ phi[j], y[j])) for j in held_out) / len(held_out) / FOLDS
        for i in sample:
            for xi in noise[:, i]:
                pair = [float(F.mse_loss(w @ (phi[i] + sign * xi), y[i])) for sign in (1, -1)]
                total -= sum(pair) / (2 * DRAWS * len(sample) * FOLDS)
    return total


def authors_loop(phi: Tensor, w: Tensor, y: Tensor) -> float:
    """Return the value as the authors' code does: every pair of a held-out and another sample."""
    places, total = assigned(N, FOLDS, 0), 0.0
    for k in range(FOLDS):
        held_out, sample = (places == k).nonzero()[:, 0].tolist(), (places != k).nonzero()[:, 0].tolist()
        weights = phi[sample].norm(dim=1) / phi[sample].norm(dim=1).sum()
        for j in held_out:
            inner = 0.0
            for v, i in zip(weights.tolist(), sample, strict=True):
                kernel = math.exp(-float((phi[j] - phi[i]).norm()) / 2) / math.sqrt(2 * math.pi)
                inner += v * kernel * float(F.mse_loss(w @ phi[i], y[j]))
            total += (float(F.mse_loss(w @ phi[j], y[j])) - inner / len(sample)) / (len(held_out) * FOLDS)
    return total


def main() -> None:
    """Print a table of times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    phi, w = torch.randn(N, M).double(), torch.randn(1, M).double()
    y, delta = (phi @ w.t()).sign(), N ** (-1 / (4 + M))
    work = {
        "Eq. 3": (
            lambda: pf.theory.representativeness(phi, w, targets=y, loss="mse_loss", folds=FOLDS, probes=DRAWS).value,
            lambda: loop(phi, w, y, delta),
        ),
        "authors": (
            lambda: pf.theory.authors_representativeness(phi, w, targets=y, loss="mse_loss", folds=FOLDS),
            lambda: authors_loop(phi, w, y),
        ),
    }
    table = Table("what", "ms", "double loop, ms", "faster by", "to reach", "values", title="float64, one thread")
    for name, (ours, theirs) in work.items():
        timings = in_turn({"ours": ours, "loop": theirs}, rounds, repeats=1)
        fast, slow = timings["ours"], timings["loop"]
        values = f"{ours():.10g}, {theirs():.10g}"
        row = f"{fast.median * 1e3:.2f}", f"{slow.median * 1e3:.0f}", f"{slow.ratio(fast):.0f} ×", "≥ 100 ×", values
        table.add_row(name, *row)
    Console(width=110).print(table)
    print(f"n = {N}, m = {M}, {FOLDS} folds, {DRAWS} pairs of draws, torch {torch.__version__}")


if __name__ == "__main__":
    main()

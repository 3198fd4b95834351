"""A head's penalty with its gradients, by the kernel and composed of torch's operations, over a floor of products.

Run from the project's root: ``python benchmarks/head_penalty.py [cuda]``, on one thread, or on a GPU, where there is no
kernel. The floor is three matrix products, φ wᵀ and the two of the backward pass; all alternatives run in turn, and
ratios are medians over the rounds. Cross-entropy with its gradients is what a training step computes anyway.
"""

import sys

import torch
from rich.console import Console
from rich.table import Table
from timing import clock_of, in_turn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.losses import penalty
from pyflatness.losses.penalty import weighted_sum

SIZES = ((128, 10, 84), (128, 10, 512), (2048, 10, 84), (50_000, 10, 84), (10_000, 64, 512))
ON_A_GPU = ((128, 10, 84), (50_000, 10, 84), (10_000, 64, 512), (8192, 1000, 2048))
ROUNDS = 3


def _row(n: int, d: int, m: int, device: torch.device) -> list[str]:
    drawn = torch.randn(n, m), 0.2 * torch.randn(d, m), torch.randn(d)
    given = features, weight, _ = [tensor.to(device).requires_grad_() for tensor in drawn]
    targets, shares = torch.randint(d, (n,)).to(device), torch.full((n,), 1 / n, dtype=torch.float64, device=device)
    slopes = torch.randn(n, d).to(device)

    @torch.no_grad()
    def products() -> None:
        torch.mm(features, weight.t())
        torch.mm(slopes, weight)
        torch.mm(slopes.t(), features)

    fits = penalty.fuses(weight)
    found = in_turn(
        {
            "floor": products,
            "kernel": lambda: torch.autograd.grad((penalty.fused if fits else weighted_sum)(*given, shares), given),
            "composed": lambda: torch.autograd.grad(weighted_sum(*given, shares), given),
            "call": lambda: torch.autograd.grad(pf.flatness_penalty(*given, targets), given),
            "risk": lambda: torch.autograd.grad(F.cross_entropy(F.linear(*given), targets), given),
        },
        ROUNDS,
        max(1, 5_000 // n) if device.type == "cpu" else 20,
        clock_of(device),
    )
    floor, call = found["floor"], found["call"]
    times = [f"{1e6 * timing.median:,.0f}" if fits or name != "kernel" else "" for name, timing in found.items()]
    kernel = f"{found['kernel'].ratio(floor):.1f}" if fits else ""
    return [f"({n}, {d}, {m})", *times, kernel, f"{call.ratio(floor):.1f}", f"{found['composed'].ratio(call):.2f}"]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(*sys.argv[1:] or ("cpu",))
    ratios = "kernel / floor", "the call / floor", "composed / the call"
    table = Table("(n, d, m)", "floor, µs", "kernel", "composed", "the call", "cross-entropy", *ratios)
    for sizes in SIZES if device.type == "cpu" else ON_A_GPU:
        table.add_row(*_row(*sizes, device))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

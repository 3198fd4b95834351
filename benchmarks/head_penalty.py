"""A head's penalty with its gradients, by the kernel and composed of torch's operations, over a floor of products.

Run from the project's root: ``python benchmarks/head_penalty.py``, on one thread. The floor is three matrix products,
φ wᵀ and the two of the backward pass; all alternatives run in turn, and ratios are medians over the rounds.
"""

import torch
from rich.console import Console
from rich.table import Table
from timing import in_turn

import pyflatness as pf
from pyflatness.training import fused_head
from pyflatness.training.softmax_variance import weighted_sum

SIZES = ((128, 10, 84), (128, 10, 512), (2048, 10, 84), (50_000, 10, 84), (10_000, 64, 512))
ROUNDS = 3


def _row(n: int, d: int, m: int) -> list[str]:
    features, weight, bias = torch.randn(n, m), 0.2 * torch.randn(d, m), torch.randn(d)
    given = [tensor.requires_grad_() for tensor in (features, weight, bias)]
    targets, shares, slopes = torch.randint(d, (n,)), torch.full((n,), 1 / n, dtype=torch.float64), torch.randn(n, d)

    @torch.no_grad()
    def products() -> None:
        torch.mm(features, weight.t())
        torch.mm(slopes, weight)
        torch.mm(slopes.t(), features)

    found = in_turn(
        {
            "floor": products,
            "kernel": lambda: torch.autograd.grad(fused_head.penalty(*given, shares), given),
            "composed": lambda: torch.autograd.grad(weighted_sum(*given, shares), given),
            "call": lambda: torch.autograd.grad(pf.flatness_penalty(*given, targets), given),
        },
        ROUNDS,
        max(1, 5_000 // n),
    )
    floor, kernel, call = (found[name] for name in ("floor", "kernel", "call"))
    times = [f"{1e6 * found[name].median:,.0f}" for name in ("floor", "kernel", "composed", "call")]
    return [f"({n}, {d}, {m})", *times, f"{kernel.ratio(floor):.1f}", f"{found['composed'].ratio(call):.2f}"]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table("(n, d, m)", "floor, µs", "kernel", "composed", "the call", "kernel / floor", "composed / the call")
    for sizes in SIZES:
        table.add_row(*_row(*sizes))
    Console().print(table)


if __name__ == "__main__":
    main()

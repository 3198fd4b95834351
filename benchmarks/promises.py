"""Count how often the interval of ``pf.allocate`` holds what unseen data show, and judge plans by KL beside these.

Run from the project's root: ``python benchmarks/promises.py resnet20 | stories [--draws 20] [--kl]``. Formats are
integers of 3, 4, 5, 6 and 8 bits with a scale for each row. Each draw plans with other data, at random among CIFAR-10's
test images or 256 stories of 64 tokens, and the changed network is judged by others that the draw left over. A line
says by how much the loss changed on both, the 90 % interval of ``plan.predicted``, and with ``--kl`` by how much it
does on others with the plan of ``loss="kl"``.
"""

import argparse
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from depth import model as storyteller
from depth import stories
from networks import cifar10, published
from torch import Tensor, nn

import pyflatness as pf

FORMATS = [f"int{bits}" for bits in (3, 4, 5, 6, 8)]


class Stories:
    """Hold the story-telling Llama, and stories."""

    model, loss, planned, judged = storyteller, "auto", 32, 224

    def __init__(self) -> None:
        self.data = stories(256)[:, :64]

    def batches(self, index: Tensor) -> Any:
        """Return some of the stories."""
        return [{"input_ids": part} for part in self.data[index].split(32)]

    def risk(self, model: nn.Module, batches: Any) -> float:
        """Return the loss on batches of one size."""
        return float(np.mean([float(model(**batch, labels=batch["input_ids"]).loss) for batch in batches]))


class Images:
    """Hold ResNet-20, and images of CIFAR-10."""

    loss, planned, judged = nn.CrossEntropyLoss(), 256, 1536

    def __init__(self) -> None:
        self.data = cifar10(10_000)

    @staticmethod
    def model() -> nn.Module:
        """Return the network with its published weights."""
        return published(20)

    def batches(self, index: Tensor) -> Any:
        """Return some of the images."""
        return [tuple(part[some] for part in self.data) for some in index.split(256)]

    def risk(self, model: nn.Module, batches: Any) -> float:
        """Return the loss on batches of one size."""
        return float(np.mean([float(self.loss(model(x), y)) for x, y in batches]))


@torch.no_grad()
def main() -> None:
    """Print a line for each draw and budget, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=("resnet20", "stories"))
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--budgets", type=float, nargs="+", default=(4.0, 5.0))
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--kl", action="store_true")
    options = parser.parse_args()
    case: Any = Stories() if options.network == "stories" else Images()
    model, found = type(case).model(), defaultdict(list)
    for seed in range(options.draws):
        index = torch.randperm(256 if options.network == "stories" else 10_000, generator=_generator(seed))
        own, others = (
            case.batches(part) for part in index[: case.planned + case.judged].split([case.planned, case.judged])
        )
        before = case.risk(model, others)
        for budget in options.budgets:
            how = {"bits": budget, "probes": options.probes, "seed": seed}
            losses = [case.loss, *(["kl"] if options.kl else [])]
            plans = [pf.allocate(model, loss, own, FORMATS, **how) for loss in losses]
            changes = [case.risk(plan.apply(model), others) - before for plan in plans]
            low, high = plans[0].predicted.interval(0.9)
            found[budget].append((low <= changes[0] <= high, *changes))
            shown = f"on these {plans[0].loss_change:.4f}, predicted [{low:.4f}, {high:.4f}], on others"
            print(f"draw {seed}, {budget} bits: {shown}", *(f"{change:.4f}" for change in changes), flush=True)
    for budget, rows in found.items():
        held, *changes = np.array(rows, dtype=float).T
        means = [f"{change.mean():.4f}" for change in changes]
        print(f"{budget} bits: {held.sum():.0f} of {len(held)} intervals; on others in the mean", *means)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    main()

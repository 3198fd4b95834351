"""Measures of Jacobians against the bare sweep: a forward pass, and C backward passes to the inputs of all layers.

Run from the project's root: ``python benchmarks/representation.py``. The network is the 2024 paper's VGG-11 on 32 × 32
images, 100 samples of noise. ``bare`` takes no gradient of a weight, and nothing of the gradients but their existence;
all alternatives in turn, ratios within a round. To reach: ``nmls`` of two classes in 1.3 × bare.
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from networks import images, measurable, vgg11
from rich.console import Console
from rich.table import Table
from timing import Timing, in_turn
from torch import Tensor, nn

import pyflatness as pf

LOSS = nn.CrossEntropyLoss()
LIMIT = 1.3


class Bare:
    """The bare sweep, on a copy of the model, in one batch."""

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model).requires_grad_(False)
        self._inputs: list[Tensor] = []
        for name in measurable(self._model):
            self._model.get_submodule(name).register_forward_pre_hook(lambda _, args: self._inputs.append(args[0]))

    def run(self, x: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the gradients of every output, in the inputs of all layers."""
        self._inputs.clear()
        outputs = self._model(x.clone().requires_grad_())
        columns = torch.eye(outputs.shape[1])
        return [
            torch.autograd.grad(outputs, self._inputs, column.expand_as(outputs), retain_graph=True)
            for column in columns
        ]

    def composed(self, x: Tensor) -> float:
        """Return NMLS of it, as a careful user would write it."""
        total = 0.0
        for rows in zip(*self.run(x), strict=True):
            jacobians = torch.stack([row.flatten(1) for row in rows], dim=1).double()
            squares = torch.linalg.eigvalsh(jacobians @ jacobians.mT)[:, -1]
            total += float(squares.clamp_min(0).sqrt().mean())
        return total


def timed(classes: int, n: int, rounds: int) -> dict[str, Timing]:
    """Return the alternatives of one row of the table; they have to agree."""
    model, x, y = vgg11(classes).eval(), images(n), torch.randint(classes, (n,))
    bare = Bare(model)

    def ours(*measures: str) -> Callable[[], Any]:
        return lambda: pf.representation(model, LOSS, (x, y), measures=measures or None)

    value, expected = ours("nmls")()["nmls"].value, bare.composed(x)
    assert abs(value - expected) < 1e-4 * expected, (value, expected)
    alternatives = {
        "bare: forward + C backward": lambda: bare.run(x),
        "composed nmls": lambda: bare.composed(x),
        "nmls": ours("nmls"),
        "all of pf.representation": ours(),
        "pf.theory.bounds": lambda: pf.theory.bounds(model, LOSS, (x, y)),
    }
    return in_turn(alternatives, rounds, repeats=1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--classes", type=int, nargs="+", default=[2, 10])
    options = parser.parse_args()
    torch.manual_seed(0)
    table = Table("classes", "what", "median ms", "it / bare", "to reach", "reached", title="VGG-11, float32")
    for classes in options.classes:
        timings = timed(classes, options.samples, options.rounds)
        bare = next(iter(timings.values()))
        table.add_section()
        for name, timing in timings.items():
            ratio = timing.ratio(bare)
            target = [f"≤ {LIMIT}", "yes" if ratio <= LIMIT else "NO"] if (classes, name) == (2, "nmls") else ["", ""]
            table.add_row(str(classes), name, f"{1e3 * timing.median:.0f}", f"{ratio:.2f}", *target)
    Console(width=110).print(table)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.samples} samples")


if __name__ == "__main__":
    main()

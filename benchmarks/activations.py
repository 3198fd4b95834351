"""What rounding of activations costs: half the trace in a layer's inputs times the mean squared error, and measured.

Run from the project's root: ``python benchmarks/activations.py [--images N]``. For every layer of the published
ResNet-20 (``../shared/models``, images of CIFAR-10) the inputs x are rounded to 2^bits levels between their least and
largest values, in this layer alone, and the loss is evaluated. If errors ε of rounding are uncorrelated it rises by

    ½ Σ_c D_c E[ε_c²]        D the diagonal by channel, ``per_neuron`` of ``input_trace``, ε_c the errors in channel c

to second order. What the gradient adds is left out of the measured change, ½ (E(x + ε) + E(x - ε)) - E(x). Then how
long a sweep takes with both traces of activations, beside one without.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from networks import cifar10, published
from rich.console import Console
from rich.table import Table
from scipy import stats
from torch import Tensor, nn

import pyflatness as pf

BITS = (3, 4, 5, 6)


def rounded(inputs: Tensor, bits: int) -> Tensor:
    """Return inputs at 2^bits levels between their least and largest value."""
    low, high = inputs.min(), inputs.max()
    step = (high - low) / (2**bits - 1)
    return ((inputs - low) / step).round() * step + low


@torch.no_grad()
def with_rounding(
    model: nn.Module, layer: nn.Module, inputs: Tensor, targets: Tensor, bits: int, sign: int
) -> tuple[float, Tensor]:
    """Return the loss with errors of rounding in a layer's inputs, or reflected, and mean squares by channel."""
    errors: list[Tensor] = []

    def change(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = args
        away = rounded(x, bits) - x
        errors.append(away.double().square().movedim(1, -1).flatten(0, -2).mean(dim=0))
        return (x + sign * away,)

    with layer.register_forward_pre_hook(change):
        value = nn.functional.cross_entropy(model(inputs).double(), targets)
    return value.item(), errors[0]


def predictions(images: int) -> None:
    """Print rank correlations and ratios over layers."""
    model, (x, y) = published(20), cifar10(images)
    report = pf.measure(model, nn.CrossEntropyLoss(), (x, y), measures=["input_trace"])
    with torch.no_grad():
        before = nn.functional.cross_entropy(model(x).double(), y).item()
    table = Table(title=f"ResNet-20, inputs of each of {len(report.layers)} layers rounded, {images} images")
    for column in ("bits", "rank correlation", "by error alone", "median ratio to measured", "median rise"):
        table.add_column(column, justify="right")
    for bits in BITS:
        expected, alone, measured = [], [], []
        for name in report.layers:
            layer = model.get_submodule(name)
            after, errors = with_rounding(model, layer, x, y, bits, 1)
            reflected, _ = with_rounding(model, layer, x, y, bits, -1)
            expected.append(0.5 * float(report[name, "input_trace"].per_neuron @ errors))
            alone.append(float(errors.sum()))
            measured.append((after + reflected) / 2 - before)
        found = (stats.spearmanr(each, measured).statistic for each in (expected, alone))
        ratio = np.median(np.array(expected) / np.array(measured))
        table.add_row(str(bits), *(f"{each:.3f}" for each in found), f"{ratio:.2f}", f"{np.median(measured):.2g}")
    Console(width=130).print(table)


def times(images: int, rounds: int) -> None:
    """Print how long sweeps take, as ratios to one for the trace."""
    model, data = published(20), cifar10(images)
    sets = (["trace"], ["output_trace"], ["output_trace", "input_trace"], ["trace", "output_trace", "input_trace"])
    sweeps: list[Callable[[], object]] = [
        lambda names=names: pf.measure(model, nn.CrossEntropyLoss(), data, measures=names) for names in sets
    ]
    seconds: list[list[float]] = [[] for _ in sweeps]
    for _ in range(rounds + 1):
        for place, sweep in enumerate(sweeps):
            start = time.perf_counter()
            sweep()
            seconds[place].append(time.perf_counter() - start)
    first, *others = (statistics.median(each[1:]) for each in seconds)
    for names, each in zip(sets[1:], others, strict=True):
        print(f"{' + '.join(names)}: {each / first:.2f} of the trace's sweep")


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("part", nargs="*", default=["predictions", "times"])
    options = parser.parse_args()
    if "predictions" in options.part:
        predictions(options.images)
    if "times" in options.part:
        times(options.images, options.rounds)


if __name__ == "__main__":
    main()

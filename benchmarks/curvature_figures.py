"""Draw the figures of docs/curvature.md: spectrum, cost of changes, and worst cases of real networks.

Run from the project's root: ``python benchmarks/curvature_figures.py [spectrum] [costs] [worst] [--out DIR]``. The
networks are LeNet5 of ``../shared/zoo`` with its own images, and the published ResNet-20 with images of CIFAR-10's.
"""

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from eigenvalues import ZOO, batches
from matplotlib import pyplot
from networks import cifar10, lenet5, published
from safetensors.torch import load_file
from torch import nn

import pyflatness as pf

LOSS = nn.CrossEntropyLoss()
BITS = (3, 4, 6, 8)


def of_zoo() -> nn.Module:
    """Return LeNet5 of the zoo."""
    model = lenet5().eval()
    model.load_state_dict(load_file(sorted(ZOO.glob("*.safetensors"))[0]))
    return model


def spectrum(path: Path, images: int = 250) -> None:
    """Draw the density of LeNet5's Hessian with its outermost eigenvalues."""
    found = pf.spectrum(of_zoo(), LOSS, batches(images), k=5, which="both", density=True, probes=4, steps=40)
    print(found)
    figure, _ = found.plot()
    figure.set_size_inches(6.4, 3.6)
    figure.savefig(path, dpi=100)


def costs(path: Path, images: int = 64) -> None:
    """Draw the predicted against the measured change of the loss of ResNet-20, for each layer and number of bits."""
    model, (x, y) = published(20), cifar10(images)
    figure, axes = pyplot.subplots(figsize=(5.2, 4.2), layout="constrained")
    ends = [float("inf"), 0.0]
    for bits in BITS:
        report = pf.cost_of_change(model, LOSS, (x, y), pf.changes.rounded(model, bits))
        predicted = [float(report[name, "cost_of_change"]) for name in report.layers]
        measured = [report[name, "loss_change"] - report[name, "gradient_of_change"] for name in report.layers]
        axes.loglog(measured, predicted, "o", markersize=4, label=f"{bits} bits")
        above = [value for value in (*measured, *predicted) if value > 0]
        ends = [min(ends[0], *above), max(ends[1], *above)]
    axes.loglog(ends, ends, color="black", linewidth=1)
    axes.set(xlabel="E(w + Δ) − E(w) − ⟨∇E, Δ⟩, measured", ylabel="½⟨Δ, H Δ⟩")
    axes.legend()
    figure.savefig(path, dpi=100)


def worst(path: Path, images: int = 500) -> None:
    """Draw the worst rise of LeNet5's loss over the radius of the ball, beside the quadratic model's bound."""
    model, data = of_zoo(), batches(images)
    radii = [0.005 * 2**step for step in range(6)]
    found = [pf.worst_case_sharpness(model, LOSS, data, rho=rho, steps=12, bound=rho == radii[0]) for rho in radii]
    first = found[0]
    assert first.bound is not None
    half = (first.bound - radii[0] * first.gradient_norm) / radii[0] ** 2  # ½ max(λ_max, 0), the same for every radius
    bounds = [rho * first.gradient_norm + half * rho**2 for rho in radii]
    for rho, each, bound in zip(radii, found, bounds, strict=True):
        print(f"rho {rho:.3f}: found {each.value:.4g}, bound of the quadratic model {bound:.4g}")
    figure, axes = pyplot.subplots(figsize=(5.2, 3.6), layout="constrained")
    axes.loglog(radii, bounds, label="ρ |∇E| + ½ ρ² λ_max, the quadratic model's bound")
    axes.loglog(radii, [each.value for each in found], "o-", label="worst rise found")
    axes.set(xlabel="ρ", ylabel="rise of the loss")
    axes.legend()
    figure.savefig(path, dpi=100)


FIGURES = {"spectrum": spectrum, "costs": costs, "worst": worst}


def main() -> None:
    """Draw the figures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []])
    parser.add_argument("--out", type=Path, default=Path("docs/curvature"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.figures or FIGURES:
        start = time.perf_counter()
        FIGURES[name](arguments.out / f"{name}.png")
        print(f"{name}: {time.perf_counter() - start:.0f} s, torch {torch.__version__}")


if __name__ == "__main__":
    main()

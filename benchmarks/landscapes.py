"""The figures of docs/curvature.md on landscapes: a slice around ResNet-20, and the line between two LeNet5s.

Run from the root: ``python benchmarks/landscapes.py [resnet20] [lenet5]``. Networks are those of ``../shared``.
The slice is along two filter-normalised random directions on images of CIFAR-10's test set; it goes on where it was
interrupted (``build/landscape.npz``). The line is between two minima of one recipe and two seeds, on 2,000 training and
2,000 test images. Printed are the slice, the barrier, and the time that a point takes.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from networks import SHARED, cifar10, published
from safetensors.torch import load_file
from torch import nn

import pyflatness as pf

DOCS = Path(__file__).resolve().parents[1] / "docs" / "curvature"
LOSS = nn.CrossEntropyLoss()


def resnet20(images: int = 128, steps: int = 13) -> None:
    """Draw the loss of ResNet-20 on a plane."""
    began = time.monotonic()
    Path("build").mkdir(exist_ok=True)
    found = pf.landscape(published(20), LOSS, cifar10(images), points=steps, span=0.5, out="build/landscape.npz")
    print(found)
    print(f"{time.monotonic() - began:.0f} s")
    figure, _ = found.plot()
    figure.savefig(DOCS / "landscape.png", dpi=80)


def lenet5(images: int = 2000) -> None:
    """Draw the loss between two LeNet5 minima."""
    sys.path.insert(0, str(SHARED / "zoo"))
    from lenet5 import LeNet5, test_data, train_data

    weights = [SHARED / "zoo" / f"lenet5_cifar10k_adam_bs64_lr0.001_seed{seed}.safetensors" for seed in (0, 1)]
    model, other = LeNet5().eval(), load_file(weights[1])
    model.load_state_dict(load_file(weights[0]))
    train, test = (_first(loader, images) for loader in (train_data(), test_data()))
    found = pf.linear_interpolation(model, LOSS, train, other, test=test, points=25)
    print(found)
    print(f"barrier of the error: {found.error_barrier:.3f}, on test data {found.test_error_barrier:.3f}")
    figure, _ = found.plot()
    figure.savefig(DOCS / "interpolation.png", dpi=80)


def _first(loader: object, images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first images of a loader, and their classes."""
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for x, y in loader:  # type: ignore[attr-defined]
        parts.append((x, y))
        if sum(len(part) for _, part in parts) >= images:
            break
    x, y = (torch.cat(each)[:images] for each in zip(*parts, strict=True))
    return x, y


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", default=["lenet5", "resnet20"])
    DOCS.mkdir(exist_ok=True)
    for name in parser.parse_args().which:
        {"resnet20": resnet20, "lenet5": lenet5}[name]()

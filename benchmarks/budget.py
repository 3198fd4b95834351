"""What ``pf.track(…, budget=0.01)`` takes of a training of ResNet-20, and how wide its intervals are at the end.

    python benchmarks/budget.py [--steps 2000] [--batch 32] [--images 4096]

ResNet-20 is trained on images of CIFAR-10 by SGD with momentum, on one thread. 1,024 of them are tracked. At the end
the exact value of the GGN over these, layer by layer, is held against the intervals of ``history.pooled()``.
"""

import time

import click
import torch
from networks import CifarResNet, cifar10
from torch import nn

import pyflatness as pf

LOSS = nn.CrossEntropyLoss()
TRACKED = 1024


@click.command()
@click.option("--steps", default=2000)
@click.option("--batch", default=32)
@click.option("--images", default=4096)
@click.option("--budget", default=0.01)
def main(steps: int, batch: int, images: int, budget: float) -> None:
    """Train, and print the share of the time, the records, and the intervals against the exact values."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = cifar10(images, "train")
    model = CifarResNet(3).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    history = pf.track(model, LOSS, (x[:TRACKED], y[:TRACKED]), budget=budget)
    began = time.perf_counter()
    for step in range(steps):
        chosen = torch.randint(images, (batch,))
        risk = LOSS(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        risk.backward()
        optimizer.step()
        record = history.step(train_loss=risk)
        if record is not None and len(history) % 10 == 1:
            network = record.reports["live"]["relative_flatness"]
            print(f"step {step + 1}: {network.samples} samples, {record.seconds:.3f} s, {network!r}", flush=True)
    whole = time.perf_counter() - began
    spent = sum(record.seconds or 0.0 for record in history)
    print(f"{steps} steps in {whole:.0f} s, of which {spent:.1f} s in {len(history)} measurements: {spent / whole:.2%}")
    exact = pf.measure(
        model,
        LOSS,
        (x[:TRACKED], y[:TRACKED]),
        measures="relative_flatness",
        curvature="ggn",
        eval=True,
        progress=False,
    )
    inside, widths = 0, []
    for name, found in history.pooled().items():
        low, high = found.interval() or (found.value, found.value)
        true = (exact[name, "relative_flatness"] if name else exact["relative_flatness"]).value
        inside += low <= true <= high
        widths.append((high - low) / 2 / found.value)
        print(f"{name or 'network'}: {found.value:.4g} ± {widths[-1]:.1%}, exact {true:.4g}")
    print(
        f"{inside} of {len(widths)} intervals hold the exact value; half widths {min(widths):.0%} to {max(widths):.0%}"
    )


if __name__ == "__main__":
    main()

"""What a penalty costs in a training step: ratios to a plain step, in turn, in one run.

    python benchmarks/training.py [lenet5] [resnet20] [resnet18] [--rounds N] [--samples N] [--device cuda]

Networks have the shapes of CIFAR-10, weights and images are random, steps are those of SGD with momentum. SAM's step is
two plain ones. A penalty of any layer is differentiated twice; its floor is stated beside it, counted in forward passes
of the layers behind it (docs/training.md). On a GPU a time is that of several steps in a row, until the last is done.
"""

from collections.abc import Callable

import click
import torch
from flatter import sam_step
from networks import CifarResNet, images, lenet5, resnet18
from rich.console import Console
from rich.table import Table
from timing import clock_of, in_turn
from torch import Tensor, nn

import pyflatness as pf

LOSS = nn.CrossEntropyLoss()
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, tuple[str, ...]]] = {  # with its head, and other layers
    "lenet5": (lenet5, "fc3", ("conv1", "conv2", "fc1")),
    "resnet20": (lambda: CifarResNet(3), "linear", ("layer1.0.conv1", "layer2.0.conv2", "layer3.2.conv2")),
    "resnet18": (resnet18, "13", ("0", "5.conv2", "10.conv2")),
}
Step = Callable[[], object]


def steps(make: Callable[[], nn.Module], head: str, layers: tuple[str, ...], x: Tensor, y: Tensor) -> dict[str, Step]:
    """Return training steps by what they are, each with a network of its own."""

    def optimised() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make().to(x.device).train()
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def plain() -> Step:
        model, optimizer = optimised()

        def step() -> None:
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()

        return step

    def of_head() -> Step:
        model, optimizer = optimised()
        last, features = model.get_submodule(head), []
        assert isinstance(last, nn.Linear)
        last.register_forward_pre_hook(lambda module, given: features.append(given[0]))

        def step() -> None:
            optimizer.zero_grad()
            features.clear()
            risk = LOSS(model(x), y)
            (risk + 1e-3 * pf.flatness_penalty(features[0], last.weight, last.bias, y, loss=LOSS)).backward()
            optimizer.step()

        return step

    def of_layers(*layers: str) -> Step:
        model, optimizer = optimised()
        penalty = pf.FlatnessPenalty(model, layers, LOSS)

        def step() -> None:
            optimizer.zero_grad()
            outputs = model(x)
            (LOSS(outputs, y) + 1e-3 * penalty(outputs, y)).backward()
            optimizer.step()

        step()  # the first one checks the layer
        return step

    def sam() -> Step:
        model, optimizer = optimised()
        return lambda: sam_step(model, optimizer, x, y, 0.05)

    found = {"plain": plain(), "the head's penalty": of_head()}
    found |= {f"one probe at {layer}": of_layers(layer) for layer in layers}
    found["one probe at all of these"] = of_layers(*layers)
    return found | {"SAM": sam()}


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice([*NETWORKS]))
@click.option("--rounds", default=7, show_default=True)
@click.option("--samples", default=128, show_default=True)
@click.option("--device", default="cpu", show_default=True, type=torch.device)
def main(names: tuple[str, ...], rounds: int, samples: int, device: torch.device) -> None:
    """Time and print."""
    torch.manual_seed(0)
    x, y = images(samples).to(device), torch.randint(10, (samples,)).to(device)
    on_gpu = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if on_gpu else f"{torch.get_num_threads()} threads"
    table = Table(title=f"training steps, n = {samples}, {where}, torch {torch.__version__}")
    for column in ("network", "step", "ms", "to a plain step"):
        table.add_column(column, justify="left" if column in ("network", "step") else "right")
    for name in names or ("lenet5", "resnet20"):
        timed = in_turn(steps(*NETWORKS[name], x, y), rounds, 10 if on_gpu else 1, clock_of(device))
        for what, timing in timed.items():
            table.add_row(name, what, f"{1e3 * timing.median:.1f}", f"{timing.ratio(timed['plain']):.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""Which strengths of a penalty are useful, beside the largest κ of the training without it: docs/penalties.md.

    python benchmarks/strengths.py [--setting digits] [--seeds 3] [--epochs 40] [--peaks]

A setting of ``flatter.py`` is trained without a penalty, in which κ of two layers is followed epoch by epoch, and then
with penalties of several strengths λ. Printed are λ times the largest κ over the loss at the beginning, the mean over
seeds, and the difference of the test loss to plain training, with its 95 % interval. ``--peaks`` trains without alone.
"""

import statistics

import click
import torch
from flatter import LOSS, SETTINGS, tested, trained, with_interval
from torch import Tensor, nn

import pyflatness as pf

STRENGTHS = (0.001, 0.003, 0.01, 0.03, 0.1)


def largest(model: nn.Module, data: tuple[Tensor, Tensor], known: dict[str, float]) -> None:
    """Put the relative flatness of layers in the place of smaller values that are known."""
    how = {"measures": "relative_flatness", "curvature": "ggn", "progress": False}
    report = pf.measure(model, LOSS, data, layers=[*known], **how)
    known.update({layer: max(value, report[layer, "relative_flatness"].value) for layer, value in known.items()})


@click.command()
@click.option("--setting", "name", type=click.Choice([*SETTINGS]), default="digits")
@click.option("--seeds", default=3)
@click.option("--epochs", default=40)
@click.option("--peaks", is_flag=True, help="Only plain training.")
def main(name: str, seeds: int, epochs: int, *, peaks: bool) -> None:
    """Train and print."""
    torch.set_num_threads(1)
    setting = SETTINGS[name]._replace(epochs=epochs)
    data = [setting.data(seed) for seed in range(seeds)]
    plain, heights = [], []
    for seed, (train, test) in enumerate(data):
        few = train[0][:1000], train[1][:1000]
        height = {"conv2": 0.0, setting.head: 0.0}
        model = trained(setting, ("plain", 0.0), seed, train, lambda model, few=few, to=height: largest(model, few, to))
        torch.manual_seed(seed)
        first = tested(setting.network(), few)[0]
        plain.append(tested(model, test)[0])
        heights.append({layer: value / first for layer, value in height.items()})
        said = " and ".join(f"{value:.3g} of {layer}" for layer, value in height.items())
        print(f"{name}, seed {seed}: the largest κ are {said}; a loss of {first:.3g} at the beginning", flush=True)
    for kind, layer in () if peaks else (("κ of conv2", "conv2"), ("κ of head", setting.head)):
        for strength in STRENGTHS:
            models = [trained(setting, (kind, strength), seed, train, id) for seed, (train, _) in enumerate(data)]
            losses = [tested(model, test)[0] for model, (_, test) in zip(models, data, strict=True)]
            apart = with_interval(loss - without for loss, without in zip(losses, plain, strict=True))
            ratio = strength * statistics.mean(height[layer] for height in heights)
            print(f"{kind}, λ = {strength:g}: {ratio:.2g} of that loss; test loss to plain: {apart}", flush=True)


if __name__ == "__main__":
    main()

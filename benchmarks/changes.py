"""What changes of weights cost: the exact second order against HAWQ's and Fisher's estimates, and a bit allocation.

Run from the project's root: ``python benchmarks/changes.py [resnet20] [stories] [allocation] [time] [--figure FILE]``.
Networks, images and stories are those of ``../shared``. For every layer and 2, 3, 4, 6 and 8 bits (round to nearest, a
scale for each row) it is computed what the change would cost, and measured what the loss does. Printed are Spearman's
rank correlations over all of these with the measured change of the loss less the gradient's part, which is what all
three estimates are of:

- ½⟨Δ, H Δ⟩, ``pf.cost_of_change``;
- HAWQ-V2's Tr(H_l) |Δ|² / (d m), with an exact trace (stories: of probes);
- the empirical Fisher information's ½ Σ_j F_j Δ_j², F_j the mean of squared gradients of single samples.

``allocation``: bits of each layer of ResNet-20 under a budget of 4, 3.5 and 3 bits a weight, by an integer linear
program (scipy.optimize.milp) over each estimate, and the accuracy on 2,000 other images that results.

``time``: what ``pf.cost_of_change`` takes, exact and of probes, over rounding each layer and running the model.
"""

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from depth import model as storyteller
from depth import stories
from networks import cifar10, published
from rich.console import Console
from rich.table import Table
from scipy import optimize, sparse, stats
from timing import in_turn
from torch import Tensor, nn

import pyflatness as pf

BITS = (2, 3, 4, 6, 8)
Costs = dict[tuple[str, int], float]


def weight(model: nn.Module, layer: str) -> nn.Parameter:
    """Return the weight of a layer; one that layers share has the name of the parameter."""
    return model.get_parameter(layer if layer.endswith(".weight") else f"{layer}.weight")


def fisher(model: nn.Module, gradients: Callable[[int], Mapping[str, Tensor]], samples: int) -> dict[str, Tensor]:
    """Return the mean of squared gradients of single samples, by layer."""
    total: dict[str, Tensor] = {}
    for sample in range(samples):
        for name, gradient in gradients(sample).items():
            total[name] = total.get(name, 0) + gradient.double().square() / samples
    return total


def estimates(
    model: nn.Module, loss: object, data: object, information: Mapping[str, Tensor], probes: int | None
) -> dict[str, Costs]:
    """Return by estimate, and for what is measured, each layer's cost at each number of bits."""
    found: dict[str, Costs] = {name: {} for name in ("measured", "½⟨Δ, H Δ⟩", "HAWQ-V2", "Fisher")}
    for place, bits in enumerate(BITS):
        changes = pf.changes.rounded(model, bits)
        report = pf.cost_of_change(
            model, loss, data, changes, by_trace=place == 0, probes=probes if place == 0 else None
        )
        if place == 0:
            traces = {
                name: report[name, "cost_by_trace"] / float(c.double().square().sum()) for name, c in changes.items()
            }
        for name, change in changes.items():
            key, square = (name, bits), change.double().square()
            gradient = report[name, "gradient_of_change"]
            found["measured"][key] = report[name, "loss_change"] - gradient
            found["½⟨Δ, H Δ⟩"][key] = float(report[name, "cost_of_change"])
            found["HAWQ-V2"][key] = traces[name] * float(square.sum())
            found["Fisher"][key] = 0.5 * float((information[name] * square).sum())
    return found


def shown(title: str, found: Mapping[str, Costs]) -> None:
    """Print rank correlations with what is measured."""
    table = Table(title=title)
    for column in ("estimate", "all layers and bits", *(f"{bits} bits" for bits in BITS), "median ratio to measured"):
        table.add_column(column, justify="left" if column == "estimate" else "right")
    measured = found["measured"]
    for name, costs in found.items():
        if name == "measured":
            continue
        keys = [[key for key in measured if key[1] in which] for which in (BITS, *((bits,) for bits in BITS))]
        pairs = [([costs[key] for key in some], [measured[key] for key in some]) for some in keys]
        ratio = np.median([costs[key] / measured[key] for key in measured])
        table.add_row(name, *(f"{stats.spearmanr(*pair).statistic:.3f}" for pair in pairs), f"{ratio:.2f}")
    Console(width=130).print(table)


def resnet20(images: int = 512) -> tuple[nn.Module, dict[str, Costs]]:
    """Return ResNet-20, and its layers' costs on images of CIFAR-10's."""
    model, loss, (x, y) = published(20), nn.CrossEntropyLoss(), cifar10(images)
    weights = {name: weight(model, name) for name in pf.changes.rounded(model)}

    def gradients(sample: int) -> dict[str, Tensor]:
        value = loss(model(x[sample : sample + 1]), y[sample : sample + 1])
        return dict(zip(weights, torch.autograd.grad(value, [*weights.values()]), strict=True))

    return model, estimates(model, loss, (x, y), fisher(model, gradients, images), None)


def of_stories(count: int = 8) -> dict[str, Costs]:
    """Return the costs of the layers of the story-telling Llama on some stories."""
    model, tokens = storyteller(), stories(count)
    data = [{"input_ids": part} for part in tokens.split(8)]
    weights = {name: weight(model, name) for name in pf.changes.rounded(model)}

    def gradients(sample: int) -> dict[str, Tensor]:
        story = tokens[sample : sample + 1]
        value = model(input_ids=story, labels=story).loss
        return dict(zip(weights, torch.autograd.grad(value, [*weights.values()]), strict=True))

    return estimates(model, "auto", data, fisher(model, gradients, count), 4)


def allocated(costs: Costs, sizes: Mapping[str, int], budget: float) -> dict[str, int]:
    """Return bits for each layer with the least sum of costs, at most so many bits a weight in the mean."""
    keys = [*costs]
    names = [*sizes]
    one_each = sparse.csr_matrix(
        ([1.0] * len(keys), ([names.index(name) for name, _ in keys], range(len(keys)))), (len(names), len(keys))
    )
    bits = np.array([[bits * sizes[name] for name, bits in keys]]) / sum(sizes.values())
    scale = max(map(abs, costs.values()))
    found = optimize.milp(
        np.array([costs[key] / scale for key in keys]),
        constraints=[optimize.LinearConstraint(one_each, 1, 1), optimize.LinearConstraint(bits, 0, budget)],
        integrality=np.ones(len(keys)),
        bounds=optimize.Bounds(0, 1),
    )
    return {name: b for (name, b), taken in zip(keys, found.x, strict=True) if taken > 0.5}


def accuracy(model: nn.Module, changes: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> float:
    """Return the accuracy at changed weights."""
    state = {f"{name}.weight": model.get_submodule(name).weight + change for name, change in changes.items()}
    with torch.no_grad():
        outputs = torch.cat([torch.func.functional_call(model, state, (part,)) for part in inputs.split(250)])
    return float((outputs.argmax(1) == targets).double().mean())


def allocation(model: nn.Module, found: Mapping[str, Costs], images: int = 2000, skipped: int = 512) -> None:
    """Print the accuracy that the allocations by each estimate have."""
    inputs, targets = (part[skipped:] for part in cifar10(skipped + images))
    sizes = {
        name: model.get_submodule(name).weight.numel() for name in dict.fromkeys(name for name, _ in found["Fisher"])
    }
    rounded = {bits: pf.changes.rounded(model, bits) for bits in BITS}
    table = Table(title=f"accuracy on {images} other images; {accuracy(model, {}, inputs, targets):.4f} unquantised")
    for column in ("bits a weight", "the same for all", *(name for name in found if name != "measured"), "measured"):
        table.add_column(column, justify="right")
    for budget in (4.0, 3.5, 3.0):
        even = int(budget) if budget in BITS else None
        cells = [f"{accuracy(model, rounded[even], inputs, targets):.4f}" if even else "–"]
        for name in (*(name for name in found if name != "measured"), "measured"):
            chosen = allocated(found[name], sizes, budget)
            changes = {layer: rounded[bits][layer] for layer, bits in chosen.items()}
            cells.append(f"{accuracy(model, changes, inputs, targets):.4f}")
        table.add_row(f"{budget}", *cells)
    Console(width=130).print(table)


def times() -> None:
    """Print what costs of 4 bits take, over measuring each layer, and how well they order the layers."""
    (x, y), tokens, entropy = cifar10(64), stories(8), nn.CrossEntropyLoss()
    networks: dict[str, tuple[nn.Module, Any, Any, Callable[[nn.Module], Tensor]]] = {
        "ResNet-20, 64 images": (published(20), entropy, (x, y), lambda model: entropy(model(x), y)),
        "stories260K, 8 stories": (
            storyteller(),
            "auto",
            [{"input_ids": tokens}],
            lambda model: model(input_ids=tokens, labels=tokens).loss,
        ),
    }
    table = Table(title="4 bits, over rounding each layer and running the model")
    for column in ("network", "layers", "call", "time", "Spearman with the measured change"):
        table.add_column(column, justify="left" if column in ("network", "call") else "right")
    for network, (model, loss, data, value) in networks.items():
        changes = pf.changes.rounded(model, 4)

        @torch.no_grad()
        def measured(
            model: nn.Module = model,
            value: Callable[[nn.Module], Tensor] = value,
            changes: Mapping[str, Tensor] = changes,
        ) -> list[float]:
            found = []
            for name in changes:
                changed = copy.deepcopy(model)
                pf.changes.add(changed, {name: changes[name]})
                found.append(float(value(changed)))
            return found

        calls: dict[str, dict[str, Any]] = {"exact": {}}
        calls |= {f"GGN, {probes} probes": {"curvature": "ggn", "probes": probes} for probes in (8, 4)}
        functions = {
            name: partial(pf.cost_of_change, model, loss, data, changes, measured=False, **how)
            for name, how in calls.items()
        }
        timings = in_turn({"measured": measured, **functions}, rounds=3, repeats=1, clock=time.process_time)
        truth = measured()
        for name, call in functions.items():
            report = call()
            rank = stats.spearmanr([report[layer, "predicted"] for layer in changes], truth).statistic
            ratio = timings[name].ratio(timings["measured"])
            table.add_row(network, f"{len(changes)}", name, f"{ratio:.2f}", f"{rank:.3f}")
    Console(width=130).print(table)


def drawn(found: Mapping[str, Mapping[str, Costs]], path: Path) -> None:
    """Draw estimates against what was measured, a panel for each network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(4.2 * len(found), 3.6), dpi=100, layout="constrained")
    for panel, (title, costs) in zip(np.atleast_1d(axes), found.items(), strict=True):
        measured = costs["measured"]
        for name in (name for name in costs if name != "measured"):
            panel.loglog([*measured.values()], [costs[name][key] for key in measured], ".", markersize=4, label=name)
        ends = [min(v for v in measured.values() if v > 0), max(measured.values())]
        panel.loglog(ends, ends, color="black", linewidth=1)
        panel.set(title=title, xlabel="E(w + Δ) − E(w) − ⟨∇E, Δ⟩", ylabel="estimate")
        panel.legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["resnet20", "stories", "allocation", "time", []])
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    parts = arguments.parts or ["resnet20", "stories", "allocation"]
    start, found = time.perf_counter(), {}
    if "resnet20" in parts or "allocation" in parts:
        model, found["ResNet-20, CIFAR-10"] = resnet20()
        shown("ResNet-20, 512 images", found["ResNet-20, CIFAR-10"])
        if "allocation" in parts:
            allocation(model, found["ResNet-20, CIFAR-10"])
    if "stories" in parts:
        found["a Llama of 260,000 weights"] = of_stories()
        shown("stories260K, 8 stories", found["a Llama of 260,000 weights"])
    if "time" in parts:
        times()
    if arguments.figure:
        drawn(found, arguments.figure)
    print(f"{time.perf_counter() - start:.0f} s, torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()

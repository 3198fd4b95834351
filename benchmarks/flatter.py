"""Does a penalty on relative flatness train flatter networks that generalise better? Five seeds, and others beside.

    python benchmarks/flatter.py digits cifar10 --out FOLDER    # trains what FOLDER has not yet, and prints tables
    python benchmarks/flatter.py digits cifar10 --out FOLDER --figure FILE.png

Digits are scikit-learn's, 300 to train on and 1,497 to test, and a network of two convolutions. CIFAR-10 is LeNet-5 on
2,000 images of ``../shared/data`` and 2,000 to test, without augmentation. The arms of a seed have the same initial
weights and the same batches. Beside the penalties are SAM, weight decay, label smoothing, and FAM as its authors' code
takes it. Intervals of 95 % are Student's over the seeds: of means, of the mean difference to plain training with the
same seed, and of that to plain training which was stopped at the training loss where the other one ended. Every run is
kept in FOLDER as soon as it is done.
"""

import itertools
import json
import math
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from networks import cifar10, lenet5
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.report.intervals import interval, shown

SEEDS = range(5)
COLOURS = {
    **{"plain": "black", "κ of conv2": "tab:blue", "κ of head": "tab:green", "SAM": "tab:orange"},
    **{"FAM of head": "tab:olive", "weight decay": "tab:purple", "label smoothing": "tab:red"},
}
LOSS = nn.CrossEntropyLoss()
Data = tuple[Tensor, Tensor]
Arm = tuple[str, float]
Values = dict[str, Any]
"""Of a run: numbers at its end, and if it is plain ``curve``, (training loss, test loss, accuracy) after each epoch."""


class Setting(NamedTuple):
    """Hold what is trained on what; the layers that are penalised are ``conv2`` and ``head``."""

    data: Callable[[int], tuple[Data, Data]]
    network: Callable[[], nn.Sequential]
    head: str
    rate: float
    batch: int
    epochs: int
    arms: Sequence[Arm]


def digits(seed: int) -> tuple[Data, Data]:
    """Return 300 images of digits to train on and the others to test, another split for each seed."""
    from sklearn.datasets import load_digits

    held = load_digits()
    x = torch.tensor(held.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(held.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return (x[order[:300]], y[order[:300]]), (x[order[300:]], y[order[300:]])


def images(seed: int, count: int = 2000) -> tuple[Data, Data]:
    """Return training images of CIFAR-10, others for each seed, and test images."""
    return cifar10(count, "train", seed * count), cifar10(count)


def small() -> nn.Sequential:
    """Return a network of two convolutions and a head for 8 × 8 images."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc=nn.Linear(128, 10),
        )
    )


SETTINGS = {
    "digits": Setting(
        digits, small, "fc", 0.05, 50, 100,
        [("plain", 0.0), ("κ of conv2", 0.003), ("κ of conv2", 0.03), ("SAM", 0.05), ("SAM", 0.2),
         ("κ of head", 0.001), ("κ of head", 0.01), ("FAM of head", 0.001), ("FAM of head", 0.01),
         ("weight decay", 0.0005), ("weight decay", 0.005), ("weight decay", 0.05),
         ("label smoothing", 0.03), ("label smoothing", 0.1)],
    ),
    "cifar10": Setting(
        images, lenet5, "fc3", 0.05, 128, 20,
        [("plain", 0.0), ("κ of conv2", 0.001), ("κ of conv2", 0.01), ("SAM", 0.1), ("κ of head", 0.001),
         ("κ of head", 0.01), ("FAM of head", 0.001), ("weight decay", 0.005), ("label smoothing", 0.1)],
    ),
}  # fmt: skip


def sam_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, rho: float) -> None:
    """Take a step of sharpness-aware minimisation (Foret et al. 2021, Algorithm 1).

    The gradient is taken at w + ρ g / |g|, where g is the one at w, and the step is made from w.
    """
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(LOSS(model(x), y), parameters)
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    moves = [rho / (norm + 1e-12) * gradient for gradient in gradients]
    with torch.no_grad():
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
    optimizer.zero_grad()
    LOSS(model(x), y).backward()
    with torch.no_grad():
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
    optimizer.step()


def of_head(model: nn.Sequential, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs, and κ of the last layer."""
    features, head = model[:-1](x), model[-1]
    assert isinstance(head, nn.Linear)
    return head(features), pf.flatness_penalty(features, head.weight, head.bias, y, loss=LOSS)


def of_fam(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs, and κ of the last layer as the code of FAM (Adilova et al. 2023) takes it, times its inputs.

    That code copies the Hessian out of the graph: Σ ⟨w_s, w_s'⟩ Tr(H_ss') has a gradient by the weights of the layer
    alone, with the traces held fixed. Its value is κ, which for cross-entropy is mean_i |φ_i|² var_{p_i}(w).
    """
    features, head = model[:-1](x), model[-1]
    assert isinstance(head, nn.Linear)
    outputs = head(features)
    with torch.no_grad():
        squares, p = features.square().sum(dim=1), outputs.softmax(dim=1)
        traces = torch.diag(squares @ p / len(x)) - (p * squares[:, None]).T @ p / len(x)
    return outputs, (head.weight @ head.weight.T * traces).sum()


def trained(setting: Setting, arm: Arm, seed: int, data: Data, after_epoch: Callable[[nn.Module], object]) -> nn.Module:
    """Return a network trained in one way; the learning rate falls to 0 along a cosine."""
    (kind, strength), (inputs, targets) = arm, data
    torch.manual_seed(seed)
    model = setting.network()
    steps = setting.epochs * math.ceil(len(inputs) / setting.batch)
    decay = strength if kind == "weight decay" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), setting.rate, momentum=0.9, weight_decay=decay)
    minimised = nn.CrossEntropyLoss(label_smoothing=strength if kind == "label smoothing" else 0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    batches = torch.Generator().manual_seed(seed)  # of its own: a penalty draws from the global one
    with pf.FlatnessPenalty(model, "conv2", LOSS) as of_layer:
        for _ in range(setting.epochs):
            for index in torch.randperm(len(inputs), generator=batches).split(setting.batch):
                x, y = inputs[index], targets[index]
                if kind == "SAM":
                    sam_step(model, optimizer, x, y, strength)
                else:
                    if kind == "κ of head":
                        outputs, value = of_head(model, x, y)
                    elif kind == "FAM of head":
                        outputs, value = of_fam(model, x)
                    else:
                        outputs = model(x)
                        value = of_layer(outputs, y) if kind == "κ of conv2" else torch.zeros(())
                    optimizer.zero_grad()
                    (minimised(outputs, y) + strength * value).backward()
                    optimizer.step()
                schedule.step()
            after_epoch(model)
    return model.eval()


@torch.no_grad()
def tested(model: nn.Module, data: Data) -> tuple[float, float]:
    """Return loss and accuracy."""
    outputs = torch.cat([model(x) for x in data[0].split(500)])
    return float(F.cross_entropy(outputs.double(), data[1])), float((outputs.argmax(1) == data[1]).double().mean())


def run(setting: Setting, arm: Arm, seed: int) -> Values:
    """Train a network and return what came of it."""
    train, test = setting.data(seed)
    curve: list[tuple[float, float, float]] = []

    def followed(model: nn.Module) -> None:
        if arm[0] == "plain":
            curve.append((tested(model, train)[0], *tested(model, test)))

    start = time.perf_counter()
    model = trained(setting, arm, seed, train, followed)
    seconds = time.perf_counter() - start
    values: Values = {"curve": curve}
    for part, data in (("train", train), ("test", test)):
        values[f"{part} loss"], values[f"{part} accuracy"] = tested(model, data)
    values["gap"] = values["test loss"] - values["train loss"]
    for name, layer in (("conv2", "conv2"), ("head", setting.head)):
        values[f"κ of {name}"] = pf.relative_flatness(model, LOSS, (train[0][:1000], train[1][:1000]), layer).value
    return values | {"seconds": seconds}


def kept(name: str, out: Path) -> dict[str, list[Values]]:
    """Return every run of a setting by its arm, in the order of the seeds; those not in the folder are made."""
    path = out / f"{name}.json"
    held: dict[str, Values] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for seed in SEEDS:
        for arm in SETTINGS[name].arms:
            key = f"{named(arm)} | {seed}"
            if key not in held:
                held[key] = run(SETTINGS[name], arm, seed)
                path.write_text(json.dumps(held, indent=1, ensure_ascii=False), encoding="utf-8")
                print(f"{name} | {key}: { ({k: v for k, v in held[key].items() if k != 'curve'}) }", flush=True)
    return {named(arm): [held[f"{named(arm)} | {seed}"] for seed in SEEDS] for arm in SETTINGS[name].arms}


def named(arm: Arm) -> str:
    """Return how an arm is called."""
    kind, strength = arm
    signs = {"SAM": "ρ = ", "weight decay": "", "label smoothing": ""}
    return "plain" if kind == "plain" else f"{kind}, {signs.get(kind, 'λ = ')}{strength:g}"


def stopped(run: Values, loss: float) -> dict[str, float]:
    """Return a run's test loss and accuracy where its training loss was first as low, by a line between two epochs.

    A run that never was so low is taken as it ended.
    """
    curve = run["curve"]
    for before, after in itertools.pairwise(curve):
        if after[0] <= loss:
            part = min(max((before[0] - loss) / (before[0] - after[0]), 0.0), 1.0) if before[0] > after[0] else 1.0
            between = [one + part * (other - one) for one, other in zip(before, after, strict=True)]
            return dict(zip(("train loss", "test loss", "test accuracy"), between, strict=True))
    return dict(zip(("train loss", "test loss", "test accuracy"), curve[-1], strict=True))


def with_interval(values: Iterable[float]) -> str:
    """Return the mean over seeds with its interval."""
    held = [*values]
    error = statistics.stdev(held) / math.sqrt(len(held))
    return shown(statistics.mean(held), interval(statistics.mean(held), error, len(held) - 1))


def printed(name: str, found: dict[str, list[Values]]) -> None:
    """Print means over seeds, and differences to plain training."""
    columns = ("κ of conv2", "κ of head", "train loss", "test loss", "gap", "test accuracy")
    tables = Table(title=f"{name}: means over {len(SEEDS)} seeds"), Table(title=f"{name}: differences to plain")
    for table in tables:
        for column in ("training", *columns):
            table.add_column(column, justify="left" if column == "training" else "right")
    for arm, runs in found.items():
        tables[0].add_row(arm, *(with_interval(values[column] for values in runs) for column in columns))
        if arm != "plain":
            pairs = [*zip(runs, found["plain"], strict=True)]
            tables[1].add_row(arm, *(with_interval(a[column] - b[column] for a, b in pairs) for column in columns))
    equal = Table(title=f"{name}: differences to plain training that was stopped at the training loss of the other")
    for column in ("training", "train loss", "test loss", "test accuracy"):
        equal.add_column(column, justify="left" if column == "training" else "right")
    for arm, runs in found.items():
        if arm != "plain":
            ends = [stopped(plain, run["train loss"]) for run, plain in zip(runs, found["plain"], strict=True)]
            pairs = [*zip(runs, ends, strict=True)]
            columns = ("train loss", "test loss", "test accuracy")
            equal.add_row(arm, *(with_interval(a[column] - b[column] for a, b in pairs) for column in columns))
    for table in (*tables, equal):
        Console(width=190).print(table)


def drawn(found: dict[str, dict[str, list[Values]]], path: Path) -> None:
    """Draw κ at the end against the test loss and the accuracy, a row for each setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(
        len(found), 2, figsize=(9, 3.4 * len(found)), dpi=90, layout="constrained", squeeze=False
    )
    for row, (name, arms) in zip(axes, found.items(), strict=True):
        for panel, column in zip(row, ("gap", "test accuracy"), strict=True):
            seen: set[str] = set()
            for arm, runs in arms.items():
                kind = arm.partition(",")[0]  # a colour each, whose weaker strength is hollow
                x, y = ([values[key] for values in runs] for key in ("κ of conv2", column))
                weaker = kind not in seen and sum(other.startswith(kind) for other in arms) > 1
                seen.add(kind)
                fill = "white" if weaker else COLOURS[kind]
                panel.plot(x, y, "o", color=COLOURS[kind], markerfacecolor=fill, markersize=5, label=arm)
            every = [(values["κ of conv2"], values[column]) for runs in arms.values() for values in runs]
            table = {"κ": [x for x, _ in every], column: [y for _, y in every]}
            tau = pf.statistics.correlations(table, "κ", column)["κ", "Kendall"].value
            panel.set(xscale="log", xlabel="κ of conv2 at the end", ylabel=column)
            panel.set_title(f"{name}: Kendall's τ of κ and {column} is {tau:.2f}", fontsize=10)
            panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
            panel.xaxis.set_minor_locator(ticker.NullLocator())
        row[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice([*SETTINGS]))
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--figure", type=click.Path(path_type=Path))
def main(names: Sequence[str], out: Path, figure: Path | None) -> None:
    """Train and print."""
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in names or SETTINGS:
        found[name] = kept(name, out)
        printed(name, found[name])
    if figure:
        drawn(found, figure)


if __name__ == "__main__":
    main()

"""Run ``pyflatness demo``: does relative flatness correlate with generalisation, over two dozen small networks?

Three architectures learn handwritten digits of 8×8 pixels (scikit-learn's, nothing is downloaded), by several
optimisers, learning rates and batch sizes. Training stops by the training loss, not after a number of epochs, so that
slow and fast optimisers are compared at about the same fit: not quite, as a fast one is further below the target at the
end of the epoch that passes it. Then relative flatness κ on the training set, summed over all layers, plain and
normalised (Petzka et al. 2021, Definition 3 and Theorem 4), is held against the generalisation gap, the mean test loss
minus the mean training loss. Architectures differ in κ by their shapes alone, so that networks of one are compared.
Networks without a finite κ are in the table, and named as excluded from the correlations.

The folder of the results has the checkpoints, their networks and the data too, to try the commands on.
"""

import contextlib
import functools
import io
import json
import math
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from .. import __version__, progress
from ..errors import MissingExtraError, printable
from ..results import Correlations
from ..scoring import export
from ..scoring.score import score
from ..statistics import correlations, plot_correlation
from . import example_networks
from .options import Json, command
from .output import echo, finite, prepare_folder, show, show_json, write_whole

TARGET_LOSS, MAX_EPOCHS = 0.05, 600
MEASURES = ("relative_flatness", "relative_flatness_std")

Data = tuple[Tensor, Tensor]  # images (n, 1, 8, 8) with values from 0 to 1, and their digits (n,)

_TRAINING_IMAGES = 700  # of 1797: few enough that the gap to the test loss is real
_NETWORKS = {made.__name__: made for made in (example_networks.mlp_1, example_networks.mlp_2, example_networks.cnn)}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
}


@command()
def demo(
    *,
    out: Path = Path("demo"),
    seed: Annotated[int, {"type": click.IntRange(0, 2**32 - 1)}] = 0,
    as_json: Json = False,
) -> None:
    """Measure relative flatness and generalisation of 24 small networks.

    The command trains them on handwritten digits (less than a minute), prints a table and the correlations, and writes
    scatter.png, results.json and results.csv; and the checkpoints, with their settings in the metadata, networks.py and
    the data, to try other commands on, some of which it prints. One seed gives one set of numbers.

    Args:
        out: folder for the results.
        seed: seed of the data and networks.
    """
    _require_extras()
    prepare_folder(out)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # more gain nothing here, and sums do not depend on how many there are
        train, test = digits(seed)
        write_whole(out / "networks.py", Path(example_networks.__file__).read_bytes())
        for name, (images, labels) in {"train": train, "test": test}.items():
            file = io.BytesIO()
            np.savez_compressed(file, images=images.numpy(), labels=labels.numpy())
            write_whole(out / f"{name}.npz", file.getvalue())
        rows = measured(recipes(seed), train, test, out)
    found = correlated(rows)
    write(out, rows, found, seed)
    if as_json:
        show_json(_results(rows, found, seed))
        return
    show(_table(rows))
    if not all(row["converged"] for row in rows):
        click.echo(f"* still above a training loss of {TARGET_LOSS} after the most epochs allowed")
    echo(*str(found or "too few networks for correlations").splitlines())
    if fixed := correlated(rows, ["loss"]):
        echo(conclusion(fixed))
    files = "scatter.png, results.json and results.csv, and the checkpoints and data,"
    echo(f"{files} are in {out}. Commands to go on with:")
    for line in commands(out):
        click.echo(f"\n    {printable(line)}")


def digits(seed: int) -> tuple[Data, Data]:
    """Return the training and the test data, split at random."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[:_TRAINING_IMAGES], order[_TRAINING_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def recipes(seed: int) -> list[dict[str, Any]]:
    """Return three architectures × two optimisers × two learning rates × two batch sizes, each with its seed."""
    choices = [
        {"network": network, "optimizer": optimizer, "learning_rate": rate, "batch_size": batch_size}
        for network in _NETWORKS
        for optimizer, rate in (("sgd", 0.005), ("sgd", 0.02), ("adam", 0.001), ("adam", 0.005))
        for batch_size in (16, 128)
    ]
    return [{**choice, "seed": seed + number} for number, choice in enumerate(choices)]


def trained(recipe: Mapping[str, Any], data: Data) -> tuple[nn.Module, int, bool]:
    """Return a network in eval mode, the epochs that it took, and whether the mean loss of the last is small enough."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe["seed"])  # of the CPU alone, which is all that is forked
        model = _NETWORKS[recipe["network"]]()
    images, labels = data
    optimizer = _OPTIMIZERS[recipe["optimizer"]](model.parameters(), lr=recipe["learning_rate"])
    shuffle, loss_of = torch.Generator().manual_seed(recipe["seed"]), nn.CrossEntropyLoss()
    mean, epochs = math.inf, 0
    while not mean < TARGET_LOSS and epochs < MAX_EPOCHS:
        total = 0.0
        for batch in torch.randperm(len(images), generator=shuffle).split(recipe["batch_size"]):
            optimizer.zero_grad()
            loss = loss_of(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        mean, epochs = total / len(images), epochs + 1
    return model.eval(), epochs, mean < TARGET_LOSS


def measured(chosen: list[dict[str, Any]], train: Data, test: Data, folder: Path) -> list[dict[str, Any]]:
    """Train a network by each recipe, save it, and return a row for each with losses, accuracy, gap and measures."""
    from safetensors.torch import save

    networks: dict[str, nn.Module] = {}
    rows: dict[str, dict[str, Any]] = {}
    for recipe in progress.track(chosen, len(chosen), "networks", None):
        how = f"{recipe['optimizer']}_lr{recipe['learning_rate']:g}_batch{recipe['batch_size']}"
        name = f"{recipe['network']}/{how}"
        networks[name], epochs, converged = trained(recipe, train)
        rows[name] = {"name": name, **recipe, "epochs": epochs, "converged": converged}
    for data, kind in ((train, "train"), (test, "test")):
        for found in score(networks, "cross_entropy", data, measures=MEASURES):
            if not found.layer:
                cells = {f"{kind}_loss": found.loss, f"{kind}_accuracy": found.accuracy}
                cells |= {found.measure: found.value} if data is train else {}
                rows[found.checkpoint] |= {name: math.nan if cell is None else cell for name, cell in cells.items()}
    for name, row in rows.items():
        row["gap"] = row["test_loss"] - row["train_loss"]
        (folder / row["network"]).mkdir(exist_ok=True)
        state = save(networks[name].state_dict(), {key: str(cell) for key, cell in row.items()})
        write_whole(folder / f"{name}.safetensors", state)
    return [*rows.values()]


def correlated(rows: list[dict[str, Any]], given: Sequence[str] = ()) -> Correlations | None:
    """Return the correlations with the gap inside of architectures, over networks of finite numbers; None of no two."""
    out = [row["name"] for row in rows if not all(map(math.isfinite, (row["gap"], *map(row.get, MEASURES))))]
    if len(rows) - len(out) < 2:
        return None
    return correlations(_columns(rows), MEASURES, exclude=out, strata="architecture", given=given)


def conclusion(found: Correlations) -> str:
    """Return a sentence that says what the correlations at equal training loss decide."""
    row = found[MEASURES[0], "Kendall"]
    if math.isnan(row.low):
        decided = "there is no interval, so that nothing is decided"
    elif row.low > 0:
        decided = "the interval is above zero: here flatter networks have the smaller gap"
    elif row.high < 0:
        decided = "the interval is below zero: here flatter networks have the larger gap"
    else:
        decided = "the interval contains zero, so that these networks do not decide whether it goes with the gap"
    ends = "" if math.isnan(row.low) else f" [{row.low:.2f}, {row.high:.2f}]"
    return (
        "Among networks of one architecture, with the training loss held fixed, Kendall's correlation of relative "
        f"flatness of all layers with the gap is {row.value:.2f}{ends}: {decided}."
    )


def write(folder: Path, rows: list[dict[str, Any]], found: Correlations | None, seed: int) -> None:
    """Write the plot, and all numbers in full precision as JSON and CSV."""
    if found is not None:
        write_whole(folder / "scatter.png", _plot(rows, found))
    results = json.dumps(_results(rows, found, seed), indent=2, allow_nan=False) + "\n"
    write_whole(folder / "results.json", results.encode())
    write_whole(folder / "results.csv", export.content(rows, folder / "results.csv"))


def commands(folder: Path) -> Iterator[str]:
    """Yield command lines that work on the checkpoints."""
    here = {name: shlex.quote(str(folder / name)) for name in ("networks.py", "train.npz", "test.npz", "mlp_1")}
    scored = f"pyflatness score --model {here['networks.py']}:mlp_1 --loss cross_entropy {here['mlp_1']}"
    train, test = folder / "train.csv", folder / "test.csv"
    yield f"pyflatness layers --model {here['networks.py']}:mlp_1"
    yield f"{scored} --data {here['train.npz']} --out {shlex.quote(str(train))}"
    yield f"{scored} --data {here['test.npz']} --out {shlex.quote(str(test))} --measures weight_norm"
    shown = f"pf.statistics.correlations({json.dumps(str(train))}, test={json.dumps(str(test))})"
    yield f"python -c {shlex.quote(f'import pyflatness as pf; print({shown})')}"


def _require_extras() -> None:
    try:
        import matplotlib  # noqa: F401
        import safetensors  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"the demo needs {error.name}: pip install 'pyflatness[demo]'") from None


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    columns = {name: [row[name] for row in rows] for name in ("name", "gap", *MEASURES)}
    return columns | {"loss": [row["train_loss"] for row in rows], "architecture": [row["network"] for row in rows]}


def _results(rows: list[dict[str, Any]], found: Correlations | None, seed: int) -> dict[str, Any]:
    """Return what results.json has, which knows no NaN."""
    import sklearn

    versions = {"pyflatness": __version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {"numpy": np.__version__, "scikit-learn": sklearn.__version__}
    held = [row.to_dict() for row in found.rows] if found else []
    facts: dict[str, Any] = finite({"seed": seed, "versions": versions, "correlations": held, "networks": rows})
    return facts


def _table(rows: list[dict[str, Any]]) -> Table:
    """Return a table narrow enough for 80 columns, without Greek, which not every terminal can show."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for header in ("network", "optimizer"):
        table.add_column(header)
    last = "train loss", "test loss", "test acc.", "gap", "kappa", "norm. kappa"
    for header in ("batch size", "rate", "seed", "epochs", *last):
        table.add_column(header.replace(" ", "\n"), justify="right")
    for row in rows:
        table.add_row(
            *(row["network"], row["optimizer"], str(row["batch_size"]), f"{row['learning_rate']:g}", str(row["seed"])),
            f"{row['epochs']}{'' if row['converged'] else '*'}",
            *(f"{row[name]:.3f}" for name in ("train_loss", "test_loss", "test_accuracy", "gap")),
            *(f"{row[name]:.4g}" for name in MEASURES),
        )
    return table


def _plot(rows: list[dict[str, Any]], found: Correlations) -> bytes:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(11, 5), layout="constrained")
    for panel, measure in zip(figure.subplots(1, len(MEASURES), sharey=True), MEASURES, strict=True):
        plot_correlation(_columns(rows), measure, exclude=found.excluded, settings="architecture", axes=panel)
        said = "\n".join(str(row) for row in found.rows if row.measure == measure)
        panel.set_title(f"networks of one architecture compared\n{said}", fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()

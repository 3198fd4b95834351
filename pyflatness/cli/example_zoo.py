"""Run ``pyflatness example-zoo``: train some small networks, so that there are checkpoints to try the commands on.

They are the networks of ``pyflatness demo``, with their settings in the metadata of their checkpoints.
"""

import io
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np

from .. import progress
from ..errors import MissingExtraError
from ..messages import printable
from . import demo_networks, example_networks
from .demo_networks import Digits, Recipe
from .paths import prepare_folder, write_whole


@click.command("example-zoo", short_help="Save 24 small networks to try the commands on.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the data and networks."
)
def example_zoo(folder: Path, seed: int) -> None:
    """Train 24 small networks and save them in DIR, with their data.

    They learn handwritten digits (less than a minute), by several optimisers, learning rates and batch sizes, which are
    in the metadata of the checkpoints. The command then prints what can be done with them.
    """
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise MissingExtraError("the digits need scikit-learn: pip install 'pyflatness[demo]'") from None
    prepare_folder(folder, "DIR")
    digits = demo_networks.load_digits(seed)
    write_whole(folder / "networks.py", Path(example_networks.__file__).read_bytes())
    write_whole(folder / "train.npz", _arrays(digits.train_images.numpy(), digits.train_labels.numpy()))
    write_whole(folder / "test.npz", _arrays(digits.test_images.numpy(), digits.test_labels.numpy()))
    recipes = demo_networks.recipes(seed)
    with demo_networks.single_thread():
        for recipe in progress.track(recipes, len(recipes), "networks", None):
            (folder / _family(recipe)).mkdir(exist_ok=True)
            write_whole(folder / _file(recipe), _checkpoint(recipe, digits))
    click.echo(printable(f"{len(recipes)} checkpoints are in {folder}. Commands to go on with:"))
    for line in commands(folder):
        click.echo(f"\n    {printable(line)}")


def commands(folder: Path) -> Iterator[str]:
    """Yield command lines that work on the zoo."""
    here = {name: shlex.quote(str(folder / name)) for name in ("networks.py", "train.npz", "test.npz", "mlp_1")}
    score = f"pyflatness score --model {here['networks.py']}:mlp_1 --loss cross_entropy {here['mlp_1']}"
    train, test = folder / "train.csv", folder / "test.csv"
    yield f"pyflatness layers --model {here['networks.py']}:mlp_1"
    yield f"{score} --data {here['train.npz']} --out {shlex.quote(str(train))}"
    yield f"{score} --data {here['test.npz']} --out {shlex.quote(str(test))}"
    correlations = f"pf.statistics.correlations({json.dumps(str(train))}, test={json.dumps(str(test))})"
    yield f"python -c {shlex.quote(f'import pyflatness as pf; print({correlations})')}"


def _family(recipe: Recipe) -> str:
    """Return the name of what makes the network, which is that of its folder."""
    return demo_networks.NETWORKS[recipe.network].__name__


def _file(recipe: Recipe) -> str:
    optimiser = recipe.optimiser.lower()
    return f"{_family(recipe)}/{optimiser}_lr{recipe.learning_rate:g}_batch{recipe.batch_size}.safetensors"


def _checkpoint(recipe: Recipe, digits: Digits) -> bytes:
    from safetensors.torch import save

    trained = demo_networks.train(recipe, digits)
    (train_loss, _), (test_loss, test_accuracy) = (
        demo_networks.evaluate(trained.model, images, labels)
        for images, labels in ((digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels))
    )
    settings = {**asdict(recipe), "epochs": trained.epochs, "train_loss": train_loss, "test_loss": test_loss}
    settings |= {"test_accuracy": test_accuracy, "generalization_gap": test_loss - train_loss}
    return save(trained.model.state_dict(), {name: str(value) for name, value in settings.items()})


def _arrays(images: np.ndarray, labels: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, images=images, labels=labels)
    return file.getvalue()

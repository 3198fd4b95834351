"""C24, Figure 3: normalised MLS against adaptive sharpness over vision transformers.

The paper takes 181 pretrained networks of timm. Here small transformers of several patch sizes, widths and depths are
trained, on digits, or at paper scale on CIFAR-10 of the user's. A sigmoid is put behind the logits and squared error
taken of it; sharpness is Eq. 38 by Monte Carlo and normalised MLS Definition F.1 by the ascent of Eq. 47, as in
appendix F.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from pyflatness import progress
from pyflatness.errors import InputError
from pyflatness.measures.adaptive_sharpness_mc import adaptive_sharpness_mc
from pyflatness.measures.mls_adversarial import mls_adversarial
from pyflatness.statistics.correlation import correlations

from . import beside, claims, correlating, image_data
from .claims import Claim
from .experiment import Bench, Experiment, Finding, Found, Points, note
from .networks import SigmoidOutputs, VisionTransformer
from .training import Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = ("patch", "width", "depth")
PAIR = ("adaptive_sharpness", "normalized_mls")


def measured(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train transformers, and measure both."""
    settings = bench.settings
    if bench.scale == "small":
        train, _ = image_data.digits(settings["samples"])
    else:
        whole, _ = image_data.read(bench.data_dir, "cifar10")
        train = image_data.scaled(whole, settings["samples"])
    train = bench.on_device(train)
    data = train[0][: settings["measured"]], F.one_hot(train[1][: settings["measured"]], 10).float()
    shapes = itertools.product(settings["patches"], settings["widths"], settings["depths"], range(settings["seeds"]))
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    with progress.bar("transformers", settings["seeds"] * _shapes(settings), bench.shown) as advance:
        for patch, width, depth, seed in shapes:
            name = f"patch{patch}_width{width}_depth{depth}_seed{seed}"
            folder = bench.folder / f"c24-transformers-{bench.scale}-{settings['samples']}-{settings['epochs']}"
            network = _trained((patch, width, depth, seed), train, settings["epochs"], folder / f"{name}.safetensors")
            with torch.no_grad():
                accuracy = float((network(train[0]).argmax(dim=1) == train[1]).float().mean())
            row = {"name": name, "patch": patch, "width": width, "depth": depth, "seed": seed, "accuracy": accuracy}
            try:
                row |= both(network, data)
            except InputError as error:  # its outputs are not finite
                note(failures, name, str(error))
            rows.append(row)
            advance(1, name)
    columns = ("name", *SHAPE, "seed", "accuracy", *PAIR)
    return {column: [row.get(column, math.nan) for row in rows] for column in columns}, failures


def both(network: nn.Module, data: Data) -> dict[str, float]:
    """Return adaptive sharpness and normalised MLS of the outputs' sigmoid."""
    outputs = SigmoidOutputs(network).eval()
    sharpness = adaptive_sharpness_mc(outputs, nn.MSELoss(), data, progress=False)
    found = mls_adversarial(outputs, nn.MSELoss(), data, normalized=True, progress=False)
    return {PAIR[0]: float(sharpness.value), PAIR[1]: float(found.value)}


def judge(points: Points) -> Found:
    """Correlate the two in logarithms; those of one shape are not independent, and neither are those of one seed."""
    table, failures = points.columns, dict(points.failures)
    kept = []
    for place, name in enumerate(table["name"]):
        missing = [column for column in PAIR if not 0 < table[column][place] < math.inf]
        if missing:
            note(failures, name, f"{', '.join(missing)}: no positive number, not in the correlations")
        else:
            kept.append(place)
    findings = [
        Finding(f"log normalised MLS with log adaptive sharpness, {how}", *ends, paper="positive trend")
        for how, ends in _correlated(table, kept).items()
    ]
    held, against = beside_settings(table, kept)
    shapes = len({*zip(*(table[name] for name in SHAPE), strict=True)})
    made = [Claim(item) for item in findings]
    verdict = (
        f"Over {len(kept)} transformers of {shapes} shapes, with 95 % intervals over shapes and seeds, the correlation "
        f"is positive in the paper. {claims.grouped(made)} These are small transformers "
        "trained here, in place of the paper's 181 pretrained ones."
    )
    return Found(
        table,
        (*findings, *held),
        verdict,
        lambda figure: draw(figure, table),
        failures,
        (6.0, 4.5),
        {"mls": against},
        made,
    )


def beside_settings(table: Mapping[str, Sequence[Any]], kept: Sequence[int]) -> tuple[list[Finding], str]:
    """Return how adaptive sharpness goes with normalised MLS, beside what shapes, other seeds and chance say of it."""
    networks: dict[str, list[Any]] = {name: [table[name][place] for place in kept] for name in ("name", "seed", *SHAPE)}
    if any(len({*networks[name]}) < 2 for name in SHAPE):
        return [], ""
    logs = {f"log {name}": [math.log(table[name][place]) for place in kept] for name in PAIR}
    called = {f"log {PAIR[0]}": "logarithm of adaptive sharpness"}
    y = "logarithm of normalised MLS"
    return beside.table(networks | logs | {y: logs[f"log {PAIR[1]}"]}, called, y, SHAPE)


def _correlated(
    table: Mapping[str, Sequence[Any]], kept: Sequence[int]
) -> dict[str, tuple[float | None, float | None, float | None]]:
    if len(kept) < 2:
        return dict.fromkeys(("Pearson", "Spearman"), (None, None, None))
    chosen = {name: [table[name][place] for place in kept] for name in ("name", "seed", *SHAPE)}
    logs = {name: [math.log(table[name][place]) for place in kept] for name in PAIR}
    found = correlations(chosen | logs, [PAIR[0]], PAIR[1], settings=SHAPE, seeds="seed", interval="fisher")
    return {how: correlating.ends(found, PAIR[0], how) for how in ("Pearson", "Spearman")}


def _shapes(settings: Mapping[str, Any]) -> int:
    return len(settings["patches"]) * len(settings["widths"]) * len(settings["depths"])


def _trained(shape: tuple[int, int, int, int], train: Data, epochs: int, path: Path) -> nn.Module:
    """Return a transformer of (patch, width, depth, seed), trained by Adam on cross-entropy, or read it."""
    from safetensors.torch import load_file, save_file

    patch, width, depth, seed = shape
    inputs, labels = train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = VisionTransformer((inputs.shape[1], inputs.shape[2]), patch, width, depth, 10)
        network = network.to(inputs.device)
        if not path.exists():
            optimizer = torch.optim.Adam(network.parameters(), lr=0.002)
            for _ in range(epochs):
                for index in torch.randperm(len(labels)).split(64):
                    optimizer.zero_grad()
                    F.cross_entropy(network(inputs[index]), labels[index]).backward()
                    optimizer.step()
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            save_file(network.state_dict(), part)
            part.replace(path)
    network.load_state_dict(load_file(path))
    return network.eval()


def draw(figure: "Figure", table: Mapping[str, Sequence[Any]]) -> None:
    """Draw the two against each other, coloured by patch size, marked by depth."""
    panel = figure.subplots()
    for color, patch in enumerate(sorted(set(table["patch"]))):
        for marker, depth in zip("o^sD", sorted(set(table["depth"])), strict=False):
            places = [p for p, own in enumerate(table["patch"]) if own == patch and table["depth"][p] == depth]
            columns = ([table[name][p] for p in places] for name in ("adaptive_sharpness", "normalized_mls"))
            panel.plot(*columns, marker, color=f"C{color}", label=f"patch {patch}, depth {depth}", markersize=5)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("adaptive sharpness")
    panel.set_ylabel("normalised MLS")
    panel.legend(fontsize=7)


EXPERIMENT = Experiment(
    name="c24-fig3",
    figure="C24, Figure 3",
    title="normalised MLS against adaptive sharpness over vision transformers",
    claim="For most of 181 pretrained vision transformers lower adaptive sharpness goes with lower normalised MLS.",
    measure=measured,
    judge=judge,
    seconds=38,
    small={
        **{"patches": [2, 4], "widths": [8, 16], "depths": [1, 2], "seeds": 3},
        **{"samples": 600, "measured": 100, "epochs": 30},
    },
    paper={
        **{"patches": [4, 8], "widths": [32, 64], "depths": [2, 4], "seeds": 5},
        **{"samples": 10_000, "measured": 100, "epochs": 10},
    },
    data="CIFAR-10",
)

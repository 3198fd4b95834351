"""C24, Figure 3: normalised MLS against adaptive sharpness over vision transformers.

The paper takes 181 pretrained networks of timm. Here small transformers of several patch sizes, widths and depths are
trained, on digits, or at paper scale on CIFAR-10 of the user's. A sigmoid is put behind the logits and squared error
taken of it; sharpness is Eq. 38 by Monte Carlo and normalised MLS Definition F.1 by the ascent of Eq. 47, as in
appendix F.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from .. import progress
from ..generalization.correlation import correlations
from ..measures.adaptive_sharpness_mc import adaptive_sharpness_mc
from ..measures.mls_adversarial import mls_adversarial
from . import correlating, image_data
from .c24_networks import SigmoidOutputs, VisionTransformer
from .experiment import Bench, Experiment, Finding, Found
from .trajectories import Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(bench: Bench) -> Found:
    """Train transformers, and correlate the two measures in logarithms."""
    settings = bench.settings
    if bench.scale == "small":
        train, _ = image_data.digits(settings["samples"])
    else:
        whole, _ = image_data.read(bench.data_dir, "cifar10")
        train = image_data.scaled(whole, settings["samples"])
    data = train[0][: settings["measured"]], F.one_hot(train[1][: settings["measured"]], 10).float()
    shapes = itertools.product(settings["patches"], settings["widths"], settings["depths"], range(settings["seeds"]))
    rows: list[dict[str, Any]] = []
    with progress.bar("transformers", settings["seeds"] * _shapes(settings), bench.shown) as advance:
        for patch, width, depth, seed in shapes:
            name = f"patch{patch}_width{width}_depth{depth}_seed{seed}"
            folder = bench.folder / f"c24-transformers-{bench.scale}-{settings['samples']}-{settings['epochs']}"
            network = _trained((patch, width, depth, seed), train, settings["epochs"], folder / f"{name}.safetensors")
            outputs = SigmoidOutputs(network).eval()
            sharpness = adaptive_sharpness_mc(outputs, nn.MSELoss(), data, progress=False)
            found = mls_adversarial(outputs, nn.MSELoss(), data, normalized=True, progress=False)
            with torch.no_grad():
                accuracy = float((network(train[0]).argmax(dim=1) == train[1]).float().mean())
            shape = {"name": name, "patch": patch, "width": width, "depth": depth, "seed": seed, "accuracy": accuracy}
            rows.append(shape | {"adaptive_sharpness": sharpness.value, "normalized_mls": found.value})
            advance(1, name)
    table = {column: [row[column] for row in rows] for column in rows[0]}
    failures = {row["name"]: "sharpness is not positive" for row in rows if not row["adaptive_sharpness"] > 0}
    kept = [place for place, row in enumerate(rows) if row["name"] not in failures]
    logs = {
        column: [float(torch.tensor(table[column][place]).log()) for place in kept]
        for column in ("adaptive_sharpness", "normalized_mls")
    }
    together = correlations(
        {"name": [table["name"][p] for p in kept], **logs}, ["adaptive_sharpness"], "normalized_mls"
    )
    findings = [
        Finding(
            f"log normalised MLS with log adaptive sharpness, {how}",
            *correlating.ends(together, "adaptive_sharpness", how),
            paper="positive trend",
        )
        for how in ("Pearson", "Spearman")
    ]
    low, high = findings[1].low, findings[1].high
    said = "not decided" if low is None or high is None or low <= 0 <= high else "positive" if low > 0 else "negative"
    interval = "" if low is None else f" [{low:.2f}, {high:.2f}]"
    verdict = (
        f"Over {len(kept)} transformers the rank correlation of normalised MLS with adaptive sharpness is "
        f"{findings[1].value:.2f}{interval}: {said}. These are small transformers trained here, in place of "
        "the paper's 181 pretrained ones."
    )
    return Found(table, tuple(findings), verdict, lambda figure: draw(figure, table), failures, (6.0, 4.5))


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
    run=run,
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

"""Walter et al. 2024 (https://arxiv.org/abs/2405.16918): relative flatness around the iterates of an attack.

An image x that a network classifies right is attacked by projected gradient descent: steps of ``STEP`` along the signs
of the loss's gradient, inside of a box of radius ``RADIUS`` around x and inside of the range of pixels. Each iterate
has a κ of its own, that of the loss of this one image in the head's weight. It is taken at the image, at the first
iterate of another class, and at the last one. Beside it stand the network's largest probability and |φ|², the squared
length of the features, of which κ of a head is a multiple.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf

from . import claims, p21_minima
from .claims import Claim, average
from .experiment import Bench, Experiment, Finding, Found, Points
from .theorems import by_recipe, networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RADIUS, STEP, STEPS, IMAGES = 0.3, 0.01, 60, 500
PLACES = ("image", "flip", "end")


def attacked(network: nn.Sequential, x: Tensor, y: Tensor, low: float, high: float) -> list[Tensor]:
    """Return the iterates of the attack, the images first."""
    found = [x]
    for _ in range(STEPS):
        here = found[-1].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(network(here), y, reduction="sum"), here)
        moved = (found[-1] + STEP * slope.sign()).clamp(x - RADIUS, x + RADIUS)
        found.append(moved.clamp(low, high))
    return found


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Measure κ of the head along the attacks of each network's test images."""
    head, _ = p21_minima.layers(bench.scale)
    rows = []
    for facts, network, _, (x, y), told in networks(bench):
        right = (network(x[:IMAGES]).argmax(dim=1) == y[:IMAGES]).nonzero().flatten()
        images, labels = x[right], y[right]
        iterates = attacked(network, images, labels, float(x.min()), float(x.max()))
        data = [(iterate, labels) for iterate in iterates]
        report = pf.measure(
            network, "cross_entropy", data, layers=head, measures="relative_flatness", per_sample=True, progress=False
        )
        values = report[head, "relative_flatness"].per_sample
        assert values is not None
        kappa = values.view(len(iterates), -1)
        with torch.no_grad():
            outputs = torch.stack([network(iterate) for iterate in iterates])
            lengths = [network[:-1](iterate).square().sum(dim=1) for iterate in (iterates[0], iterates[-1])]
        wrong, p = outputs.argmax(dim=2) != labels, outputs.softmax(dim=2).amax(dim=2).mean(dim=1)
        fooled = wrong[-1]
        flip = wrong.int().argmax(dim=0)
        at = kappa[0], kappa.gather(0, flip[None])[0], kappa[-1]
        means = {place: float(values[fooled].mean()) for place, values in zip(PLACES, at, strict=True)}
        rows.append(
            facts | told | means
            | {"fooled": float(fooled.double().mean()), "flip step": float(flip[fooled].double().mean())}
            | {"share": float((at[2] < at[0])[fooled].double().mean())}
            | {"lengths": float(lengths[1][fooled].mean() / lengths[0][fooled].mean())}
            | {"confidence": float(p[0]), "confidence at the end": float(p[-1])}
            | {"curve": kappa[:, fooled].mean(dim=1).tolist()}
        )  # fmt: skip
    return {name: [row[name] for row in rows] for name in rows[0]}, {}


def judge(points: Points) -> Found:
    """Say by how much κ rises until the label flips, and where it is when the attack ends."""
    columns = points.columns
    every = range(len(columns["name"]))

    def mean(what: str, values: Sequence[float], paper: str = "") -> Finding:
        return average(what, by_recipe(columns, every, values), paper)

    def ratio(one: str, other: str) -> list[float]:
        return [math.log10(a / b) for a, b in zip(columns[one], columns[other], strict=True)]

    rise = mean("log10 of κ where the label flips over κ at the image", ratio("flip", "image"), "above 0")
    fall = mean("log10 of κ at the end over κ where the label flips", ratio("end", "flip"), "below 0")
    whole = mean("log10 of κ at the end over κ at the image", ratio("end", "image"), "below 0")
    share, fooled, flip, lengths, before, after, error = (
        mean(what, columns[name])
        for what, name in (
            ("share of images with a smaller κ at the end", "share"),
            ("share of images that are fooled", "fooled"),
            ("step of the flip", "flip step"),
            ("|φ|² at the end over |φ|² at the image", "lengths"),
            ("confidence at the images", "confidence"),
            ("confidence at the end", "confidence at the end"),
            ("test error", "test error"),
        )
    )
    made = [Claim(rise), Claim(fall, -1), Claim(whole, -1)]
    verdict = (
        f"{len(columns['name'])} networks of {len(set(columns['recipe']))} recipes, with a mean test error of "
        f"{claims.shown(error)}; means over recipes, of test images that the network classifies right and the attack "
        f"fools ({claims.shown(fooled)} of them, on average at step {claims.shown(flip)} of {STEPS}). "
        f"{claims.grouped(made)} At {claims.shown(share)} of these images κ is smaller at the end than at the image. "
        f"|φ|² is {claims.shown(lengths)} times as large at the end. The largest probability is {claims.shown(before)} "
        f"at the images and {claims.shown(after)} at the end."
    )
    findings = (rise, fall, whole, share, fooled, flip, lengths, before, after, error)
    return Found(
        columns, findings, verdict, lambda figure: _draw(figure, columns), points.failures, claims=made, size=(7.0, 4.5)
    )


def _draw(figure: "Figure", columns: Mapping[str, Sequence[Any]]) -> None:
    axes, first = figure.subplots(), [curve[0] for curve in columns["curve"]]
    for curve in columns["curve"]:
        axes.plot([value / curve[0] for value in curve], color="C0", alpha=0.25, linewidth=0.8)
    by_step = zip(*columns["curve"], strict=True)
    middle = [statistics.median(b / a for a, b in zip(first, step, strict=True)) for step in by_step]
    axes.plot(middle, color="C1", linewidth=2, label="median over networks")
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("step of the attack")
    axes.set_ylabel("mean κ of the fooled images, over that at the images")
    axes.legend()


EXPERIMENT = Experiment(
    name="uncanny-valley",
    figure="Walter et al. 2024, relative flatness along an attack",
    title="relative flatness of the head around the iterates of an attack",
    claim="Along an iterated attack κ rises until the label flips, and then falls into a flat region.",
    measure=measure,
    judge=judge,
    seconds=90,
    small=p21_minima.SMALL,
    paper=p21_minima.PAPER,
    data=p21_minima.DATA,
)

"""P21, Appendix B: what relative flatness says where labels change with the inputs, as in regression.

With ℓ = (f - y)², labels y(x) and rotations A of the inputs, Eq. 8 to 11 of the paper are for each sample

    γ(δ) = ℓ(f(x + δAx), y(x + δAx)),   γ'(0) = 2 (f - y) ⟨f_x - y_x, Ax⟩,
    E_A γ''(0) = κ_i/m + (|x|²/m) (2 |y_x|² - 2 (f - y) Δy - 4 ⟨f_x, y_x⟩),

κ_i the sample's part of κ of the first layer. The first term is that of Theorem 5, the others are the labels'.
"""

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

import pyflatness as pf
from pyflatness import progress
from pyflatness.statistics.correlation import correlations

from . import claims, correlating
from .claims import Claim, average
from .experiment import Bench, Experiment, Finding, Found, Points
from .training import initialized

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURES, HIDDEN = 6, 24
NAMES = ("steepness", "seed", "flatness", "labels", "gap", "test_loss", "loss", "first", "second")


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train networks on labels of each steepness, and compute the terms of Eq. 11."""
    settings, table = bench.settings, []
    with progress.bar("networks", len(settings["steepness"]) * settings["seeds"], bench.shown) as advance:
        for steepness in settings["steepness"]:
            for seed in range(settings["seeds"]):
                facts = (steepness, seed, settings["samples"], settings["tested"])
                table.append(bench.once(f"p21-appB {facts}", functools.partial(_terms, *facts)))
                advance(1, f"steepness {steepness:g}")
    return dict(zip(NAMES, map(list, zip(*table, strict=True)), strict=True)), {}


def _terms(steepness: float, seed: int, samples: int, tested: int) -> list[float]:
    """Return the second-order terms of flatness and of labels, gap, losses, and errors of Eq. 9 and 11."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(2, FEATURES, generator=generator, dtype=torch.float64) / FEATURES**0.5
    inputs = torch.randn(samples + tested, FEATURES, generator=generator, dtype=torch.float64)

    def label(x: Tensor) -> Tensor:
        one, other = (x @ teacher.t()).unbind(dim=-1)
        return torch.tanh(steepness * (one + torch.sin(2 * other)))

    x, y, test = inputs[:samples], label(inputs[:samples]), inputs[samples:]
    network = initialized(lambda: nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)), seed)
    _fit(network.double(), x, y)

    def output(point: Tensor) -> Tensor:
        value: Tensor = network(point)[..., 0]
        return value

    kappa = float(pf.relative_flatness(network, nn.MSELoss(), (x, y[:, None]), layer="0"))
    with torch.no_grad():
        loss, test_loss = (float((output(part) - label(part)).square().mean()) for part in (x, test))
    f_x, y_x = vmap(grad(output))(x).detach(), vmap(grad(label))(x)
    residual, squares = (output(x) - y).detach(), x.square().sum(dim=1)
    curved = vmap(hessian(label))(x)
    bent = curved.diagonal(dim1=1, dim2=2).sum(dim=1)
    labels = (squares * (2 * y_x.square().sum(1) - 2 * residual * bent - 4 * (f_x * y_x).sum(1))).mean() / FEATURES
    turn, _ = torch.linalg.qr(torch.randn(FEATURES, FEATURES, generator=generator, dtype=torch.float64))
    turned = x @ turn.t()

    def risk(delta: float) -> float:
        return float((output(x + delta * turned) - label(x + delta * turned)).square().mean().detach())

    slope = float((2 * residual * ((f_x - y_x) * turned).sum(dim=1)).mean())
    inner = vmap(hessian(output))(x).detach() - curved
    second = ((f_x - y_x) * turned).sum(1).square() + residual * torch.einsum("ni,nij,nj->n", turned, inner, turned)
    delta = 2e-4 / max(steepness, 1.0)
    first = (risk(delta) - risk(-delta)) / (2 * delta)
    double = (risk(delta) - 2 * risk(0.0) + risk(-delta)) / delta**2
    parts = [kappa / FEATURES, float(labels), test_loss - loss, test_loss, loss]
    return [steepness, seed, *parts, abs(slope / first - 1), abs(2 * float(second.mean()) / double - 1)]


def _fit(network: nn.Module, x: Tensor, y: Tensor) -> None:
    """Take a network near a minimum of the mean squared error, with a small penalty on the weights."""
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=400, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = torch.stack([parameter.square().sum() for parameter in network.parameters()]).sum()
        loss: Tensor = (network(x)[:, 0] - y).square().mean() + 1e-4 * penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    network.zero_grad()


def judge(points: Points) -> Found:
    """Hold the labels' terms against that of flatness, and κ against the gap and the test loss."""
    columns = points.columns
    steep = [*dict.fromkeys(columns["steepness"])]
    at = {s: {name: _at(columns, name, s) for name in NAMES} for s in steep}
    parts = [
        average(f"log10 of |labels' terms| over flatness's, steepness {s:g}",
                [float(v) for v in np.log10(np.abs(np.array(own["labels"]) / np.array(own["flatness"])))],
                "can contribute stronger")
        for s, own in at.items()
    ]  # fmt: skip
    rows = {
        target: [Finding(f"κ with the {target}, Pearson, steepness {s:g}", *_r(at[s], target)) for s in steep]
        for target in ("gap", "test_loss")
    }
    ends = [(np.array(at[s]["flatness"]), np.array(at[s]["gap"])) for s in (steep[-1], steep[0])]
    rise = correlating.paired_difference(
        f"κ with the gap, Pearson at steepness {steep[-1]:g} less that at {steep[0]:g}",
        ends,
        np.arange(len(ends[0][0])),
        paper="above 0",
    )
    totals = [
        average(f"flatness and labels together, over flatness alone, steepness {s:g}",
                [(a + b) / a for a, b in zip(own["flatness"], own["labels"], strict=True)])
        for s, own in at.items()
    ]  # fmt: skip
    made = [Claim(rise)]
    told = "; ".join(
        f"{s:g}: gap {claims.shown(rows['gap'][place])}, test error {claims.shown(rows['test_loss'][place])}"
        for place, s in enumerate(steep)
    )
    kept = "; ".join(f"{s:g}: {claims.shown(item)}" for s, item in zip(steep, totals, strict=True))
    larger = sum(abs(b) > a for a, b in zip(columns["flatness"], columns["labels"], strict=True))
    sizes = "; ".join(f"{item.what} {claims.shown(item)}" for item in parts)
    verdict = (
        f"{len(columns['seed'])} networks, {len(columns['seed']) // len(steep)} of each steepness of the labels, whose "
        f"test errors are mean squared errors, {_span(at, 'test_loss')} in the mean. Eq. 9 agrees with finite "
        f"differences to a relative {statistics.median(columns['first']):.1g} in the median network and Eq. 11 to "
        f"{max(columns['second']):.1g} in all. The paper says that label changes can contribute more to the loss than "
        f"flatness: in {larger} networks their terms are larger. In the mean {sizes}. The curvature with labels that "
        f"change, over that with constant ones: {kept}. Pearson's correlation of κ with gap and test error, by "
        f"steepness: {told}. The paper says that κ says less where labels change. {claims.grouped(made)}"
    )
    return Found(
        columns,
        (*parts, *totals, *rows["gap"], *rows["test_loss"], rise),
        verdict,
        lambda figure: _draw(figure, steep, parts, rows),
        points.failures,
        size=(8.0, 3.5),
        claims=made,
    )


def _span(at: Mapping[float, Mapping[str, Sequence[float]]], name: str) -> str:
    means = [statistics.fmean(own[name]) for own in at.values()]
    return f"{min(means):.2g} to {max(means):.2g}"


def _r(own: Mapping[str, Sequence[float]], target: str) -> tuple[float | None, float | None, float | None]:
    table = {"kappa": own["flatness"], "y": own[target], "seed": own["seed"]}
    return correlating.ends(correlations(table, "kappa", "y", settings="seed", interval="fisher"), "kappa", "Pearson")


def _at(columns: Mapping[str, Sequence[float]], name: str, steepness: float) -> list[float]:
    return [value for value, s in zip(columns[name], columns["steepness"], strict=True) if s == steepness]


def _draw(
    figure: "Figure", steep: Sequence[float], parts: Sequence[Finding], rows: Mapping[str, Sequence[Finding]]
) -> None:
    left, right = figure.subplots(1, 2)
    claims.error_bars(left, steep, parts)
    left.set_ylabel("log10, labels' terms over flatness's")
    for name, label in (("gap", "gap"), ("test_loss", "test error")):
        claims.error_bars(right, steep, rows[name], label)
    right.set_ylabel("Pearson, κ of the first layer")
    right.legend()
    for axes in (left, right):
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("steepness of the labels")


EXPERIMENT = Experiment(
    name="p21-appB",
    figure="P21, Appendix B",
    title="the terms of the labels beside that of flatness, where labels change with the inputs",
    claim="Where labels are not locally constant their changes can contribute more to the loss around the samples than "
    "relative flatness does, which then says less of the gap.",
    measure=measure,
    judge=judge,
    seconds=120,
    small={"steepness": [0.5, 2.0, 8.0], "seeds": 20, "samples": 200, "tested": 4000},
    paper={"steepness": [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0], "seeds": 100, "samples": 200, "tested": 10_000},
)

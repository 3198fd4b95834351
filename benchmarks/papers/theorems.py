"""P21, Theorem 5 and Eq. 5, and P19, Appendix D.2, over trained networks: how far second order carries.

**Theorem 5.** E_F(α), the mean rise of the loss over rotations A of a layer's features, is held against α²κ/(2m). At
the first layer the features are the inputs. With the noise of Proposition 2 in the place of rotations, Eq. 5 divides
the gap into representativeness and feature robustness: E_gen = E_Rep + E_F.

**Appendix D.2.** One matrix A moves all samples. How much more does the loss rise when each goes its own worst way,
φ_i + δ|φ_i| u_i, and how large is the smallest A that takes k samples there at once?
"""

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness import progress

from . import claims, p21_minima
from .claims import Claim, average
from .experiment import Bench, Experiment, Finding, Found, Points
from .training import Data, metadata
from .zoo import trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = {"fc1": "the inputs", "fc3": "the features before the last hidden layer", "fc4": "the penultimate features"}
SMALL, COUNTS, RHO, PROBES = 0.01, (2, 8, 32), 0.05, 8


def networks(bench: Bench) -> Iterator[tuple[dict[str, Any], nn.Sequential, Data, Data, dict[str, float]]]:
    """Yield networks that converged: facts, themselves in float64, training and test data, and losses and errors."""
    from safetensors.torch import load_file

    zoo = p21_minima.zoo(bench)
    train, test = (bench.on_device((x.double(), y)) for x, y in (zoo.train, zoo.test))
    paths = trained(bench, zoo)
    with progress.bar("networks", len(paths), bench.shown) as advance:
        for name, path in paths.items():
            if metadata(path)["converged"] == "true":
                network = zoo.network()
                network.load_state_dict(load_file(path))
                assert isinstance(network, nn.Sequential)
                network.double().to(bench.device).eval()
                with torch.no_grad():
                    losses = [float(F.cross_entropy(network(x), y)) for x, y in (train, test)]
                    error = float((network(test[0]).argmax(1) != test[1]).double().mean())
                facts = {"name": name, "recipe": name.rsplit("_seed", 1)[0]}
                told = {"gap": losses[1] - losses[0], "test error": error, "loss": losses[0]}
                yield facts, network, train, test, told
            advance(1, name)


def rises(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Measure robustness of three layers of each network to rotations and to noise."""
    rows = []
    for seed, (facts, network, train, _, told) in enumerate(networks(bench)):  # of rotations, others for each network
        places = {name: place for place, (name, _) in enumerate(network.named_children())}
        for layer in LAYERS:
            before, after = network[: places[layer]], network[places[layer] :]
            with torch.no_grad():
                features = before(train[0])
                n, m = features.shape
                delta = n ** (-1 / (4 + m))
                noise = pf.theory.truncated_normal_noise(features, delta, probes=PROBES, seed=seed)
                noisy = [float(F.cross_entropy(after(features + s * xi), train[1])) for xi in noise for s in (1, -1)]
            found = pf.theory.feature_robustness(
                network, "cross_entropy", train, layer=layer, rho=[SMALL, delta], probes=PROBES, seed=seed
            )
            small, large = (found.rises / found.parabola).tolist()
            robust = statistics.fmean(noisy) - told["loss"]
            rows.append(
                facts | told | {"layer": layer, "kappa": found.kappa, "parabola": float(found.parabola[1])}
                | {"small": small, "large": large, "robustness": robust, "representativeness": told["gap"] - robust}
            )  # fmt: skip
    return _columns(rows), {}


def tightness(points: Points) -> Found:
    """Say by layer how many times the parabola the rise is, and what is left of the gap."""
    columns = points.columns
    findings, said = [], []
    for layer, words in LAYERS.items():
        own = [place for place, name in enumerate(columns["layer"]) if name == layer]
        small, large, part, over = (
            average(f"{what}, {layer}", by_recipe(columns, own, values), paper)
            for what, values, paper in (
                (f"E_F over δ²κ/2m at δ = {SMALL:g}", columns["small"], "1 as δ → 0"),
                ("the same at n^(-1/(4+m))", columns["large"], "1 + O(δ)"),
                ("E_Rep of the gap", _ratio(columns, "representativeness", "gap"), "near 0"),
                ("δ²κ/2m over the gap", _ratio(columns, "parabola", "gap"), "at least 1, where E_Rep is near 0"),
            )
        )
        findings += [small, large, part, over]
        said.append(
            f"for {words} ({layer}) {claims.shown(small)} and {claims.shown(large)}, with an E_Rep of "
            f"{claims.shown(part)} of the gap"
        )
    error = average("test error", by_recipe(columns, range(len(columns["name"])), columns["test error"]))
    verdict = (
        f"{len(set(columns['name']))} networks of {len(set(columns['recipe']))} recipes, with a mean test error of "
        f"{claims.shown(error)}; means over recipes. E_F is this many times δ²κ/2m, at δ = {SMALL:g} and at the "
        f"paper's n^(-1/(4+m)): {'; '.join(said)}."
    )
    return Found(columns, (*findings, error), verdict, lambda figure: _draw(figure, columns), points.failures)


def _ratio(columns: Mapping[str, Sequence[Any]], one: str, other: str) -> list[float]:
    return [a / b for a, b in zip(columns[one], columns[other], strict=True)]


def by_recipe(columns: Mapping[str, Sequence[Any]], places: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return the mean over the networks of each recipe."""
    held: dict[str, list[float]] = {}
    for place in places:
        held.setdefault(columns["recipe"][place], []).append(values[place])
    return [statistics.fmean(those) for those in held.values()]


def own_ways(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Measure the rises of the loss by one matrix and by a direction for each sample, at the head."""
    rows = []
    for facts, network, train, _, told in networks(bench):
        head = network[-1]
        features = network[:-1](train[0]).detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(head(features), train[1]), features)
        with torch.no_grad():
            ways = features.norm(dim=1, keepdim=True) * slope / slope.norm(dim=1, keepdim=True)
            moved = float(F.cross_entropy(head(features + RHO * ways), train[1])) - told["loss"]
        common = pf.theory.largest_robustness(network, "cross_entropy", train, layer="fc4", rho=RHO).rise
        report = pf.measure(
            network, "cross_entropy", train, layers="fc4", measures=["weight_norm", "lambda_max"], progress=False
        )
        bound = pf.theory.spectral_robustness_bound(RHO, report["fc4", "weight_norm"], report["fc4", "lambda_max"])
        sizes = {f"norm {k}": _norm(features[:k].detach(), ways[:k]) for k in COUNTS}
        rows.append(facts | told | {"own": moved, "common": common, "bound": float(bound)} | sizes)
    return _columns(rows), {}


def _norm(features: Tensor, ways: Tensor) -> float:
    """Return the operator norm of the least matrix A with Aφ_i = z_i."""
    return float(torch.linalg.matrix_norm(ways.t() @ torch.linalg.pinv(features).t(), 2))


def hidden(points: Points) -> Found:
    """Say by how much more the loss rises by directions of their own."""
    columns, every = points.columns, range(len(points.columns["name"]))
    more, bound = (
        average(f"own directions' rise over that of {what}, less 1", [value - 1 for value in ratios], paper)
        for what, ratios, paper in (
            ("the worst A of norm 1", by_recipe(columns, every, _ratio(columns, "own", "common")), "above 0"),
            ("the bound ½δ²‖w‖²λ_max", by_recipe(columns, every, _ratio(columns, "own", "bound")), "may be above 0"),
        )
    )
    norms = [
        average(
            f"log10 of the norm of the least A for {k} samples",
            by_recipe(columns, every, [math.log10(norm) for norm in columns[f"norm {k}"]]),
            "large",
        )
        for k in COUNTS
    ]
    error = average("test error", by_recipe(columns, every, columns["test error"]))
    made = [Claim(more)]
    told = ", ".join(f"{k} samples {claims.shown(item)}" for k, item in zip(COUNTS, norms, strict=True))
    verdict = (
        f"{len(columns['name'])} networks of {len(set(columns['recipe']))} recipes, with a mean test error of "
        f"{claims.shown(error)}; means over recipes, at the head and δ = {RHO:g}. The paper says that a large rise of "
        f"single samples can hide in the mean over one matrix. {claims.grouped(made)} Over the bound "
        f"½δ²‖w‖²λ_max, less 1, it is {claims.shown(bound)}. The least norm of a matrix that takes samples their own "
        f"ways, as log10, where the bound is of norm 1: {told}."
    )
    return Found(
        columns, (more, bound, *norms, error), verdict, functools.partial(_norms, norms=norms), points.failures,
        claims=made,
    )  # fmt: skip


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _norms(figure: "Figure", norms: Sequence[Finding]) -> None:
    axes = figure.subplots()
    claims.error_bars(axes, COUNTS, norms)
    axes.set_xscale("log")
    axes.set_xlabel("samples that go their own ways")
    axes.set_ylabel("log10, norm of the least matrix")


def _draw(figure: "Figure", columns: Mapping[str, Sequence[Any]]) -> None:
    axes = figure.subplots()
    for number, layer in enumerate(LAYERS):
        own = [place for place, name in enumerate(columns["layer"]) if name == layer]
        for name, marker in (("small", "o"), ("large", "x")):
            axes.scatter(
                [number] * len(own), [columns[name][place] for place in own], marker=marker, color=f"C{number}"
            )
    axes.set_xticks(range(len(LAYERS)), [*LAYERS])
    axes.set_yscale("log")
    axes.set_ylabel("E_F over δ²κ/2m; o: δ = 0.01, x: n^(-1/(4+m))")


THEOREM5 = Experiment(
    name="p21-theorem5",
    figure="P21, Theorem 5, Eq. 5",
    title="feature robustness beside the parabola of relative flatness, and representativeness, by layer",
    claim="A minimum is feature robust on average for δ²κ/(2m) + O(δ³); where the data are representative, robustness "
    "is the gap.",
    measure=rises,
    judge=tightness,
    seconds=60,
    small=p21_minima.SMALL,
    paper=p21_minima.SMALL | {"seeds": 10},
)
ADVERSARIAL = Experiment(
    name="p19-d2",
    figure="P19, Appendix D.2",
    title="the rise of the loss by one feature matrix, and by a direction for each sample",
    claim="Large changes of the loss at single samples can hide in the mean over one matrix; to take samples their own "
    "ways needs a matrix of large norm, for which the bound says almost nothing.",
    measure=own_ways,
    judge=hidden,
    seconds=60,
    small=p21_minima.SMALL,
    paper=p21_minima.SMALL | {"seeds": 10},
)

"""P21, Figure 4, in the setting of the authors' notebook rather than of their Appendix C.1.

The [notebook](https://github.com/kampmichael/RelativeFlatnessAndGeneralization) draws δ²/m κ + R with δ = 0.1. Data are
scikit-learn's ``make_classification`` with 10 features. 50 samples of a third train ``RidgeClassifier``, and the other
two thirds test it. R is what the authors' code calls representativeness, of the classes that ten refitted heads
predict. κ is that of fc4, the layer before the head, and the inputs are taken back through the linear maps of the
network alone, without its tanh, so that the features are not those that the head learned. The gap is one of squared
errors between the head's outputs, which learned labels -1 and 1, and labels 0 and 1. The authors' code changes weights
by the features' variances while it computes κ, which is left out here.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness import progress
from pyflatness.theory.sampling import authors_representativeness

from . import claims
from .claims import Claim, average
from .experiment import Bench, Experiment, Found, Points
from .p21_fig4 import at, draw
from .training import initialized

if TYPE_CHECKING:
    pass

DELTA, SAMPLES, TRAINED, FEATURES, THIRDS = 0.1, 600, 50, 10, 3
LABELS = {"bound": "δ²κ/m + R", "flatness": "δ²κ/m", "gap": "gap", "error": "test error"}
NAMES = ("separation", "seed", "flatness", "representativeness", "bound", "gap", "error")


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Compute bound and gap of some data sets of each class separation, each the mean over three trainings."""
    settings, rows = bench.settings, []
    with progress.bar("data sets", len(settings["separations"]) * settings["repetitions"], bench.shown) as advance:
        for separation, seed in itertools.product(settings["separations"], range(settings["repetitions"])):
            compute = functools.partial(_thirds, separation, seed)
            parts = bench.once(f"p21-fig4-authors {separation} {seed}", compute)
            rows.append([separation, seed, *torch.tensor(parts).mean(dim=0).tolist()])
            advance(1, f"class separation {separation:g}")
    return dict(zip(NAMES, map(list, zip(*rows, strict=True)), strict=True)), {}


def _thirds(separation: float, seed: int) -> list[list[float]]:
    return [*_parts(separation, seed)]


def _parts(separation: float, seed: int) -> Iterator[list[float]]:
    """Yield, for each third, δ²κ/m, R, their sum, the gap, and the error of the classes."""
    from sklearn.datasets import make_classification

    made = make_classification(
        SAMPLES, FEATURES, n_informative=3, n_redundant=4, class_sep=separation, random_state=seed
    )
    features, labels = (torch.from_numpy(part).double() for part in made)
    for third in torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).chunk(THIRDS):
        held = torch.ones(SAMPLES, dtype=torch.bool)
        held[third] = False
        x, y = features[third[:TRAINED]], labels[third[:TRAINED]]
        weight, bias = ridge(x, y[:, None])
        rep = authors_representativeness(x, weight, bias, y[:, None], loss=_wrong, folds=10, fit=ridge, seed=seed)
        network = _network(weight, bias, seed)
        inputs = _back(network, features)
        kappa = float(pf.relative_flatness(network, nn.MSELoss(), (inputs[third[:TRAINED]], y[:, None]), layer="6"))
        with torch.no_grad():
            outputs = network(inputs)[:, 0]
            gap = F.mse_loss(outputs[held], labels[held]) - F.mse_loss(outputs[third[:TRAINED]], y)
            error = _wrong(features[held] @ weight.t() + bias, labels[held, None])
        flatness = DELTA**2 / FEATURES * kappa
        yield [flatness, float(rep), flatness + float(rep), float(gap), float(error)]


def ridge(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight (1, m) and intercept of ``RidgeClassifier``: ridge regression on -1 and 1 with penalty 1."""
    center, targets = features.mean(dim=0), 2 * labels - 1
    x = features - center
    gram = x.t() @ x + torch.eye(x.shape[1]).to(x)
    weight = torch.linalg.solve(gram, x.t() @ (targets - targets.mean(dim=0))).t()
    return weight, targets.mean(dim=0) - weight @ center


def _wrong(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the squared error of predicted classes 0 and 1."""
    return ((outputs > 0).to(labels) - labels).square().mean()


def _network(weight: Tensor, bias: Tensor, seed: int) -> nn.Sequential:
    """Return the tanh network 784-512-128-16-10 with the head."""

    def make() -> nn.Module:
        widths = (784, 512, 128, 16, FEATURES)
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
        return nn.Sequential(*itertools.chain(*((layer, nn.Tanh()) for layer in layers)), nn.Linear(FEATURES, 1))

    network = initialized(make, seed).double().eval()
    assert isinstance(network, nn.Sequential)
    with torch.no_grad():
        for parameter, values in zip(network[-1].parameters(), (weight, bias), strict=True):
            parameter.copy_(values)
    return network


@torch.no_grad()
def _back(network: nn.Sequential, features: Tensor) -> Tensor:
    """Return inputs that the linear maps take to the features, without tanh."""
    found = features
    for layer in [layer for layer in network if isinstance(layer, nn.Linear)][-2::-1]:
        found = torch.linalg.lstsq(layer.weight, (found - layer.bias).t()).solution.t()
    return found


def judge(points: Points) -> Found:
    """Say what falls with the class separation, and what the sum consists of."""
    columns = points.columns
    separations = [*dict.fromkeys(columns["separation"])]
    means = {
        name: [average(f"{name} at class separation {c:g}, mean", at(columns, name, c)) for c in separations]
        for name in NAMES[2:]
    }
    first, last = separations[0], separations[-1]
    fall = average(
        f"the sum at {last:g} less that at {first:g}",
        [a - b for a, b in zip(at(columns, "bound", last), at(columns, "bound", first), strict=True)],
        "below 0",
    )
    held = sum(b >= g for b, g in zip(columns["bound"], columns["gap"], strict=True))
    ends = {name: [claims.shown(rows[place]) for place in (0, -1)] for name, rows in means.items()}
    share = max(claims.number(a) / claims.number(b) for a, b in zip(means["flatness"], means["bound"], strict=True))
    made = [Claim(fall, -1)]
    verdict = (
        f"{len(columns['seed'])} data sets, {len(columns['seed']) // len(separations)} of each class separation, in "
        f"the setting of the authors' notebook. Means at class separation {first:g} and {last:g}: the sum "
        f"{' and '.join(ends['bound'])}, of which δ²κ/m is {' and '.join(ends['flatness'])}, gaps of "
        f"{' and '.join(ends['gap'])}, test errors {' and '.join(ends['error'])}. The gap is below the sum in {held} "
        f"data sets. The paper says that the bound falls as the problem becomes easier. {claims.grouped(made)} "
        f"The term of relative flatness is at most {share:.2g} of the sum in the mean: what falls is the other one."
    )
    return Found(
        columns,
        (*itertools.chain(*means.values()), fall),
        verdict,
        lambda figure: draw(figure, separations, means, LABELS),
        points.failures,
        size=(6.0, 4.0),
        claims=made,
    )


EXPERIMENT = Experiment(
    name="p21-fig4-authors",
    figure="P21, Figure 4, as the notebook has it",
    title="the sum that the authors' notebook draws beside the gap, by class separation",
    claim="Relative flatness and an approximation of representativeness tightly bound the generalisation gap, and the "
    "bound decreases the easier the learning problem becomes.",
    measure=measure,
    judge=judge,
    seconds=60,
    small={"repetitions": 10, "separations": [0.5, 1.0, 2.0, 5.0]},
    paper={"repetitions": 100, "separations": [0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]},
)

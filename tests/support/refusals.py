"""Entries of the grid that are bad input: what is recorded is the type and message of the error."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import doors
from support.doors import LOSS, ON_MODELS, ON_TENSORS, C, M, X, Y


class Odd(nn.Module):
    """Two layers and a head, with something unusual in the forward pass."""

    def __init__(self, forward: Callable[["Odd", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.spare, self.head = (nn.Linear(M, M), nn.Linear(M, M), nn.Linear(M, M), nn.Linear(M, C))
        self.run = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def _without_graph(net: Odd, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = F.relu(net.one(x))
    return net.head(net.two(h))


def _mixed(net: Odd, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(net.one(x))
    return net.head(F.relu(net.two(h - h.mean(0))))


FORWARDS: dict[str, Callable[[Odd, torch.Tensor], Any]] = {
    "random": lambda net, x: net.head(F.dropout(net.two(net.one(x)), 0.5, training=True)),
    "mixing": _mixed,
    "without a graph": _without_graph,
    "no second derivative": lambda net, x: net.head(net.two(F.hardsigmoid(net.one(x)))),
    "turned outputs": lambda net, x: net.head(net.two(net.one(x))).t(),
    "two outputs": lambda net, x: (net.head(net.one(x)), net.two(x)),
    "raises": lambda net, x: net.head(x[:, :3]),
    "functional use": lambda net, x: net.head(F.linear(net.one(x), net.two.weight)),
    "detached": lambda net, x: net.head(net.two(net.one(x).detach())),
}


def _model(*parts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(M, 6), *parts, nn.Linear(6, C))


MODELS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "a class": lambda: nn.Linear,
    "a function": lambda: F.relu,
    "no parameters": nn.ReLU,
    "meta": lambda: doors.net().to("meta"),
    "training": lambda: _model(nn.Dropout(0.5)).train(),
    "batch norm in training": lambda: _model(nn.BatchNorm1d(6)).train(),
    "batch norm without statistics": lambda: _model(nn.BatchNorm1d(6, track_running_stats=False)).eval(),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, C)),
    "embedding alone": lambda: nn.Sequential(nn.Embedding(5, C)),
    "transposed convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.ConvTranspose1d(2, 3, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(9, C)),
    "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.GRU(2, C)),
    "weight not finite": lambda: _model(nn.Threshold(0.0, torch.nan)),
    **{name: partial(Odd, forward) for name, forward in FORWARDS.items()},
}  # fmt: skip
DATA: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "one tensor": lambda: X,
    "a loss": lambda: LOSS,
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "three": lambda: (X, Y, Y),
    "lists": lambda: [(X, Y.tolist())],
    "other lengths": lambda: (X, Y[:5]),
    "no samples": lambda: (X[:0], Y[:0]),
    "no batches": lambda: [],
    "float64": lambda: (X.double(), Y),
    "integers": lambda: (X.long(), Y),
    "another width": lambda: (X[:, :3], Y),
    "class out of range": lambda: (X, Y + C),
    "negative class": lambda: (X, Y - 5),
    "targets of another shape": lambda: (X, Y[:, None].expand(-1, 2)),
    "values as targets": lambda: (X, X[:, :C]),
    "all ignored": lambda: (X, torch.full_like(Y, -100)),
    "meta": lambda: (X.to("meta"), Y),
    "sparse": lambda: (doors.of_layout("sparse"), Y),
    "quantised": lambda: (doors.of_layout("quantised"), Y),
    "once": lambda: iter([(X, Y)]),
    "raises": lambda: (1 / 0 for _ in range(1)),
    "not finite": lambda: (torch.where(X > 1, torch.nan, X), Y),
    "later batch of another width": lambda: [(X, Y), (X[:, :3], Y)],
}
LOSSES: dict[str, Any] = {
    "none": None,
    "a class": nn.CrossEntropyLoss,
    "no such name": "hinge",
    "no reduction": nn.MSELoss(reduction="none"),
    "a number": lambda f, y: 3,
    "not reduced": lambda f, y: f,
    "arguments swapped": lambda y, f: F.cross_entropy(f, y),
    "no derivative": lambda f, y: (f.argmax(1) != y).double().mean(),
    "no second derivative": nn.MultiMarginLoss(),
    "couples samples": lambda f, y: f.sum(1).prod(),
    "weights of another length": nn.CrossEntropyLoss(weight=torch.ones(C + 2)),
    "of the outputs alone": lambda f, y: f.square().sum(1).mean(),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "layer": (3, "nothing", "re:(", "*", "1", nn.Linear, nn.Linear(2, 2), b"0", "type:LayerNorm"),
    "layers": (3, [], [None], "nothing", nn.Linear, ["0", "nothing"]),
    "measures": (3, [3], [], "kappa", ["trace", "kappa"]),
    "curvature": (3, "fisher"),
    "probes": (0, True, 2.5, 10**12, "many"),
    "rtol": (0.1, "1%", float("nan"), 2),
    "conv": ([], "pixel"),
    "normalize": (False, "variance"),
    "per_sample": (None, "yes", 1),
    "backend": (None, "gpu", "cuda"),
    "nan_policy": (None, "drop"),
    "memory": (0, "1GB", 1e9, True),
    "seed": (0.5, True, 2**63),
    "progress": ("yes",),
    "reduction": (3, "none", "batchmean"),
    "forward": (3, lambda model, batch: model(batch[0])),
    "samples": (2.5, 0),
    "steps": (2.5, 0),
    "points": (2.5, 1),
    "folds": ("2", 1, 100),
    "top": (0, "a"),
    "rho": ("a", -1, [], ["a"]),
    "drop": (1, 0),
    "tolerance": ("x", 0),
    "kappa": ("a",),
    "squared": (None,),
    "scaled": (None,),
    "normalized": (3,),
    "inplace": (None,),
    "sharpness": ([1], "some"),
    "initial": (3,),
}
TENSORS: dict[str, dict[str, Any]] = {
    "no features": {"features": None},
    "array of features": {"features": X.numpy()},
    "integers": {"features": X.long()},
    "float64 features": {"features": X.double()},
    "one row": {"features": X[0]},
    "no rows": {"features": X[:0], "targets": Y[:0]},
    "narrow weight": {"weight": torch.ones(C, M - 1)},
    "weight of one dimension": {"weight": torch.ones(M)},
    "bias of another length": {"bias": torch.ones(C + 1)},
    "targets out of range": {"targets": Y + C},
    "targets of another length": {"targets": Y[:5]},
    "targets missing": {"targets": None, "loss": nn.CrossEntropyLoss(weight=torch.ones(C))},
    "features not finite": {"features": torch.where(X > 1, torch.nan, X)},
    "weight not finite": {"weight": torch.full((C, M), torch.inf)},
    "no such loss": {"loss": "hinge"},
}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "rtol with probes": {"probes": 2, "rtol": 0.1},
    "std and affine": {"normalize": "std", "conv": "affine"},
    "sampled by sample": {"probes": 2, "per_sample": True, "nan_policy": "omit"},
}
ON_BAD_MODELS = ("relative_flatness", "measure", "block_traces", "representation", "pac_bayes", "verify")


def _on_tensors(call: Callable[..., Any], loss: Any = LOSS, **given: Any) -> Any:
    features, weight, bias, targets = doors.head()
    whole = {"features": features, "weight": weight, "bias": bias, "targets": targets, **given}
    return call(*whole.values(), loss=loss)


def entries() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every bad model, batch, loss and option, with the calls that take it."""
    for (name, make), door in itertools.product(MODELS.items(), ON_BAD_MODELS):
        yield f"{door} | bad model: {name}", lambda make=make, door=door: ON_MODELS[door](make(), LOSS, (X, Y))
    for (name, make), layer in itertools.product(MODELS.items(), ("one", "two", "spare", "0", "*")):
        yield (
            f"measure all | bad model: {name} | layers {layer.replace('*', 'all')}",
            lambda make=make, layer=layer: pf.measure(make(), LOSS, (X, Y), layers=layer, measures="all"),
        )
    for (name, make), (door, call) in itertools.product(DATA.items(), ON_MODELS.items()):
        yield f"{door} | bad data: {name}", lambda make=make, call=call: call(doors.net(), LOSS, make())
    for (name, loss), (door, call) in itertools.product(LOSSES.items(), ON_MODELS.items()):
        yield f"{door} | bad loss: {name}", lambda loss=loss, call=call: call(doors.net(), loss, (X, Y))
    for option, values in OPTIONS.items():
        for (place, value), (door, call) in itertools.product(enumerate(values), ON_MODELS.items()):
            if doors.takes(call, option):
                given = {option: value}
                yield (
                    f"{door} | bad option: {option} {place}",
                    lambda call=call, given=given: call(doors.net(), LOSS, (X, Y), **given),
                )
    for (name, options), layer in itertools.product(COMBINATIONS.items(), ("0", "2")):
        yield (
            f"relative_flatness | {name} | layer {layer}",
            partial(
                lambda layer, options: pf.relative_flatness(doors.net(), LOSS, (X, Y), layer, **options), layer, options
            ),
        )
    for (name, given), (door, call) in itertools.product(TENSORS.items(), ON_TENSORS.items()):
        yield f"{door} | bad tensors: {name}", partial(_on_tensors, call, **given)

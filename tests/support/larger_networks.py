"""Entries of the grid on networks large enough for the routes that the smallest ones do not reach."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.grid import Net

CROSS_ENTROPY = nn.CrossEntropyLoss()


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(seed, count, *shape):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def lenet5():
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def stages():
    """Convolutions of every kind of a residual network's: strided, depthwise, grouped, pointwise, dilated."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=4), nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2, padding=2, dilation=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(48, 5),
    )  # fmt: skip


def on_tokens(net, x):
    h = F.relu(net.one(x))
    return net.head(F.relu(net.two(h + h.mean(1, keepdim=True))).mean(1))


def tokens():
    return Net(on_tokens, one=nn.Linear(24, 40), two=nn.Linear(40, 32), head=nn.Linear(32, 6))


def on_embedded(net, x):
    h = net.embed(x)
    h = h + net.attention(h, h, h, need_weights=False)[0]
    return net.head(F.relu(net.up(h)).mean(1))


def encoder():
    """Weights that no measured layer has: an embedding's and attention's packed projections."""
    return Net(on_embedded, embed=nn.Embedding(30, 16), attention=nn.MultiheadAttention(16, 4, batch_first=True),
        up=nn.Linear(16, 32), head=nn.Linear(32, 4))  # fmt: skip


def vocabulary():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1500))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, torch.Tensor, tuple[str, ...]]] = {
    "lenet5": (lenet5, normal(1, 5, 3, 32, 32), classes(2, 10, 5), ("0", "3", "7", "11")),
    "stages": (stages, normal(3, 4, 3, 20, 20), classes(4, 5, 4), ("0", "3", "5", "7", "9", "13")),
    "tokens": (tokens, normal(5, 4, 50, 24), classes(6, 6, 4), ("one", "two", "head")),
    "encoder": (encoder, classes(7, 30, 4, 12), classes(8, 4, 4), ("up", "head", "attention", "embed")),
    "vocabulary": (vocabulary, normal(9, 6, 8), classes(10, 1500, 6), ("2",)),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "std by sample": {"normalize": "std", "per_sample": True},
    "2 probes": {"probes": 2, "seed": 5},
    "adaptive": {"probes": "adaptive", "rtol": 0.1},
    "tight": {"memory": 200_000, "nan_policy": "omit"},
}


def built(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return make().to(dtype).eval()


def on_network(
    name: str, call: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    make, inputs, targets, _ = NETWORKS[name]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    return call(built(make, dtype), CROSS_ENTROPY, (inputs, targets), *args, **options)


class LanguageModel(nn.Module):
    """Logits of the next token, as an attribute of what it returns, from batches that are mappings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 11)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        h = self.embed(input_ids)
        return SimpleNamespace(logits=self.head(F.relu(self.body(h + h.cumsum(1)))))


def of_language(layer: str, **options: Any) -> pf.results.Estimate:
    ids = classes(11, 11, 5, 6)
    batches = [{"input_ids": part, "labels": part} for part in ids.split(2)]
    return pf.relative_flatness(built(LanguageModel), CROSS_ENTROPY, batches, layer, forward=pf.causal_lm, **options)


def wide_head(classes_: int, dtype: torch.dtype, **options: Any) -> pf.results.Estimate:
    features, weight = normal(12, 40, 16).to(dtype), normal(13, classes_, 16).to(dtype)
    return pf.head_flatness(features, 3 * weight, None, classes(14, classes_, 40), **options)


def entries() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield values of each layer and reports of each network, and of language models and wide heads."""
    backends = "reference", "compiled"
    for (name, (*_, layers)), backend in itertools.product(NETWORKS.items(), backends):
        for variant, options in VARIANTS.items():
            call = partial(on_network, name, pf.measure, backend=backend, **{"measures": "sweep", **options})
            yield f"measure | larger: {name} | {variant} | {backend}", call
        for layer in layers:
            call = partial(on_network, name, pf.relative_flatness, layer, backend=backend, dtype=torch.float64)
            yield f"relative_flatness | larger: {name} | layer {layer} | float64 | {backend}", call
    for name in ("lenet5", "stages", "tokens", "encoder"):
        yield f"measure all | larger: {name}", partial(on_network, name, pf.measure, measures="all")
    eigenvalues = ["lambda_max", "relative_flatness_max", "matrix_normalized_sharpness"]
    call = partial(on_network, "vocabulary", pf.measure, measures=eigenvalues)
    yield "measure eigenvalues | larger: vocabulary", call
    for layer, (variant, options) in itertools.product(("body", "head"), VARIANTS.items()):
        yield f"relative_flatness | language model | {layer} | {variant}", partial(of_language, layer, **options)
    for count, dtype, backend in itertools.product((3, 300, 1500), (torch.float32, torch.float64), backends):
        name = f"head_flatness | {count} classes | {dtype} | {backend}"
        yield name, partial(wide_head, count, dtype, backend=backend, per_sample=True)
        yield f"{name} | rtol", partial(wide_head, count, dtype, backend=backend, rtol=0.05)
        yield f"{name} | std", partial(wide_head, count, dtype, backend=backend, normalize="std")

"""Random networks whose weights act in unusual ways: no value that is wrong is called exact.

Blocks follow one another: linear layers, bare parameters, flat weights that are reshaped, complex spectra, vectors that
scale, weights that two blocks share, matrices and rows of a parameter, weights that are computed, changed in place,
detached at a second use, or in the backward pass of a custom function. The output may be the derivative of what comes
out, or have it beside it.
"""

import copy
import random
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import pyflatness as pf
from support import truth
from support.combinations import in_soak
from support.functions import WeightInBackward
from support.grid import normal

WIDTH, SAMPLES, OUTPUTS = 4, 6, 3
LOSS = nn.MSELoss()
CHUNKS = 50


def with_gradient(layer, x):
    """Return x with the derivative of an energy in it."""
    x = x.detach().requires_grad_() if not x.requires_grad else x
    energy = torch.tanh(layer(x)).square().sum()
    return x + torch.autograd.grad(energy, x, create_graph=True)[0]


def written(weight):
    """Return a copy of a weight that is changed in place."""
    changed = weight.clone()
    changed[0] = weight[0] * weight[1]
    return changed


class Block(nn.Module):
    """One linear map of the block's kind, and an activation."""

    def __init__(self, kind: str, act: str, shared: nn.Parameter) -> None:
        super().__init__()
        self.kind, self.act = kind, {"tanh": torch.tanh, "relu": torch.relu, "softplus": nn.functional.softplus}[act]
        if kind in ("linear", "detached", "custom", "checkpointed"):
            self.layer = nn.Linear(WIDTH, WIDTH)
        elif kind == "computed":
            self.layer = random.choice([parametrizations.weight_norm, parametrizations.spectral_norm])(
                nn.Linear(WIDTH, WIDTH)
            )
        elif kind == "stacked":
            self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 2)
        elif kind in ("bare", "twice", "rows", "written"):
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        elif kind == "flat":
            self.weight = nn.Parameter(torch.randn(WIDTH * WIDTH) / 2)
        elif kind == "vector":
            self.weight = nn.Parameter(1 + torch.randn(WIDTH) / 2)
        elif kind == "complex":
            self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))
        elif kind == "product":
            self.left, self.right = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))
        else:
            self.weight = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("linear", "computed"):
            h = self.layer(x)
        elif self.kind == "detached":
            h = self.layer(x) + x @ self.layer.weight.detach()
        elif self.kind == "custom":
            h = WeightInBackward.apply(torch.tanh(self.layer(x)), self.layer.weight)
        elif self.kind == "checkpointed":
            h = checkpoint(with_gradient, self.layer, x, use_reentrant=False)
        elif self.kind == "stacked":
            first, second, third = self.weight.unbind()
            linear = nn.functional.linear
            h = linear(torch.tanh(linear(x, first)), second) + linear(x, third)
        elif self.kind == "rows":
            h = x @ self.weight.index_select(0, torch.tensor([2, 0, 2, 1]))
        elif self.kind == "written":
            h = x @ written(self.weight)
        elif self.kind == "flat":
            h = x @ self.weight.view(WIDTH, WIDTH)
        elif self.kind == "vector":
            h = x * self.weight
        elif self.kind == "complex":
            h = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)
        elif self.kind == "product":
            h = x @ (self.left @ self.right)
        elif self.kind == "twice":
            h = (x @ self.weight) @ self.weight.t()
        else:
            h = nn.functional.linear(x, self.weight)
        return self.act(h)


KINDS = ["linear", "linear", "bare", "twice", "flat", "vector", "complex", "product", "shared", "shared", "computed"]
KINDS += ["detached", "custom", "checkpointed", "stacked", "rows", "written"]


class Network(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        random.seed(seed)
        shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        blocks = [(draw.choice(KINDS), draw.choice(["tanh", "relu", "softplus"])) for _ in range(draw.randint(1, 3))]
        self.blocks = nn.ModuleList([Block(kind, act, shared) for kind, act in blocks])
        self.head = nn.Linear(WIDTH, draw.choice([1, OUTPUTS]))
        self.how = draw.choice(["plain", "derivative", "both", "both"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how != "plain":
            x = x.requires_grad_()
        h = x
        for block in self.blocks:
            h = block(h)
        out = self.head(h)
        if self.how == "plain":
            return out
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return gradient if self.how == "derivative" else torch.cat([out, gradient], dim=1)


def check(seed: int) -> None:
    model = Network(seed).double().eval()
    x = normal(seed, SAMPLES, WIDTH)
    with torch.enable_grad():
        y = normal(seed + 1, *model(x.clone()).shape)
    try:
        report = pf.measure(model, LOSS, (x.clone(), y))
    except pf.errors.InputError:  # such as no layer with a path to the outputs
        return
    simple = plain(model)
    parameters = dict(simple.named_parameters())

    def traces(name: str, place: str) -> tuple[float, float]:
        weight = parameters[name]
        (gradient,) = torch.autograd.grad(LOSS(simple(x.clone()), y), weight, create_graph=True, materialize_grads=True)
        hessian = truth.rows(gradient, weight).view(*weight.shape, *weight.shape)
        weight = weight.detach()
        if place:
            weight, hessian = weight[int(place)], hessian[int(place), :, :, int(place)]
        blocks = torch.einsum("sjtj->st", hessian)
        return float((weight @ weight.t() * blocks).sum()), float(blocks.trace())

    covered = set()
    for layer in report.layers:
        parameter, place = re.fullmatch(r"(.*?)(?:\[(\d)\])?", layer).groups()
        name = parameter if parameter in parameters else f"{parameter}.weight"
        covered.add(name)
        found = [report[layer, measure] for measure in ("relative_flatness", "trace")]
        if "through the layer's calls only" in "".join(found[1].notes):
            assert not report["trace"].exact, (seed, layer)
            continue
        for estimate, value in zip(found, traces(name, place or ""), strict=True):
            assert not estimate.exact or estimate.value == pytest.approx(value, rel=1e-8, abs=1e-10), (seed, layer)
    missing = {name for name in parameters if not name.endswith("bias")} - covered
    reached = {name for name in missing if matters(simple, x, name)}
    assert reached <= report.uncovered.keys(), (seed, reached)
    assert not (reached and report["trace"].exact), (seed, reached)


def plain(model: nn.Module) -> nn.Module:
    """Return a copy in which weights that are computed are parameters."""
    made = copy.deepcopy(model)
    for module in [*made.modules()]:
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
    return made


def matters(model: nn.Module, x: torch.Tensor, name: str) -> bool:
    """Return whether the outputs change with a parameter."""
    weight = dict(model.named_parameters())[name].detach()
    before = torch.func.functional_call(model, {name: weight}, (x.clone(),)).detach()
    after = torch.func.functional_call(model, {name: 1.5 * weight + 0.1}, (x.clone(),)).detach()
    return not torch.allclose(before, after)


@pytest.mark.parametrize("chunk", [0, *in_soak(*range(1, CHUNKS))])
def test_no_wrong_value_is_called_exact(chunk: int) -> None:
    for seed in range(20 * chunk, 20 * (chunk + 1)):
        check(seed)

"""Random networks whose weights act in unusual ways: no value that is wrong is called exact.

Blocks follow one another: linear layers, bare parameters, flat weights that are reshaped, complex spectra, vectors that
scale, weights that two blocks share. The output may be the derivative of what comes out, or have it beside it.
"""

import random

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.grid import normal

WIDTH, SAMPLES, OUTPUTS = 4, 6, 3
LOSS = nn.MSELoss()
CHUNKS = 20


class Block(nn.Module):
    """One linear map of the block's kind, and an activation."""

    def __init__(self, kind: str, act: str, shared: nn.Parameter) -> None:
        super().__init__()
        self.kind, self.act = kind, {"tanh": torch.tanh, "relu": torch.relu, "softplus": nn.functional.softplus}[act]
        if kind == "linear":
            self.layer = nn.Linear(WIDTH, WIDTH)
        elif kind in ("bare", "twice"):
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
        if self.kind == "linear":
            h = self.layer(x)
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


KINDS = ["linear", "linear", "bare", "twice", "flat", "vector", "complex", "product", "shared", "shared"]


class Network(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
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
    parameters = dict(model.named_parameters())

    def traces(name: str) -> tuple[float, float]:
        weight = parameters[name].detach()

        def risk(w: torch.Tensor) -> torch.Tensor:
            return LOSS(torch.func.functional_call(model, {name: w}, (x.clone(),)), y)

        hessian = torch.autograd.functional.hessian(risk, weight)
        blocks = torch.einsum("sjtj->st", hessian)
        return float((weight @ weight.t() * blocks).sum()), float(blocks.trace())

    shared = {id(block.weight) for block in model.blocks if block.kind == "shared"}
    for layer in report.layers:
        name = layer if layer in parameters else f"{layer}.weight"
        found = [report[layer, measure] for measure in ("relative_flatness", "trace")]
        expected = traces(name)
        if id(parameters[name]) in shared and sum(block.kind == "shared" for block in model.blocks) > 1:
            continue  # by use where modules share it, which the tests of tied weights hold
        for estimate, value in zip(found, expected, strict=True):
            assert not estimate.exact or estimate.value == pytest.approx(value, rel=1e-8, abs=1e-10), (seed, layer)
    covered = {layer if layer in parameters else f"{layer}.weight" for layer in report.layers}
    weights = {name for name in parameters if not name.endswith("bias")}
    missing = weights - covered
    reached = {name for name in missing if matters(model, x, name)}
    assert reached <= report.uncovered.keys(), (seed, reached)
    assert not (reached and report["trace"].exact), (seed, reached)


def matters(model: nn.Module, x: torch.Tensor, name: str) -> bool:
    """Return whether the outputs change with a parameter."""
    weight = dict(model.named_parameters())[name].detach()
    before = torch.func.functional_call(model, {name: weight}, (x.clone(),)).detach()
    after = torch.func.functional_call(model, {name: 1.5 * weight + 0.1}, (x.clone(),)).detach()
    return not torch.allclose(before, after)


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.soak) for chunk in range(1, CHUNKS))])
def test_no_wrong_value_is_called_exact(chunk: int) -> None:
    for seed in range(50 * chunk, 50 * (chunk + 1)):
        check(seed)

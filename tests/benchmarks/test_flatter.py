"""What penalties are held against: FAM as its code takes it, plain training that is stopped, and the tables printed."""

import json
import math
import re

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call

from support import ROOT


@pytest.fixture
def flatter(benchmark_modules):
    return benchmark_modules("flatter")


def test_fam_is_the_hessian_of_the_head_held_fixed(flatter):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    weight = model[2].weight
    risk = lambda w: flatter.LOSS(functional_call(model, {"2.weight": w}, (x,)), y)  # noqa: E731
    whole = torch.autograd.functional.hessian(risk, weight.detach())
    expected = (weight @ weight.T * torch.einsum("skuk->su", whole)).sum()
    outputs, value = flatter.of_fam(model, x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(value, flatter.of_head(model, x, y)[1])
    torch.testing.assert_close(outputs, model(x))
    parameters = [*model.parameters()]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    assert [gradient is None for gradient in found] == [True, True, False, True]
    torch.testing.assert_close(found[2], torch.autograd.grad(expected, weight)[0])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(0.75, (0.75, 1.25, 0.65)), (0.5, (0.5, 1.0, 0.7)), (0.2, (0.4, 1.1, 0.75)), (0.45, (0.45, 1.125, 0.7375))],
)
def test_a_run_that_is_stopped_at_a_loss(flatter, loss, expected):
    run = {"curve": [(1.0, 1.5, 0.6), (0.5, 1.0, 0.7), (0.6, 1.2, 0.7), (0.4, 1.1, 0.75)]}
    found = flatter.stopped(run, loss)
    assert [*found.values()] == pytest.approx(expected)


def told(values):
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return np.mean(values), np.mean(values) - half, np.mean(values) + half


@pytest.mark.parametrize(
    ("name", "arm", "row"),
    [
        ("digits", "κ of head, λ = 0.01", "κ of the head, λ = 0.01"),
        ("digits", "label smoothing, 0.1", "label smoothing, 0.1"),
        ("cifar10", "weight decay, 0.005", "weight decay, 0.005"),
    ],
)
def test_printed_differences_follow_from_the_runs(flatter, name, arm, row):
    runs = json.loads((ROOT / "docs" / "penalties" / f"{name}.json").read_text(encoding="utf-8"))
    pairs = [(runs[f"{arm} | {seed}"], runs[f"plain | {seed}"]) for seed in flatter.SEEDS]
    text = (ROOT / "docs" / "penalties.md").read_text(encoding="utf-8").replace("−", "-")
    rows = [
        line.split(" | ")[1:] for line in text.splitlines() if line.startswith(f"| {row} |") and line.count("|") == 5
    ]
    one, two = rows[:2] if name == "digits" else rows[-2:]

    def printed(cell):
        return [float(number) for number in re.findall(r"-?\d+\.?\d*", cell)]

    ends = [flatter.stopped(plain, run["train loss"]) for run, plain in pairs]
    loss = told([run["test loss"] - plain["test loss"] for run, plain in pairs])
    equal = told([run["test loss"] - end["test loss"] for (run, _), end in zip(pairs, ends, strict=True)])
    assert printed(one[0]) == pytest.approx(loss, abs=0.006)
    assert printed(two[1]) == pytest.approx(equal, abs=0.006)

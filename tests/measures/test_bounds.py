"""Bounds against the paper's formulas by brute force, and the inequalities where they must hold."""

import itertools
import json
import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.measures.normalized_sharpness import minimised
from support import networks
from support.bounds import holds
from support.brute_force import network
from support.cases import INDICES, C, M
from support.combinations import in_turn
from support.grid import normal
from support.jacobian_truth import places
from support.minimiser import brute_force
from support.residual import LOSS

X = normal(10, 6, M)


def parts(model, x):
    """By layer: W, and of each sample |x|, s, |J|_F, g and the volume."""
    found = {name: [] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for i in range(len(x)):
        f = model(x[i : i + 1])[0]
        at = places(model, x[i : i + 1], [*found])
        for name, numbers in found.items():
            phi, jacobian = at[name]
            weight = model.get_submodule(name).weight
            rows = [torch.autograd.grad(value, weight, retain_graph=True)[0] for value in f]
            s = torch.linalg.svdvals(jacobian)
            volume = s.prod() if len(s) == len(f) else torch.zeros(())
            numbers.append([phi.norm(), s[0], jacobian.norm(), torch.stack(rows).norm(), volume])
    weights = {name: model.get_submodule(name).weight.detach() for name in found}
    return weights, {name: torch.tensor(numbers, dtype=torch.float64).T for name, numbers in found.items()}


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_both_sides_by_brute_force(activation):
    model = network(M, 6, 5, C, activation=activation)
    weights, found = parts(model, X)
    n, N = len(X), C
    S = sum(float(g.square().mean()) for _, _, _, g, _ in found.values())
    bounds = pf.theory.bounds(model, LOSS, [(X[:4], INDICES[:4]), (X[4:], INDICES[4:])])
    assert (bounds.samples, bounds.outputs) == (n, N)
    assert bounds.sharpness == pytest.approx(S, rel=1e-10)
    expected = {}
    for name, (x, s, frobenius, g, volume) in found.items():
        W = float(torch.linalg.matrix_norm(weights[name], 2))
        spread = float(x.pow(-2).mean().sqrt())
        expected |= {
            (name, "5"): (s.mean(), (W * g / x).mean()),
            (name, "6, W"): (s.square().mean(), W**2 / x.min() ** 2 * g.square().mean()),
            (name, "6"): (s.square().mean(), W**2 / x.min() ** 2 * S),
            (name, "9, middle"): (volume.mean().log(), (N ** (-N / 2) * frobenius.pow(N).mean()).log()),
            (name, "9"): (volume.mean().log(), ((W / x).pow(2 * N).sum().sqrt() / n * (n * S / N) ** (N / 2)).log()),
            (name, "48, C"): (s.mean(), W * spread * g.square().mean().sqrt()),
            (name, "11"): (s.mean(), W * spread * S**0.5),
            (name, "37"): (2 * (frobenius * x).mean(), g.square().mean() + weights[name].square().sum()),
        }
    for one, other in itertools.pairwise(found):
        W = torch.linalg.matrix_norm(weights[one], 2)
        expected[one, "17"] = (found[one][1] - found[other][1]).mean(), (W * found[one][3] / found[one][0]).mean()
    norms = {name: float(torch.linalg.matrix_norm(w, 2)) for name, w in weights.items()}
    powers = torch.stack([(norms[name] / f[0]).pow(2 * N) for name, f in found.items()])
    total = sum(f[4].mean() for f in found.values()).log()
    scaled = sum(f[1].mean() / f[0].pow(-2).mean().sqrt() for f in found.values())
    ends = [*found]
    expected |= {
        ("", "10, middle"): (total, sum(N ** (-N / 2) * f[2].pow(N).mean() for f in found.values()).log()),
        ("", "10"): (total, (powers.sum().sqrt() / n * (n * S / N) ** (N / 2)).log()),
        ("", "12"): (
            sum(f[1].mean() for f in found.values()),
            (sum((norms[name] / f[0]).square().mean() for name, f in found.items()) * S) ** 0.5,
        ),
        ("", "35"): (scaled, sum(norms[name] * f[3].square().mean().sqrt() for name, f in found.items())),
        ("", "35, F"): (scaled, sum(weights[name].norm() * f[3].square().mean().sqrt() for name, f in found.items())),
        ("", "17, summed"): (
            (found[ends[0]][1] - found[ends[-1]][1]).mean(),
            sum((norms[name] * found[name][3] / found[name][0]).mean() for name in ends[:-1]),
        ),
    }
    assert {(row.layer, row.equation) for row in bounds.rows} == expected.keys()
    for (layer, equation), (left, right) in expected.items():
        row = bounds[layer, equation]
        assert row.left == pytest.approx(float(left), rel=1e-8, abs=1e-12), row
        assert row.right == pytest.approx(float(right), rel=1e-8), row
        assert row.log == (equation.startswith(("9", "10")))


@in_turn(4, "seed", range(60))
def test_the_inequalities_hold_for_linear_layers(seed):
    generator = torch.Generator().manual_seed(seed)
    depth, n = (int(torch.randint(1, high, (), generator=generator)) for high in (5, 9))
    widths = torch.randint(1, 12, (depth + 1,), generator=generator).tolist()
    activation = (nn.ReLU, nn.Tanh, nn.GELU, nn.Identity)[seed % 4]
    model = network(*widths, activation=activation, seed=seed)
    for module in model:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(10 ** float(torch.randn((), generator=generator)))
    x = torch.randn(n, widths[0], generator=generator, dtype=torch.float64).exp()
    data = x, torch.zeros(n, widths[-1], dtype=torch.float64)
    bounds = pf.theory.bounds(model, nn.MSELoss(), data, normalized=True)
    for row in bounds.rows:
        assert row.guaranteed, row
        assert holds(row), row
    for layer in dict.fromkeys(row.layer for row in bounds.rows if row.layer):
        chain = [bounds[layer, equation] for equation in ("5", "48, C", "11")]
        values = [chain[0].left, *(row.right for row in chain)]
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(values))  # A ≤ B ≤ C ≤ D


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_the_scales_of_normalised_sharpness(activation):
    model = network(M, 6, 5, C, activation=activation)
    model[2].weight.data[:, 1] = 0  # a column that drops out
    data = [(X[:4], INDICES[:4]), (X[4:], INDICES[4:])]
    bounds, plain = pf.theory.bounds(model, LOSS, data, normalized=True), pf.theory.bounds(model, LOSS, data)
    assert [row for row in bounds.rows if row.equation != "37, least"] == [*plain.rows]
    for name in ("0", "2", "4"):
        weight, at = (
            model.get_submodule(name).weight,
            [places(model, X[i : i + 1], [name])[name] for i in range(len(X))],
        )
        rows = [
            torch.autograd.grad(value, weight, retain_graph=True)[0].square() for x in X for value in model(x[None])[0]
        ]
        h, w = sum(rows) / len(X), weight.detach()
        b = minimised(h, w).columns
        kept = b > 0
        sides = [
            (jacobian[:, kept] / b[kept].sqrt()).norm() * (phi.flatten()[kept] * b[kept].sqrt()).norm()
            for phi, jacobian in at
        ]
        row = bounds[name, "37, least"]
        assert row.left == pytest.approx(2 * float(torch.stack(sides).mean()), rel=1e-6), name
        assert row.right == pytest.approx(brute_force(h, w), rel=1e-6), name
        assert row.right <= bounds[name, "37"].right * (1 + 1e-9)
        assert holds(row)
    convolution = networks.CASES["cnn"]
    found = pf.theory.bounds(
        convolution.build(), convolution.loss, (convolution.inputs, convolution.targets), normalized=True
    )
    assert [row.layer for row in found.rows if row.equation == "37, least"] == ["7"]


@pytest.mark.parametrize(
    ("name", "caveats"),
    [
        ("cnn", {"0": "a convolution", "3": "a convolution", "7": ""}),
        ("tokens", {"mix": "several positions", "next": "several positions", "head": "several positions"}),
        ("siamese", {"encoder": "called several times", "join": "", "head": ""}),
        ("gating", {"value": "its input goes another way too", "gate": "its input goes another way too", "head": ""}),
        ("conv 2d, grouped", {"0": "a convolution"}),
        ("mlp GELU", {"0": "", "2": "", "4": ""}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_guaranteed(name, caveats, dtype):
    case = networks.CASES[name]
    inputs = case.inputs.to(dtype) if case.inputs.is_floating_point() else case.inputs
    data = inputs, case.targets
    bounds = pf.theory.bounds(case.build().to(dtype), case.loss, data, layers=[*case.layers])
    for layer, caveat in caveats.items():
        shape = "" if caveat == "its input goes another way too" else caveat  # Eq. 17 is for such layers
        for row in bounds.rows:
            assert row.layer != layer or row.caveat == (shape if row.equation == "17" else caveat), row
    assert bounds["12"].guaranteed == (not any(caveats.values()))
    assert ("no guarantee" in str(bounds)) == any(caveats.values())
    report = pf.measure(case.build().to(dtype), case.loss, data, layers=[*case.layers], measures=["nmls_bound"])
    assert bool(report["nmls_bound"].notes) == any(caveats.values())


def test_an_input_of_zero_and_a_dead_network():
    x = torch.cat([X, torch.zeros(1, M, dtype=torch.float64)])
    data = x, torch.cat([INDICES, INDICES[:1]])
    assert pf.theory.bounds(network(M, 6, C), LOSS, data)["0", "11"].right == math.inf
    dead = network(M, 6, C)
    dead[2].weight.data.zero_()
    assert all(holds(row) for row in pf.theory.bounds(dead, LOSS, (X, INDICES)).rows)


def test_measures_by_name_and_the_table():
    model = network(M, 6, C)
    bounds = pf.theory.bounds(model, LOSS, (X, INDICES))
    report = pf.measure(
        model, LOSS, (X, INDICES), measures=["mls_bound", "nmls_bound", "log_volume_bound", "mls", "nmls"]
    )
    assert report["nmls_bound"].value == bounds["12"].right
    assert report["log_volume_bound"].value == bounds["10"].right
    assert report["2", "log_volume_bound"].value == bounds["2", "9"].right
    assert report["2", "mls_bound"].value == bounds["2", "48, C"].right
    assert bounds["12"].left == pytest.approx(report["nmls"].value, rel=1e-12)
    assert json.loads(bounds.to_json())["sharpness"] == bounds.sharpness
    with pytest.raises(pf.errors.InputError, match="nothing of layer 'x' and equation '12'"):
        bounds["x", "12"]


def test_another_sharpness():
    """The paper's, of all parameters, weights and biases here."""
    model = network(M, 6, C)
    whole = 0.0
    for x in X:
        for f in model(x):
            whole += sum(
                float(g.square().sum()) for g in torch.autograd.grad(f, [*model.parameters()], retain_graph=True)
            )
    S = whole / len(X)
    own, bounds = (pf.theory.bounds(model, LOSS, (X, INDICES), sharpness=s) for s in (None, S))
    assert bounds.sharpness == S > own.sharpness
    for row, other in zip(bounds.rows, own.rows, strict=True):
        powers = {"6": 1, "11": 0.5, "12": 0.5}
        if row.equation in powers:
            assert row.right == pytest.approx(other.right * (S / own.sharpness) ** powers[row.equation], rel=1e-10)
        assert row.left == other.left
        assert holds(row)
    found = pf.theory.bounds(model, LOSS, (X, INDICES), sharpness="all", normalized=True)
    assert found.sharpness == pytest.approx(S, rel=1e-10)
    assert found["12"].right == pytest.approx(bounds["12"].right, rel=1e-10)
    with pytest.raises(pf.errors.InputError, match="sharpness='some': a number or 'all' is wanted"):
        pf.theory.bounds(model, LOSS, (X, INDICES), sharpness="some")
    with pytest.raises(pf.errors.InputError, match=r"sharpness=0\.1: of the chosen layers' weights alone it is"):
        pf.theory.bounds(model, LOSS, (X, INDICES), sharpness=0.1)


def test_nan():
    x = X.clone()
    x[3] = torch.inf
    with pytest.raises(pf.errors.NonFiniteError, match="1 of 6 samples"):
        pf.theory.bounds(network(M, 6, C), LOSS, (x, INDICES))
    kept = [0, 1, 2, 4, 5]
    found = pf.theory.bounds(network(M, 6, C), LOSS, (x, INDICES), nan_policy="omit")
    expected = pf.theory.bounds(network(M, 6, C), LOSS, (X[kept], INDICES[kept]))
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row.right == pytest.approx(other.right, rel=1e-12)

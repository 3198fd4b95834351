"""Definition 9, Corollary 10, the constants of Proposition 12 and Theorem 15, by integrals and grids."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.grid import normal


def test_definition_9_on_the_line():
    """One feature, squared error: |(wz - 1)² - (wz)²| = |1 - 2wz| beyond the threshold, largest at an end."""
    phi, w = torch.tensor([[1.0], [2.0], [-1.0]]).double(), torch.tensor([[0.7]]).double()

    def labels(x):
        return (x > 1.5).double()

    deltas = [0.3, 0.6]
    found = pf.theory.label_constancy(phi, w, labels=labels, loss="mse_loss", rho=deltas, probes=400)
    expected = []
    for delta in deltas:
        largest = []
        for value in phi.flatten().tolist():
            z = torch.linspace(value - delta * abs(value), value + delta * abs(value), 20001).double()
            y = float(value > 1.5)
            change = ((0.7 * z - labels(z)).square() - (0.7 * z - y).square()).abs()
            largest.append(float(change.max()))
        expected.append(sum(largest) / 3)
    assert expected[0] > 0
    assert found.changes.tolist() == pytest.approx(expected, rel=0.05)
    assert all(change <= truth * (1 + 1e-3) for change, truth in zip(found.changes.tolist(), expected, strict=True))
    assert found.constant == pytest.approx(max(c / d**3 for c, d in zip(found.changes.tolist(), deltas, strict=True)))
    assert found.epsilon(3.0).tolist() == pytest.approx(
        [d**2 * 3 / 2 + c for c, d in zip(found.changes.tolist(), deltas, strict=True)]
    )


def test_constant_labels_change_nothing():
    phi, w = normal(1, 20, 4), normal(2, 3, 4)
    found = pf.theory.label_constancy(
        phi, w, targets=torch.arange(20) % 3, labels=lambda x: torch.arange(20) % 3, rho=[1]
    )
    assert (float(found.changes), found.constant) == (0, 0)
    assert found.epsilon(2.0).tolist() == pytest.approx([2 / 8])


def test_what_label_constancy_refuses():
    phi, w = normal(1, 20, 4), normal(2, 3, 4)
    with pytest.raises(pf.errors.InputError, match="rho"):
        pf.theory.label_constancy(phi, w, labels=lambda x: x[:, 0].long(), targets=torch.arange(20) % 3, rho=[0])
    with pytest.raises(pf.errors.NotYetError, match="no loss of a single sample"):
        pf.theory.label_constancy(phi, w, labels=lambda x: x, loss=lambda f, y: f.sum(), targets=phi, rho=[1])


def kernel(r):
    return torch.exp(-(r**2) / 2)


@pytest.mark.parametrize("m", [1, 2, 3, 400])
def test_the_kernel_by_quadrature(m):
    features = normal(m, 500 if m > 3 else 50, m) + 4
    found = pf.theory.density_constants(features, 1.0)
    r = (torch.arange(200_000).double() + 0.5) / 200_000
    sphere = math.log(2) + m / 2 * math.log(math.pi) - math.lgamma(m / 2)
    mass, second, square = (float((r ** (m - 1) * f).mean()) for f in (kernel(r), r**2 * kernel(r), kernel(r) ** 2))
    assert found.tau == pytest.approx(second / mass, rel=1e-4)
    assert found.log_beta == pytest.approx(math.log(square / mass**2) - sphere, rel=1e-6, abs=1e-6)
    assert found.log_alpha == pytest.approx(
        float((-m * features.norm(dim=1).log()).logsumexp(dim=0)) - math.log(len(features)), rel=1e-9
    )


def test_the_curvature_by_quadrature_and_autograd():
    """In the plane: a grid of ∇²(p|z|²) by nested autograd for the normal density of the features."""
    features = normal(7, 300, 2) @ torch.tensor([[1.0, 0.3], [0.0, 0.6]]).double() + torch.tensor([0.5, -0.2]).double()
    mean, covariance = features.mean(dim=0), torch.cov(features.t())
    axis = torch.linspace(-6, 6, 301).double()
    z = torch.cartesian_prod(axis, axis)

    z.requires_grad_()
    away = z - mean
    density = (-(away @ torch.linalg.inv(covariance) * away).sum(dim=1) / 2).exp()
    weighted = density / (2 * math.pi * torch.linalg.det(covariance).sqrt()) * z.square().sum(dim=1)
    (slope,) = torch.autograd.grad(weighted.sum(), z, create_graph=True)
    laplacian = sum(torch.autograd.grad(slope[:, c].sum(), z, retain_graph=True)[0][:, c] for c in (0, 1))
    truth = float(laplacian.abs().sum() * (axis[1] - axis[0]) ** 2)
    found = pf.theory.density_constants(features, 2.0, probes=200_000)
    assert found.curvature == pytest.approx(truth, rel=0.02)
    assert found.log_first == pytest.approx(math.log(found.tau * 2 * found.curvature))
    assert found.log_second == pytest.approx((found.log_alpha + found.log_beta + found.log_volume) / 2 + math.log(2))
    radius = float((features - features.mean(dim=0)).norm(dim=1).max())
    assert found.log_volume == pytest.approx(math.log(math.pi * radius**2))
    own = pf.theory.density_constants(features, 2.0, volume=3.0)
    assert own.log_volume == pytest.approx(math.log(3))
    both = math.exp(own.log_first) + math.exp(own.log_second) / math.sqrt(0.1)
    assert own.log_bound(0.1) == pytest.approx(math.log(both * 300 ** (-2 / 6)))


def test_features_without_a_density():
    for features in (normal(1, 3, 3), normal(1, 20, 1).expand(20, 3), torch.ones(20)):
        with pytest.raises(pf.errors.InputError, match="features"):
            pf.theory.density_constants(features, 1.0)


def test_theorem_15():
    torch.manual_seed(0)
    x = normal(5, 120, 4)
    net, data = nn.Linear(4, 3).double(), (x[:60], torch.arange(60) % 3)
    test = x[60:], torch.arange(60) % 3
    loss = nn.CrossEntropyLoss()
    plain = pf.theory.generalization_bound(net, loss, data, test=test)
    found = pf.theory.generalization_bound(net, loss, data, test=test, uniform=True)
    report = pf.measure(net, loss, data, measures="relative_flatness_max").by_measure()["relative_flatness_max"]
    (largest,) = report.values()
    assert found.flatness == pytest.approx(pf.theory.uniform_robustness_bound(plain.rho, 3, largest), rel=1e-9)
    every = [pf.theory.generalization_bound(net, loss, data, rho=share * plain.rho) for share in (0.25, 0.5, 0.75, 1)]
    best = min(every, key=lambda bound: bound.representativeness.magnitude)
    assert found.representativeness.magnitude == best.representativeness.magnitude
    assert found.representativeness.rho == best.rho
    assert found.bound == found.flatness + found.representativeness.magnitude
    assert (found.rho, found.measured) == (plain.rho, plain.measured)
    known = pf.theory.generalization_bound(net, loss, data, test=test, uniform=True, kappa=largest)
    assert known.bound == pytest.approx(found.bound, rel=1e-12)

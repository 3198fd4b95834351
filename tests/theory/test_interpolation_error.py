"""Lemma B.1 and E.2 of C24, both sides by nested autograd over all parameters."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.brute_force import network
from support.cases import C, M
from support.grid import normal
from support.unchanged import assert_unchanged, snapshot

X = normal(10, 6, M)


def brute_force(net, targets, *, adaptive):
    """Sharpness, its value at interpolation, the sum between the sides, and M, entry by entry."""
    names = [name for name, _ in net.named_parameters()]
    values = [w.detach() for w in net.parameters()]
    flat, sizes = torch.cat([w.flatten() for w in values]), [w.numel() for w in values]

    def outputs(theta, x):
        parts = zip(names, theta.split(sizes), values, strict=True)
        return torch.func.functional_call(net, {name: part.view_as(w) for name, part, w in parts}, (x,))

    scale = flat.square() if adaptive else torch.ones_like(flat)
    sharpness = near = middle = largest = 0.0
    for x, y in zip(X, targets, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda theta, x=x: outputs(theta, x), flat)
        second = torch.stack(
            [
                torch.autograd.functional.hessian(lambda theta, x=x, c=c: outputs(theta, x)[c], flat).diagonal()
                for c in range(C)
            ]
        )
        residual = outputs(flat, x) - y
        near += float((scale * jacobian.square().sum(dim=0)).sum()) / len(X)
        along = scale * (residual.unsqueeze(1) * second).sum(dim=0)
        sharpness += float((scale * jacobian.square().sum(dim=0) + along).sum()) / len(X)
        middle += float(along.abs().sum()) / len(X)
        largest = max(largest, float((scale * second.norm(dim=0)).max()))
    return sharpness, near, middle, largest


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("size", [0.0, 0.3])
def test_both_sides(adaptive, size):
    net = network(M, 5, C, activation=nn.Tanh)
    targets = (net(X) + size * normal(2, 6, C)).detach()
    sharpness, near, middle, largest = brute_force(net, targets, adaptive=adaptive)
    before = snapshot(net)
    cut = [(X[:4], targets[:4]), (X[4:], targets[4:])]
    found = pf.theory.interpolation_error(net, cut, adaptive=adaptive, second_derivatives=True)
    assert_unchanged(net, before)
    assert found.sharpness == pytest.approx(sharpness, rel=1e-9)
    assert found.at_interpolation == pytest.approx(near, rel=1e-9)
    assert (found.middle, found.largest) == pytest.approx((middle, largest), rel=1e-9, abs=1e-12)
    residuals = (net(X) - targets).norm(dim=1).detach()
    assert found.residual == pytest.approx(float(residuals.max()), abs=1e-12)
    assert (found.parameters, found.samples) == (sum(w.numel() for w in net.parameters()), 6)
    assert found.difference <= found.middle + 1e-9
    assert found.middle <= found.bound + 1e-12


def test_a_piecewise_linear_network_has_no_difference():
    net = network(M, 5, C)
    found = pf.theory.interpolation_error(net, (X, normal(2, 6, C)), second_derivatives=True)
    assert found.sharpness == pytest.approx(found.at_interpolation, rel=1e-12)
    assert (found.middle, found.largest, found.bound) == (0, 0, 0)
    assert found.residual > 0
    without = pf.theory.interpolation_error(net, (X, normal(2, 6, C)))
    assert (without.middle, without.largest, without.bound) == (None, None, None)


def test_what_does_not_fit():
    net = network(M, 5, C)
    with pytest.raises(pf.errors.InputError, match="targets of the outputs' shape"):
        pf.theory.interpolation_error(net, (X, torch.arange(6) % C))
    with pytest.raises(pf.errors.InputError, match="take a run each, more than max_passes=20"):
        pf.theory.interpolation_error(net, (X, normal(2, 6, C)), second_derivatives=True, max_passes=20)

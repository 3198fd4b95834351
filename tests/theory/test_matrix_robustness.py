"""Feature robustness to one matrix and to the worst, by brute force over matrices."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.brute_force import network
from support.cases import INDICES, C, M
from support.combinations import every
from support.grid import normal
from support.residual import LOSS
from support.unchanged import assert_unchanged, snapshot

X = normal(10, 6, M)
CUT = [(X[:4], INDICES[:4]), (X[4:], INDICES[4:])]


def displaced(net, name, change, loss=LOSS, data=(X, INDICES)):
    weight = net.get_submodule(name).weight.detach()
    values = {f"{name}.weight": weight + change.view_as(weight)}
    return float(loss(torch.func.functional_call(net, values, (data[0],)), data[1]).detach())


@every(together=1, reduction=["mean", "sum"], name=["0", "2"])
def test_one_matrix(name, reduction):
    net, loss = network(M, 6, C, activation=nn.Tanh), nn.CrossEntropyLoss(reduction=reduction)
    weight = net.get_submodule(name).weight.detach()
    matrix, alphas = normal(3, weight.shape[1], weight.shape[1]), [0.3, -0.2, 1.0]
    before = snapshot(net)
    found = pf.theory.matrix_robustness(net, loss, CUT, name, matrix=matrix, rho=alphas)
    assert_unchanged(net, before)
    own = displaced(net, name, 0 * weight, loss)
    expected = [displaced(net, name, alpha * weight @ matrix, loss) - own for alpha in alphas]
    assert found.rises.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.epsilon == pytest.approx(max(map(abs, expected)))
    assert (found.loss, found.layer, found.samples) == (pytest.approx(own), name, 6)


@pytest.mark.parametrize("several", [True, False])
def test_groups_of_a_convolution_have_matrices_of_their_own_or_one(several):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)).double()
    x, y = normal(1, 8, 4, 3, 3), torch.arange(8) % 3
    weight, matrices = net[0].weight.detach(), normal(2, 2, 8, 8) if several else normal(2, 8, 8)
    turned = (weight.view(2, 3, 8) @ matrices).view_as(weight)
    found = pf.theory.matrix_robustness(net, LOSS, (x, y), "0", matrix=matrices, rho=[0.4])
    own = displaced(net, "0", 0 * weight, data=(x, y))
    assert found.rises.tolist() == pytest.approx([displaced(net, "0", 0.4 * turned, data=(x, y)) - own], rel=1e-9)


def test_the_mean_over_orthogonal_matrices_is_feature_robustness():
    """Reflections and rotations of the plane, a grid of all angles, against the sampled mean."""
    net = network(2, C)
    data = normal(10, 6, 2), INDICES
    angles = torch.arange(64).double() * 2 * math.pi / 64
    rises = []
    for sign in (1.0, -1.0):
        for angle in angles.tolist():
            c, s = math.cos(angle), math.sin(angle)
            matrix = torch.tensor([[c, -sign * s], [s, sign * c]]).double()
            rises.append(float(pf.theory.matrix_robustness(net, LOSS, data, matrix=matrix, rho=[0.5]).rises))
    mean = pf.theory.feature_robustness(net, LOSS, data, rho=[0.5], probes=2000)
    low, high = mean.interval(0.999)[0].tolist()
    assert low < sum(rises) / len(rises) < high
    best = pf.theory.largest_robustness(net, LOSS, data, rho=0.5, starts=8)
    assert best.rise >= max(rises) * (1 - 1e-9)
    assert best.rise == pytest.approx(max(rises), rel=0.02)  # the grid's step is 0.1


@pytest.mark.parametrize("name", ["0", "2"])
def test_the_worst_matrix(name):
    """It has norm 1, its rise is what it says, and neither random matrices nor small changes of it do better."""
    net = network(M, 6, C, activation=nn.Tanh)
    weight = net.get_submodule(name).weight.detach()
    before = snapshot(net)
    found = pf.theory.largest_robustness(net, LOSS, CUT, name, rho=0.3, starts=6)
    assert_unchanged(net, before)
    assert float(torch.linalg.matrix_norm(found.matrix, 2)) == pytest.approx(1)
    own = displaced(net, name, 0 * weight)
    assert displaced(net, name, 0.3 * weight @ found.matrix) - own == pytest.approx(found.rise, rel=1e-9)
    assert float(found.rises.max()) == found.rise
    for seed in range(50):
        other = found.matrix + 0.1 * normal(seed, *found.matrix.shape)
        for matrix in (normal(seed, *found.matrix.shape), other):
            matrix = matrix / torch.linalg.matrix_norm(matrix, 2)
            assert displaced(net, name, 0.3 * weight @ matrix) - own <= found.rise
    again = pf.theory.largest_robustness(net, LOSS, (X, INDICES), name, rho=0.3, starts=6)
    assert again.rise == pytest.approx(found.rise, rel=1e-9)


def test_theorem_14_at_a_minimum():
    """Both sides, of squared error, where E is its second order and the left side δ²/2 max vec(wA)ᵀ H vec(wA)."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2, bias=False).double()
    data = normal(1, 20, 3), normal(2, 20, 2)
    net.weight.data = torch.linalg.lstsq(*data).solution.t().contiguous()
    report = pf.measure(net, nn.MSELoss(), data, measures="relative_flatness_max")
    right = pf.theory.uniform_robustness_bound(
        0.2, 2, next(iter(report.by_measure()["relative_flatness_max"].values()))
    )
    left = pf.theory.largest_robustness(net, nn.MSELoss(), data, rho=0.2, starts=10).rise
    second = data[0].t() @ data[0] / 20  # 2/(n d) for each row; ½ · 2/(20 · 2) · 20
    weight = net.weight.detach()
    angles = [torch.linalg.qr(normal(seed, 3, 3)).Q for seed in range(400)]
    brute = max(0.2**2 / 2 * float(torch.trace((weight @ a) @ second @ (weight @ a).t())) for a in angles)
    assert brute <= left * (1 + 1e-9)
    assert brute == pytest.approx(left, rel=0.1)
    assert left <= right


def test_what_does_not_fit():
    net = network(M, 6, C)
    with pytest.raises(pf.errors.InputError, match=r"6 columns, \(6, 6\) is wanted"):
        pf.theory.matrix_robustness(net, LOSS, CUT, "2", matrix=torch.eye(3), rho=[0.1])
    with pytest.raises(pf.errors.InputError, match=r"rho=\[\]: numbers are wanted, one at least"):
        pf.theory.matrix_robustness(net, LOSS, CUT, "2", matrix=torch.eye(6), rho=[])
    with pytest.raises(pf.errors.NonFiniteError, match="with changed features is nan"):
        pf.theory.matrix_robustness(net, LOSS, CUT, matrix=torch.eye(6) * 1e30, rho=[1e300])
    with pytest.raises(pf.errors.NonFiniteError, match="the loss of the model is nan"):
        pf.theory.matrix_robustness(
            net, lambda f, y: (f * math.inf - math.inf).sum(), CUT, matrix=torch.eye(6), rho=[0.1]
        )


def test_one_read_of_the_data_is_enough():
    net, matrix = network(M, 6, C), normal(3, 6, 6)
    found = pf.theory.matrix_robustness(net, LOSS, iter(CUT), "2", matrix=matrix, rho=[0.3, -0.2])
    again = pf.theory.matrix_robustness(net, LOSS, CUT, "2", matrix=matrix, rho=[0.3, -0.2])
    assert torch.equal(found.rises, again.rises)

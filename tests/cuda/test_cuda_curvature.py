"""Spectra, worst cases, slices of the loss and costs of changes on a GPU: the CPU's values, with BatchNorm in them."""

import copy

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import unchanged
from support.on_cuda import assert_close, moved, on_a_gpu, random_states

pytestmark = on_a_gpu
LOSS = nn.CrossEntropyLoss()
N, C = 14, 3


def network(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, C),
    ).double()  # fmt: skip
    net(images()[0][0])  # statistics that are not those of a new network
    return net.eval()


def images():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N, 2, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(C, (N,), generator=generator)
    return [(x[:5], y[:5]), (x[5:], y[5:])]


FIRST, SECOND = network(1), network(2)


def along_eigenvectors(net, data):
    return pf.landscape(net, LOSS, data, directions=pf.spectrum(net, LOSS, data, k=1), points=3, quadratic=True)


CALLS = {
    "eigenvalues": lambda net, data: pf.spectrum(net, LOSS, data, k=2).eigenvalues,
    "smallest eigenvalue": lambda net, data: pf.spectrum(net, LOSS, data, k=1, which="smallest").eigenvalues,
    "eigenvalues of the GGN": lambda net, data: pf.spectrum(net, LOSS, data, k=1, curvature="ggn").eigenvalues,
    "density": lambda net, data: pf.spectrum(net, LOSS, data, k=0, density=True, probes=2, steps=5).density.moment(2),
    "worst case": lambda net, data: pf.worst_case_sharpness(net, LOSS, data, steps=3, starts=2, bound=True),
    "worst case, m": lambda net, data: pf.worst_case_sharpness(net, LOSS, data, steps=2, m=3, adaptive=True),
    "worst case, linf": lambda net, data: pf.worst_case_sharpness(
        net, LOSS, data, steps=2, norm="linf", normalize_logits=True
    ),
    "keskar": lambda net, data: pf.measures.keskar_sharpness(net, LOSS, data, steps=3, starts=2),
    "plane": lambda net, data: pf.landscape(net, LOSS, data, dimensions=2, points=3, quadratic=True, accuracy=True),
    "line of an eigenvector": lambda net, data: along_eigenvectors(net, data).losses.abs().sum(),
    "plane through networks": lambda net, data: pf.landscape(
        net, LOSS, data, through=[FIRST.state_dict(), copy.deepcopy(SECOND).to(data[0][0].device)], points=3
    ),
    "line": lambda net, data: pf.linear_interpolation(
        net, LOSS, data, FIRST, test=data, points=4, update_bn=True, accuracy=True
    ),
    "line, statistics as they are": lambda net, data: pf.linear_interpolation(
        net, LOSS, data, FIRST.state_dict(), points=4, update_bn=False
    ),
    "rounded": lambda net, data: pf.cost_of_change(
        net, LOSS, data, pf.changes.rounded(net, 4, per="group", group_size=4), by_trace=True
    ),
    # Exact: random probes go along eigenvectors of the loss's Hessian, whose signs are a library's.
    "pruned": lambda net, data: pf.cost_of_change(net, LOSS, data, pf.changes.pruned(net, 0.5), by_trace=True),
    "2:4": lambda net, data: pf.cost_of_change(net, LOSS, data, pf.changes.pruned_2_4(net, layers="8")),
    "of rank 1": lambda net, data: pf.cost_of_change(net, LOSS, data, pf.changes.of_rank(net, 1, layers="8")),
    "between": lambda net, data: pf.cost_of_change(net, LOSS, data, pf.changes.between(net, FIRST, layers=["0", "8"])),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_are_the_cpus(cuda_device, name):
    net = network().to(cuda_device)
    before, states = unchanged.snapshot(net), random_states()
    found = CALLS[name](net, moved(images(), cuda_device))
    unchanged.assert_unchanged(net, before)
    assert all(map(torch.equal, random_states(), states))
    assert_close(found, CALLS[name](network(), images()), rel=1e-6, most=1e-9)


def test_eigenvectors_are_on_the_models_device(cuda_device):
    net, data = network().to(cuda_device), moved(images(), cuda_device)
    found = pf.spectrum(net, LOSS, data, k=1)
    assert {vector.device.type for vector in found.eigenvectors.values()} == {cuda_device.type}
    parameters = dict(net.named_parameters())
    total = 0
    for x, y in data:
        gradients = torch.autograd.grad(LOSS(net(x), y), parameters.values(), create_graph=True)
        vector = [found.eigenvectors[name][0].to(p.dtype) for name, p in parameters.items()]
        products = torch.autograd.grad(gradients, parameters.values(), vector)
        total = total + torch.cat([part.flatten() for part in products]) * len(x) / N
    right = torch.cat([part.flatten() for part in vector])
    assert (total - found.eigenvalues[0] * right).norm() <= 1e-5 * found.eigenvalues[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda net: pf.changes.rounded(net, 3),
        lambda net: pf.changes.rounded(net, 4, per="group", group_size=4),
        lambda net: pf.changes.pruned(net, 0.4),
        lambda net: pf.changes.pruned_2_4(net, layers="8"),
        lambda net: pf.changes.of_rank(net, 1, layers="8"),
        lambda net: pf.changes.between(net, FIRST, layers=["0", "8"]),
    ],
)
def test_changes_of_weights(cuda_device, change):
    found, expected = change(network().to(cuda_device)), change(network())
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        torch.testing.assert_close(found[name].cpu(), right, rtol=1e-9, atol=1e-10)


def test_the_step_that_makes_the_loss_rise(cuda_device):
    def found(device):
        net, data = network().to(device), moved(images(), device)
        whole = tuple(torch.cat(parts) for parts in zip(*data, strict=True))
        LOSS(net(whole[0]), whole[1]).backward()
        step = {name: -parameter.grad for name, parameter in net.named_parameters()}
        net.zero_grad()
        return pf.measures.critical_sharpness(net, LOSS, data, step).value

    assert found(cuda_device) == pytest.approx(found(torch.device("cpu")), rel=1e-6)


def test_a_network_in_float32(cuda_device):
    """Numbers of the network's own precision, with convolutions in full precision."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        net, data = network().float().to(cuda_device), moved([(x.float(), y) for x, y in images()], cuda_device)
        values = pf.spectrum(net, LOSS, data, k=1, tolerance=1e-3).eigenvalues
        lines = pf.landscape(net, LOSS, data, points=3).losses
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    expected = pf.spectrum(network(), LOSS, images(), k=1).eigenvalues
    assert values.tolist() == pytest.approx(expected.tolist(), rel=2e-3)
    again = pf.landscape(copy.deepcopy(net).cpu(), LOSS, moved(data, torch.device("cpu")), points=3).losses
    torch.testing.assert_close(lines, again, rtol=1e-4, atol=0)

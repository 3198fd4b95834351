"""Networks and data that are channels_last, in front of every normalisation: values are those of contiguous ones."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import truth
from support.combinations import every


class OfChannels(nn.LayerNorm):
    """Normalise the channels of each pixel, as ConvNeXt does."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Functional(nn.Module):
    """Have a GroupNorm that no module of torch's calls."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(4)) for _ in range(2))

    def forward(self, x):
        return F.group_norm(x, 2, self.weight, self.bias)


NORMS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "group": lambda: nn.GroupNorm(2, 4),
    "function": Functional,
    "layer": lambda: OfChannels(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance, running": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


def importances(kind):
    def route(*given):
        found = pf.importance(*given, kind=kind)
        assert found.exact
        return [found[name] for name in found]

    return route


def of_report(report):
    estimates = [estimate for _, _, estimate in report]
    assert all(estimate.exact for estimate in estimates)
    return [torch.tensor(estimate.value) for estimate in estimates]


ROUTES = {
    "importance, hessian": importances("hessian"),
    "importance, ggn": importances("ggn"),
    "importance, fisher": importances("fisher"),
    "measures": lambda *given: of_report(
        pf.measure(*given, measures=["relative_flatness", "trace", "adaptive_sharpness", "sharpness"])
    ),
    "of the normalisation": lambda *given: of_report(pf.measure(*given, layers="1", measures=["trace"])),
    "spectrum": lambda *given: [pf.spectrum(*given, seed=0).eigenvalues],
    "cost of change": lambda model, *rest: of_report(
        pf.cost_of_change(model, *rest, {"0": 0.01 * torch.ones_like(model[0].weight)}, measured=False)
    ),
    "verify": lambda *given: [torch.tensor(pf.verify(*given, layer="0").truth)],
}


def network(norm):
    torch.manual_seed(3)
    layers = [nn.Conv2d(2, 4, 3, padding=1), NORMS[norm](), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)]
    for name, buffer in layers[1].named_buffers():
        if name.startswith("running"):
            buffer.uniform_(0.5, 2)
    return nn.Sequential(*layers).double().eval()


def data(samples=5):
    return torch.randn(samples, 2, 4, 4, dtype=torch.float64), torch.arange(samples) % 3


@every(together=1, norm=[*NORMS], route=[*ROUTES])
def test_values_do_not_depend_on_them(norm, route):
    if norm in ("function", "layer") and route == "of the normalisation":
        pytest.skip("its weight is no layer, or one of a forward of its own, which is refused")
    model, (x, y) = network(norm), data()
    wanted = ROUTES[route](model, nn.CrossEntropyLoss(), (x, y))
    for images in (x, x.to(memory_format=torch.channels_last)):
        other = copy.deepcopy(model).to(memory_format=torch.channels_last)
        found = ROUTES[route](other, nn.CrossEntropyLoss(), (images, y))
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)
        assert other[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_importances_behind_a_batch_norm_are_the_dense_diagonal():
    model, (x, y) = network("batch"), data()
    weight, rest = model[0].weight.detach(), dict(model.named_parameters())

    def risk(matrix):
        values = {**rest, "0.weight": matrix.view_as(weight)}
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

    wanted = truth.hessian(risk, weight.flatten(1)).reshape(weight.numel(), -1).diagonal()
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    found = pf.importance(other, nn.CrossEntropyLoss(), (x, y), kind="hessian")
    torch.testing.assert_close(found["0.weight"].flatten(), wanted, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("norm", ["group", "function"])
def test_a_group_norm_that_alone_is_trained(norm):
    """Torch's gradient in its weight, without one in its input, ends the process."""
    model, (x, y) = network(norm), data()
    model.requires_grad_(False)[1].requires_grad_(True)
    wanted = pf.spectrum(model, nn.CrossEntropyLoss(), (x, y), seed=0).eigenvalues
    x = x.to(memory_format=torch.channels_last)
    found = pf.spectrum(model, nn.CrossEntropyLoss(), (x, y), seed=0).eigenvalues
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("route", ["importance, hessian", "measures", "of the normalisation", "spectrum"])
def test_one_image_that_gets_its_dimension_of_samples_later(route):
    """Its strides are such that torch's gradients of a BatchNorm are wrong."""
    images, classes = data()
    model = nn.Sequential(nn.Identity(), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)).double().eval()
    image = images.to(memory_format=torch.channels_last)[0].unsqueeze(0)
    wanted = ROUTES[route](model, nn.CrossEntropyLoss(), (images[:1], classes[:1]))
    found = ROUTES[route](model, nn.CrossEntropyLoss(), (image, classes[:1]))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


def test_torch_is_as_it_was():
    before = torch.group_norm, torch.batch_norm
    pf.measure(network("group"), nn.CrossEntropyLoss(), data(), measures=["trace"])
    assert (torch.group_norm, torch.batch_norm) == before

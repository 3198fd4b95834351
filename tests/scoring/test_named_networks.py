"""Networks by the names of the real libraries, ``timm:`` and ``torchvision:``, where these can be imported."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.scoring import pretrained

CLASSES = 5
NETWORKS = {
    "timm:resnet10t": {},
    "timm:vit_tiny_patch16_224": {"img_size": 32},
    "timm:convnext_atto": {},
    "timm:tf_efficientnet_b0": {},
    "torchvision:resnet18": {},
    "torchvision:mobilenet_v3_small": {},
    "torchvision:vit_b_32": {"image_size": 32},
    "torchvision:swin_t": {},
}
GIVEN_TO_FUNCTIONS = {"torchvision:swin_t"}  # weights of the Linears of attention, which are not called


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_the_library_is_measured(name: str) -> None:
    """Its head against the dense Hessian's formula, and all its layers by a probe."""
    library = name.partition(":")[0]
    try:
        __import__(library)
    except Exception as error:  # torchvision raises what torch does, where their builds do not fit
        pytest.skip(f"{library} cannot be imported: {error}")
    torch.manual_seed(0)
    net = pretrained.resolve(name)(num_classes=CLASSES, dtype="float64", **NETWORKS[name])
    assert not net.training
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(3, 3, 32, 32, generator=generator, dtype=torch.float64), torch.tensor([0, 4, 2])
    report = pf.measure(net, nn.CrossEntropyLoss(), (x, y), measures="relative_flatness", curvature="ggn", probes=1)
    if name in GIVEN_TO_FUNCTIONS:
        assert any("linear outside of the layer" in why for why in report.why_uncovered.values())
    else:
        assert sum(report.uncovered.values()) < 0.01, report.why_uncovered
    head = report.layers[-1]
    features: list[torch.Tensor] = []
    handle = net.get_submodule(head).register_forward_pre_hook(lambda module, args: features.append(args[0].detach()))
    with torch.no_grad():
        p = torch.softmax(net(x), dim=1)
    handle.remove()
    weight = net.get_submodule(head).weight.detach()
    spread = p @ weight.square().sum(dim=1) - (p @ weight).square().sum(dim=1)  # var_p(w), Definition 3
    expected = float((features[0].flatten(1).square().sum(dim=1) * spread).mean())
    assert report[head, "relative_flatness"].value == pytest.approx(expected, rel=1e-8)

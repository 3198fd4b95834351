"""Kinds of layers: found by class, by their own word, and cheaply; what they say against torch."""

import pytest
import torch
from torch import nn

from pyflatness.model import kinds, layers
from pyflatness.model.kinds import AnyUse, Convolution, TransposedLinear
from support.combinations import every

CONVOLUTIONS = {
    "plain": nn.Conv2d(4, 6, 3),
    "strided, dilated, padded, in groups": nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), dilation=2, groups=2),
    "same": nn.Conv2d(4, 6, (4, 3), padding="same", dilation=(1, 2)),
    "valid": nn.Conv1d(4, 6, 3, padding="valid"),
    "circular": nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular"),
    "reflect": nn.Conv3d(4, 6, 3, padding=(1, 2, 1), padding_mode="reflect"),
    "same, circular": nn.Conv2d(4, 6, (4, 3), padding="same", padding_mode="circular"),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same.")
@pytest.mark.parametrize("convolution", CONVOLUTIONS.values(), ids=[*CONVOLUTIONS])
def test_a_convolution_is_its_matrix_times_patches_of_the_padded_input(convolution: nn.Module) -> None:
    layer = convolution.double()
    kind = layers.kind_of(layer)
    inputs = torch.randn(2, 4, *(9, 8, 7)[: kind.space], dtype=torch.float64)
    patches = kind.geometry.patches(kind.in_common_form(kind.pad(inputs, layer(inputs)).unsqueeze(1))[0])
    weight, bias = layers.matrix(layer)
    outputs = patches @ weight.unflatten(0, (kind.groups, -1)).mT
    (expected,) = kind.in_common_form((layer(inputs) - bias.view(-1, *(1,) * kind.space)).unsqueeze(1))
    torch.testing.assert_close(outputs, kind.geometry.rows(expected))
    torch.testing.assert_close(kind.affine(inputs, layer.weight, layer.bias), layer(inputs), rtol=0, atol=0)
    torch.testing.assert_close(kind.as_weight(weight), layer.weight.detach(), rtol=0, atol=0)


def test_layers_of_the_same_sizes_share_a_kind_which_follows_their_attributes() -> None:
    layer, other = nn.Conv2d(2, 3, 3, stride=2), nn.Conv2d(2, 5, 3, stride=2)
    assert layers.kind_of(layer) is layers.kind_of(other)
    layer.stride = [1, 1]
    assert layers.kind_of(layer).geometry.stride == (1, 1, 1)


def test_a_module_that_stands_for_the_use_of_a_weight_says_its_own_kind() -> None:
    use = AnyUse()
    assert kinds.find(use) is None
    use.weight = nn.Parameter(torch.randn(3, 2))
    use.kind = TransposedLinear()
    assert kinds.is_plain(use)
    assert layers.matrix(use)[0].shape == (2, 3)
    use.weight = nn.Parameter(torch.randn(4, 2, 3))
    use.kind = Convolution((3,), (1,), (1,), (1,), 1, "zeros")
    assert layers.is_convolution(use)
    inputs = torch.randn(5, 2, 7)
    torch.testing.assert_close(
        layers.kind_of(use).affine(inputs, use.weight, None), nn.functional.conv1d(inputs, use.weight, padding=1)
    )


# --- whether an output is W φ + b, looked at in a few rows ------------------------------------------------------------


MODULES = {
    "linear": (nn.Linear(5, 4), (3, 5)),
    "sequence": (nn.Linear(5, 4, bias=False), (3, 7, 5)),
    "plain": (nn.Conv2d(2, 4, 3), (3, 2, 9, 7)),
    "one image": (nn.Conv2d(2, 4, 3), (1, 2, 3, 7)),
    "stride, padding, dilation, groups": (nn.Conv2d(4, 6, (3, 2), (2, 3), (2, 1), (2, 1), 2), (3, 4, 11, 9)),
    "reflected": (nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), (3, 2, 5, 5)),
    "same": (nn.Conv2d(2, 4, (4, 3), padding="same", dilation=(2, 1), bias=False), (3, 2, 9, 7)),
    "valid": (nn.Conv1d(2, 4, 3, padding="valid"), (3, 2, 9)),
    "1-D": (nn.Conv1d(2, 4, 3, 2, 1), (3, 2, 10)),
    "3-D": (nn.Conv3d(2, 4, 2, 2, 1), (3, 2, 5, 6, 7)),
}


@every(together=1, name=[*MODULES], dtype=[torch.float32, torch.bfloat16])
@torch.no_grad()
def test_what_is_seen(name, dtype):
    module, shape = MODULES[name]
    inputs = torch.randn(shape).to(dtype)
    output = module.to(dtype)(inputs)
    assert layers.computes(module, inputs, output)
    assert not layers.computes(module, inputs, 1.5 * output)
    assert not layers.computes(module, inputs, output + 1)
    for place in (0, -1):
        changed = output.clone()
        changed[place].flatten()[place] += 1
        assert not layers.computes(module, inputs, changed)
    without = inputs.clone()
    without[0] = torch.nan  # is no proof of anything
    assert layers.computes(module, without, module(without))

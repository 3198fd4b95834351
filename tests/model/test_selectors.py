"""Names that are no layer's, of parameters and blocks: the error says which layers are meant, or why there are none."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.grid import normal

LOSS, Y = nn.CrossEntropyLoss(), torch.arange(5) % 3


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 6, batch_first=True)
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.block(self.cell(x)[0]).relu().mean(1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("head.bias", "'head.bias' is a parameter and no layer; the layer that it belongs to is 'head'"),
        ("block.0.weight", "is a parameter and no layer; the layer that it belongs to is 'block.0'"),
        ("block.0.bias", "is a parameter and no layer; the layer that it belongs to is 'block.0'"),
        ("cell.bias_hh_l0", "is a parameter and no layer; nn.LSTM computes with it in a kernel of its own"),
        ("block", r"layer 'block' is a Sequential; .*; the layers inside of it are 'block\.\*' \('block.1', …\)$"),
        ("cell", r"layer 'cell' is a LSTM; .*; the layers inside of it are 'cell\.\*' \('cell.weight_ih_l0', …\)$"),
    ],
)
def test_names_of_parameters_and_blocks(name, message):
    model, data = Recurrent().double(), (normal(0, 5, 3, 4), Y)
    with pytest.raises(pf.errors.InputError, match=message):
        pf.measure(model, LOSS, data, layers=name, measures="trace")


def test_the_glob_that_the_error_names_is_the_layers_inside():
    model, data = Recurrent().double(), (normal(0, 5, 3, 4), Y)
    assert pf.measure(model, LOSS, data, layers="block.*", measures="trace").layers == ("block.1",)


def test_a_parameter_of_many_experts():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from support.mixtures import Mixture

    model, data = Mixture(), (normal(0, 5, 3, 4), Y)
    message = r"its parts are layers: 'experts.down_proj\[0\]' to '.*\[\d\]', and 'experts.down_proj\*' is all of them"
    with pytest.raises(pf.errors.InputError, match=message):
        pf.measure(model, LOSS, data, layers="experts.down_proj", measures="trace")
    assert all("down_proj[" in name for name in pf.measure(model, LOSS, data, layers="experts.down_proj*").layers)

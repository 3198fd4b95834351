"""What depends on a layer's weight alone is made once for all micro-batches of a Hessian value."""

import torch
from torch import nn

import pyflatness as pf
from pyflatness.passes import layer_form


def test_the_factor_of_a_weight_is_made_once(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    x, y = torch.randn(12, 9).double(), torch.arange(12) % 3
    made = []

    def counted(weight):
        made.append(weight)
        return gram_factor(weight)

    gram_factor = layer_form.gram_factor
    monkeypatch.setattr(layer_form, "gram_factor", counted)
    batches = list(zip(x.split(3), y.split(3), strict=True))
    value = pf.relative_flatness(model, nn.CrossEntropyLoss(), batches, "0")
    assert value.method == "hessian"
    assert len(made) == 1
    whole = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "0")
    assert abs(value.value - whole.value) <= 1e-12 * abs(whole.value)

"""The table of quantities: its rows agree with each other, and no module goes by a quantity's name."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.contractions import Geometry, LayerContraction, WithColumns
from pyflatness.contractions.backends import reference
from pyflatness.contractions.quantities import QUANTITIES, Forms, Made, Quantities
from pyflatness.measures import MEASURES
from support.combinations import every

USERS = {measure.name for measure in MEASURES if measure.quantity}


def network(activation):
    body = [nn.Conv2d(2, 3, 2), activation(), nn.Conv2d(3, 4, 2, groups=1), activation(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(16, 5), activation(), nn.Linear(5, 3)).double().eval()


def values(activation, **options):
    torch.manual_seed(0)
    model, data = network(activation), (torch.randn(4, 2, 4, 4).double(), torch.arange(4) % 3)
    return pf.measure(
        model, nn.CrossEntropyLoss(), data, layers=["0", "2", "5"], measures="sweep", progress=False, **options
    )


def test_products_are_named_alike():
    assert Made._fields == Forms._fields


@every(together=1, activation=[nn.ReLU, nn.Tanh], options=[{}, {"curvature": "ggn"}, {"conv": "affine"}, {"probes": 3}])
def test_under_another_name_a_quantity_is_the_same(activation, options, monkeypatch):
    """Every row is entered a second time, and the measures are of those."""
    expected = values(activation, **options)
    asked = [name for name in expected.measures if name in USERS]
    assert "relative_flatness" in asked
    renamed = [replace(m, quantity=f"another {m.quantity}") if m.quantity in QUANTITIES else m for m in MEASURES]
    for name, row in list(QUANTITIES.items()):
        monkeypatch.setitem(QUANTITIES, f"another {name}", row)
    monkeypatch.setattr("pyflatness.measures.MEASURES", tuple(renamed))
    found = values(activation, **options)
    assert found.measures == expected.measures
    for layer in expected.layers:
        for name in asked:
            one, other = found[layer, name], expected[layer, name]
            assert (one.value, one.stderr, one.method) == (other.value, other.stderr, other.method)
            assert (one.per_neuron is None) == (other.per_neuron is None)
            if one.per_neuron is not None:
                assert torch.equal(one.per_neuron, other.per_neuron)


@pytest.mark.parametrize("names", [[name] for name in QUANTITIES] + [[*QUANTITIES]], ids="+".join)
def test_no_cotangent_contributes_zeros_of_the_same_shapes(names):
    geometry, weight = Geometry(2, (1, 2, 2)), torch.randn(2, 3, 12)
    make = WithColumns if "gram_weighted_columns" in names else LayerContraction
    layer = make(weight, geometry, reference, names, memory=2**20)
    contraction = layer.at([torch.randn(5, 6, 1, 3, 3)], 1)
    found, nothing = contraction.of([torch.randn(5, 6, 1, 2, 2)]), layer.nothing(5)
    assert nothing.values.shape == found.values.shape == (len(names), 5)
    assert {name: part.shape for name, part in nothing.summands.items()} == {
        n: p.shape for n, p in found.summands.items()
    }
    assert not any(part.any() for part in (nothing.values, *nothing.summands.values()))


def test_what_quantities_need_together():
    plain, all_of_them = Quantities(["squares", "gram_weighted"]), Quantities([*QUANTITIES])
    assert plain.plain
    assert plain.gram_factor
    assert not plain.weighted
    assert plain.forms == Made(True, True, False, False, False, False)
    assert all_of_them.forms == Made(True, True, True, True, True, True)
    assert not all_of_them.plain
    assert list(all_of_them.neurons) == ["by_column", "by_row"]
    assert all_of_them.squared_entries == ["diagonal"]

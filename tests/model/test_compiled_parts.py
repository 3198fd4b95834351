"""Modules that torch.compile made inside of a model: their layers have the names that the user gave."""

import pytest
import torch
from torch import nn

import pyflatness as pf

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
LOSS = nn.CrossEntropyLoss()
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12) % 3


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.mixing = nn.MultiheadAttention(4, 1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        hidden = self.body(inputs).unsqueeze(1)
        return self.head((hidden + self.mixing(hidden, hidden, hidden)[0]).squeeze(1))


def networks():
    """The same network twice, parts of the second one compiled."""
    plain, compiled = Network().double().eval(), Network().double().eval()
    for name, part in [*compiled.named_children()]:
        setattr(compiled, name, torch.compile(part, backend="eager"))
    return plain, compiled


def test_reports_have_the_names_of_the_model_and_its_values():
    plain, compiled = networks()
    before = [name for name, _ in compiled.named_modules()]
    names = [*pf.layers(plain)]
    assert [*pf.layers(compiled)] == names
    expected, found = (
        pf.measure(model, LOSS, (X, Y), measures=["relative_flatness", "trace"]) for model in (plain, compiled)
    )
    assert found.layers == expected.layers
    for layer in expected.layers:
        for measure in expected.measures:
            assert found[layer, measure].value == pytest.approx(expected[layer, measure].value, rel=1e-9, abs=1e-15)
    assert not [text for text in (str(found), *found.uncovered) if "_orig_mod" in text]
    assert [name for name, _ in compiled.named_modules()] == before
    assert "head._orig_mod" in before


def test_selectors():
    model = networks()[1]
    for selector, layers in (
        ("body.0", ("body.0",)),
        ("body._orig_mod.0", ("body.0",)),
        ("body.*", ("body.0", "body.2")),
        ("re:head", ("head",)),
        (model.head, ("head",)),
        ("type:Linear", ("body.0", "body.2", "head")),
        ("mixing.*", ("mixing.in_proj_weight", "mixing.out_proj")),
    ):
        assert pf.measure(model, LOSS, (X, Y), layers=selector).layers == layers


def test_other_calls():
    plain, compiled = networks()
    found = [pf.relative_flatness(model, LOSS, (X, Y)) for model in (plain, compiled)]
    assert [one.layer for one in found] == ["head", "head"]
    assert found[0].value == pytest.approx(found[1].value, rel=1e-12)
    values = [
        pf.spectrum(model, LOSS, (X, Y), layers="body.0", k=1).eigenvalues[0].item() for model in (plain, compiled)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    with pf.FlatnessPenalty(compiled, "head", LOSS) as penalty:
        assert penalty(compiled(X), Y) > 0


def test_a_line_to_another_checkpoint():
    """The other network's names may have been made by torch.compile, or not."""
    plain, compiled = networks()
    other = networks()
    with torch.no_grad():
        for model in other:
            for parameter in model.parameters():
                parameter.mul_(1.1)
    expected = pf.linear_interpolation(plain, LOSS, (X, Y), other[0], points=3).losses
    for model in (plain, compiled):
        for end in (*other, other[1].state_dict()):
            found = pf.linear_interpolation(model, LOSS, (X, Y), end, points=3).losses
            assert torch.allclose(found, expected)

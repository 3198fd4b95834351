"""``pf.invariances``: which measures move at other weights of the same function, by hand and by the table's claims."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.measures import MEASURES
from pyflatness.theory.invariance import _change


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)
        return nn.Sequential(*parts).double().eval()


X = torch.randn(30, 5, generator=torch.Generator().manual_seed(1)).double()
DATA = X, torch.arange(30) % 3
LOSS = nn.CrossEntropyLoss()


def test_claims_of_the_table_are_found():
    names = [row.name for row in MEASURES if not row.name.startswith(("pac_bayes", "mls_adversarial"))]
    found = pf.invariances(network(), LOSS, DATA, measures=names)
    assert (found.layers, [*found.skipped]) == (("0", "2"), ["4"])
    for row in found.rows:
        assert row.kept == row.claimed, row
    assert {row.measure for row in found.rows} == {*names}


def test_changes_are_those_of_the_values():
    model = network()
    found = pf.invariances(model, LOSS, DATA, measures=["trace", "weight_norm", "neuron_flatness"], factors=(3, 3))
    other = pf.reparameterize(model, {"0": 3.0, "2": 3.0}, X)
    before, after = (pf.measure(net, LOSS, DATA, measures=["trace", "weight_norm"]) for net in (model, other))
    for name in ("trace", "weight_norm"):
        changes = [
            abs(float(after.by_measure()[name][place]) / float(value) - 1)
            for place, value in before.by_measure()[name].items()
        ]
        for way in ("layer-wise", "neuron-wise"):  # with one factor for all rows these are the same
            assert found[name, way].change == pytest.approx(max(changes))
            assert not found[name, way].kept
    assert found["neuron_flatness", "layer-wise"].change < 1e-10


def test_a_value_of_one_neuron_counts():
    """Of two neurons that change places the sum and the largest stay as they are."""
    one, other = (
        pf.results.Estimate(3.0, None, 10, "ggn", True, "reference", None, per_neuron=torch.tensor(values).double())
        for values in ([1.0, 2.0], [2.0, 1.0])
    )
    assert _change(one, one) == 0
    assert _change(one, other) == pytest.approx(0.5)


def test_the_model_is_as_it_was_and_seeds_differ():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    changes = [
        pf.invariances(model, LOSS, DATA, measures=["trace"], seed=seed)["trace", "layer-wise"].change
        for seed in (0, 0, 1)
    ]
    assert changes[0] == changes[1] != changes[2]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_single_precision_and_frame():
    pytest.importorskip("pandas")
    found = pf.invariances(network().float(), LOSS, (X.float(), DATA[1]), measures=["relative_flatness"])
    frame = found.to_frame()
    assert frame["kept"].tolist() == [True, False]
    assert "kept" in str(found)
    with pytest.raises(pf.errors.InputError, match="no \\('trace', 'layer-wise'\\)"):
        found["trace", "layer-wise"]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (network(), {"factors": (0, 1)}, "two positive numbers"),
        (network(), {"factors": (2, 1)}, "two positive numbers"),
        (nn.Sequential(nn.Linear(5, 3)).double().eval(), {}, "no layer whose weights can be multiplied"),
        (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval(), {}, "no layer whose weights"),
        (network(), {"measures": ["tracé"]}, "does not exist"),
    ],
)
def test_errors(model, options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.invariances(model, LOSS, DATA, **options)

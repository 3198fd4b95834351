"""The table of the Jacobians' quantities: each row by its definition, and no module goes by a quantity's name."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.options import Options
from pyflatness.session import session
from pyflatness.sweep import jacobians
from pyflatness.sweep.jacobian_rows import QUANTITIES

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.double().eval()

    def behind(self, x):  # the input of `second`
        return self.last(x + torch.tanh(self.second(x)))

    def forward(self, x):
        return self.behind(torch.tanh(self.first(x)))


def samples(needs, scales=None, x=X):
    data = x, torch.zeros(len(x), dtype=torch.int64)
    with session(Residual(), nn.CrossEntropyLoss(), data, Options(nan_policy="omit")) as task:
        return jacobians.measured(task.of(None), needs, scales=scales)


def test_every_quantity_is_what_its_definition_says():
    net, b = Residual(), torch.tensor([2.0, 0.0, 1.0, 3.0, 0.5], dtype=torch.float64)
    found = samples([*QUANTITIES], {"second": b})
    for i, x in enumerate(torch.tanh(net.first(X)).detach()):
        jacobian = torch.autograd.functional.jacobian(net.behind, x)
        z = torch.tanh(net.second(x)).detach()
        of_z = net.last.weight.detach() * (1 - z.square())
        s, there = torch.linalg.svdvals(jacobian), b > 0
        expected = {
            "size": x.square().sum(),
            "largest": s[0],
            "trace": s.square().sum(),
            "square": s.pow(4).sum(),
            "scaled": (jacobian * x).square().sum(),
            "log_volume": s.log().sum(),
            "weights": of_z.square().sum() * x.square().sum(),
            "past": torch.linalg.svdvals(jacobian - of_z @ net.second.weight.detach())[0],
            "rescaled": (jacobian[:, there].square() / b[there]).sum() * (x.square() * b).sum(),
        }
        assert expected.keys() == QUANTITIES.keys()
        for name, value in expected.items():
            assert float(found.each("second", name)[i]) == pytest.approx(float(value), rel=1e-9), name


def test_what_was_not_asked_for_or_has_no_meaning_at_a_place_is_not_there():
    few, every = samples([]), samples([*QUANTITIES])
    always = {name for name, row in QUANTITIES.items() if row.always}
    assert {name for name in QUANTITIES if few.has("second", name)} == always
    assert {name for name in QUANTITIES if every.has("second", name)} == {*QUANTITIES} - {"rescaled"}  # no scales
    assert {name for name in QUANTITIES if every.has("", name)} == {*QUANTITIES} - {"rescaled", "weights", "past"}


def test_under_another_name_a_quantity_is_the_same(monkeypatch):
    """Every row is entered a second time; of a sample that is NaN all are left out."""
    x = X.clone()
    x[2, 1] = torch.nan
    for name, row in list(QUANTITIES.items()):
        monkeypatch.setitem(QUANTITIES, f"another {name}", row)
    scales = {"second": torch.ones(5, dtype=torch.float64)}
    found = samples([name for name in QUANTITIES if name.startswith("another")], scales, x)
    original = samples([name for name in QUANTITIES if not name.startswith("another")], scales, x)
    assert found.kept.tolist() == [i != 2 for i in range(6)]
    for name in [name for name in QUANTITIES if not name.startswith("another")]:
        one, other = found.each("second", f"another {name}"), original.each("second", name)
        assert torch.equal(one[found.kept], other[found.kept])
        assert bool(one[2].isnan())


def test_a_volume_of_zero_is_no_missing_value():
    """More outputs than inputs: log_volume is minus infinity, and no sample is left out."""
    net = nn.Linear(2, 3).double().eval()
    report = pf.measure(
        net, nn.CrossEntropyLoss(), (X[:, :2], torch.zeros(6, dtype=torch.int64)), measures="log_volume"
    )
    assert report["log_volume"].value == -torch.inf

"""A change of a weight is one of all its uses: what is predicted, what is measured and what a plan applies are one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf

CE = nn.CrossEntropyLoss()


class Tokens(nn.Module):
    """A table that is the head too: as a layer's weight, or in the forward pass."""

    def __init__(self, how):
        super().__init__()
        self.how, self.table, self.inner = how, nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False) if how == "tied" else None
        if how == "tied":
            self.head.weight = self.table.weight

    def forward(self, tokens):
        h = self.table(tokens)
        h = (self.inner(h) + h.mean(dim=1, keepdim=True)).tanh()
        return (h @ self.table.weight.t() if self.head is None else self.head(h)).movedim(-1, 1)


def _texts(how):
    torch.manual_seed(1)
    return Tokens(how).double().eval(), (torch.randint(7, (40, 5)), torch.randint(7, (40, 5)))


def _risk(model, data):
    with torch.no_grad():
        return CE(model(data[0]), data[1]).item()


def _expansion(model, data, change):
    """⟨∇E, Δ⟩ and ½ΔᵀGΔ of a change of the table, by nested autograd."""
    t = torch.zeros((), dtype=torch.float64)

    def outputs(t):
        table = model.table.weight.detach() + t * change
        return torch.func.functional_call(model, {"table.weight": table}, (data[0],))

    along, at = torch.autograd.functional.jacobian(outputs, t).flatten(), outputs(t).detach()
    curved = torch.autograd.functional.hessian(lambda f: CE(f.view_as(at), data[1]), at.flatten())
    first = torch.autograd.functional.jacobian(lambda t: CE(outputs(t), data[1]), t)
    return float(first), float(along @ curved @ along) / 2


CASES = [("tied", "table"), ("tied", "head"), ("tied", "head.weight"), ("forward", "table"), ("forward", None)]


@pytest.mark.parametrize(("how", "layer"), CASES)
def test_a_plan_prices_measures_and_applies_all_uses_of_a_weight(how, layer):
    model, data = _texts(how)
    fixed = {"inner": "keep"} if layer is None else {}
    plan = pf.allocate(model, CE, data, ["int3"], bits=64, layers=layer, fixed=fixed, probes=None)
    change = pf.changes.of_format(model, "int3", layers="table")["table"]
    (expanded,) = plan.frontier([64]).plans
    assert expanded.predicted == pytest.approx(sum(_expansion(model, data, change)), rel=1e-9)
    made = plan.apply(model)
    torch.testing.assert_close(made.table.weight, model.table.weight + change)
    assert plan.loss_change == pytest.approx(_risk(made, data) - _risk(model, data), rel=1e-6)
    assert how != "tied" or (made.head.weight is made.table.weight and plan.choice["head"] == plan.choice["table"])


@pytest.mark.parametrize(("how", "layer"), CASES[:4])
def test_the_cost_of_a_change_is_that_of_all_uses(how, layer):
    model, data = _texts(how)
    change = 0.1 * torch.randn(7, 4, dtype=torch.float64)
    report = pf.cost_of_change(model, CE, data, {layer: change}, curvature="ggn")
    first, second = _expansion(model, data, change)
    assert report[layer, "gradient_of_change"].value == pytest.approx(first, rel=1e-9)
    assert report[layer, "cost_of_change"].value == pytest.approx(second, rel=1e-9)
    before = _risk(model, data)
    model.table.weight.data += change
    assert report[layer, "loss_change"].value == pytest.approx(_risk(model, data) - before, rel=1e-9)


class Scaled(nn.Module):
    """Divide by a size of weights, taken as a number: of a layer, and of one whose weight another has too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.tied, self.skip, self.cell = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4)), nn.GRUCell(4, 4)
        self.tied.weight = self.a.weight

    def forward(self, x):
        h = self.tied(self.a(x).relu()) / float(self.a.weight.norm()) + x @ self.skip
        return self.head(self.b(self.cell(h)).relu() / self.b.weight.detach().abs().max().item())


def test_measured_losses_are_those_of_the_changed_parameters():
    torch.manual_seed(0)
    model, data = Scaled().double().eval(), (torch.randn(12, 4).double(), torch.randint(3, (12,)))
    before, changes = _risk(model, data), pf.changes.rounded(model, 3)
    report = pf.cost_of_change(model, CE, data, changes)
    for name in report.layers:
        made = copy.deepcopy(model)
        held = dict(made.named_parameters(remove_duplicate=False))
        held[name if name in held else f"{name}.weight"].data.add_(changes[name])
        assert report[name, "loss_change"].value == pytest.approx(_risk(made, data) - before, rel=1e-9), name
    plan = pf.allocate(model, CE, data, ["int3", "int8"], bits=6, probes=None)
    assert plan.loss_change == pytest.approx(_risk(plan.apply(model), data) - before, rel=1e-6)


def test_two_formats_of_one_tied_weight_are_refused_by_both_names():
    model, data = _texts("tied")
    fixed = {"table": "int3", "head": "int8"}
    message = "'table' is 'int3' and 'head' is 'int8', but 'table' and 'head' are one weight"
    with pytest.raises(pf.errors.InputError, match=message):
        pf.allocate(model, CE, data, ["int3", "int8"], bits=8, fixed=fixed)
    plan = pf.allocate(model, CE, data, ["int3", "int8"], bits=8, fixed={"head": "int3"})
    assert plan.choice["table"] == "int3"


def test_globs_name_layers_that_have_a_format_or_one_together():
    model, data = _texts("tied")
    plan = pf.allocate(model, CE, data, ["int3", "int8"], bits=8, fixed={"*": "int3", "inner": "int8"})
    assert plan.choice == {"table": "int3", "head": "int3", "inner": "int8"}
    plan = pf.allocate(model, CE, data, ["int3", "int8"], bits=5, together=[["*"]])
    assert {*plan.choice.values()} == {"int3"}
    with pytest.raises(pf.errors.InputError, match=r"'inner' is meant by both"):
        pf.allocate(model, CE, data, ["int3"], bits=8, fixed={"inn*": "int3", "i*": "int8"})


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(x).mean(dim=1))


class Standardised(nn.Conv2d):
    def forward(self, x):
        w = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, w / (w.std(dim=(1, 2, 3), keepdim=True) + 1e-5), self.bias)


class Skips(nn.Module):
    """A layer that does not run, a matrix without a layer, and one that is used in another way."""

    def __init__(self):
        super().__init__()
        self.idle, self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.skip, self.squared = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(1, 4))

    def forward(self, x):
        return self.head(self.a(x).relu() + x @ self.skip * (self.squared * self.squared))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        return self.head(self.cell(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0][0])


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(3, 4, 4)), nn.Linear(4, 3)

    def forward(self, x):
        for w in self.w:
            x = (x @ w).tanh()
        return self.head(x)


ODD = {
    "attention": (Attention, (5, 4), [], 5),
    "standardised": (
        lambda: nn.Sequential(Standardised(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)),
        (2, 5, 5),
        ["0.weight"],
        1,
    ),
    "skips": (Skips, (4,), ["idle.weight", "squared"], 3),
    "packed": (Packed, (5, 4), ["cell.weight_hh_l0", "cell.weight_ih_l0"], 1),
    "stacked": (Stacked, (4,), [], 4),
}


@pytest.mark.parametrize("case", ODD)
def test_what_can_be_measured_gets_a_plan_and_the_rest_a_reason(case):
    make, shape, left_out, count = ODD[case]
    torch.manual_seed(0)
    model, data = make().double().eval(), (torch.randn(12, *shape).double(), torch.randint(3, (12,)))
    plan = pf.allocate(model, CE, data, ["int3", "int8"], bits=6, probes=None)
    assert sorted(plan.uncovered) == left_out
    assert sorted(plan.why_uncovered) == left_out
    assert len(plan.choice) == count
    assert all(name in str(plan) for name in left_out)
    made = plan.apply(model)
    assert plan.loss_change == pytest.approx(_risk(made, data) - _risk(model, data), rel=1e-6)


def test_rows_of_a_weight_are_those_of_the_operation():
    """The outputs of x @ w are in the columns of w, each of which has a scale."""
    torch.manual_seed(0)
    model, data = Stacked().double().eval(), (torch.randn(12, 4).double(), torch.randint(3, (12,)))
    made = pf.allocate(model, CE, data, ["int3"], bits=3).apply(model)
    expected = pf.changes.named("int3").kept(model.w[1].detach().t()).t()
    assert torch.equal(made.w[1], expected)


def test_the_change_of_a_layer_that_does_not_run_is_left_out_of_the_cost():
    torch.manual_seed(0)
    model, data = Skips().double().eval(), (torch.randn(12, 4).double(), torch.randint(3, (12,)))
    report = pf.cost_of_change(model, CE, data, pf.changes.rounded(model, 3, layers=["idle", "a", "head"]))
    assert report.layers == ("a", "head")
    assert "did not run" in report.why_uncovered["idle"]
    with pytest.raises(pf.errors.InputError, match="'squared' is no layer here: its weight is used in mul"):
        pf.cost_of_change(model, CE, data, pf.changes.rounded(model, 3))


class Masked(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * (self.weight > 0))


def test_the_change_of_a_weight_that_the_forward_pass_computes_is_refused():
    """Its second order would be that of the computed weight, and the change is one of the parameter."""
    torch.manual_seed(0)
    model, data = (
        nn.Sequential(Masked(4, 4), nn.Tanh(), nn.Linear(4, 3)).double(),
        (torch.randn(12, 4).double(), torch.randint(3, (12,))),
    )
    changes = pf.changes.rounded(model, 3)
    with pytest.raises(pf.errors.InputError, match=r"changes\['0'\]: the forward pass computes"):
        pf.cost_of_change(model, CE, data, changes)
    assert pf.cost_of_change(model, CE, data, {"2": changes["2"]}).layers == ("2",)


def test_changes_are_of_all_layers_that_are_listed_and_tell_the_rest():
    torch.manual_seed(0)
    model = nn.Sequential(Standardised(2, 3, 3), Attention(), Stacked(), nn.GRU(3, 2), nn.LayerNorm(3))
    changes = pf.changes.rounded(model, 3)
    assert changes.uncovered == {}
    assert [*changes][:2] == ["0", "1.block.self_attn.in_proj_weight[q]"]
    assert {"2.w", "3.weight_ih_l0", "3.weight_hh_l0"} <= {*changes}
    some = pf.changes.of_format(model, "int3", layers="2.*")
    assert "0.weight" in some.uncovered
    assert "2.w" not in some.uncovered

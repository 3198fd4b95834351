"""Experts of a mixture in a plan: each has the price of the tokens that are routed to it, and without tokens none."""

import pytest
import torch
from torch import nn

import pyflatness as pf

pytest.importorskip("transformers", reason="transformers is not installed")

from support import weight_truth
from support.grid import normal
from support.mixtures import EXPERTS, FIRST, KINDS, Mixture

CE, X, Y = nn.CrossEntropyLoss(), normal(0, 5, 3, 4), torch.arange(5) % 3


def experts(kind="gated", of=range(EXPERTS)):
    return [f"experts.{key}[{e}]" for key in (FIRST.get(kind, "gate_up_proj"), "down_proj") for e in of]


def unreached(kind="gated"):
    model = Mixture(kind)
    model.router.bias.data[1] = -1e3
    return model


def tokens(model):
    return torch.bincount(model.routed(X)[1].flatten(), minlength=EXPERTS).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_has_the_price_of_the_tokens_that_are_routed_to_it(kind):
    model = Mixture(kind)
    plan = pf.allocate(model, CE, (X, Y), ["int3"], bits=3, layers="experts.*", probes=None)
    assert [*plan.choice] == experts(kind)
    made, of_change = plan.apply(model), []
    for layer in plan.choice:
        name, expert = weight_truth.parameter_of(model, layer)
        change = made.get_parameter(name)[expert] - model.get_parameter(name)[expert]
        of_change.append((name, expert, change.detach()))

    def outputs(steps):
        values = {name: values.detach() for name, values in model.named_parameters()}
        for step, (name, expert, change) in zip(steps, of_change, strict=True):
            values[name] = values[name].index_add(0, torch.tensor([expert]), (step * change)[None])
        return torch.func.functional_call(model, values, (X,))

    none = torch.zeros(len(of_change), dtype=torch.float64)
    along = torch.autograd.functional.jacobian(outputs, none)
    p = outputs(none).softmax(1)
    curvature = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / len(X)
    folds = plan._plan.folds
    first, gram = folds.shares @ folds.first, torch.einsum("f,fab->ab", folds.shares, folds.gram)
    gradient = torch.autograd.functional.jacobian(lambda steps: CE(outputs(steps), Y), none)
    torch.testing.assert_close(first, gradient, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(gram, torch.einsum("nca,ncd,ndb->ab", along, curvature, along), rtol=1e-8, atol=1e-12)
    with torch.no_grad():
        assert plan.loss_change == pytest.approx((CE(plan.apply(model)(X), Y) - CE(model(X), Y)).item(), rel=1e-9)


@pytest.mark.parametrize("batches", [1, 2])
def test_the_table_has_the_tokens_of_each_expert(batches):
    model = Mixture()
    data = (X, Y) if batches == 1 else [(X[:2], Y[:2]), (X[2:], Y[2:])]
    plan = pf.allocate(model, CE, data, ["int4", "int8"], bits=6)
    rows = {row["layer"]: row for row in plan._rows()}
    assert [rows[layer]["tokens"] for layer in experts()] == 2 * tokens(model)
    assert rows["router"]["tokens"] is None
    assert "tokens" in str(plan)
    dense = nn.Sequential(nn.Linear(4, 3)).double().eval()
    assert "tokens" not in str(pf.allocate(dense, CE, (X[:, 0], Y), ["int4"], bits=4))


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_without_tokens_is_named_and_has_what_the_user_says(kind):
    model, idle = unreached(kind), experts(kind, [1])
    plan = pf.allocate(model, CE, (X, Y), ["int4"], bits=4)
    assert tokens(model)[1] == 0
    assert not set(idle) & plan.choice.keys()
    assert set(plan.why_uncovered.values()) == {"no token of the data is routed to expert 1"}
    assert "no token of the data is routed to expert 1" in str(plan)
    kept = plan.apply(model).state_dict()
    fixed = pf.allocate(model, CE, (X, Y), ["int4"], bits=4, fixed=dict.fromkeys(idle, "int3"))
    assert {layer: fixed.choice[layer] for layer in idle} == dict.fromkeys(idle, "int3")
    assert fixed.uncovered == {}
    assert fixed.weights == plan.weights + sum(model.get_parameter(layer[:-3])[1].numel() for layer in idle)
    assert [row["tokens"] for row in fixed._rows() if row["layer"] in idle] == [0, 0]
    assert fixed.loss_change == pytest.approx(plan.loss_change, rel=1e-9)
    assert fixed.predicted.value == pytest.approx(plan.predicted.value, rel=1e-9)
    reached = Mixture(kind)
    wanted = pf.allocate(reached, CE, (X, Y), ["int4"], bits=4, fixed=dict.fromkeys(idle, "int3")).apply(reached)
    made = fixed.apply(model).state_dict()
    for layer in idle:
        name = layer[:-3]
        assert torch.equal(kept[name][1], model.state_dict()[name][1])
        assert torch.equal(made[name][1], wanted.state_dict()[name][1])
        assert not torch.equal(made[name][1], kept[name][1])
        assert torch.equal(made[name][[0, 2]], kept[name][[0, 2]])


def test_all_experts_of_a_layer_have_one_format_together_also_one_without_tokens():
    model = unreached()
    plan = pf.allocate(model, CE, (X, Y), ["int3", "int4", "int8"], bits=5, together="vllm", rounds=2)
    assert len({plan.choice[layer] for layer in experts()}) == 1
    apart = pf.allocate(model, CE, (X, Y), ["int3", "int4", "int8"], bits=5)
    assert len({apart.choice[layer] for layer in experts(of=[0, 2])}) > 1


def test_a_layer_that_does_not_run_has_the_format_that_it_is_given():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    model = Idle().double().eval()
    data = X[:, 0], Y
    assert pf.allocate(model, CE, data, ["int4"], bits=4).choice == {"used": "int4"}
    plan = pf.allocate(model, CE, data, ["int4"], bits=4, fixed={"idle": "int2"})
    assert plan.choice == {"used": "int4", "idle": "int2"}
    assert not torch.equal(plan.apply(model).idle.weight, model.idle.weight)

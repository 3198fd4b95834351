"""Costs, spectra and worst cases where a shortcut would give another number, against derivatives in float64."""

import copy
import statistics

import pytest
import torch
from torch import nn
from torch.func import functional_call

import pyflatness as pf
from pyflatness.numerics.eigenpairs import Search
from pyflatness.numerics.signs import RandomVectors

LOSS = nn.CrossEntropyLoss()


def _data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator).double(), torch.randint(3, (6,), generator=generator)


def _network(activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3)).double().eval()


class OfParameter(nn.Module):
    """A product with a parameter that torch takes apart into another shape than the parameter's."""

    def __init__(self, shape, product):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.head, self.product = nn.Parameter(torch.randn(shape)), nn.Linear(4, 3), product

    def forward(self, x):
        return self.head(self.product(x, self.w).tanh())


PRODUCTS = {
    "experts": ((2, 4, 4), lambda x, w: torch.bmm(x.expand(2, -1, -1), w).sum(0)),
    "heads": ((4, 2, 2), lambda x, w: torch.einsum("nd,dhk->nhk", x, w).flatten(1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_change_has_the_shape_of_the_parameter(name):
    model, (inputs, targets) = OfParameter(*PRODUCTS[name]).double().eval(), _data()
    change = 0.1 * torch.randn(model.w.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    report = pf.cost_of_change(model, LOSS, (inputs, targets), {"w": change})

    def value(t):
        return LOSS(functional_call(model, {"w": model.w.detach() + t * change}, (inputs,)), targets)

    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(value(t), t, create_graph=True)
    (second,) = torch.autograd.grad(first, t)
    assert report["w", "gradient_of_change"].value == pytest.approx(first.item(), rel=1e-9)
    assert report["w", "cost_of_change"].value == pytest.approx(second.item() / 2, rel=1e-9)
    assert report["w", "loss_change"].value == pytest.approx((value(1.0) - value(0.0)).item(), rel=1e-9)


def test_error_of_the_traces_sum_is_not_below_its_spread():
    torch.manual_seed(3)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(6, 6, bias=False), nn.ReLU())))
    model = model.append(nn.Linear(6, 6)).double().eval()
    data = torch.randn(4, 6).double(), torch.randint(6, (4,))
    changes = {name: torch.ones(6, 6, dtype=torch.float64) for name in ("0", "2", "4", "6")}
    options = {"by_trace": True, "measured": False, "probes": 20}
    found = [pf.cost_of_change(model, LOSS, data, changes, seed=s, **options)["cost_by_trace"] for s in range(40)]
    spread = statistics.stdev(estimate.value for estimate in found)
    assert spread < 1.4 * statistics.fmean(estimate.stderr for estimate in found)


def test_max_passes_does_not_limit_the_exact_second_order():
    changes = pf.changes.rounded(_network(), 3)
    few, many = (
        pf.cost_of_change(_network(), LOSS, _data(), changes, max_passes=most, measured=False) for most in (1, 100)
    )
    assert few["2", "cost_of_change"].value == many["2", "cost_of_change"].value


@pytest.mark.parametrize("change", [nn.DataParallel, lambda model: model], ids=["wrapped", "plain"])
def test_between_takes_the_weights_as_they_are_computed(change):
    model = _network()
    model[0] = nn.utils.parametrizations.weight_norm(model[0])
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].parametrizations.weight.original0.mul_(2)
    found = pf.changes.between(model, change(other))
    assert [*found] == ["0", "2"]
    torch.testing.assert_close(found["0"], model[0].weight.detach())
    assert not found["2"].any()


def test_density_alone_takes_no_product_for_pairs():
    found = pf.spectrum(_network(), LOSS, _data(), k=0, density=True, probes=3, steps=4)
    assert found.products == 3 * 4
    assert found.converged
    assert not len(found.eigenvalues)


def test_pairs_of_a_matrix_that_is_not_symmetric_are_not_converged():
    torch.manual_seed(0)
    search = Search(RandomVectors(0, 8, torch.device("cpu")), tolerance=1e-8, room=30, max_products=1000)
    matrix = torch.randn(8, 8).double()

    def found():
        asking = search.pairs(2, 0)
        wanted = next(asking)
        try:
            while True:
                wanted = asking.send(wanted @ matrix)
        except StopIteration as end:
            return end.value

    assert not found().converged


class Normalized(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        outputs = self.model(x)
        return outputs / (outputs - outputs.mean(1, keepdim=True)).square().mean(1, keepdim=True).sqrt()


def test_bound_is_one_of_normalised_logits():
    options = {"rho": 0.01, "bound": True, "steps": 5}
    found = pf.worst_case_sharpness(_network(), LOSS, _data(), normalize_logits=True, **options)
    expected = pf.worst_case_sharpness(Normalized(_network()), LOSS, _data(), **options)
    assert found.value == pytest.approx(expected.value, rel=1e-9)
    assert found.bound == pytest.approx(expected.bound, rel=1e-9)


WEIGHTED = {
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_loss_of_groups_is_that_of_all_data(name):
    loss, model, (inputs, targets) = WEIGHTED[name], _network(), _data()
    found = pf.worst_case_sharpness(model, loss, (inputs, targets), m=2, steps=1)
    assert found.loss == pytest.approx(loss(model(inputs), targets).item(), rel=1e-12)


def test_a_group_without_targets_is_refused():
    inputs, targets = _data()
    targets = targets.index_fill(0, torch.tensor([4, 5]), -100)
    with pytest.raises(pf.errors.InputError, match="no target of a group of samples counts"):
        pf.worst_case_sharpness(_network(), LOSS, (inputs, targets), m=2, steps=1)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

    def forward(self, x):
        return torch.exp(self.w * x)


def test_an_infinite_loss_is_a_rise():
    data = torch.full((1, 1), 30.0).double(), torch.full((1, 1), 3e13).double()
    found = [
        pf.measures.critical_sharpness(Growing(), nn.MSELoss(), data, {"w": torch.ones(1, 1)}, start=start).value
        for start in (1e-4, 1e4)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


class Tied(nn.Module):
    """Tokens whose embedding is the head too."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.inner(self.embed(tokens)))).movedim(-1, 1)


@pytest.mark.parametrize("curvature", ["auto", "ggn"])
def test_a_change_of_a_weight_in_all_of_its_uses(curvature):
    torch.manual_seed(0)
    model, loss = Tied().double().eval(), nn.CrossEntropyLoss()
    tokens, targets = torch.randint(7, (5, 3)), torch.randint(7, (5, 3))
    change = 0.1 * torch.randn(7, 4, dtype=torch.float64)

    def outputs(t):
        return torch.func.functional_call(model, {"embed.weight": model.embed.weight.detach() + t * change}, (tokens,))

    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(loss(outputs(t), targets), t, create_graph=True)
    if curvature == "ggn":
        moved = torch.autograd.functional.jacobian(outputs, t)
        p = outputs(t).detach().softmax(1)
        second = ((p * moved.square()).sum(1) - (p * moved).sum(1).square()).mean()
    else:
        (second,) = torch.autograd.grad(first, t)
    report = pf.cost_of_change(model, loss, (tokens, targets), {"head.weight": change}, curvature=curvature)
    assert report["head.weight", "gradient_of_change"].value == pytest.approx(first.item(), rel=1e-10)
    assert report["head.weight", "cost_of_change"].value == pytest.approx(second.item() / 2, rel=1e-9)
    assert report["head.weight", "cost_of_change"].per_neuron is None
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    rise = loss(outputs(one), targets) - loss(outputs(zero), targets)
    assert report["head.weight", "loss_change"].value == pytest.approx(rise.item(), rel=1e-10)


def test_critical_sharpness_refuses_noise():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1e-3 * torch.randn(len(x), self.out_features, dtype=x.dtype)

    torch.manual_seed(0)
    model, data = Noisy(4, 3).double().eval(), (torch.randn(12, 4).double(), torch.randint(3, (12,)))
    step = {"weight": -model.weight.detach()}
    with pytest.raises(pf.errors.InputError, match="draws random numbers in its forward pass"):
        pf.measures.critical_sharpness(model, nn.CrossEntropyLoss(), data, step)

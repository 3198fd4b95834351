"""Limits of spectra and worst cases that are said, and changes and steps by the names and shapes that users have."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

import pyflatness as pf
from pyflatness.numerics import lanczos
from pyflatness.passes.memory import Budget

LOSS = nn.CrossEntropyLoss()


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def _data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator).double(), torch.randint(3, (8,), generator=generator)


def test_the_fewest_vectors_of_a_residual_network_fit():
    wanted = 12 * 8 * 11_689_512  # five eigenpairs of a ResNet-18
    assert Budget(None).bases < wanted <= Budget(None).least_bases
    assert Budget(2**20).least_bases == Budget(2**20).bases


# --- tied weights ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


def test_the_block_of_a_tied_weight_says_that_it_is_of_one_use():
    model, data = Tied().double().eval(), (torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 3, 1]))
    assert "head: weight tied with embedding" in str(pf.spectrum(model, LOSS, data, layers=["head", "hidden"], k=1))
    assert not pf.spectrum(model, LOSS, data, layers="hidden", k=1).notes
    assert not pf.spectrum(model, LOSS, data, k=1).notes


def test_a_tied_weight_is_one_layer_of_changes():
    """By default it has a row for all of its uses, against the dense Hessian in the parameter."""
    model, data = Tied().double().eval(), (torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 3, 1]))
    changes = pf.changes.rounded(model, bits=3)
    assert [*changes] == ["head.weight", "hidden"]
    scale = model.head.weight.detach().abs().amax(dim=1, keepdim=True) / 3.5  # a row is a token
    levels = (changes["head.weight"] + model.head.weight.detach()) / scale
    torch.testing.assert_close(levels, levels.round(), atol=1e-9, rtol=0)
    report = pf.cost_of_change(model, LOSS, data, changes)

    def risk(table):
        return LOSS(torch.func.functional_call(model, {"embedding.weight": table}, (data[0],)), data[1])

    table, change = model.embedding.weight.detach(), changes["head.weight"].detach()
    hessian = torch.autograd.functional.hessian(risk, table).view(12, 12)
    (gradient,) = torch.autograd.grad(risk(table.requires_grad_()), table)
    cost = 0.5 * change.flatten() @ hessian @ change.flatten()
    assert float(report["head.weight", "cost_of_change"]) == pytest.approx(cost.item(), rel=1e-9)
    assert report["head.weight", "gradient_of_change"] == pytest.approx((gradient * change).sum().item(), rel=1e-9)
    rise = risk(table + change) - risk(table)
    assert float(report["head.weight", "loss_change"]) == pytest.approx(rise.item(), rel=1e-9)
    assert "this use only" not in str(report)


def test_a_tied_weight_has_one_change_by_whatever_name():
    """Each row is of all uses, and the network counts the change once."""
    model, data = Tied().double().eval(), (torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 3, 1]))
    changes = pf.changes.rounded(model, bits=3, layers=["embedding", "hidden", "head"])
    assert changes["embedding"] is changes["head"]
    torch.testing.assert_close(changes["head"], pf.changes.rounded(model, bits=3)["head.weight"])
    report = pf.cost_of_change(model, LOSS, data, changes)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.embedding.weight += changes["embedding"]
        changed.hidden.weight += changes["hidden"]
        expected = LOSS(changed(data[0]), data[1]) - LOSS(model(data[0]), data[1])
    assert float(report["loss_change"]) == pytest.approx(expected.item(), rel=1e-9)
    for measure in ("cost_of_change", "gradient_of_change", "loss_change"):
        both = report["embedding", measure], report["head", measure]
        assert float(both[0]) == float(both[1])
    with pytest.raises(pf.errors.InputError, match="'embedding' and 'head' are one weight, and have two changes"):
        pf.cost_of_change(model, LOSS, data, changes | {"head": 2 * changes["head"]})


@pytest.mark.parametrize("key", ["embedding.weight", "head.weight"])
def test_another_checkpoint_may_have_a_tied_weight_under_any_of_its_names(key):
    model, table = Tied().double(), torch.randn(4, 3).double()
    assert [*pf.changes.between(model, {key: table})] == ["head.weight"]
    torch.testing.assert_close(pf.changes.between(model, {key: table})["head.weight"], table - model.head.weight)
    other = Tied().double()
    assert [*pf.changes.between(model, other)] == ["head.weight", "hidden"]
    pf.changes.add(model, pf.changes.between(model, other))
    torch.testing.assert_close(model.embedding.weight, other.head.weight)
    assert model.embedding.weight is model.head.weight


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_search_that_ends_by_its_limit_says_so():
    found = pf.spectrum(_network(), LOSS, _data(), k=2, max_products=4)
    assert found.limited
    assert not found.converged
    assert found.products == 4
    assert "max_products=4" in str(found)
    whole = pf.spectrum(_network(), LOSS, _data(), k=2)
    assert whole.converged
    assert not whole.limited
    assert not whole.notes


def test_fewer_products_than_pairs_are_refused():
    with pytest.raises(pf.errors.InputError, match=r"max_products=5: 6 eigenpairs"):
        pf.spectrum(_network(), LOSS, _data(), k=3, which="both", max_products=5)


@pytest.mark.parametrize(
    ("options", "named", "vectors"),
    [
        ({"k": 40, "memory": 2**20}, r"40 eigenpairs", 88),
        ({"density": True, "steps": 100, "memory": 2**20}, r"steps=100", 104),
        ({"k": 120}, r"120 eigenpairs", 248),
    ],
)
def test_vectors_that_do_not_fit_are_an_error_before_the_first_product(options, named, vectors):
    model = nn.Sequential(nn.Linear(1500, 1500), nn.Tanh(), nn.Linear(1500, 2))
    size = sum(w.numel() for w in model.parameters())
    needed = vectors * 8 * size
    assert needed > (2**30 if "memory" in options else 2**32)
    data = torch.randn(2, 1500), torch.randint(2, (2,))
    with pytest.raises(pf.errors.InputError, match=rf"{named}: {vectors} vectors of {size:,} .* pass memory={needed} "):
        pf.spectrum(model.eval(), LOSS, data, **options)


def test_a_bound_that_is_not_converged_says_so(monkeypatch):
    options = {"rho": 0.1, "steps": 1, "bound": True}
    assert not pf.worst_case_sharpness(_network(), LOSS, _data(), **options).notes
    monkeypatch.setattr(lanczos, "MAX_PRODUCTS", 2)
    (note,) = pf.worst_case_sharpness(_network(), LOSS, _data(), **options).notes
    assert "not converged after 3 products" in note


# --- shapes -----------------------------------------------------------------------------------------------------------


class OfParameter(nn.Module):
    def __init__(self, shape, product):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.product = nn.Parameter(torch.randn(shape)), product

    def forward(self, x):
        return self.product(x, self.w)


PRODUCTS = {
    "experts": ((2, 4, 3), lambda x, w: torch.bmm(x.expand(2, -1, -1), w).sum(0)),
    "heads": ((4, 1, 3), lambda x, w: torch.einsum("nd,dhk->nhk", x, w).flatten(1)),
    "transposed": ((4, 3), lambda x, w: x @ w),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_eigenvectors_have_the_shape_of_the_parameter(name):
    model, (inputs, targets) = OfParameter(*PRODUCTS[name]).double().eval(), _data()
    found = pf.spectrum(model, LOSS, (inputs, targets), layers="w", k=2)
    (vectors,) = found.eigenvectors.values()
    assert vectors.shape == (2, *model.w.shape)

    def value_at(w):
        return LOSS(functional_call(model, {"w": w}, (inputs,)), targets)

    for value, vector in zip(found.eigenvalues, vectors, strict=True):
        _, image = torch.autograd.functional.hvp(value_at, model.w.detach(), vector)
        torch.testing.assert_close(image, value * vector, rtol=0, atol=1e-7)
        cost = pf.cost_of_change(model, LOSS, (inputs, targets), {"w": vector}, measured=False)
        assert cost["cost_of_change"].value == pytest.approx(float(value) / 2, abs=1e-9)


# --- changes ----------------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.across = nn.MultiheadAttention(4, 2, batch_first=True, kdim=3, vdim=3)
        self.over, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        x, _ = self.attend(x, x, x, need_weights=False)
        x, _ = self.across(x, x[..., :3], x[..., :3], need_weights=False)
        return self.head(self.over(x)[0][:, -1])


CHANGED = [
    *(f"attend.in_proj_weight[{which}]" for which in "qkv"),
    "attend.out_proj",
    *(f"across.{which}_proj_weight" for which in "qkv"),
    *("across.out_proj", "over.weight_ih_l0", "over.weight_hh_l0", "head"),
]


def test_weights_of_attention_and_recurrent_modules_are_changed_too():
    model = Attending().double().eval()
    data = torch.randn(8, 3, 4).double(), _data()[1]
    changes = pf.changes.rounded(model, 6)
    assert sorted(changes) == sorted(CHANGED)
    report = pf.cost_of_change(model, LOSS, data, changes)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in changed.named_parameters():
            for layer, change in changes.items():
                key, _, part = (layer if "weight" in layer else f"{layer}.weight").partition("[")
                if key == name:
                    place = "qkv".index(part[0]) if part else 0
                    weight[4 * place : 4 * place + len(change)] += change
        expected = LOSS(changed(data[0]), data[1]) - LOSS(model(data[0]), data[1])
    assert report["loss_change"].value == pytest.approx(float(expected), rel=1e-9)
    for other in (changed, changed.state_dict()):
        for name, change in pf.changes.between(model, other).items():
            torch.testing.assert_close(change, changes[name], rtol=0, atol=1e-12)


def test_changes_of_half_precision_keep_their_digits():
    model = _network().bfloat16()
    weight = model[0].weight.detach()
    for change in (pf.changes.rounded(model, 8)["0"], pf.changes.of_rank(model, 2)["0"]):
        assert change.dtype == torch.float32
    change = pf.changes.rounded(model, 8)["0"]
    wanted = pf.changes.named("int8").kept(weight).double()  # which is of bfloat16, as tools keep it
    torch.testing.assert_close(weight.double() + change, wanted, rtol=0, atol=1e-7)
    data = _data()[0].bfloat16(), _data()[1]
    report = pf.cost_of_change(model, LOSS, data, {"0": change})
    moved = {"0.weight": wanted.bfloat16()}
    expected = LOSS(functional_call(model, moved, (data[0],)).double(), data[1]) - LOSS(
        model(data[0]).double(), data[1]
    )
    assert report["loss_change"].value == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel])
def test_a_step_by_the_names_of_a_wrapped_model(wrap):
    model, data = _network(), _data()
    gradients = torch.autograd.grad(LOSS(model(data[0]), data[1]), [*model.parameters()])
    wrapped = wrap(model)
    found = [
        pf.measures.critical_sharpness(
            wrapped, LOSS, data, {name: -g for (name, _), g in zip(names.named_parameters(), gradients, strict=True)}
        ).value
        for names in (wrapped, model)
    ]
    assert [*dict(wrapped.named_parameters())] != [*dict(model.named_parameters())]
    assert found[0] == found[1] > 0


def test_without_copies_a_multiple_eigenvalue_has_one():
    layer = nn.Linear(3, 4, bias=False).double().eval()  # squared error: the block of each row is the same
    data = _data()[0][:, :3], torch.zeros(8, 4).double()
    found, once = (pf.spectrum(layer, nn.MSELoss(), data, k=2, copies=copies) for copies in (True, False))
    values = torch.linalg.eigvalsh(2 * data[0].T @ data[0] / 32).flip(0)
    torch.testing.assert_close(found.eigenvalues, values[[0, 0]], rtol=0, atol=1e-7)
    torch.testing.assert_close(once.eigenvalues, values[:2], rtol=0, atol=1e-7)
    assert once.products < found.products

"""The square-root factors whose columns random signs add up: S Sᵀ is the loss Hessian, and probes vary as they say."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness import losses


def test_sizes_are_traces():
    """Of losses with all kinds of columns, weighted, ignored and not convex; very peaked ones too."""
    logits = torch.tensor([[1.0, 2.0, -1.0], [0.0, 0.0, 0.0], [60.0, 3.0, -5.0]]).double()
    labels, values = torch.tensor([0, 2, -100]), torch.rand(3, 3).double()
    labelled = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]).double(), label_smoothing=0.2)
    for loss, targets in (
        (nn.CrossEntropyLoss(), torch.tensor([0, 2, 1])),
        (labelled, labels),
        (nn.BCEWithLogitsLoss(), values),
        (nn.MSELoss(), values),
        (lambda f, y: (f - y).square().prod(dim=1).mean(), values),
    ):
        known = losses.resolve(loss)
        terms = known.terms(logits, targets, 1)
        found = known.factors(logits, terms)
        each = [found.column(c)[0].double().square().sum(dim=1) for c in range(found.count)]
        assert torch.allclose(found.sizes(), torch.stack(each).sum(dim=0), rtol=1e-9, atol=1e-300)


def columns(logits, loss=None, *, alone=True):
    """The square-root factor of rows, (rows, C, C), and its weights."""
    loss = losses.resolve(loss or nn.CrossEntropyLoss())
    terms = loss.terms(logits, torch.zeros(len(logits), dtype=torch.long), 1)
    found = loss.factors(logits, terms, alone=alone).mixtures()
    return stacked(found, logits), found


def stacked(found, logits):
    """All columns of mixtures, (rows, C, C)."""
    nothing = torch.zeros_like(logits, dtype=torch.float64)
    each = [sum((part for part, _ in found.mixed(e.expand_as(logits))), nothing) for e in torch.eye(logits.shape[1])]
    return torch.stack(each, dim=2)


def hessians(logits):
    p = torch.softmax(logits.double(), dim=1)
    others = 1 - torch.eye(logits.shape[1], dtype=torch.float64)
    return torch.diag_embed(p * (p @ others)) - others * p.unsqueeze(2) * p.unsqueeze(1)


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 40.0])
@pytest.mark.parametrize("classes", [2, 3, 10, 16, 17, 100])
def test_they_are_factors_of_the_loss_hessian(classes, scale):
    """With equal, flat and very peaked probabilities, ties, and a class that is masked; nothing cancels in them."""
    logits = scale * torch.randn(7, classes, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[1, 0] = logits[1, -1]
    if classes > 2:
        logits[2, 1] = -torch.inf
    factor, found = columns(logits)
    expected = hessians(logits)
    trace = expected.diagonal(dim1=1, dim2=2).sum(dim=1)
    assert float(((factor @ factor.mT - expected).abs().amax(dim=(1, 2)) / trace).max()) < 1e-12
    assert torch.allclose(found.weights(), factor.square().sum(dim=1), rtol=1e-9, atol=1e-300)
    taken = found.take(torch.tensor([5, 2, 5]))
    signs = torch.randn(3, classes, generator=torch.Generator().manual_seed(2), dtype=torch.float64).sign()
    assert torch.allclose(taken.mixed(signs)[0][0], (factor[[5, 2, 5]] @ signs.unsqueeze(2)).squeeze(2), atol=1e-12)


def test_the_eigenbasis_is_orthogonal():
    factor, _ = columns(torch.randn(9, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    gram = factor.mT @ factor
    assert float((gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))).abs().max()) < 1e-15


def test_a_sample_of_several_terms_keeps_the_columns_of_exact_values():
    factor, _ = columns(torch.randn(9, 12, generator=torch.Generator().manual_seed(1)), alone=False)
    loss = losses.resolve(nn.CrossEntropyLoss())
    logits = torch.randn(9, 12, generator=torch.Generator().manual_seed(1))
    exact = loss.factors(logits, loss.terms(logits, torch.zeros(9, dtype=torch.long), 1))
    both = torch.stack([exact.column(c)[0] for c in range(exact.count)], dim=2).double()
    assert torch.allclose(factor @ factor.mT, both @ both.mT, atol=1e-6)


@pytest.mark.parametrize("how", [{"probes": 3}, {"probes": "adaptive"}])
@pytest.mark.parametrize(("outputs", "loss"), [(2, nn.CrossEntropyLoss()), (1, nn.BCEWithLogitsLoss())])
def test_one_column_has_nothing_to_sample(outputs, loss, how):
    """With any sign it gives the same: the value is exact, and says so; behind tanh products are sampled."""
    torch.manual_seed(0)
    x = torch.randn(12, 3, dtype=torch.float64)
    y = torch.arange(12) % 2 if outputs == 2 else (torch.arange(12) % 2).double().unsqueeze(1)
    for activation in (nn.ReLU(), nn.Tanh()):
        model = nn.Sequential(nn.Linear(3, 5), activation, nn.Linear(5, outputs)).double().eval()
        exact = pf.relative_flatness(model, loss, (x, y), "0")
        found = pf.relative_flatness(model, loss, (x, y), "0", **how)
        if isinstance(activation, nn.ReLU):
            assert found.value == pytest.approx(exact.value, rel=1e-13)
            assert (found.stderr, found.exact, found.method) == (None, True, "ggn")
        elif "probes" in how:
            assert found.method.startswith("hessian")
            assert found.exact is (found.stderr is None)


@pytest.mark.parametrize(
    ("classes", "name"), [(4, "cross_entropy"), (35, "cross_entropy"), (4, "binary"), (4, "squared"), (4, "callable")]
)
def test_mean_and_variance_over_all_signs(classes, name, monkeypatch):
    """By enumeration of all signs of one sample's few likely classes: E = tr B, Var = 2 (|B|² - Σ B_cc²)."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, classes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        model[2].bias[4:] = -300.0  # without weight
    x = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    one_hot = F.one_hot(torch.tensor([1]), classes).double()
    loss, y = {
        "cross_entropy": (nn.CrossEntropyLoss(), torch.tensor([1])),
        "binary": (nn.BCEWithLogitsLoss(), one_hot),
        "squared": (nn.MSELoss(), one_hot),
        "callable": (lambda f, y: F.cross_entropy(f, y), torch.tensor([1])),
    }[name]
    last = [classes - 4 + k for k in range(4)] if classes > 4 else range(4)

    def signs(pattern):
        def drawn(self, stream, samples, *shape):
            found = torch.ones(len(self.draws), len(samples), *shape, dtype=torch.int8)
            found[0, 0].view(-1)[torch.tensor([*last])] = torch.tensor(pattern, dtype=torch.int8)
            return found

        return drawn

    exact = pf.relative_flatness(model, loss, (x, y), "0").value
    values = []
    for pattern in itertools.product((-1, 1), repeat=4):
        monkeypatch.setattr("pyflatness.numerics.signs.Signs.__call__", signs(pattern))
        values.append(pf.relative_flatness(model, loss, (x, y), "0", probes=1).value)
    values = torch.tensor(values, dtype=torch.float64)
    assert float(values.mean()) == pytest.approx(exact, rel=1e-9)
    known = losses.resolve(loss)
    outputs = model(x).detach()
    mixtures = known.factors(outputs, known.terms(outputs, y, 1), alone=True).mixtures()
    factor = stacked(mixtures, outputs)[0]
    weight = model[0].weight.detach()
    jacobian = torch.autograd.functional.jacobian(
        lambda w: torch.func.functional_call(model, {"0.weight": w}, (x,))[0], weight
    )
    carried = torch.einsum("dk,cdm->ckm", weight, jacobian).flatten(1)
    normaliser = classes if name in ("binary", "squared") else 1
    gram = factor.T @ carried @ carried.T @ factor / normaliser
    expected = 2 * (gram.square().sum() - gram.diagonal().square().sum())
    assert float(gram.trace()) == pytest.approx(exact, rel=1e-9)
    assert float(values.var(unbiased=False)) == pytest.approx(float(expected), rel=1e-6, abs=1e-18)

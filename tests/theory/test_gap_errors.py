"""Standard errors of the generalisation gap: by their formula, and against how much the values scatter over samples."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.combinations import every
from support.grid import Net, normal

N, C = 60, 4
X, Y = normal(1, N, 5), torch.arange(N) % C
LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), Y),
    "class weights, ignored": (nn.CrossEntropyLoss(torch.linspace(1, 3, C).double(), ignore_index=2), Y),
    "a sum": (nn.CrossEntropyLoss(reduction="sum"), Y),
    "squared error": (nn.MSELoss(), normal(2, N, C)),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), (normal(3, N, C) > 0).double()),
}


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, C).double()


def ratio(values, masses):
    """Σ t / Σ m and its standard error by leaving out one sample after the other (the jackknife)."""
    values, masses = values[masses > 0], masses[masses > 0]
    n = len(values)
    left = (values.sum() - values) / (masses.sum() - masses)
    return float(values.sum() / masses.sum()), float(((left - left.mean()).square().sum() * (n - 1) / n).sqrt())


@every(together=1, size=[N, 7], name=[*LOSSES])
def test_of_the_loss(name, size):
    loss, targets = LOSSES[name]
    model = linear()
    data = [*zip(X.split(size), targets.split(size), strict=True)]
    found = pf.generalization_gap(model, loss, data, [(X[:9], targets[:9])])
    with torch.no_grad():
        outputs = model(X)
        each = type(loss)(**{**options(loss), "reduction": "none"})(outputs, targets).view(N, -1).sum(dim=1)
    masses = torch.full((N,), 1.0 if each.ndim == 1 and targets.ndim == 1 else float(C)).double()
    if name == "class weights, ignored":
        masses = torch.where(targets == 2, 0.0, loss.weight[targets])
    value, error = ratio(each, masses)
    assert found.train.loss == pytest.approx(value, rel=1e-12)
    assert found.train.loss_stderr == pytest.approx(error, rel=0.03)
    assert found.gap_stderr == pytest.approx(math.hypot(found.train.loss_stderr, found.test.loss_stderr))


def options(loss):
    names = {
        nn.CrossEntropyLoss: ("weight", "ignore_index"),
        nn.BCEWithLogitsLoss: ("weight", "pos_weight"),
    }
    return {name: getattr(loss, name) for name in names.get(type(loss), ())}


def test_of_the_accuracy():
    found = pf.generalization_gap(linear(), nn.CrossEntropyLoss(), (X, Y), (X[:30], Y[:30]))
    for part, n in ((found.train, N), (found.test, 30)):
        p = part.accuracy
        assert part.accuracy_stderr == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))
    both = found.train.accuracy_stderr, found.test.accuracy_stderr
    assert found.accuracy_gap_stderr == pytest.approx(math.hypot(*both))
    assert pf.generalization_gap(linear(), nn.MSELoss(), *2 * [(X, normal(2, N, C))]).accuracy_gap_stderr is None
    one = pf.generalization_gap(linear(), nn.CrossEntropyLoss(), (X, Y), (X[:1], Y[:1]))
    assert (one.test.loss_stderr, one.test.accuracy_stderr, one.gap_stderr) == (None, None, None)


@pytest.mark.parametrize("flat", [False, True])
def test_tokens_of_a_sample_are_not_independent(flat):
    """All tokens of a sample alike: as much is known as from one token of each."""
    torch.manual_seed(0)
    model = Net(lambda net, x: net.layer(x).transpose(1, 2), layer=nn.Linear(5, C).double())

    def forward(model, batch):
        outputs, targets = model(batch[0]), batch[1]
        return (outputs.transpose(1, 2).flatten(0, 1), targets.flatten()) if flat else (outputs, targets)

    loss = nn.CrossEntropyLoss(ignore_index=2)
    data = X[:, None].expand(N, 6, 5), Y[:, None].expand(N, 6)
    many = pf.generalization_gap(model, loss, data, data, forward=forward).train
    single = pf.generalization_gap(model, loss, *2 * [(X[:, None], Y[:, None])]).train
    assert many.loss_stderr == pytest.approx(single.loss_stderr)
    assert many.accuracy_stderr == pytest.approx(single.accuracy_stderr)


def test_of_a_callable_by_groups_of_samples():
    """As many calls as there are groups; what their sums scatter by is that of the samples."""
    calls = []

    def loss(outputs, targets):
        calls.append(len(outputs))
        return F.cross_entropy(outputs, targets)

    x, y = normal(1, 4000, 5), torch.arange(4000) % C
    found = pf.generalization_gap(linear(), loss, [(x, y)], [(x[:3], y[:3])])
    plain = pf.generalization_gap(linear(), nn.CrossEntropyLoss(), [(x, y)], [(x[:3], y[:3])])
    assert found.train.loss == pytest.approx(plain.train.loss, rel=1e-12)
    assert found.train.loss_stderr == pytest.approx(plain.train.loss_stderr, rel=0.3)
    assert found.test.loss_stderr == pytest.approx(plain.test.loss_stderr, rel=1e-9)
    assert len(calls) < 80


def test_left_out_and_let_through():
    x = X.clone()
    x[4] = math.nan
    left = [k for k in range(N) if k != 4]
    found = pf.generalization_gap(linear(), nn.CrossEntropyLoss(), (X, Y), (x, Y), nan_policy="omit").test
    clean = pf.generalization_gap(linear(), nn.CrossEntropyLoss(), (X, Y), (X[left], Y[left])).test
    assert (found.loss_stderr, found.accuracy_stderr) == pytest.approx((clean.loss_stderr, clean.accuracy_stderr))
    through = pf.generalization_gap(linear(), nn.CrossEntropyLoss(), (X, Y), (x, Y), nan_policy="propagate").test
    assert math.isnan(through.loss_stderr)


@pytest.mark.parametrize("draws", [250, pytest.param(1500, marks=pytest.mark.soak)])
def test_coverage_over_samples(draws):
    """Of a population of 50,000: ± 1.96 standard errors of 400 samples hold its loss, accuracy and gap in 95 %."""
    x = normal(5, 50_000, 5)
    y = (x @ normal(6, 5, C) + normal(7, 50_000, C)).argmax(dim=1)
    model, loss = linear(), nn.CrossEntropyLoss(torch.linspace(1, 2, C).double())
    whole = pf.generalization_gap(model, loss, [(x, y)], [(x, y)]).test
    inside = torch.zeros(3)
    for seed in range(draws):
        order = torch.randint(len(x), (800,), generator=torch.Generator().manual_seed(seed))
        train, test = ([(x[part], y[part])] for part in order.chunk(2))
        found = pf.generalization_gap(model, loss, train, test)
        off = torch.tensor([found.test.loss - whole.loss, found.test.accuracy - whole.accuracy, found.gap]).abs()
        claimed = torch.tensor([found.test.loss_stderr, found.test.accuracy_stderr, found.gap_stderr])
        inside += off <= 1.96 * claimed
    low, high = (0.9, 0.985) if draws == 250 else (0.93, 0.97)
    assert bool(((inside / draws >= low) & (inside / draws <= high)).all()), inside / draws

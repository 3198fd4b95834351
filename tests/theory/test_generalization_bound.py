"""The generalisation bound by its parts and by brute force, uniform bounds, and the paper's synthetic setup."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.theory import perturbed
from pyflatness.theory.sampling import assigned
from support.cases import C
from support.grid import Net, classes, normal
from support.many_samples import seeded as generator
from support.unchanged import LOSS, X, Y, assert_unchanged, snapshot


def net(tail=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), tail or nn.ReLU(), nn.Linear(6, C)).double().eval()


DATA, TEST = (normal(1, 50, 5), classes(2, 50)), (normal(3, 20, 5), classes(4, 20))


def test_the_bound_of_a_head_is_that_of_its_features():
    model = net()
    features, others = (model[:2](x).detach() for x in (DATA[0], TEST[0]))
    found = pf.theory.generalization_bound(model, LOSS, DATA, test=TEST, seed=4)
    parts = pf.theory.representativeness(
        features, model[2].weight, model[2].bias, DATA[1], test=(others, TEST[1]), seed=4
    )
    mine = found.representativeness
    for one, two in zip([*mine.folds, mine.test], [*parts.folds, parts.test], strict=True):
        assert one.representativeness == pytest.approx(two.representativeness, rel=1e-9)
        assert one.robustness == pytest.approx(two.robustness, rel=1e-9)
    kappa = float(pf.head_flatness(features, model[2].weight, model[2].bias))
    assert found.rho == 50 ** (-1 / 10)
    assert found.flatness == pytest.approx(found.rho**2 * kappa / 12)
    assert found.bound == found.flatness + found.representativeness.magnitude
    assert found.measured == pf.generalization_gap(model, LOSS, DATA, TEST)
    assert found.representativeness.test.gap == pytest.approx(found.measured.gap)
    assert "measured gap" in repr(found)


def test_the_bound_of_an_inner_layer_by_brute_force():
    model = net(nn.Tanh())
    cut = [*zip(DATA[0].split(50), DATA[1].split(50), strict=True)]
    found = pf.theory.generalization_bound(model, LOSS, cut, "0", rho=0.3, probes=4, seed=1)
    places, noisy = assigned(50, 3, 1), []
    for xi in perturbed.kernel_noise(DATA[0], 0.3, 4, generator(1)):
        noisy.append(sum(F.cross_entropy(model(DATA[0] + s * xi), DATA[1], reduction="none") for s in (1, -1)) / 2)
    values, own = (
        torch.stack(noisy).mean(0).detach(),
        F.cross_entropy(model(DATA[0]), DATA[1], reduction="none").detach(),
    )
    for k, part in enumerate(found.representativeness.folds):
        assert part.representativeness == pytest.approx(float(own[places == k].mean() - values[places != k].mean()))
    assert found.kappa == pytest.approx(float(pf.relative_flatness(model, LOSS, DATA, "0")))
    assert (found.features, found.samples, found.layer, found.measured) == (5, 50, "0", None)


def test_the_reduction_sum_gives_means():
    model = net()
    one = pf.theory.generalization_bound(model, LOSS, DATA, test=TEST)
    two = pf.theory.generalization_bound(model, nn.CrossEntropyLoss(reduction="sum"), DATA, test=TEST)
    assert two.bound == pytest.approx(one.bound)
    assert two.kappa == pytest.approx(one.kappa)


def test_a_network_that_fitted_noise_is_above_the_approximate_bound():
    """The folds held out were trained on: what is called a bound does not see it. A refitted head does."""
    features, y, others, other_y = normal(1, 30, 20), normal(2, 30, 1), normal(3, 500, 20), normal(4, 500, 1)

    def ridge(x, targets):
        gram = x.t() @ x + 1e-2 * torch.eye(20).double()
        return torch.linalg.solve(gram, x.t() @ targets).t(), None

    model = nn.Linear(20, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(ridge(features, y)[0])
    found = pf.theory.generalization_bound(model, nn.MSELoss(), (features, y), test=(others, other_y), rho=0.1)
    assert found.bound < found.measured.gap
    refitted = pf.theory.representativeness(features, model.weight, targets=y, loss="mse_loss", fit=ridge, rho=0.1)
    assert found.flatness + refitted.value > found.measured.gap


def test_uniform_bounds():
    """Both hold at a minimum for every |A| ≤ 1, to second order; and for the example of the specification."""
    torch.manual_seed(0)
    phi, delta = normal(1, 40, 3), 1e-3
    y = torch.softmax(phi @ normal(2, 3, 3).t(), 1)
    w = normal(2, 3, 3)  # the minimum, where the slope is 0
    loss = nn.CrossEntropyLoss()

    def risk(weight):
        return loss(phi @ weight.t(), y)

    hessian = torch.autograd.functional.hessian(risk, w)
    blocks = [float(torch.linalg.eigvalsh(hessian[s, :, s]).max()) for s in range(3)]
    maximal = sum(float(w[s].square().sum()) * blocks[s] for s in range(3))
    largest = float(torch.linalg.eigvalsh(hessian.reshape(9, 9)).max())
    uniform = pf.theory.uniform_robustness_bound(delta, 3, maximal)
    spectral = pf.theory.spectral_robustness_bound(delta, float(w.square().sum()), largest)
    assert uniform == pytest.approx(delta**2 * 1.5 * maximal)
    for seed in range(50):
        a = normal(seed, 3, 3)
        a = a / torch.linalg.matrix_norm(a, 2)
        rise = float(risk(w + delta * w @ a) - risk(w))
        assert rise <= uniform * 1.01
        assert rise <= spectral * 1.01
    bad = (
        lambda: pf.theory.uniform_robustness_bound(0, 3, 1.0),
        lambda: pf.theory.uniform_robustness_bound(0.1, 0, 1.0),
        lambda: pf.theory.spectral_robustness_bound(0.1, "a", 1.0),
        lambda: pf.theory.spectral_robustness_bound(0.1, 1.0, math.nan),
    )
    for call in bad:
        with pytest.raises(pf.errors.InputError, match="wanted"):
            call()


def test_no_trace():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    LOSS(model(X), Y).backward()
    model.eval()
    before = snapshot(model)
    pf.theory.generalization_bound(model, LOSS, (X, Y), "0", test=(X, Y))
    assert_unchanged(model, before)
    with pytest.raises(pf.errors.NonFiniteError):
        pf.theory.generalization_bound(model, LOSS, (X * torch.nan, Y), kappa=1.0)
    assert_unchanged(model, before)


def twice(net, x):
    return net.layer(torch.relu(net.layer(x)))


PATCHES = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, C)).double()
POSITIONS = nn.Sequential(nn.Unflatten(1, (5, 1)), nn.Linear(1, C), nn.Flatten(), nn.Linear(5 * C, C)).double()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (net(), {"layer": "0", "train": iter([DATA])}, "can be read once"),
        (net(), {"folds": 60}, "folds=60: there are 50 samples"),
        (PATCHES, {"layer": "0", "train": (DATA[0][:, None], DATA[1])}, "is a Conv1d"),
        (Net(twice, layer=nn.Linear(5, 5)).double(), {}, "runs several times"),
        (POSITIONS, {"layer": "1"}, r"\(50, 5, 1\)"),
        (net(), {"rho": 0}, "rho=0"),
    ],
)
def test_bounds_refuse(model, options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.theory.generalization_bound(model, LOSS, **{"train": DATA, **options})


# --- the paper's synthetic setup, appendix C.1 ------------------------------------------------------------------------


def synthetic(separation, seed, n):
    """Four Gaussians in R^6 (two for each class) of random covariances, and two redundant features."""
    rng = np.random.default_rng(seed)
    corners = rng.permutation([*itertools.product([-1.0, 1.0], repeat=6)])[:4] * separation / 2
    mixing = [rng.uniform(-1, 1, (6, 6)) for _ in range(4)]
    redundant = rng.uniform(-1, 1, (6, 2))
    cluster = rng.integers(4, size=n)
    x = np.stack([corners[k] + rng.normal(size=6) @ mixing[k] for k in cluster])
    features = np.concatenate([x, x @ redundant], axis=1)
    return torch.tensor(features), torch.tensor(np.where(cluster < 2, 1.0, -1.0))[:, None]


def inverted(extractor, features):
    """Inputs that the tanh network takes to the features, layer by layer."""
    for layer in reversed([part for part in extractor if isinstance(part, nn.Linear)]):
        features = torch.linalg.lstsq(
            layer.weight.detach(), (torch.atanh(features) - layer.bias.detach()).t()
        ).solution.t()
    return features


def setup(separation, seed, n=600):
    """A ridge head behind a random tanh network 784-512-128-16-8, inputs by reverse propagation, and test data."""
    phi, y = synthetic(separation, seed, n + 2400)
    phi = phi * 0.02  # so that every layer's inverse image is within tanh's range
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = [784, 512, 128, 16, 8]
        parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
        head = nn.Linear(8, 1, bias=False)
        model = nn.Sequential(*parts, head).double().eval()
    for part in parts[::2]:
        nn.init.xavier_uniform_(part.weight, generator=generator(seed))
        nn.init.zeros_(part.bias)
    train = phi[:n], y[:n]
    gram = train[0].t() @ train[0] + 1e-4 * torch.eye(8).double()
    with torch.no_grad():
        head.weight.copy_(torch.linalg.solve(gram, train[0].t() @ train[1]).t())
    x = inverted(model[:-1], phi)
    assert torch.isfinite(x).all()
    torch.testing.assert_close(model[:-1](x).detach(), phi, rtol=1e-6, atol=1e-8)
    return model, (x[:n], y[:n]), (x[n:], y[n:])


def test_bound_and_gap_on_the_papers_synthetic_setup():
    """Figure 4: the bound is above the gap, Eq. 5 holds to rounding, what the authors compute follows the loss."""
    theirs = []
    for separation in (0.5, 2.0, 6.0):
        model, train, test = setup(separation, 3)
        found = pf.theory.generalization_bound(model, nn.MSELoss(), train, test=test, probes=8)
        parts = found.representativeness.test
        assert (found.rho, found.features, found.samples) == (600 ** (-1 / 12), 8, 600)
        assert parts.gap == pytest.approx(parts.representativeness + parts.robustness, abs=1e-12)
        assert parts.gap == pytest.approx(found.measured.gap, abs=1e-12)
        assert found.bound > found.measured.gap
        assert found.flatness > parts.robustness > 0
        features, w = model[:-1](train[0]).detach(), model[-1].weight.detach()
        theirs.append(pf.theory.authors_representativeness(features, w, targets=train[1], loss="mse_loss"))
        assert theirs[-1] == pytest.approx(found.measured.train.loss, rel=0.01)  # nearly the loss itself
    assert theirs == sorted(theirs, reverse=True)

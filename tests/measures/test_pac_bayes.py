"""PAC-Bayes flatness: the bisection against a dense search, its bounds against their formulas, BatchNorm folded."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import pyflatness as pf
from pyflatness.model import state
from pyflatness.reparameterization.folding import Folding
from support.cases import TOKEN_TARGETS, TOKENS, C, Tokens, classifier
from support.convolutions import batch_norm
from support.grid import normal
from support.residual import LOSS, residual
from support.residual import X as IMAGES
from support.residual import Y as LABELS
from support.unchanged import assert_unchanged, snapshot

X = normal(1, 400, 5)


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return classifier(5, 12, C).double()


@pytest.fixture(scope="module")
def data(net):
    return X, net(X).argmax(1)


def test_sigma_costs_the_wanted_accuracy(net, data):
    """Fresh noise of that size does so too, within what ten draws can tell."""
    for drop in (0.05, 0.1, 0.3):
        found = pf.measures.pac_bayes(net, LOSS, data, drop=drop, probes=40)
        assert found.reached
        assert abs(found.drop - drop) < 0.01
        assert found.drop == pytest.approx(sum(found.drops) / 40)
        assert found.bracket[0] < found.sigma < found.bracket[1]
        assert found.accuracy == 1.0
        fresh = torch.tensor([1 - accuracy(net, data, found.sigma, seed) for seed in range(100)])
        spread = torch.tensor(found.drops).std() * math.sqrt(1 / 40 + 1 / 100)
        assert abs(float(fresh.mean()) - drop) < 0.01 + 3 * float(spread)


def accuracy(net, data, sigma, seed):
    noisy, generator = copy.deepcopy(net), torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(sigma * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        return float((noisy(data[0]).argmax(1) == data[1]).double().mean())


def test_monotone_in_the_drop_and_in_the_scale_of_the_weights(net, data):
    found = [pf.measures.pac_bayes(net, LOSS, data, drop=drop, tolerance=1e-9) for drop in (0.02, 0.05, 0.1, 0.2, 0.3)]
    assert [f.sigma for f in found] == sorted(f.sigma for f in found)
    assert [f.flatness for f in found] == sorted((f.flatness for f in found), reverse=True)
    torch.manual_seed(0)
    plain = classifier(5, 12, C, bias=False).double()
    larger = copy.deepcopy(plain)
    with torch.no_grad():
        for p in larger.parameters():
            p.mul_(2)
    labelled = X, plain(X).argmax(1)
    one, twice = (pf.measures.pac_bayes(model, LOSS, labelled, tolerance=1e-9) for model in (plain, larger))
    assert twice.sigma == pytest.approx(
        2 * one.sigma, abs=2 * 2.0**-14
    )  # the same draws, so the same noise twice as large
    assert twice.flatness == pytest.approx(one.flatness / 4, rel=1e-2)


def test_steps_draws_seeds_and_cuts(net, data):
    few = pf.measures.pac_bayes(net, LOSS, data, steps=3, tolerance=1e-9)
    assert not few.reached
    assert few.bracket[1] - few.bracket[0] == 0.25
    assert few.sigma in few.bracket
    assert pf.measures.pac_bayes(net, LOSS, data) == pf.measures.pac_bayes(net, LOSS, data)
    assert pf.measures.pac_bayes(net, LOSS, data, seed=1).drops != pf.measures.pac_bayes(net, LOSS, data).drops
    cut = [*zip(data[0].split(150), data[1].split(150), strict=True)]
    assert pf.measures.pac_bayes(net, LOSS, cut).sigma == pf.measures.pac_bayes(net, LOSS, data).sigma


def test_the_authors_sigma_is_the_root(net, data):
    ours = pf.measures.pac_bayes(net, LOSS, data, tolerance=1e-9, steps=20)
    theirs = pf.measures.pac_bayes(net, LOSS, data, tolerance=1e-9, steps=20, squared=True)
    assert theirs.sigma == pytest.approx(math.sqrt(ours.sigma), rel=1e-3)


def test_bounds(net, data):
    torch.manual_seed(7)
    start = classifier(5, 12, C).double()
    found = pf.measures.pac_bayes(net, LOSS, data, initial=start)
    assert found == pf.measures.pac_bayes(net, LOSS, data, initial=start.state_dict())
    weights = torch.cat([net[0].weight.flatten(), net[2].weight.flatten()]).detach()
    steps = weights - torch.cat([start[0].weight.flatten(), start[2].weight.flatten()]).detach()
    bound = float(weights.square().sum()) / (4 * found.sigma**2) + math.log(400 / found.sigma) + 10
    assert found.bound == pytest.approx(bound)
    assert found.flatness == 1 / found.sigma**2
    assert found.magnitude.reached
    sigma, epsilon = found.magnitude.sigma, 1e-3
    mean = float(steps.square().sum()) / len(steps)
    terms = [math.log((epsilon**2 + (sigma**2 + 1) * mean) / (epsilon**2 + sigma**2 * s**2)) for s in steps.tolist()]
    assert found.magnitude_bound == pytest.approx(sum(terms) / 4 + math.log(400 / sigma) + 10)
    without = pf.measures.pac_bayes(net, LOSS, data)
    assert (without.magnitude, without.magnitude_bound) == (None, None)
    assert without.sigma == found.sigma


def test_the_noise_of_the_magnitude_aware_form(net, data):
    """N(0, σ²θ² + ε²): with all parameters ±1 that of the plain form, but for ε; multiplied with the weights."""
    signs = copy.deepcopy(net)
    with torch.no_grad():
        for p in signs.parameters():
            p.copy_(p.sign())
    labelled = X, signs(X).argmax(1)
    found = pf.measures.pac_bayes(signs, LOSS, labelled, initial=net, tolerance=1e-9, steps=20)
    assert found.magnitude.sigma == pytest.approx(found.sigma, rel=1e-2)


def test_as_a_measure(net, data):
    estimate = pf.measure(net, LOSS, data, measures="pac_bayes", seed=2)["pac_bayes"]
    found = pf.measures.pac_bayes(net, LOSS, data, seed=2)
    assert estimate.value == found.flatness
    assert (estimate.samples, estimate.exact, estimate.method) == (400, False, "monte-carlo")
    for number in (f"σ = {found.sigma:.5g}", "in 10 probes", f"bound {found.bound:.5g}", f"{min(found.drops):.3g} to"):
        assert number in estimate.notes[0]


@pytest.mark.parametrize("which", ["chance", "brittle"])
def test_drops_out_of_reach_are_said_so(which):
    torch.manual_seed(0)
    net = classifier(5, 12, C)
    x = torch.randn(100, 5)
    with torch.no_grad():
        net[2].weight.mul_(1e-9 if which == "brittle" else 1.0)
        net[2].bias.mul_(0.0 if which == "brittle" else 1.0)
        y = net(x).argmax(1) if which == "brittle" else torch.full((100,), int(net(x).argmin(1)[0]))
    report = pf.measure(net, LOSS, (x, y), measures="pac_bayes")
    found = pf.measures.pac_bayes(net, LOSS, (x, y))
    assert not found.reached
    assert found.sigma == pytest.approx(2.0 if which == "chance" else 2.0**-14, rel=1e-3)
    assert any("no σ was found" in note for note in report["pac_bayes"].notes)


# --- what accuracy is -------------------------------------------------------------------------------------------------


def test_accuracy_of_every_kind_of_target(net):
    def of(model, loss, *data):
        return pf.measures.pac_bayes(model, loss, data, steps=1, probes=1).accuracy

    y = net(X).argmax(1)
    wrong = y.clone()
    wrong[:100] = (wrong[:100] + 1) % C
    assert of(net, LOSS, X, wrong) == 0.75
    ignored = wrong.clone()
    ignored[:100] = -100
    assert of(net, LOSS, X, ignored) == 1.0
    assert of(net, LOSS, X, nn.functional.one_hot(wrong, C).double()) == 0.75
    assert of(net, lambda f, t: nn.functional.cross_entropy(f, t), X, wrong) == 0.75
    assert of(net, nn.BCEWithLogitsLoss(), X, (net(X) > 0).double()) == 1.0
    tokens = Tokens()
    hits = (tokens(TOKENS).argmax(1) == TOKEN_TARGETS)[TOKEN_TARGETS >= 0]
    assert of(tokens, LOSS, TOKENS, TOKEN_TARGETS) == float(hits.double().mean())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drop": 1.5}, pf.errors.InputError, "drop=1.5"),
        ({"probes": 0}, pf.errors.InputError, "probes=0"),
        ({"steps": 0}, pf.errors.InputError, "steps=0"),
        ({"tolerance": -1}, pf.errors.InputError, "tolerance=-1"),
        (
            {"loss": nn.MSELoss(), "data": (X, normal(2, 400, C))},
            pf.errors.InputError,
            r"an accuracy needs classes of shape",
        ),
        (
            {"data": (X * torch.nan, torch.zeros(400).long())},
            pf.errors.NonFiniteError,
            "batch 0: the model's outputs have NaN",
        ),
        ({"data": (X, torch.full((400,), -100))}, pf.errors.InputError, "every one is ignored"),
        ({"data": iter([(X, torch.zeros(400).long())])}, pf.errors.InputError, "can be read once"),
        ({"initial": nn.Linear(5, 4)}, pf.errors.InputError, "initial: it does not fit the model .*Missing"),
        ({"initial": {}}, pf.errors.InputError, "initial: it does not fit the model"),
    ],
)
def test_refusals(net, data, options, error, message):
    options = {"loss": LOSS, "data": data, **options}
    with pytest.raises(error, match=message):
        pf.measures.pac_bayes(net, **options)


# --- BatchNorm --------------------------------------------------------------------------------------------------------


def folded(model, x):
    with state.observing(model) as (module, _):
        folding = Folding(module, (x, None), None)
        return folding, folding.of(module)


def test_batch_norm_behind_layers_is_folded():
    with torch.no_grad():
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, groups=1, bias=False), batch_norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5),
            batch_norm(5, 1), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False),
        ).eval()  # fmt: skip
    before = snapshot(net)
    folding, other = folded(net, IMAGES)
    assert folding.into == {"1": "0", "5": "4", "8": "7"}
    assert folding.alone == ()
    torch.testing.assert_close(other(IMAGES), net(IMAGES), rtol=1e-4, atol=1e-5)
    names = {name for name, _ in other.named_parameters()}
    assert names == {f"{layer}.{what}" for layer in (0, 4, 7) for what in ("weight", "bias")}
    bare = nn.Sequential(other[0], nn.ReLU(), nn.Flatten(), other[4], nn.ReLU(), other[7])
    torch.testing.assert_close(bare(IMAGES), net(IMAGES), rtol=1e-4, atol=1e-5)
    assert_unchanged(net, before)


def test_batch_norm_that_cannot_be_folded_becomes_a_scale_and_shift():
    class Odd(nn.Module):
        """Behind an activation, a layer that is read elsewhere, one called twice, a tied and a parametrised one."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(5, 5) for _ in range(4))
            self.d.weight = self.c.weight
            self.parametrised = parametrizations.weight_norm(nn.Linear(5, 5))
            self.norms = nn.ModuleList(batch_norm(5, 1) for _ in range(6))

        def forward(self, x):
            z = self.norms[0](torch.relu(x))
            a = self.a(z)
            z = a + self.norms[1](a)
            z = self.norms[2](self.b(z)) + self.norms[3](self.b(-z))
            return self.norms[5](self.parametrised(self.norms[4](self.c(z)))) + self.d(z)

    with torch.no_grad():
        net = Odd().double().eval()
    x = normal(3, 8, 5)
    folding, other = folded(net, x)
    assert folding.into == {}
    assert folding.alone == tuple(f"norms.{k}" for k in range(6))
    torch.testing.assert_close(other(x), net(x))
    assert torch.equal(other.norms[0].running_mean, torch.zeros(5).double())
    notes = pf.measure(net, LOSS, (x, torch.arange(8) % 5), measures="pac_bayes")["pac_bayes"].notes
    assert "norms.0, norms.1" in notes[-1]


def test_scales_inside_of_batch_norm_do_not_count():
    """Running statistics and layers in front multiplied together: the same function, and the same σ."""
    net = residual().double()
    images = IMAGES.double()
    labels = net(images).argmax(1)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for conv, norm in ((other[0], other[1]), (other[3].conv2, other[3].norm2)):
            conv.weight.mul_(7.0)
            norm.running_mean.mul_(7.0)
            norm.running_var.add_(norm.eps).mul_(49.0).sub_(norm.eps)
    torch.testing.assert_close(other(images), net(images))
    one, two = (pf.measures.pac_bayes(model, LOSS, (images, labels)) for model in (net, other))
    assert one.sigma == two.sigma
    assert one.bound == pytest.approx(two.bound)


def test_no_trace_with_batch_norm_and_initial_weights():
    net, start = residual(), residual()
    before, first = snapshot(net), snapshot(start)
    pf.measures.pac_bayes(net, LOSS, (IMAGES, LABELS), initial=start, steps=2, probes=2)
    assert_unchanged(net, before)
    assert_unchanged(start, first)


def test_noise_reaches_every_parameter():
    """Also frozen ones and those outside of layers."""
    seen = {}

    class Affine(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.head = nn.Parameter(torch.ones(5), requires_grad=False), nn.Linear(5, C)

        def forward(self, x):
            for name, p in self.named_parameters():
                seen.setdefault(name, []).append(p.detach().clone())
            return self.head(x * self.scale)

    net = Affine()
    pf.measures.pac_bayes(net, LOSS, (X.float(), torch.zeros(400).long()), steps=1, probes=2)
    for name, p in net.named_parameters():
        assert any(not torch.equal(value, p) for value in seen[name])

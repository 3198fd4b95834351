"""Feature robustness: moves of features, of weights and of the model are one; the mean over A is the parabola of κ."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import pyflatness as pf
from pyflatness.theory import perturbed
from pyflatness.theory.perturbed import turns
from support.cases import LOSSES, TOKEN_TARGETS, TOKENS, C, Tokens, to
from support.combinations import every
from support.grid import Net, classes, normal
from support.unchanged import LOSS, X, Y, assert_unchanged, snapshot


def net(tail=None, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), tail or nn.ReLU(), nn.Linear(6, C)).double().eval()


DATA = normal(1, 40, 5), classes(2, 40)


def turns_of(layer, draws, seed=0):
    """The wA of a run with this seed."""
    return [*itertools.islice(turns(layer, torch.Generator().manual_seed(seed)), draws)]


def moved(model, name, weight):
    """A copy of the model with a layer's weight moved."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule(name).weight.add_(weight)
    return other


# --- random matrices --------------------------------------------------------------------------------------------------


def test_orthonormal_rows_are_uniform():
    """First two moments of the Haar measure: E q = 0, E q_ij q_kl = δ_ik δ_jl / m; QR without signs fails the first."""
    q = perturbed.orthonormal(40_000, 3, 3, torch.Generator().manual_seed(0), torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(q @ q.transpose(1, 2), torch.eye(3).double().expand_as(q), rtol=0, atol=1e-12)
    flat = q.flatten(1)
    error = 4 / 40_000**0.5
    assert flat.mean(dim=0).abs().max() < error * 3**-0.5
    assert (flat.t() @ flat / len(flat) - torch.eye(9).double() / 3).abs().max() < error
    plain = torch.linalg.qr(torch.randn(2000, 3, 3, dtype=torch.float64))[0].flatten(1).mean(dim=0)
    assert plain.abs().max() > 0.2
    determinants = torch.linalg.det(q)
    assert abs(float((determinants > 0).double().mean()) - 0.5) < error  # both components of O(3)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 5), (5, 5)])
def test_a_turned_weight_is_w_times_an_orthogonal_matrix(shape):
    """For wA (wA)ᵀ = w wᵀ an orthogonal A with that product exists; E wA = 0, E AᵀwᵀwA = |w|²/m I."""
    layer = nn.Linear(shape[1], shape[0]).double()
    w = layer.weight.detach()
    drawn = torch.stack(turns_of(layer, 3000))
    torch.testing.assert_close(drawn @ drawn.transpose(1, 2), (w @ w.t()).expand(3000, -1, -1), rtol=0, atol=1e-12)
    size = float(w.square().sum())
    assert drawn.mean(dim=0).abs().max() < 5 * (size / 3000) ** 0.5
    square = (drawn.transpose(1, 2) @ drawn).mean(dim=0)
    assert (square - size / shape[1] * torch.eye(shape[1]).double()).abs().max() < 5 * size / 3000**0.5


def test_wide_layers_and_groups_turn_apart():
    conv = nn.Conv2d(4, 6, 3, groups=2).double()
    (one,) = turns_of(conv, 1)
    w, turned = conv.weight.detach().flatten(1), one.flatten(1)
    assert one.shape == conv.weight.shape
    for rows in (slice(0, 3), slice(3, 6)):
        torch.testing.assert_close(turned[rows] @ turned[rows].t(), w[rows] @ w[rows].t())
    assert not torch.allclose(turned[:3] @ turned[3:].t(), w[:3] @ w[3:].t())


# --- the curve by brute force -----------------------------------------------------------------------------------------


@every(
    together=1,
    name=["0", "2"],
    tail={"relu": nn.ReLU(), "in place": nn.ReLU(inplace=True), "tanh": nn.Tanh()},
)
def test_curve_by_brute_force(name, tail):
    model = net(tail)
    alphas, draws = [0.05, 0.7], 3
    found = pf.theory.feature_robustness(model, LOSS, DATA, name, rho=alphas, probes=draws, seed=5)
    own = float(LOSS(model(DATA[0]), DATA[1]).detach())
    rises = torch.tensor(
        [
            [
                sum(float(LOSS(moved(model, name, s * a * step)(DATA[0]), DATA[1]).detach()) for s in (1, -1)) / 2 - own
                for a in alphas
            ]
            for step in turns_of(model.get_submodule(name), draws, 5)
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(found.rises, rises.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.stderr, rises.std(0) / draws**0.5, rtol=1e-10, atol=1e-12)
    kappa = float(pf.relative_flatness(model, LOSS, DATA, name))
    m = model.get_submodule(name).in_features
    torch.testing.assert_close(
        found.parabola, torch.tensor([a**2 * kappa / (2 * m) for a in alphas], dtype=torch.float64)
    )
    assert (found.features, found.probes, found.samples, found.layer) == (m, draws, 40, name)
    assert found.loss == pytest.approx(own, rel=1e-12)


def test_a_move_of_features_is_a_move_of_the_weight():
    """ψ(φ + αAφ): with A recovered from wA, the key identity (Eq. 1)."""
    torch.manual_seed(3)
    model = nn.Linear(4, 6).double()  # w has full column rank, so wA determines A
    x, y = normal(1, 30, 4), classes(2, 30, of=6)
    found = pf.theory.feature_robustness(model, LOSS, (x, y), rho=[0.3], probes=2)
    rises = []
    for step in turns_of(model, 2):
        a = torch.linalg.lstsq(model.weight.detach(), step).solution
        torch.testing.assert_close(a @ a.t(), torch.eye(4).double())
        values = [float(LOSS(model(x + s * 0.3 * x @ a.t()), y).detach()) for s in (1, -1)]
        rises.append(sum(values) / 2 - float(LOSS(model(x), y).detach()))
    assert float(found.rises) == pytest.approx(sum(rises) / 2, rel=1e-10)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "nll of a head"])
def test_every_loss(loss):
    fn, targets = (to(torch.float64, part) for part in LOSSES[loss])
    model, x = net(seed=4), normal(7, 6, 5)
    found = pf.theory.feature_robustness(model, fn, (x, targets), rho=[0.5], probes=2, kappa=1.0)
    rises = [
        sum(float(fn(moved(model, "2", s * 0.5 * step)(x), targets).detach()) for s in (1, -1)) / 2
        - float(fn(model(x), targets).detach())
        for step in turns_of(model[2], 2)
    ]
    assert float(found.rises) == pytest.approx(sum(rises) / 2, rel=1e-6, abs=1e-12)
    assert float(found.parabola) == pytest.approx(0.25 / 12)


# --- the mean over A against κ, at points that are no minima ----------------------------------------------------------


class Images(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, padding=1, **options), nn.Linear(4 * 16, C)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).flatten(1))


def twice():
    def twice_forward(net, x):
        """A layer on its own output."""
        return net.head(torch.tanh(net.layer(torch.tanh(net.layer(x)))))

    return Net(twice_forward, layer=nn.Linear(5, 5), head=nn.Linear(5, C))


AVERAGES = {
    "head": (lambda: net(), DATA, "2"),
    "relu": (lambda: net(), DATA, "0"),
    "tanh": (lambda: net(nn.Tanh()), DATA, "0"),
    "convolution": (Images, (normal(3, 12, 2, 4, 4), classes(4, 12)), "conv"),
    "groups": (lambda: Images(groups=2), (normal(3, 12, 2, 4, 4), classes(4, 12)), "conv"),
    "tokens": (Tokens, (TOKENS, TOKEN_TARGETS), "mix"),
    "recurrence": (twice, DATA, "layer"),
}


@pytest.mark.parametrize("case", AVERAGES)
def test_the_mean_is_the_parabola_within_its_standard_error(case):
    build, data, name = AVERAGES[case]
    torch.manual_seed(11)
    model = build().double().eval()
    weight = model.get_submodule(name).weight
    (gradient,) = torch.autograd.grad(LOSS(model(data[0]), data[1]), weight)
    assert gradient.norm() > 1e-2  # no minimum
    alpha = 3e-5 if case == "relu" else 0.02  # so small that no sample crosses a kink
    found = pf.theory.feature_robustness(model, LOSS, data, name, rho=[alpha], probes=300)
    assert abs(float(found.rises - found.parabola)) < 3.5 * float(found.stderr)
    assert float(found.stderr) < 0.2 * abs(float(found.parabola))


def test_kinks_add_to_the_parabola():
    """Behind ReLU Theorem 5, of twice differentiable models, holds up to the nearest kink: those crossed add α² too."""
    found = pf.theory.feature_robustness(net(), LOSS, DATA, "0", rho=[0.02, 0.04], probes=300)
    assert bool((found.rises > found.parabola + 3 * found.stderr).all())
    assert 3 < float(found.rises[1] / found.rises[0]) < 5


def test_parametrised_half_and_wide_models():
    torch.manual_seed(0)
    plain = nn.Linear(5, C).double()
    normed = parametrizations.weight_norm(copy.deepcopy(plain))
    x, y = DATA
    one, two = (pf.theory.feature_robustness(m, LOSS, (x, y), rho=[0.3], probes=4) for m in (plain, normed))
    assert float(one.rises) == pytest.approx(float(two.rises), rel=1e-12)
    half = copy.deepcopy(plain).bfloat16()
    found = pf.theory.feature_robustness(half, LOSS, (x.bfloat16(), y), rho=[0.3], probes=4, kappa=0.1)
    assert float(found.rises) == pytest.approx(float(one.rises), rel=0.2)


def test_batches_seeds_and_memory(monkeypatch):
    from pyflatness.theory import robustness as module

    model = net()
    one = pf.theory.feature_robustness(model, LOSS, DATA, "0", probes=5)
    cut = [*zip(DATA[0].split(7), DATA[1].split(7), strict=True)]
    monkeypatch.setattr(module, "_MEMORY", 1)  # a pass for every draw
    two = pf.theory.feature_robustness(model, LOSS, cut, "0", probes=5)
    torch.testing.assert_close(one.rises, two.rises, rtol=1e-9, atol=1e-12)
    other = pf.theory.feature_robustness(model, LOSS, DATA, "0", probes=5, seed=1)
    assert not torch.equal(one.rises, other.rises)
    total = pf.theory.feature_robustness(model, nn.CrossEntropyLoss(reduction="sum"), DATA, "0", probes=5)
    torch.testing.assert_close(total.rises, 40 * one.rises)
    torch.testing.assert_close(total.parabola, 40 * one.parabola)


def test_outputs_that_are_a_view_of_the_head():
    """Permuted outputs of tokens: moved without running the model again, and with."""
    model = Tokens().double()
    found = pf.theory.feature_robustness(model, LOSS, (TOKENS, TOKEN_TARGETS), rho=[0.5], probes=3)
    copied = Tokens(lambda z: z.transpose(1, 2).clone()).double()
    copied.load_state_dict(model.state_dict())
    other = pf.theory.feature_robustness(copied, LOSS, (TOKENS, TOKEN_TARGETS), rho=[0.5], probes=3)
    torch.testing.assert_close(found.rises, other.rises, rtol=1e-9, atol=1e-12)


def test_a_plain_fall_is_not_a_rise():
    """Where κ < 0 the curve falls, too."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1).double()
    x, y = normal(1, 20, 3), normal(2, 20, 1)
    found = pf.theory.feature_robustness(model, lambda f, t: -F.mse_loss(f, t), (x, y), rho=[0.1], probes=50)
    assert float(found.rises) < 0
    assert float(found.parabola) < 0


def test_repr_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    found = pf.theory.feature_robustness(net(), LOSS, DATA, rho=[0.1, 0.5], probes=4)
    assert "layer '2'" in repr(found)
    assert "α = 0.5: " in repr(found)
    figure, axes = found.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0
    assert figure.axes == [axes]
    assert len(axes.get_legend().get_texts()) == 2


def test_no_trace():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    LOSS(model(X), Y).backward()
    model.eval()
    model[0].weight.requires_grad_(False)
    before = snapshot(model)
    pf.theory.feature_robustness(model, LOSS, (X, Y), "0", rho=[0.1], probes=2)
    assert_unchanged(model, before)
    with pytest.raises(pf.errors.NonFiniteError):
        pf.theory.feature_robustness(model, LOSS, (X * torch.nan, Y), "0", rho=[0.1], probes=2)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": []}, r"rho=\[\]"),
        ({"rho": [0.1, -1]}, r"rho=\[0.1, -1\]: positive numbers are wanted, and -1 is among them"),
        ({"rho": "ab"}, "rho='ab'"),
        ({"probes": 1}, "probes=1"),
        ({"nan_policy": "omit"}, "nan_policy='omit'"),
        ({"layer": "9"}, "'9'"),
        ({"data": iter([DATA])}, "can be read once"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.theory.feature_robustness(net(), LOSS, **{"data": DATA, **options})


def test_nan_is_propagated_on_request():
    x = DATA[0].clone()
    x[0] = torch.nan
    found = pf.theory.feature_robustness(
        net(), LOSS, (x, DATA[1]), rho=[0.1], probes=2, nan_policy="propagate", kappa=1.0
    )
    assert bool(found.rises.isnan().all())

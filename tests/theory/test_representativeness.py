"""Feature noise against its density; representativeness by double loops and where its true value is known."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

import pyflatness as pf
from pyflatness.theory import perturbed
from pyflatness.theory.sampling import assigned
from support.cases import LOSSES, C, to
from support.grid import classes, normal
from support.many_samples import seeded as generator


def radial(m, power=0):
    """∫ t^power p(t) dt of the radial law, by quadrature."""
    weight = lambda t: t ** (m - 1) * math.exp(-t * t / 2)  # noqa: E731
    return integrate.quad(lambda t: t**power * weight(t), 0, 1)[0] / integrate.quad(weight, 0, 1)[0]


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 3, 8, 84])
def test_radii_have_their_density(m):
    drawn = perturbed.radii(20_000, m, generator(m)).numpy()
    whole = integrate.quad(lambda t: t ** (m - 1) * math.exp(-t * t / 2), 0, 1)[0]

    def distribution(t):
        return np.array([integrate.quad(lambda s: s ** (m - 1) * math.exp(-s * s / 2), 0, x)[0] for x in t]) / whole

    grid = np.linspace(0, 1, 401)
    fit = stats.kstest(drawn, lambda t: np.interp(t, grid, distribution(grid)))
    assert fit.pvalue > 0.01
    assert drawn.min() > 0
    assert drawn.max() <= 1


def test_radii_of_many_features_do_not_underflow():
    drawn = perturbed.radii(5000, 4096, generator())
    assert float(drawn.min()) > 0.99
    flipped = 4096 * (1 - drawn)  # near 1 the law is exponential of rate m - 1 - 1
    assert float(flipped.mean()) == pytest.approx(1, abs=0.06)


def test_noise_is_a_truncated_normal_in_the_plane():
    """Against normal numbers of width δ|φ|, those outside of the ball thrown away."""
    phi, delta = torch.tensor([[3.0, 4.0]]).double(), 0.2
    drawn = pf.theory.truncated_normal_noise(phi, delta, probes=20_000)[:, 0]
    plain = torch.randn(60_000, 2, generator=generator(), dtype=torch.float64)
    plain = delta * 5 * plain[plain.norm(dim=1) < 1]
    for of in (lambda xi: xi[:, 0], lambda xi: xi.sum(1), lambda xi: xi.norm(dim=1)):
        assert stats.ks_2samp(of(drawn).numpy(), of(plain).numpy(), method="asymp").pvalue > 0.01
    assert float(drawn.norm(dim=1).max()) <= delta * 5


def test_noise_shapes_seeds_dtypes_and_random_state():
    phi = torch.randn(4, 3, 5, generator=generator()).bfloat16()
    state = torch.get_rng_state()
    one, two = (pf.theory.truncated_normal_noise(phi, 0.1, probes=2, seed=3) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one, two)
    assert (one.shape, one.dtype) == ((2, 4, 3, 5), torch.float32)
    assert not torch.equal(one[0], one[1])
    assert float(pf.theory.truncated_normal_noise(torch.zeros(2, 3), 1.0).abs().max()) == 0
    for bad, message in ((torch.arange(3), "int64"), (3.0, "float"), (torch.ones(2, 0), r"\(2, 0\)")):
        with pytest.raises(pf.errors.InputError, match=message):
            pf.theory.truncated_normal_noise(bad, 0.1)
    for options, message in (({"rho": 0.0}, "rho=0.0"), ({"rho": 1.0, "probes": 0}, "probes=0")):
        with pytest.raises(pf.errors.InputError, match=message):
            pf.theory.truncated_normal_noise(phi, **options)


# --- representativeness -----------------------------------------------------------------------------------------------

PHI, W, B = normal(1, 31, 4), normal(2, C, 4), normal(3, C)
LABELS = classes(4, 31)


def double_loop(phi, weight, bias, targets, loss, places, delta, draws, seed):
    """Decompositions of the folds, sample by sample and draw by draw."""

    def one(phi_i, i):
        return float(loss((weight @ phi_i + bias)[None], targets[i][None]))

    xi = [*perturbed.kernel_noise(phi, delta, draws, generator(seed))]
    own = [one(phi[i], i) for i in range(len(phi))]
    noisy = [sum(one(phi[i] + s * x[i], i) for x in xi for s in (1, -1)) / (2 * draws) for i in range(len(phi))]
    found = []
    for k in sorted(set(places.tolist())):
        inside = [i for i in range(len(phi)) if places[i] == k]
        outside = [i for i in range(len(phi)) if places[i] != k]
        mean = lambda values, index: sum(values[i] for i in index) / len(index)  # noqa: E731
        found.append(
            (
                mean(own, inside) - mean(own, outside),
                mean(own, inside) - mean(noisy, outside),
                mean(noisy, outside) - mean(own, outside),
            )
        )
    return found


@pytest.mark.parametrize("loss", ["cross-entropy", "squared error", "binary", "custom", "cross-entropy sum"])
@pytest.mark.parametrize("folds", [2, 5])
def test_by_a_double_loop(loss, folds):
    fn, targets = (to(torch.float64, part) for part in LOSSES[loss])
    targets = targets.repeat(6, *(1,) * (targets.ndim - 1))[:31]
    found = pf.theory.representativeness(PHI, W, B, targets, loss=fn, rho=0.4, folds=folds, probes=3, seed=2)
    truth = double_loop(PHI, W, B, targets, fn, assigned(31, folds, 2), 0.4, 3, 2)
    for part, (gap, rep, robustness) in zip(found.folds, truth, strict=True):
        assert part.gap == pytest.approx(gap, rel=1e-9)
        assert part.representativeness == pytest.approx(rep, rel=1e-9)
        assert part.robustness == pytest.approx(robustness, rel=1e-9)
        assert part.gap == pytest.approx(part.representativeness + part.robustness, abs=1e-12)
    assert found.value == pytest.approx(sum(t[1] for t in truth) / folds)
    assert found.magnitude == pytest.approx(sum(abs(t[1]) for t in truth) / folds)


def test_weights_and_ignored_targets_count_as_in_the_loss():
    fn = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0, 3.0]).double(), label_smoothing=0.1)
    labels = LABELS.clone()
    labels[:5] = -100
    found = pf.theory.representativeness(PHI, W, B, labels, loss=fn, rho=0.4, folds=2, probes=2)
    places = assigned(31, 2, 0)
    for k, part in enumerate(found.folds):
        inside, outside = (float(fn(PHI[i] @ W.t() + B, labels[i])) for i in (places == k, places != k))
        assert part.gap == pytest.approx(inside - outside, rel=1e-9)


def test_folds_are_even_and_cover():
    places = assigned(31, 3, 0)
    assert sorted(places.bincount().tolist()) == [10, 10, 11]
    assert not torch.equal(places, assigned(31, 3, 1))
    with pytest.raises(pf.errors.InputError, match="folds=3: there are 2 samples"):
        assigned(2, 3, 0)


def squared(delta, m, w, phi):
    """E_F of squared error on one output: |w|² E|ξ|²/m = |w|² δ² E t² mean|φ|² / m, whatever the targets."""
    return float(w.square().sum()) * delta**2 * radial(m, 2) / m * float(phi.square().sum(1).mean())


def test_where_the_value_is_known():
    """φ ~ N(0, I), y = 0, squared error: E(f) = |w|², and E_Rep = -E_F on average, for any fixed w."""
    n, m, delta = 20_000, 6, 0.5
    phi, w = normal(5, n, m), normal(6, 1, m)
    y = torch.zeros(n, 1).double()
    found = pf.theory.representativeness(
        phi, w, targets=y, loss="mse_loss", rho=delta, probes=64, test=(normal(7, n, m), y)
    )
    true_robustness = float(w.square().sum()) * delta**2 * radial(m, 2)  # mean |φ|² = m
    spread = float(w.square().sum()) * 2**0.5 / n**0.5  # of a mean of (wφ)²
    assert found.test.robustness == pytest.approx(true_robustness, rel=0.03)
    assert found.test.representativeness == pytest.approx(-true_robustness, abs=4 * 2 * spread)
    assert abs(found.test.gap) < 4 * 2**0.5 * spread
    exact = squared(delta, m, w, phi)  # given the data
    assert abs(found.test.robustness - exact) < 4 * found.test.stderr
    assert abs(found.value + exact) < 4 * found.stderr + 1e-3 * exact
    assert found.stderr < 0.01 * exact


def test_a_grid_with_the_right_kernel_is_representative():
    """Data that are the mixture of the kernels themselves: E_Rep is 0 up to sampling, though E_F is not."""
    n, m, delta = 400, 2, 0.8
    phi, w = 1 + normal(8, n, m), torch.tensor([[2.0, -1.0]]).double()
    y = (phi @ w.t()).sign()
    copies = 200
    cloud = phi + pf.theory.truncated_normal_noise(phi, delta, probes=copies, seed=9)
    test = cloud.flatten(0, 1), y.repeat(copies, 1)
    found = pf.theory.representativeness(phi, w, targets=y, loss="mse_loss", rho=delta, probes=400, test=test).test
    assert found.robustness > 0.1
    assert abs(found.representativeness) < 0.02 * found.robustness


def test_the_folds_of_one_head_say_minus_robustness_and_a_fit_does_not():
    """Held-out folds of the data that ψ was trained on have no gap on average."""
    phi, y = normal(1, 60, 8), normal(2, 60, 1)

    def ridge(features, targets):
        gram = features.t() @ features + 1e-3 * torch.eye(8).double()
        return torch.linalg.solve(gram, features.t() @ targets).t(), None

    w, _ = ridge(phi, y)
    plain = pf.theory.representativeness(phi, w, targets=y, loss="mse_loss")
    robustness = sum(part.robustness for part in plain.folds) / 3
    assert plain.value == pytest.approx(-robustness, rel=1e-9)
    fitted = pf.theory.representativeness(phi, w, targets=y, loss="mse_loss", fit=ridge)
    assert fitted.refitted
    assert sum(part.gap for part in fitted.folds) / 3 > 0.1  # pure noise, 8 features: refitted heads do worse on T
    places = assigned(60, 3, 0)
    w0, _ = ridge(phi[places != 0], y[places != 0])
    values = (phi @ w0.t() - y).square().squeeze(1)
    assert fitted.folds[0].gap == pytest.approx(float(values[places == 0].mean() - values[places != 0].mean()))
    assert fitted.rho == 60 ** (-1 / 12)


def test_robustness_of_the_kernel_is_that_of_turned_features():
    """E_F over ξ is E_r of the parabola in r = δt (Proposition 2, Theorem 5): δ² E t² κ / (2m), at no minimum."""
    n, m, delta = 200, 4, 0.05
    phi, labels = normal(1, n, m), classes(4, n)
    kappa = float(pf.head_flatness(phi, W, B))
    found = pf.theory.representativeness(phi, W, B, labels, rho=delta, probes=300)
    robustness = sum(part.robustness for part in found.folds) / 3
    assert abs(robustness - delta**2 * radial(m, 2) * kappa / (2 * m)) < 4 * found.stderr + 0.01 * robustness
    assert delta**2 * kappa / (2 * m) > robustness


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": None}, "targets: a tensor is wanted, got NoneType"),
        ({"folds": 1}, "folds=1"),
        ({"probes": 1}, "probes=1"),
        ({"rho": -0.1}, "rho=-0.1"),
        ({"features": normal(1, 31, 2, 4)}, r"\(31, 2, 4\)"),
        ({"features": normal(1, 31, 3)}, r"\(31, 3\)"),
        ({"targets": LABELS[:5]}, r"\(5,\)"),
        ({"fit": lambda f, t: f}, "fit: a pair"),
        ({"features": PHI * torch.nan}, "the loss of the model is nan; no sample can be left out"),
        ({"loss": "hinge"}, "hinge"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.theory.representativeness(**{"features": PHI, "weight": W, "bias": B, "targets": LABELS, **options})


# --- the authors' quantity --------------------------------------------------------------------------------------------


def their_loops(phi, predict, targets, loss, places):
    """As their code has it, δ and all, with a density estimate that normalises its weights."""
    delta, values = 0.01, []
    for k in range(int(places.max()) + 1):
        sample, held_out = (torch.nonzero(places != k)[:, 0], torch.nonzero(places == k)[:, 0])
        weights = delta * phi[sample].norm(dim=1)
        weights = weights / weights.sum()
        total = 0.0
        for j in held_out.tolist():
            inner = 0.0
            for v, i in zip(weights.tolist(), sample.tolist(), strict=True):
                distance = math.sqrt(float((phi[j] - phi[i]).norm()))
                kernel = math.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi)
                inner += v * kernel * float(loss(predict(phi[i])[None], targets[j][None]))
            total += float(loss(predict(phi[j])[None], targets[j][None])) - inner / len(sample)
        values.append(total / len(held_out))
    return sum(values) / len(values)


@pytest.mark.parametrize("loss", ["cross-entropy", "squared error", "binary", "custom"])
def test_the_authors_quantity_by_their_loops(loss):
    fn, targets = (to(torch.float64, part) for part in LOSSES[loss])
    targets = targets.repeat(6, *(1,) * (targets.ndim - 1))[:31]
    found = pf.theory.authors_representativeness(PHI, W, B, targets, loss=fn, seed=2)
    truth = their_loops(PHI, lambda phi: phi @ W.t() + B, targets, fn, assigned(31, 3, 2))
    assert found == pytest.approx(truth, rel=1e-9)


def test_the_authors_quantity_knows_no_delta_and_refusals():
    assert pf.theory.authors_representativeness(3 * PHI, W / 3, B, LABELS) != pf.theory.authors_representativeness(
        PHI, W, B, LABELS
    )
    refit = pf.theory.authors_representativeness(PHI, W, B, LABELS, fit=lambda f, t: (W, B))
    assert refit == pf.theory.authors_representativeness(PHI, W, B, LABELS)
    refused = ({"folds": 0}, "folds=0"), ({"targets": None}, "got NoneType"), ({"weight": W[:, :2]}, r"\(4, 2\)")
    for options, message in refused:
        with pytest.raises(pf.errors.InputError, match=message):
            pf.theory.authors_representativeness(
                **{"features": PHI, "weight": W, "bias": B, "targets": LABELS, **options}
            )

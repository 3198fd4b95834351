"""How the columns of samples' square-root factors are put in groups, and which groups have a replicate."""

import itertools
import math

import numpy as np
import pytest
import torch

from pyflatness.numerics.signs import Signs
from pyflatness.sweep import groups
from pyflatness.sweep.adaptive_sweep import Grouped
from support.many_samples import seeded


def weights_of(samples=50, columns=30, power=6, seed=0):
    weights = torch.rand(samples, columns, generator=seeded(seed), dtype=torch.float64) ** power
    weights[:, :3] = 0
    weights[7] = 0
    return weights


@pytest.mark.parametrize("allowed", [0.0, 1e-3, 1.0, 1e9])
def test_every_column_is_in_one_group(allowed):
    weights = weights_of()
    found = groups.group(weights, allowed)
    assert torch.equal(found.of == -1, weights == 0)
    assert torch.equal(found.of.amax(dim=1) + 1, found.counts)
    for row, counts in zip(found.of, found.counts, strict=True):
        assert set(row[row >= 0].tolist()) == set(range(int(counts)))
    assert float(found.variances.sum()) <= 1.5 * allowed + 1e-20
    if allowed == 0:
        assert torch.equal(found.counts, (weights > 0).sum(dim=1))
        assert not found.variances.any()
    if allowed == 1e9:
        assert int(found.counts.max()) == 1


def test_groups_are_of_about_equal_mass_and_heavy_columns_alone():
    ordered = weights_of().sort(dim=1, descending=True).values
    tau = 0.5
    numbers = groups.cut(ordered, tau)
    for row, of in zip(ordered, numbers, strict=True):
        assert bool((of[1:][of[1:] >= 0] >= of[: int((of[1:] >= 0).sum())]).all())  # heaviest first
        for number in range(int(of.max()) + 1):
            members = row[of == number]
            assert len(members) == 1 or (float(members.max()) < tau and float(members.sum()) <= 2 * tau)


def test_the_threshold_is_the_largest_that_is_allowed():
    ordered = weights_of(power=2).sort(dim=1, descending=True).values

    def predicted(tau):
        light = torch.where(ordered < tau, ordered, 0.0)
        mass = light.sum(dim=1)
        return float(2 * (mass * mass.clamp(max=tau) - light.square().sum(dim=1)).clamp_min(0).sum())

    for allowed in (1.0, 20.0, 100.0):
        tau = groups.threshold(ordered, allowed)
        assert predicted(tau) <= allowed
        assert predicted(tau * 1.05) > allowed
    assert groups.threshold(torch.zeros(3, 4).double(), 1.0) > 0


def test_groups_that_are_sent_twice():
    found = groups.group(weights_of(), 10.0)
    chances = groups.chances(found.variances, 10_000)
    assert float(chances.sum()) <= groups.REPLICATED * 50 + 1e-9
    assert torch.equal(chances > 0, found.variances > 0)
    uniform = torch.rand(chances.shape, generator=seeded(0), dtype=torch.float64)
    probes = groups.probes(found, chances, uniform)
    replicated = int((uniform < chances).sum())
    assert len(probes.samples) == int(found.counts.sum()) + replicated
    assert float(probes.fractions.sum()) == float(found.counts.sum())
    assert int((probes.replicates == 1).sum()) == len(probes.chances) == replicated
    for sample in range(50):
        rounds = probes.rounds[probes.samples == sample].tolist()
        assert sorted(rounds) == list(range(len(rounds)))
    for pair in range(replicated):
        (a, b), of = probes.replicates[probes.pairs == pair].tolist(), probes.pairs == pair
        assert {a, b} == {0, 1}
        assert len(probes.groups[of].unique()) == len(probes.samples[of].unique()) == 1


def test_a_group_of_a_heavy_and_a_light_column_is_not_exact():
    """Twice the product of their weights, which is lost to rounding in the difference of squares."""
    weights = torch.tensor([[1.0, 1e-17, 0.0], [0.5, 0.0, 0.0]]).double()
    found = groups.group(weights, 10.0)
    assert found.variances[0, 0] >= 2 * 1e-17
    assert found.variances[1, 0] == 0


@pytest.mark.parametrize("chance", [0.2, 0.9])
def test_mean_and_variance_over_all_signs_and_replicates(chance):
    """By B = Sᵀ N S: E = tr B, and Var = Σ_g 2 (|B_g|² - Σ B_cc²) (1 - π/2), as is estimated."""
    factor = torch.randn(5, 5, generator=seeded(2), dtype=torch.float64)
    form, blocks = factor @ factor.T, (slice(0, 3), slice(3, 5))
    found = groups.Groups(torch.tensor([[0, 0, 0, 1, 1]]), torch.tensor([2]), torch.ones(1, 2).double())
    chances = torch.tensor([[chance, 0.5]]).double()
    patterns = [(1, a, b, 1, c) for a, b, c in itertools.product((-1, 1), repeat=3)]  # -r gives what r does
    totals = torch.zeros(4, dtype=torch.float64)
    for uniform in itertools.product((0.0, 0.999), repeat=2):
        drawn = torch.tensor([uniform]).double()
        likely = float(torch.where(drawn < chances, chances, 1 - chances).prod()) / len(patterns) ** 2
        probes, none = groups.probes(found, chances, drawn), torch.zeros(1, 1, 1, dtype=torch.float64)
        for pair in itertools.product(patterns, repeat=2) if likely else ():
            signs = torch.tensor(pair, dtype=torch.int8).unsqueeze(1)
            differences = none.new_zeros(1, 1, len(probes.chances))
            sent = Grouped(None, None, None, None, found, probes, signs, none.clone(), differences, None, None)
            every = torch.arange(len(probes.samples))
            rows = sent.rows(every).double()
            sent.add(every, ((rows @ form) * rows).sum(dim=1).view(1, 1, -1))
            value, error = sent.sums.sum(), sent.variances()[0, 0].sum()
            totals += likely * torch.stack([torch.ones_like(value), value, value**2, error])
    whole, mean, second, estimated = totals.tolist()
    of_groups = [2 * (form[b, b].square().sum() - form.diagonal()[b].square().sum()) for b in blocks]
    expected = float(sum(v * (1 - pi / 2) for v, pi in zip(of_groups, chances[0], strict=True)))
    assert (whole, mean) == (pytest.approx(1), pytest.approx(float(form.trace())))
    assert (second - mean**2, estimated) == (pytest.approx(expected), pytest.approx(expected))


@pytest.mark.parametrize("ratios", [(0.02,), (0.02, 0.5), (0.0, 0.5), (0.02, 0.5, math.nan)])
def test_the_plan_learns_from_replicates(ratios):
    """The layer that varies most decides, whatever its values are in units of weights; one that is NaN has no say.

    It plans for more than was measured, here by 50 degrees of freedom, and the layers' ratios are nearer to their mean.
    """
    weights, sizes = weights_of(), [3.0, 0.1, 1.0][: len(ratios)]
    tolerance = groups.Tolerance(0.01, 1000)
    mean = float(weights.sum()) / 50
    assert tolerance.allowed(weights) == pytest.approx((0.01 * mean) ** 2 * 1000 * 50 / 0.25)
    replicated = torch.full((100_000,), 1e-6, dtype=torch.float64)
    values = torch.stack([size * weights.sum(dim=1) for size in sizes]).unsqueeze(1)
    bound = float(replicated.sum())
    spent = [ratio * size**2 * bound / 50 for ratio, size in zip(ratios, sizes, strict=True)]
    variances = torch.tensor(spent, dtype=torch.float64).view(-1, 1, 1).expand_as(values)
    tolerance.add(weights, values, torch.stack([variances, variances.square()]), replicated)
    ratio = max(ratio for ratio in ratios if not math.isnan(ratio)) * (1 + 4 / 50)
    if ratios[:2] == (0.02, 0.5):
        mean_ratio, noise = 0.26 * 1.08, 2 / 3 / 50 * np.array([0.02 * 1.08, 0.5 * 1.08]) ** 2
        between = 2 * (0.24 * 1.08) ** 2 - noise.mean()
        ratio = mean_ratio + 0.24 * 1.08 * between / (between + noise[1])
    whole = (0.01 * 1000 * mean) ** 2
    expected = (whole - ratio * bound) / 950 * 50 / ratio
    assert tolerance.allowed(weights) == pytest.approx(expected, rel=1e-3)
    assert tolerance.allowed(weights, 0.25) < 0.26 * expected


def test_uniform_numbers_belong_to_samples():
    drawn = Signs(3, [0]).uniform(5, torch.arange(400), 50)
    assert torch.equal(drawn[:, [4, 1]], Signs(3, [0]).uniform(5, torch.tensor([4, 1]), 50))
    assert 0 <= float(drawn.min()) < 0.001
    assert 0.999 < float(drawn.max()) < 1
    assert float(drawn.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * drawn.numel()))

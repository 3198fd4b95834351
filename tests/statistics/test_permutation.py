"""Permutation p-values and their adjustment, against all permutations, scipy and one permutation at a time."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

import pyflatness as pf
from pyflatness.statistics import permutation
from pyflatness.statistics.coefficients import STATISTICS, coefficients, whole

CLUSTERS = np.repeat(np.arange(6), 4)


def distances(values):
    return np.abs(np.array(values) - np.mean(values))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_all_permutations_of_six_networks(statistic):
    x, y = np.array([3.0, 1.0, 2.0, 6.0, 5.0, 9.0]), np.array([1.0, 2.0, 4.0, 3.0, 8.0, 6.0])
    values = [coefficients(statistic, [x, y[[*order]]], whole(6))[0] for order in itertools.permutations(range(6))]
    exact = (distances(values) >= distances(values)[0] - 1e-12).mean()
    found = pf.statistics.correlations({"x": x, "gap": y}, permutations=20_000)["x", statistic]
    assert found.p == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / 20_000) + 1e-4)
    assert found.p_holm == found.p_bh == found.p  # one measure
    assert str(found).endswith(f", p = {found.p:.2g} (Holm {found.p:.2g}, B–H {found.p:.2g})")


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("given", [0, 1, 2])
def test_against_one_permutation_at_a_time(statistic, given):
    """With columns held fixed the residuals are permuted, and fitted again in every order."""
    generator = np.random.default_rng(given)
    x, y, *fixed = generator.normal(size=(2 + given, 12))
    orders = permutation.orders(12, None, False, 50, seed=1)
    aspect = {
        "Pearson": lambda v: v - v.mean(),
        "Spearman": lambda v: stats.rankdata(v) - 6.5,
        "Kendall": lambda v: np.sign(v[:, None] - v),
    }[statistic]
    columns = np.stack([aspect(column).ravel() for column in fixed], axis=1) if fixed else np.zeros((aspect(y).size, 1))

    def left(values):
        return values.ravel() - columns @ np.linalg.lstsq(columns, values.ravel(), rcond=None)[0]

    residual = left(aspect(y)).reshape(aspect(y).shape)
    values = []
    for order in orders:
        moved = residual[np.ix_(order, order)] if statistic == "Kendall" else residual[order]
        a, b = left(aspect(x)), left(moved)
        values.append(a @ b / math.sqrt((a @ a) * (b @ b)))
    assert values[0] == pytest.approx(coefficients(statistic, [x, y, *fixed], whole(12))[0])
    expected = (distances(values) >= distances(values)[0] - 1e-9).mean()
    assert permutation.p_values(statistic, [x], y, fixed, orders)[0] == pytest.approx(expected)


def test_orders_keep_clusters_whole_or_inside():
    shuffle = np.random.default_rng(0).permutation(24)
    clusters = CLUSTERS[shuffle]
    free = permutation.orders(24, None, False, 100, seed=0)
    whole_clusters = permutation.orders(24, clusters, False, 100, seed=0)
    inside = permutation.orders(24, clusters, True, 100, seed=0)
    for orders in (free, whole_clusters, inside):
        assert orders.shape == (101, 24)
        assert (orders[0] == np.arange(24)).all()
        assert (np.sort(orders, axis=1) == np.arange(24)).all()
        assert len({tuple(order) for order in orders}) == 101
    assert (clusters[inside] == clusters).all()
    sources = clusters[whole_clusters]
    for cluster in range(6):  # the values of a cluster go to one cluster
        assert (sources[:, clusters == cluster] == sources[:, clusters == cluster][:, :1]).all()
    assert (sources[1:] != clusters).any(axis=1).mean() > 0.9


def test_clusters_of_different_sizes_get_the_values_of_one_cluster():
    clusters = np.repeat(np.arange(4), [1, 2, 4, 3])[np.random.default_rng(2).permutation(10)]
    orders = permutation.orders(10, clusters, False, 300, seed=0)
    of_clusters = np.stack(
        [clusters[orders][:, np.flatnonzero(clusters == cluster)[0]] for cluster in range(4)], axis=1
    )
    assert (np.sort(of_clusters, axis=1) == np.arange(4)).all()
    assert len({tuple(row) for row in of_clusters}) == 24
    for row in orders:
        for cluster in range(4):
            times = np.bincount(row[clusters == cluster], minlength=10)
            source = clusters[row[clusters == cluster][0]]
            assert (times[clusters != source] == 0).all()
            assert np.ptp(times[clusters == source]) <= 1  # as evenly as may be


def test_a_measure_of_the_recipe_alone_says_nothing_within_recipes():
    generator = np.random.default_rng(0)
    recipe = generator.normal(size=6)[CLUSTERS]
    kappa, gap = (recipe + 1e-3 * generator.normal(size=24) for _ in range(2))
    table = {"kappa": kappa, "gap": gap, "recipe": CLUSTERS}
    plain, over, within = (
        pf.statistics.correlations(table, "kappa", permutations=1999, **options)["kappa", "Pearson"].p
        for options in ({}, {"settings": "recipe"}, {"settings": "recipe", "within": True})
    )
    assert plain == 1 / 2000  # none of the random orders is as far
    assert over < 0.05  # of 720 orders of the clusters
    assert within > 0.05


def rejected(clusters, within=False, runs=200, size=0.1, truth=CLUSTERS):
    """How often a true null hypothesis is rejected at the level ``size``."""
    generator = np.random.default_rng(1)
    count = 0
    for run in range(runs):
        x, y = (generator.normal(size=24)[truth] + 0.3 * generator.normal(size=len(truth)) for _ in range(2))
        orders = permutation.orders(len(truth), clusters, within, 199, seed=run)
        count += permutation.p_values("Spearman", [x], y, [], orders)[0] <= size
    return count


def test_permuting_networks_of_clusters_is_wrong_and_permuting_clusters_is_right():
    assert rejected(None) > 2 * 20  # 20 of 200 are due
    for within in (False, True):
        assert 6 <= rejected(CLUSTERS, within) <= 38  # 20 ± 4.2 standard deviations of 4.24
    unequal = np.repeat(np.arange(7), [1, 2, 3, 4, 5, 8, 9])
    assert rejected(None, truth=unequal) > 2 * 20
    assert 6 <= rejected(unequal, truth=unequal) <= 38


def test_adjusted_p_values():
    """Of 0.01, 0.02, 0.03, 0.2: Holm 4·0.01, 3·0.02, max(2·0.03, 0.06), 0.2; Benjamini–Hochberg min of 4p/k behind."""
    p = np.array([0.03, 0.01, math.nan, 0.2, 0.02])
    assert permutation.holm(p) == pytest.approx([0.06, 0.04, math.nan, 0.2, 0.06], nan_ok=True)
    assert permutation.benjamini_hochberg(p) == pytest.approx([0.04, 0.04, math.nan, 0.2, 0.04], nan_ok=True)
    many = np.random.default_rng(0).uniform(size=50) ** 3
    assert permutation.benjamini_hochberg(many) == pytest.approx(stats.false_discovery_control(many))
    assert (permutation.holm(many) <= np.minimum(50 * many, 1)).all()  # no worse than Bonferroni
    assert permutation.holm(np.array([0.9, 0.8])).max() == 1


def test_p_values_of_many_measures():
    pytest.importorskip("pandas")
    generator = np.random.default_rng(0)
    gap = generator.normal(size=30)
    table = {"good": gap + 0.3 * generator.normal(size=30), "flat": np.ones(30), "gap": gap}
    table |= {f"noise{k}": generator.normal(size=30) for k in range(8)}
    found = pf.statistics.correlations(table, permutations=999)
    assert "; 95 % bootstrap intervals, p by 999 permutations of networks" in str(found)
    assert math.isnan(found["flat", "Kendall"].p)
    good = found["good", "Kendall"]
    assert (good.p, good.p_holm, good.p_bh) == pytest.approx((0.001, 0.009, 0.009))  # of 9 that are defined
    assert list(found.to_frame().columns)[5:8] == ["p", "p_holm", "p_bh"]
    assert [row.value for row in pf.statistics.correlations(table).rows[:3]] == [row.value for row in found.rows[:3]]

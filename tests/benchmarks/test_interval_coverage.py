"""``benchmarks/coverage.py``: how often intervals contain the truth and p-values reject it, roughly and at length."""

import importlib.util
import sys

import numpy as np
import pytest
from scipy import stats

from support import ROOT

RUNNER = ROOT / "benchmarks" / "coverage.py"


@pytest.fixture(scope="module")
def coverage():
    """The runner as a module."""
    if not RUNNER.is_file():
        pytest.skip("the benchmarks are not part of this source tree")
    spec = importlib.util.spec_from_file_location("coverage_runner", RUNNER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def near(share, runs, deviations=4.0):
    """The fractions that a probability of ``share`` lets one expect."""
    return pytest.approx(share, abs=deviations * np.sqrt(share * (1 - share) / runs))


def test_the_truth_is_what_large_studies_have(coverage):
    """11,000 independent networks have it to a few per cent, and a recipe has its part of the variance."""
    for skewed in (False, True):
        design = coverage.Design(110, 0.0, skewed, 0.5)
        x, y = np.concatenate([*design.studies(100)], axis=1)
        assert design.truth("Spearman") == pytest.approx(stats.spearmanr(x, y).statistic, abs=0.03)
        assert design.truth("Kendall") == pytest.approx(stats.kendalltau(x, y).statistic, abs=0.03)
        assert design.truth("Pearson") == pytest.approx(stats.pearsonr(x, y).statistic, abs=0.08 if skewed else 0.03)
    recipes = coverage.Design(57, 0.9, False, 0.5).recipes
    assert sorted(np.bincount(recipes)) == [4] * 3 + [5] * 9
    means = [x.reshape(22, 5).mean(axis=1).var() for x, _ in coverage.Design(110, 0.9, False, 0.5).studies(50)]
    assert np.mean(means) == pytest.approx(0.9 + 0.1 / 5, abs=0.08)


def test_coverage_of_independent_networks(coverage):
    runs = 60
    for interval in ("fisher", "bootstrap"):
        found = coverage.coverage(coverage.Design(24, 0.0, False, 0.5), interval, False, runs)
        assert found == dict.fromkeys(found, near(0.94, runs))


def test_coverage_of_networks_in_recipes(coverage):
    """Intervals that take networks as independent are too short, those over recipes are not."""
    runs, design = 60, coverage.Design(57, 0.9, False, 0.5)
    plain = coverage.coverage(design, "fisher", False, runs)
    for interval in ("fisher", "bootstrap"):
        over = coverage.coverage(design, interval, True, runs)
        for statistic, share in over.items():
            assert share > 0.8
            assert plain[statistic] < 0.8 < share


@pytest.mark.soak
@pytest.mark.parametrize("networks", [10, 24, 57, 110])
def test_coverage_at_length(coverage, networks):
    runs = 400
    for shared, clustered in ((0.0, False), (0.5, True), (0.9, True)):
        for interval in ("bootstrap", "fisher"):
            found = coverage.coverage(coverage.Design(networks, shared, False, 0.5), interval, clustered, runs)
            assert min(found.values()) > (0.80 if interval == "bootstrap" else 0.90)
            if interval == "fisher" and not clustered:
                assert found == dict.fromkeys(found, near(0.95, runs))


@pytest.mark.soak
def test_rejections_at_length(coverage):
    runs, design = 400, coverage.Design(57, 0.9, False, 0.0)
    assert min(coverage.rejections(design, False, False, runs).values()) > 0.2
    for within in (False, True):
        found = coverage.rejections(design, True, within, runs)
        assert found == dict.fromkeys(found, near(0.05, runs))

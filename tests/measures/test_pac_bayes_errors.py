"""Standard errors of PAC-Bayes flatness: what σ and 1/σ² scatter by over seeds of the noise."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.cases import C, classifier
from support.combinations import in_soak
from support.covering import share
from support.grid import normal

LOSS = nn.CrossEntropyLoss()


def labelled():
    torch.manual_seed(0)
    net, x = classifier(5, 12, C).double(), normal(1, 200, 5)
    return net, (x, net(x).argmax(1))


@pytest.mark.parametrize("seeds", [20, *in_soak(60)])
def test_what_flatness_scatters_by(seeds):
    net, data = labelled()
    found, slack = [pf.measures.pac_bayes(net, LOSS, data, probes=10, seed=seed) for seed in range(seeds)], 60 / seeds
    spread = torch.tensor([f.flatness for f in found]).std()
    claimed = torch.tensor([f.flatness_stderr for f in found]).square().mean().sqrt()
    assert -0.25 * slack**0.5 < float(spread / claimed) - 1 < 0.3 * slack**0.5
    estimates = [pf.measure(net, LOSS, data, measures="pac_bayes", seed=seed)["pac_bayes"] for seed in range(3)]
    assert [(e.value, e.stderr, e.dof) for e in estimates] == [(f.flatness, f.flatness_stderr, 9) for f in found[:3]]


def test_the_delta_method():
    net, data = labelled()
    found = pf.measures.pac_bayes(net, LOSS, data, probes=20)
    assert found.flatness_stderr == pytest.approx(2 * found.stderr / found.sigma**3)
    drops = torch.tensor(found.drops)
    error = math.hypot(float(drops.std()) / math.sqrt(20), found.drop - 0.1)
    lower, upper = (
        pf.measures.pac_bayes(net, LOSS, data, probes=20, drop=drop, tolerance=1e-3) for drop in (0.07, 0.14)
    )
    slope = (upper.drop - lower.drop) / (upper.sigma - lower.sigma)
    assert found.stderr == pytest.approx(error / slope, rel=0.25)


def test_no_standard_error():
    net, data = labelled()
    assert pf.measures.pac_bayes(net, LOSS, data, probes=1).stderr is None
    unreached = pf.measures.pac_bayes(net, LOSS, data, steps=2, tolerance=1e-9)
    assert (unreached.stderr, unreached.flatness_stderr) == (None, None)
    at_once = pf.measures.pac_bayes(net, LOSS, data, tolerance=0.89)
    assert (at_once.sigma, at_once.stderr) == (1.0, None)


@pytest.mark.soak
@pytest.mark.parametrize("draws", [5, 10, 40])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_coverage(draws, activation):
    """Against 1/σ² of 2,000 draws: too short from few, a little too long from many.

    The standard error grows with 1/σ² itself, so that a value which is too small has too short an interval; and what
    the bisection leaves is bounded, and taken as if it were not.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 12), activation(), nn.Linear(12, C)).double()
    x = normal(1, 200, 5)
    data = x, net(x).argmax(1)
    truth = pf.measures.pac_bayes(net, LOSS, data, probes=2000, tolerance=5e-4, seed=10**6).flatness
    ends = []
    for seed in range(1500):
        found = pf.measures.pac_bayes(net, LOSS, data, probes=draws, seed=seed)
        estimate = pf.results.Estimate(found.flatness, found.flatness_stderr, 200, "", False, "", dof=draws - 1)
        ends.append(estimate.interval())
    assert (0.93 if draws == 40 else 0.9) <= share(ends, truth) <= 0.985

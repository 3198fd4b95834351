"""Of intervals from many seeds as many hold the truth as they promise: every sampled estimate, from few draws and many.

The truth is the exact value, or the mean over all seeds, which is known √seeds times as well as a value of one. Of
1,500 seeds the share that holds it is known to 0.6 %: the soak run holds it to 93-97 % for a nominal 95 %, the short
version to what 150 seeds can tell. Left out, and documented in docs/values.md, is what one or two samples carry: random
signs take few values there, and their squares are skewed.
"""

import functools
from statistics import fmean

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.covering import share
from support.grid import normal
from support.many_samples import LAYER, NETWORKS, many
from support.many_samples import network as ten_classes

LOSS = nn.CrossEntropyLoss()
SHORT, LONG = (150, (0.89, 0.995)), (1500, (0.93, 0.97))  # seeds, and the share of intervals that hold the truth
SOAK = [pytest.param(*LONG, marks=pytest.mark.soak)]


def runs(short, *others):
    """Parameters of a test: the first ones in short too, all of them in the soak run."""
    long = (pytest.param(*case, *LONG, marks=pytest.mark.soak) for case in (short, *others))
    return [(*short, *SHORT), *long]


def held(found, truth=None):
    """The share of estimates whose interval holds the truth; their values' mean, if there is none."""
    return share([estimate.interval() for estimate in found], fmean(found) if truth is None else truth)


@functools.cache
def classifier(activation, samples=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), activation(), nn.Linear(12, 4)).double().eval()
    return model, (torch.randn(samples, 8).double(), torch.randint(4, (samples,)))


# --- draws for all samples together -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("draws", "seeds", "within"), runs((2,), (4,), (32,)))
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_adaptive_sharpness_mc(activation, draws, seeds, within):
    model, data = classifier(activation)
    found = [pf.measures.adaptive_sharpness_mc(model, LOSS, data, probes=draws, seed=seed) for seed in range(seeds)]
    assert within[0] <= held(found) <= within[1]


@pytest.mark.parametrize(("draws", "seeds", "within"), runs((2,), (4,), (16,)))
@pytest.mark.parametrize(("layer", "activation"), [("2", nn.ReLU), ("0", nn.ReLU), ("0", nn.Tanh)])
def test_feature_robustness(layer, activation, draws, seeds, within):
    model, data = classifier(activation)
    found = [
        pf.theory.feature_robustness(model, LOSS, data, layer, rho=[0.1, 0.8], probes=draws, kappa=1.0, seed=seed)
        for seed in range(seeds)
    ]
    for place in range(2):
        truth = fmean(float(f.rises[place]) for f in found)
        assert within[0] <= share([f.interval()[place].tolist() for f in found], truth) <= within[1]


@pytest.mark.parametrize(("draws", "seeds", "within"), runs((2,), (4,), (8,)))
def test_representativeness(draws, seeds, within):
    """With one ψ and folds of one size the mean over folds is -E_F, whatever the folds."""
    phi, w = normal(1, 30, 4), normal(2, 3, 4)
    found = [
        pf.theory.representativeness(phi, w, targets=(phi @ w.t()).argmax(1), probes=draws, seed=seed)
        for seed in range(seeds)
    ]
    assert within[0] <= share([f.interval() for f in found], fmean(f.value for f in found)) <= within[1]


# --- draws of each sample ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seeds", "within"), SOAK)
@pytest.mark.parametrize("probes", [2, 4, 8])
@pytest.mark.parametrize(("name", "layer"), LAYER.items())
def test_values_of_a_sweep(name, layer, probes, seeds, within):
    model, loss, data = many(name)
    exact = pf.relative_flatness(model, loss, data, layer)
    found = [pf.relative_flatness(model, loss, data, layer, probes=probes, seed=seed) for seed in range(seeds)]
    assert within[0] <= held(found, exact) <= within[1]


@pytest.mark.parametrize(("seeds", "within"), SOAK)
@pytest.mark.parametrize("probes", [2, 8])
@pytest.mark.parametrize("measure", ["sharpness", "adaptive_sharpness", "interpolation_sharpness", "trace"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_values_of_a_network(activation, measure, probes, seeds, within):
    model, data = classifier(activation, 60)
    exact = pf.measure(model, LOSS, data, measures=measure)[measure]
    found = [
        pf.measure(model, LOSS, data, measures=measure, probes=probes, seed=seed)[measure] for seed in range(seeds)
    ]
    assert within[0] <= held(found, exact) <= within[1]


@pytest.mark.parametrize(("seeds", "within"), SOAK)
@pytest.mark.parametrize("probes", [2, 8])
@pytest.mark.parametrize("measure", ["scaled_trace", "matrix_normalized_sharpness"])
def test_bounds_of_errors_that_are_added_up(measure, probes, seeds, within):
    """Layers' errors are taken to go together: the network's interval may be too wide, not too narrow."""
    model, data = classifier(nn.ReLU, 60)
    exact = pf.measure(model, LOSS, data, measures=measure)[measure]
    found = [
        pf.measure(model, LOSS, data, measures=measure, probes=probes, seed=seed)[measure] for seed in range(seeds)
    ]
    assert held(found, exact) >= within[0]


@pytest.mark.parametrize(("seeds", "within"), SOAK)
@pytest.mark.parametrize("samples", [30, 200])
def test_one_draw_of_each_sample(samples, seeds, within):
    """What true values differ by from their sizes is taken for their probes' error: rather too wide, not too narrow."""
    for scale in (0.5, 3.0, 20.0):
        model, data = ten_classes(scale, samples=samples)
        exact = pf.relative_flatness(model, LOSS, data, "0")
        found = [pf.relative_flatness(model, LOSS, data, "0", probes=1, seed=seed) for seed in range(seeds)]
        assert held(found, exact) >= within[0]


@pytest.mark.parametrize(("seeds", "within"), SOAK)
@pytest.mark.parametrize("samples", [60, 240])
@pytest.mark.parametrize("name", NETWORKS)
def test_groups(name, samples, seeds, within):
    scale, loss, rtol = NETWORKS[name]
    model, data = ten_classes(scale, samples=samples)
    exact = pf.relative_flatness(model, loss, data, "0")
    found = [
        pf.relative_flatness(model, loss, data, "0", probes="adaptive", rtol=rtol, seed=seed) for seed in range(seeds)
    ]
    assert within[0] <= held(found, exact) <= within[1]

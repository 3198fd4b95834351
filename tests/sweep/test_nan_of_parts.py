"""Under ``nan_policy="propagate"`` a sample without a loss makes what is read off sums over samples NaN, too."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.brute_force import network
from support.cases import LABELS, PROBABILITIES, C, M, N
from support.grid import normal

X = normal(10, N, M)
OF_PARTS = ["neuron_flatness", "neuron_flatness_max", "neuron_flatness_rows_max", "normalized_sharpness"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.MSELoss()])
@pytest.mark.parametrize("name", [*OF_PARTS, "fisher_rao"])
def test_targets_that_are_no_numbers(name, loss, bad):
    model = network(M, 6, C, activation=nn.ReLU)
    targets = (LABELS if isinstance(loss, nn.BCEWithLogitsLoss) else PROBABILITIES).double()

    def values(targets):
        data = list(zip(X.split(2), targets.split(2), strict=True))
        report = pf.measure(model, loss, data, measures=[name], nan_policy="propagate")
        return list(report.by_measure()[name].values())

    assert all(math.isfinite(estimate) for estimate in values(targets))
    targets = targets.clone()
    targets[2, 1] = bad
    for estimate in values(targets):
        assert math.isnan(estimate)
        assert estimate.per_neuron is None or bool(torch.as_tensor(estimate.per_neuron).isnan().all())

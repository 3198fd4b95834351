"""Measures that cannot be had: errors that say so, or NaN, never one of torch's own."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import known_stderr
from support.cases import small as network
from support.grid import batches
from support.networks import CASES

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 2, 1, 0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adaptive_sharpness_mc", {"rho": 0.0}, "rho=0.0"),
        ("adaptive_sharpness_mc", {"probes": 1}, "probes=1"),
        (
            "adaptive_sharpness_mc",
            {"data": (X * math.nan, Y), "nan_policy": "omit"},
            "batch 0: .* no sample can be left out",
        ),
        ("adaptive_sharpness_mc", {"nan_policy": "skip"}, "nan_policy='skip' does not exist"),
        ("adaptive_sharpness_mc", {"data": iter([(X, Y)])}, "can be read once"),
        ("adaptive_sharpness_mc", {"data": (X * math.nan, Y)}, "batch 0: the loss of the model is nan"),
        ("mls_adversarial", {"steps": 0}, "steps=0"),
        ("mls_adversarial", {"rho": -1.0}, r"rho=-1\.0"),
        (
            "mls_adversarial",
            {"data": (torch.arange(6), Y)},
            "batch 0: there is no floating-point tensor among its inputs",
        ),
    ],
)
def test_functions_of_single_measures(name, options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        getattr(pf.measures, name)(network(), nn.CrossEntropyLoss(), **{"data": (X, Y), **options})


def test_no_measure_of_the_jacobian():
    with pytest.raises(
        pf.errors.InputError, match="measures: at least one name is wanted, or None for all of the Jacobian"
    ):
        pf.representation(network(), nn.CrossEntropyLoss(), (X, Y), measures=[])


def test_a_weight_with_nan_has_nan_for_its_norms():
    net = network()
    net[0].weight.data[1, 2] = math.nan
    report = pf.measure(net, nn.CrossEntropyLoss(), (X, Y), measures="all", nan_policy="propagate")
    assert math.isnan(report["0", "weight_norm"].value)
    assert math.isnan(report["matrix_normalized_sharpness"].value)
    assert not any("linalg" in reason for reason in report.skipped.values())


def test_columns_in_groups_of_outputs_that_are_not_contiguous():
    """Terms of binary cross-entropy in the dimensions of (n, C, T), a view of (n, T, C)."""
    case = CASES["tokens, binary"]
    model, data = case.build(), batches(case)
    exact = pf.relative_flatness(model, case.loss, data, "mix")
    sampled = pf.relative_flatness(model, case.loss, data, "mix", probes="adaptive", rtol=0.3)
    assert abs(sampled.value - exact.value) <= 6 * known_stderr(sampled) + 1e-5 * exact.value

"""Inputs whose squares underflow: a value that is lost so is an error, or NaN, and not a 0 that is called exact."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.combinations import every
from support.grid import normal

LOSS, Y, HEAD = nn.CrossEntropyLoss(), torch.arange(40) % 3, normal(2, 3, 6)
TINY = {torch.float32: 1e-30, torch.float64: 1e-200}
MESSAGE = (
    r"batch 0: (19 of 20|15 of 16) samples have inputs of layer '0' whose squares underflow .* "
    "rescale the inputs or compute"
)


def network(dtype, activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), activation(), nn.Linear(5, 3)).to(dtype)


def batches(dtype):
    """Twenty samples whose inputs are tiny, but for one of zeros, and twenty others."""
    x = normal(1, 40, 6)
    x[:20] *= TINY[dtype]
    x[7] = 0
    return list(zip(x.to(dtype).split(20), Y.split(20), strict=True))


@every(per_sample=[False, True], loss=[LOSS, nn.MSELoss()], dtype=[*TINY])
def test_heads(dtype, loss, per_sample):
    features, weight = normal(1, 40, 6).to(dtype), HEAD.to(dtype)
    targets = Y if loss is LOSS else normal(3, 40, 3).to(dtype)

    def flatness(features, weight=weight, **options):
        return pf.head_flatness(features, weight, targets=targets, loss=loss, per_sample=per_sample, **options)

    tiny = TINY[dtype] * features
    with pytest.raises(
        pf.errors.NonFiniteError, match="40 of 40 rows have inputs of the layer whose squares underflow"
    ):
        flatness(tiny)
    found = flatness(tiny, nan_policy="propagate")
    assert math.isnan(found)
    assert not found.exact
    with pytest.raises(pf.errors.NonFiniteError, match="all 40 samples"):
        flatness(tiny, nan_policy="omit")
    with pytest.raises(
        pf.errors.NonFiniteError, match="squares underflow"
    ):  # here those of weights times deviations do
        flatness(tiny, normalize="std")
    small = 1e-15  # its square does not
    assert flatness(small * features) == pytest.approx(flatness(features, small * weight), rel=1e-5, abs=0)
    for zero in flatness(0 * features), flatness(features, 0 * weight):
        assert (zero.value, zero.exact) == (0, True)


@every(options=[{}, {"probes": 2}, {"probes": "adaptive"}], activation=[nn.ReLU, nn.Tanh], dtype=[*TINY])
def test_layers(dtype, options, activation):
    model, data = network(dtype, activation), batches(dtype)
    with pytest.raises(pf.errors.NonFiniteError, match=MESSAGE):
        pf.measure(model, LOSS, data, measures="trace", **options)
    found = pf.measure(model, LOSS, data, measures="trace", nan_policy="propagate", per_sample=True, **options)
    lost = torch.arange(40) < 20
    lost[7] = False
    assert torch.equal(found["0", "trace"].per_sample.isnan(), lost)
    assert not found["0", "trace"].exact
    assert math.isfinite(found["2", "trace"])  # its inputs are the bias of the layer in front
    omitted = pf.measure(model, LOSS, data, measures="trace", nan_policy="omit", **options)["0", "trace"]
    assert (omitted.samples, omitted.omitted) == (21, 19)


def test_what_is_read_off_sums_over_samples():
    model, data = network(torch.float32), batches(torch.float32)
    names = ["neuron_flatness", "normalized_sharpness"]
    found = pf.measure(model, LOSS, data, layers="0", measures=names, nan_policy="propagate")
    assert all(math.isnan(found["0", name]) for name in names)
    with pytest.raises(pf.errors.NonFiniteError, match=MESSAGE):
        pf.block_traces(model, LOSS, data, "0")
    assert bool(pf.block_traces(model, LOSS, data, "0", nan_policy="propagate").isnan().all())
    left = [(x[kept], y[kept]) for (x, y), kept in zip(data, (slice(7, 8), slice(None)), strict=True)]
    expected = pf.block_traces(model, LOSS, left, "0")
    assert torch.allclose(pf.block_traces(model, LOSS, data, "0", nan_policy="omit"), expected)


@pytest.mark.parametrize("dtype", TINY)
def test_zeros_that_are_true(dtype):
    x = normal(1, 40, 6).to(dtype)
    dead, still = network(dtype), network(dtype)
    nn.init.constant_(dead[0].bias, -100.0)
    nn.init.zeros_(still[2].weight)
    for model, inputs in ((dead, x), (still, x), (network(dtype), 0 * x)):
        found = pf.measure(model, LOSS, (inputs, Y), layers="0", measures="sweep")
        for name in ("relative_flatness", "trace"):
            assert (found["0", name].value, found["0", name].exact) == (0, True)

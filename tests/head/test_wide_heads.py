"""Heads of a vocabulary's size and half precision: tiles of classes, memory, and models spared their logits."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.contractions import SoftmaxVariance
from pyflatness.contractions.backends import compiled
from support import truth
from support.combinations import ENGINES, every


def rows_route(engine, features, weight, bias=None, memory=1):
    """The route for wide heads; so little memory gives tiles of sixteen classes and chunks of sixteen rows."""
    head = SoftmaxVariance(weight, bias, engine.module, rows=len(features), route="rows", memory=memory)
    return head(features)


def worst(values, expected):
    return float(((values - expected).abs() / expected).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("peak", [None, 0, 16, 50, 99])
def test_tiles_of_classes(engine, dtype, peak):
    """The most probable class in the first, a middle or the ragged last tile, or a maximum that wanders."""
    features, weight, bias = torch.randn(40, 20).to(dtype), torch.randn(100, 20).to(dtype), torch.randn(100).to(dtype)
    if peak is not None:
        bias[peak] = 60.0
    expected = truth.softmax_variance(features, weight, bias)
    limit = 3e-5 if dtype == torch.float32 else 1e-11
    assert worst(rows_route(engine, features, weight, bias), expected) < limit
    assert worst(rows_route(engine, features, weight, bias, memory=2**20), expected) < limit


def test_maxima_that_rise_with_every_tile(engine):
    features, weight = torch.rand(20, 4).double(), torch.randn(80, 4).double()
    bias = torch.arange(80).double() / 2
    expected = truth.softmax_variance(features, weight, bias)
    assert worst(rows_route(engine, features, weight, bias), expected) < 1e-12


def test_equal_rows_in_different_tiles(engine):
    """The rows that are done again from differences, across tiles."""
    weight, features = torch.randn(70, 8), torch.rand(10, 8) / 16
    weight[65] = weight[3] = weight[3] + 8
    bias = torch.full((70,), math.log(1e-7))
    bias[3] = bias[65] = 0
    assert worst(rows_route(engine, features, weight, bias), truth.softmax_variance(features, weight, bias)) < 3e-5


def test_classes_masked_by_a_bias_of_minus_infinity(engine):
    features, weight, bias = torch.randn(30, 8).double(), torch.randn(70, 8).double(), torch.randn(70).double()
    bias[:40] = -math.inf
    expected = truth.softmax_variance(features, weight[40:], bias[40:])
    for route in ("rows", "pairs"):
        head = SoftmaxVariance(weight, bias, engine.module, rows=30, route=route, memory=1)
        assert worst(head(features), expected) < 1e-12


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_features_in_tiles(engine, bad):
    features, weight = torch.randn(40, 6), torch.randn(90, 6)
    features[7, 2] = bad
    values = rows_route(engine, features, weight)
    assert values.isfinite().tolist() == [i != 7 for i in range(40)]


@pytest.mark.parametrize("peaked", [False, True])
def test_a_vocabulary(engine, peaked):
    """32,000 classes in float32, flat, and with 1 - p_max of about 1e-6."""
    d = 32_000
    features, weight = torch.randn(24, 32), torch.randn(d, 32) / 6
    bias = torch.zeros(d)
    if peaked:
        bias[31_000] = math.log(d) + math.log(1e6)
    expected = by_tiles(features.double(), weight.double(), bias.double())
    assert worst(rows_route(engine, features, weight, bias, memory=2**22), expected) < 1e-5


def by_tiles(features, weight, bias):
    """|φ|² Σ_s p_s |w_s - μ|² in float64, without a (d, d) matrix."""
    p = torch.softmax(features @ weight.t() + bias, 1)
    return features.square().sum(1) * (p * torch.cdist(p @ weight, weight, compute_mode=DIRECT).square()).sum(1)


DIRECT = "donot_use_mm_for_euclid_dist"


# --- half precision ---------------------------------------------------------------------------------------------------

HALF_LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), lambda n, d: torch.randint(d, (n,))),
    "squared error": (nn.MSELoss(), lambda n, d: torch.rand(n, d)),
    "binary": (nn.BCEWithLogitsLoss(), lambda n, d: (torch.rand(n, d) > 0.5).float()),
    "custom": (lambda f, y: (f.logsumexp(1) ** 2).mean(), lambda n, d: torch.zeros(n)),
}


@every(
    engine=ENGINES, dtype=[torch.float16, torch.bfloat16], loss=[*HALF_LOSSES], d=[10, 80, 300], normalize=[None, "std"]
)
def test_half_precision(engine, dtype, loss, d, normalize):
    """Against float64 on the rounded inputs."""
    criterion, make = HALF_LOSSES[loss]
    features, weight, bias = torch.randn(50, 64).to(dtype), (torch.randn(d, 64) / 2).to(dtype), torch.randn(d).to(dtype)
    targets = make(50, d)
    half = pf.head_flatness(
        features, weight, bias, targets, loss=criterion, normalize=normalize, backend=engine.backend
    )
    doubles = (features.double(), weight.double(), bias.double())
    targets = targets.double() if targets.is_floating_point() else targets
    exact = pf.head_flatness(*doubles, targets, loss=criterion, normalize=normalize)
    assert half.value == pytest.approx(exact.value, rel=2e-3)
    assert half.backend == engine.backend


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("peaked", [False, True])
def test_half_precision_of_wide_heads(engine, dtype, peaked):
    features, weight, bias = torch.randn(30, 16).to(dtype), (torch.randn(3000, 16) / 4).to(dtype), torch.zeros(3000)
    if peaked:
        bias[1234] = 20
    bias = bias.to(dtype)
    expected = by_tiles(features.double(), weight.double(), bias.double())
    assert worst(rows_route(engine, features, weight, bias, memory=2**16), expected) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision(dtype):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype).eval()
    x, y = torch.randn(10, 4).to(dtype), torch.arange(10) % 3
    value = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y))
    features = model[1](model[0](x)).double()
    exact = pf.head_flatness(features, model[2].weight.double(), model[2].bias.double())
    assert value.value == pytest.approx(exact.value, rel=2e-3)


def test_autocast():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    single = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y))
    with torch.autocast("cpu", torch.bfloat16):
        half = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y))
    assert half.value == pytest.approx(single.value, rel=3e-2)
    assert half.value != single.value


# --- models -----------------------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """Tokens to the logits of 2,000 classes; one that looks at them reads their largest."""

    def __init__(self, looks=False):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), Counted(6, 2000)
        self.looks = looks

    def forward(self, x):
        z = self.head(torch.tanh(self.body(self.embed(x))))
        if self.looks and z.max().item() > 1e9:
            raise AssertionError
        return z.transpose(1, 2)


class Counted(nn.Linear):
    made = 0


def counting_linear():
    """``F.linear`` that counts the logits it makes for the wide layer."""
    right = nn.functional.linear

    def linear(inputs, weight, bias=None):
        if weight.shape[0] == 2000:
            Counted.made += inputs.numel() // inputs.shape[-1] * 2000
        return right(inputs, weight, bias)

    return linear


@pytest.mark.parametrize("options", [{}, {"normalize": "std"}, {"per_sample": True}])
@pytest.mark.parametrize("layer", ["head", None])
def test_a_wide_head_is_spared_its_logits(monkeypatch, layer, options):
    model = LanguageModel().eval()
    x, y = torch.randint(11, (6, 5)), torch.randint(2000, (6, 5))
    y[2, 3] = -100
    features = torch.tanh(model.body(model.embed(x)))
    expected = pf.head_flatness(features, model.head.weight, model.head.bias, y, **options)
    Counted.made = 0
    monkeypatch.setattr(nn.functional, "linear", counting_linear())
    value = pf.relative_flatness(model, nn.CrossEntropyLoss(), [(x[:4], y[:4]), (x[4:], y[4:])], layer, **options)
    assert value.value == pytest.approx(expected.value, rel=1e-6)
    assert Counted.made == (5 + 2) * 2000  # one sample's tokens, to establish the head, and two rows to compare
    assert "forward" not in model.head.__dict__
    if "per_sample" in options:
        torch.testing.assert_close(value.per_sample, expected.per_sample, rtol=1e-5, atol=0)


def test_a_model_that_looks_at_its_logits_gets_them():
    model = LanguageModel(looks=True).eval()
    x, y = torch.randint(11, (3, 5)), torch.randint(2000, (3, 5))
    value = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y))
    model.looks = False
    assert value.value == pytest.approx(pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y)).value, rel=1e-6)


def test_a_wide_layer_that_is_not_the_head():
    model = nn.Sequential(nn.Linear(4, 2000), nn.ReLU(), nn.Linear(2000, 3)).eval()
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    assert pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "0").method == "ggn"
    assert pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y)).layer == "2"


# --- memory -----------------------------------------------------------------------------------------------------------

MEASURE_MEMORY = """
import torch, pyflatness as pf

def peak():  # of the process, by the kernel's own account
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

n, d, m = 4096, 128256, 512
features, weight = torch.empty(n, m).normal_(), torch.empty(d, m).normal_().div_(m**0.5)
targets = torch.randint(d, (n,))
pf.head_flatness(features[:600], weight[:6000], None)  # threads, libraries and their buffers
weight.sum(), features.sum()  # so that all of them is in memory, whatever the kernel has moved out meanwhile
open("/proc/self/clear_refs", "w").write("5")
before = peak()
value = pf.head_flatness(features, weight, None, targets)
print(peak() - before, value.value)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.soak
def test_extra_memory_of_a_vocabulary_head():
    """(4096, 128256, 512): the logits would be 2 GiB, the weight is 250 MiB; at most 64 MiB on top."""
    for _ in range(8):  # a kernel that moves pages out and in meanwhile counts these too
        result = subprocess.run([sys.executable, "-c", MEASURE_MEMORY], capture_output=True, text=True, check=True)
        extra, value = map(float, result.stdout.split())
        if extra <= 64:
            break
    assert 4 < extra <= 64  # less than 4 MiB would mean that the measurement does not work
    assert value > 0


def test_pairs_are_not_taken_beyond_the_memory():
    weight = torch.zeros(3000, 4000)
    assert SoftmaxVariance(weight, None, compiled, rows=10**6, memory=2**25).route == "rows"
    assert SoftmaxVariance(weight[:1000, :2000], None, compiled, rows=10**6, memory=2**25).route == "pairs"


# --- around the contractions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", HALF_LOSSES)
@pytest.mark.parametrize("d", [10, 100])
def test_autocast_does_not_reach_the_contractions(engine, d, loss):
    criterion, make = HALF_LOSSES[loss]
    features, weight, targets = 2 * torch.randn(60, 40), torch.randn(d, 40), make(60, d)
    expected = pf.head_flatness(features, weight, None, targets, loss=criterion, backend=engine.backend)
    with torch.autocast("cpu", torch.bfloat16):
        value = pf.head_flatness(features, weight, None, targets, loss=criterion, backend=engine.backend)
    assert value.value == expected.value


def test_wide_heads_behind_forwards_that_take_whole_batches_only():
    model, table = nn.Linear(5, 2000), torch.randn(4, 5)
    x, y = torch.randn(4, 3, 5), torch.randint(2000, (4, 3))
    expected = pf.head_flatness(x + table[:3], model.weight, model.bias, y).value

    def forward(net, batch):
        assert len(batch["x"]) == 4
        return net(batch["x"] + batch["table"][torch.arange(3)]).transpose(1, 2), batch["y"]

    value = pf.relative_flatness(model, nn.CrossEntropyLoss(), [{"x": x, "y": y, "table": table}], forward=forward)
    assert value.value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_verify_in_half_precision(dtype):
    data = torch.randn(6, 5).to(dtype), torch.randint(3, (6,))
    assert pf.verify(nn.Linear(5, 3).to(dtype), nn.CrossEntropyLoss(), data)

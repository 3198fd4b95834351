"""Sampled values and their errors, and Hessian values behind tails that the grid of networks has not."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pyflatness as pf
from pyflatness.numerics.signs import Signs
from support import truth
from support.combinations import in_soak
from support.grid import batches, checked
from support.many_samples import many
from support.networks import CASES


@pytest.mark.parametrize(("name", "layer"), [("mlp ReLU", "0"), ("attention", "q"), ("siamese, product", "encoder")])
def test_a_seed_is_one_value_in_any_cut(name, layer):
    case = CASES[name]
    found = [
        pf.measure(
            case.build(),
            case.loss,
            batches(case, size),
            layers=layer,
            probes=3,
            seed=7,
            memory=memory,
            measures="sweep",
        )
        for size, memory in ((case.samples, None), (1, None), (case.samples, 1))
    ]
    for measure in ("relative_flatness", "trace"):
        values = [report[layer, measure].value for report in found]
        assert values == pytest.approx([values[0]] * 3, rel=1e-6)  # the basis of a sample's inputs is rounded
        assert [report[layer, measure].stderr for report in found] == pytest.approx(
            [found[0][layer, measure].stderr] * 3
        )
    other = pf.measure(case.build(), case.loss, batches(case), layers=layer, probes=3, seed=8, measures="sweep")
    assert other[layer, "trace"].value != found[0][layer, "trace"].value


@pytest.mark.parametrize("seeds", [30, *in_soak(100)])
def test_the_network_s_error_is_that_of_the_sum(seeds):
    """Layers share a draw's signs, so their errors do not add up in squares."""
    model, loss, data = many("mlp ReLU")
    exact = pf.measure(model, loss, data)["trace"].value
    found = [pf.measure(model, loss, data, probes=4, seed=seed)["trace"] for seed in range(seeds)]
    spread = torch.tensor([e.value for e in found], dtype=torch.float64).std()
    assert float(spread) == pytest.approx(sum(e.stderr for e in found) / seeds, rel=2.5 / seeds**0.5)
    assert sum(e.value for e in found) / seeds == pytest.approx(exact, abs=4 * float(spread) / seeds**0.5)


def test_one_draw_of_one_sample_says_nothing_of_its_error():
    case = CASES["one sample"]
    estimate = pf.relative_flatness(case.build(), case.loss, (case.inputs, case.targets), "0", probes=1)
    assert not math.isfinite(estimate.stderr)


def test_per_sample_values_of_draws():
    model, loss, data = many("mlp Tanh")
    estimate = pf.relative_flatness(model, loss, data, "2", probes=5, per_sample=True)
    assert float(estimate.per_sample.mean()) == pytest.approx(estimate.value, rel=1e-12)


def test_samples_that_are_left_out():
    model, loss, (inputs, targets) = many("mlp Tanh")
    kept = torch.ones(len(inputs), dtype=torch.bool)
    kept[[3, 17]] = False
    inputs = torch.where(kept[:, None], inputs, torch.nan)
    with pytest.raises(pf.errors.NonFiniteError, match="2 of 240 samples"):
        pf.relative_flatness(model, loss, (inputs, targets), "0")
    expected = pf.relative_flatness(model, loss, (inputs[kept], targets[kept]), "0").value
    assert pf.relative_flatness(model, loss, (inputs, targets), "0", nan_policy="omit").value == pytest.approx(expected)
    sampled = pf.relative_flatness(model, loss, (inputs, targets), "0", nan_policy="omit", probes=64)
    assert (sampled.samples, sampled.omitted) == (238, 2)
    assert abs(sampled.value - expected) <= 4 * sampled.stderr
    traces = pf.block_traces(model, loss, (inputs, targets), "0", nan_policy="omit")
    assert traces == pytest.approx(pf.block_traces(model, loss, (inputs[kept], targets[kept]), "0"))


# --- its parts --------------------------------------------------------------------------------------------------------


def test_signs_belong_to_samples():
    signs = Signs(3, range(2))
    drawn = signs(0, torch.arange(5), 7, 20)
    assert drawn.shape == (2, 5, 7, 20)
    assert torch.equal(drawn[:, [4, 1]], signs(0, torch.tensor([4, 1]), 7, 20))
    assert torch.equal(drawn[1:], Signs(3, [1])(0, torch.arange(5), 7, 20))
    others = signs(1, torch.arange(5), 7, 20), Signs(4, range(2))(0, torch.arange(5), 7, 20)
    assert not any(torch.equal(drawn, other) for other in others)


def test_signs_are_fair_and_independent():
    """Means and correlations between seeds, streams, draws, samples and places are those of coins."""
    drawn = torch.stack(
        [Signs(seed, range(8))(stream, torch.arange(64), 130) for seed in (0, 1) for stream in (0, 1)]
    ).double()
    assert abs(float(drawn.mean())) < 4 / math.sqrt(drawn.numel())
    for dim in range(drawn.ndim):
        rows = drawn.movedim(dim, 0).flatten(1)
        correlation = rows @ rows.t() / rows.shape[1]
        correlation.fill_diagonal_(0)
        assert float(correlation.abs().max()) < 6 / math.sqrt(rows.shape[1])


def test_more_products_than_are_allowed():
    model, loss, data = many("mlp Tanh", 1)
    message = r"layer '0': its exact Hessian value takes \d+ Hessian products \(\d+ rows .* probes= for a"
    with pytest.raises(pf.errors.InputError, match=message):
        pf.relative_flatness(model, loss, data, "0", max_passes=3)
    assert pf.relative_flatness(model, loss, data, "0", probes=2, max_passes=3).stderr > 0


class Slope(torch.autograd.Function):
    """The slope of tanh; its own looks at a number of what comes in, which vmap does not allow."""

    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(x.tanh(), g)
        return g * (1 - x.tanh() ** 2)

    @staticmethod
    def backward(ctx, h):
        if float(h.sum()) == math.inf:
            raise ValueError
        y, g = ctx.saved_tensors
        return -2 * h * g * y * (1 - y**2), h * (1 - y**2)


class Looking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        return Slope.apply(ctx.saved_tensors[0], g)


def test_functions_that_cannot_take_several_directions_at_once():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    model[1].forward = Looking.apply
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    found = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "0", curvature="hessian")
    assert found.value == pytest.approx(truth.of_model(model, nn.CrossEntropyLoss(), x, y, "0"), rel=1e-9)


def test_operations_without_a_batching_rule_raise_no_warnings():
    model = nn.Sequential(nn.Linear(4, 5), nn.Mish(), nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    found = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "0")
    assert found.value == pytest.approx(truth.of_model(model, nn.CrossEntropyLoss(), x, y, "0"), rel=1e-9)


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU])
def test_autocast(activation):
    """LayerNorm takes half precision beside its own weights in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), activation(), nn.Linear(8, 3))
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    expected = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "0").value
    with torch.autocast("cpu", torch.bfloat16):
        found = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "0")
    assert found.value == pytest.approx(expected, rel=0.1)


class Checkpointed(nn.Module):
    """Fused attention that is computed again in backward passes."""

    def __init__(self, *, again):
        super().__init__()
        self.again, self.embed, self.qkv, self.head = again, nn.Linear(4, 6), nn.Linear(6, 18), nn.Linear(6, 3)

    def attend(self, x):
        return x + F.scaled_dot_product_attention(*self.qkv(x).unsqueeze(1).chunk(3, dim=-1)).squeeze(1)

    def forward(self, x):
        x = self.embed(x)
        x = checkpoint(self.attend, x, use_reentrant=False) if self.again else self.attend(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("options", [{}, {"probes": 3}, {"curvature": "ggn"}])
def test_checkpointed_attention(options):
    torch.manual_seed(0)
    model = Checkpointed(again=False).double()
    data = torch.randn(6, 5, 4, dtype=torch.float64), torch.arange(6) % 3
    expected = pf.measure(model, nn.CrossEntropyLoss(), data, **options)
    model.again = True
    found = pf.measure(model, nn.CrossEntropyLoss(), data, **options)
    for key in [("embed", "trace"), ("qkv", "relative_flatness"), "trace"]:
        assert found[key].value == pytest.approx(expected[key].value, rel=1e-9)


class Twice(nn.Module):
    """One of its layer's two calls is not used."""

    def __init__(self, used):
        super().__init__()
        self.used, self.shared, self.head = used, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh((self.shared(x), self.shared(x.flip(1)))[self.used]))


@pytest.mark.parametrize("used", [0, 1])
def test_a_call_whose_output_is_not_used(used):
    torch.manual_seed(0)
    model, x, y = Twice(used).double(), torch.randn(6, 4).double(), torch.arange(6) % 3
    checked(model, nn.CrossEntropyLoss(), (x, y), "relative_flatness", layers="shared")


def test_a_peaked_softmax_in_float32():
    """The residual p - y at a trained minimum comes out of float64."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x = torch.randn(32, 6).double()
    with torch.no_grad():
        y = model(x).argmax(1)
        model[2].weight.mul_(30)
        model[2].bias.mul_(30)
    exact = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "0", per_sample=True)
    peaked = F.softmax(model(x), dim=1).amax(1) > 1 - 1e-6
    assert int(peaked.sum()) > 2
    found = pf.relative_flatness(model.float(), nn.CrossEntropyLoss(), (x.float(), y), "0", per_sample=True)
    assert found.value == pytest.approx(exact.value, rel=2e-4)
    torch.testing.assert_close(found.per_sample[peaked], exact.per_sample[peaked], rtol=2e-3, atol=0)

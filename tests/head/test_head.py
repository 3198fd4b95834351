"""Relative flatness of heads against dense Hessians: every loss, its options, and the layouts that outputs come in."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import truth
from support.cases import (
    CLASS_WEIGHTS,
    INDICES,
    LOSSES,
    PROBABILITIES,
    TOKEN_TARGETS,
    TOKENS,
    C,
    N,
    Pixels,
    Tokens,
    classifier,
    head,
    to,
)
from support.combinations import ENGINES, every
from support.grid import Net


@every(engine=ENGINES, name=[*LOSSES], dtype=[torch.float32, torch.float64])
def test_every_loss(engine, name, dtype):
    loss, targets = (to(dtype, part) for part in LOSSES[name])
    features, weight, bias = head(dtype)

    def risk(w):
        return to(torch.float64, loss)(features.double() @ w.t() + bias.double(), to(torch.float64, targets))

    expected = truth.relative_flatness(risk, weight.double())
    estimate = pf.head_flatness(features, weight, bias, targets, loss=loss, per_sample=True, backend=engine.backend)
    limit = 1e-5 if dtype == torch.float32 else 1e-12
    assert estimate.value == pytest.approx(expected, rel=limit, abs=limit)
    assert (expected != 0) == (name not in ("custom, linear", "nll of a head"))
    assert estimate.per_sample.shape == (N,)
    assert float(estimate.per_sample.mean()) == pytest.approx(estimate.value, rel=1e-12, abs=1e-15)
    assert (estimate.method, estimate.exact, estimate.stderr) == ("head", True, None)
    assert estimate.backend == engine.backend
    assert estimate.samples == N


def test_example_by_hand(engine):
    weight, features = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double(), torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double()
    estimate = pf.head_flatness(features, weight, per_sample=True, backend=engine.backend)
    assert float(estimate) == pytest.approx(1.474589, abs=1e-6)
    assert estimate.per_sample.tolist() == pytest.approx([0.983060, 1.966119], abs=5e-7)


def test_per_sample_is_each_samples_share():
    features, weight, bias = head(torch.float64)
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.double())
    estimate = pf.head_flatness(features, weight, bias, INDICES, loss=loss, per_sample=True)
    total = CLASS_WEIGHTS[INDICES].sum()
    for i in range(N):

        def share(w, i=i):
            alone = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.double(), reduction="sum")
            return alone(features[i : i + 1] @ w.t() + bias, INDICES[i : i + 1]) / total

        assert float(estimate.per_sample[i]) == pytest.approx(N * truth.relative_flatness(share, weight), rel=1e-12)


def test_reduction_can_be_said():
    features, weight, bias = head(torch.float64)
    mean, total = (float(pf.head_flatness(features, weight, bias, INDICES, reduction=how)) for how in ("mean", "sum"))
    assert total == pytest.approx(N * mean, rel=1e-13)
    none = nn.CrossEntropyLoss(reduction="none")
    assert float(pf.head_flatness(features, weight, bias, INDICES, loss=none, reduction="sum")) == total


def test_a_sum_written_as_a_callable_is_noticed():
    features, weight, bias = head(torch.float64)
    with pytest.raises(pf.errors.InputError, match="couples samples, or its reduction is not that"):
        pf.head_flatness(features, weight, bias, PROBABILITIES.double(), loss=lambda f, y: (f - y).square().sum())
    value = pf.head_flatness(
        features, weight, bias, PROBABILITIES.double(), loss=lambda f, y: (f - y).square().sum(), reduction="sum"
    )
    expected = pf.head_flatness(features, weight, bias, PROBABILITIES.double(), loss=nn.MSELoss(reduction="sum"))
    assert float(value) == pytest.approx(float(expected), rel=1e-12)


# --- models -----------------------------------------------------------------------------------------------------------


def check_model(model, loss, inputs, targets, name, engine, samples, **options):
    """float64 against the dense Hessian, float32 against the same; every cut into batches; sums of shares."""
    model = model.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    targets = targets.double() if targets.is_floating_point() else targets
    loss64 = to(torch.float64, loss)
    expected = truth.of_model(model, loss64, inputs, targets, name)
    for size in (1, 2, len(inputs)):
        batches = list(zip(inputs.split(size), targets.split(size), strict=True))
        estimate = pf.relative_flatness(
            model, loss64, batches, name, per_sample=True, backend=engine.backend, **options
        )
        assert estimate.value == pytest.approx(expected, rel=1e-12)
        assert float(estimate.per_sample.mean()) == pytest.approx(expected, rel=1e-12)
        assert estimate.per_sample.shape == (samples,)
        assert (estimate.layer, estimate.method, estimate.exact, estimate.samples) == (name, "head", True, samples)
    model = model.float()
    inputs, targets = (part.float() if part.is_floating_point() else part for part in (inputs, targets))
    single = pf.relative_flatness(model, to(torch.float32, loss), (inputs, targets), name, backend=engine.backend)
    assert single.value == pytest.approx(expected, rel=1e-4)


def test_classifier(engine):
    inputs, targets = torch.randn(5, 6), torch.tensor([0, 3, 1, 1, 2])
    check_model(classifier(6, 7, C), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), inputs, targets, "2", engine, 5)
    check_model(classifier(6, 7, C, bias=False), nn.CrossEntropyLoss(), inputs, targets, "2", engine, 5)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(reduction="sum")])
def test_tokens(engine, loss):
    check_model(Tokens(), loss, TOKENS, TOKEN_TARGETS, "head", engine, 3)


def test_tokens_shifted_as_language_models_do(engine):
    """Outputs at all positions but the last: a view of a part of the layer's rows."""
    model = Tokens(lambda z: z[:, :-1].transpose(1, 2))
    check_model(model, nn.CrossEntropyLoss(), TOKENS, TOKEN_TARGETS[:, 1:], "head", engine, 3)


def test_only_the_last_token_is_classified(engine):
    check_model(Tokens(lambda z: z[:, -1]), nn.CrossEntropyLoss(), TOKENS, INDICES[:3], "head", engine, 3)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, "same", "valid"])
def test_pixels(engine, dims, padding):
    inputs = torch.randn(2, 2, *(3, 2, 2)[:dims])
    targets = torch.randint(C, (2, *inputs.shape[2:]))
    targets[0, 0] = -100
    check_model(Pixels(dims, padding=padding), nn.CrossEntropyLoss(), inputs, targets, "head", engine, 2)


def test_pixels_in_channels_last_memory():
    model, inputs = Pixels().double(), torch.randn(2, 2, 4, 3).double()
    targets = torch.randint(C, (2, 4, 3))
    expected = truth.of_model(model, nn.CrossEntropyLoss(), inputs, targets, "head")
    model, inputs = model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    estimate = pf.relative_flatness(model, nn.CrossEntropyLoss(), (inputs, targets), "head")
    assert estimate.value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum"), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("model", ["tokens", "pixels"])
def test_element_wise_losses_on_positions(engine, loss, model):
    if model == "tokens":
        check_model(Tokens(lambda z: z), loss, TOKENS, torch.rand(3, 4, C), "head", engine, 3)
    else:
        check_model(Pixels(), loss, torch.randn(2, 2, 3, 2), torch.rand(2, C, 3, 2), "head", engine, 2)


def test_probability_targets_of_pixels(engine):
    targets = torch.softmax(torch.randn(2, C, 3, 2), 1)
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1)
    check_model(Pixels(), loss, torch.randn(2, 2, 3, 2), targets, "head", engine, 2)


def squeezed():
    def forward(net, x):
        return net.head(torch.relu(net.body(x))).squeeze(-1)

    return Net(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 1))


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), nn.MSELoss()])
def test_one_output_squeezed_away(engine, loss):
    check_model(squeezed(), loss, torch.randn(5, 3), torch.tensor([0.0, 1, 1, 0, 1]), "head", engine, 5)


def test_positions_of_tensors(engine):
    """head_flatness on (n, T, m) features equals the model that makes them."""
    features, weight = torch.randn(3, 4, 6).double(), torch.randn(C, 6).double()
    estimate = pf.head_flatness(features, weight, None, TOKEN_TARGETS, per_sample=True, backend=engine.backend)

    def risk(w):
        return F.cross_entropy((features @ w.t()).transpose(1, 2), TOKEN_TARGETS)

    assert estimate.value == pytest.approx(truth.relative_flatness(risk, weight), rel=1e-12)
    assert estimate.per_sample.shape == (3,)


# --- normalised -------------------------------------------------------------------------------------------------------


def test_normalised_value_is_that_of_the_rescaled_network(engine):
    """Theorem 4: κ of the network with features φ_j / σ_j and columns w_j σ_j."""
    features, weight, bias = head(torch.float64)
    deviation = features.std(dim=0, correction=0)
    expected = pf.head_flatness(features / deviation, weight * deviation, bias, INDICES)
    value = pf.head_flatness(features, weight, bias, INDICES, normalize="std", backend=engine.backend)
    assert value.value == pytest.approx(expected.value, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalised_dead_and_constant_features(dtype):
    features, weight, bias = head(dtype)
    features[:, 1], features[:, 3] = 0, -2.5
    scale = features.double().std(dim=0, correction=0)
    scale[3] = 2.5
    kept = [0, 2, 3, 4]
    expected = pf.head_flatness(
        features.double()[:, kept] / scale[kept], weight.double()[:, kept] * scale[kept], bias.double()
    )
    value = pf.head_flatness(features, weight, bias, normalize="std")
    assert value.value == pytest.approx(expected.value, rel=1e-5 if dtype == torch.float32 else 1e-12)
    assert value.notes == ("1 features that are zero throughout dropped",)


def test_normalised_deviation_is_over_all_batches_and_counted_positions():
    model = Tokens().double()
    whole = pf.relative_flatness(model, nn.CrossEntropyLoss(), (TOKENS, TOKEN_TARGETS), "head", normalize="std")
    cut = [(TOKENS[:2], TOKEN_TARGETS[:2]), (TOKENS[2:], TOKEN_TARGETS[2:])]
    parts = pf.relative_flatness(model, nn.CrossEntropyLoss(), cut, "head", normalize="std")
    assert parts.value == pytest.approx(whole.value, rel=1e-12)
    seen = []
    handle = model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(TOKENS)
    handle.remove()
    kept = seen[0][TOKEN_TARGETS != -100].detach()
    by_hand = pf.head_flatness(kept, model.head.weight, model.head.bias, normalize="std")
    assert whole.value == pytest.approx(by_hand.value, rel=1e-12)


def test_coupled_samples_are_noticed_one_sample_at_a_time():
    model, x, y = nn.Sequential(nn.Linear(5, 3)), torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])

    def weighted(f, t):
        return F.cross_entropy(f, t, weight=torch.tensor([1.0, 2, 5]).to(f))

    for size in (1, 6):
        with pytest.raises(pf.errors.InputError, match="couples samples"):
            pf.relative_flatness(model, weighted, list(zip(x.split(size), y.split(size), strict=True)))


def test_omitted_samples_leave_the_deviations_too():
    model = Tokens().double()
    features = torch.randn(4, 3, 6).double()
    targets, kept = torch.randint(C, (4, 3)), [0, 2, 3]
    features[1, 2, 0] = torch.nan
    weight, bias = model.head.weight, model.head.bias
    value = pf.head_flatness(features, weight, bias, targets, normalize="std", nan_policy="omit")
    expected = pf.head_flatness(features[kept], weight, bias, targets[kept], normalize="std")
    assert value.value == pytest.approx(expected.value, rel=1e-12)


def test_rows_of_class_weight_zero_count_for_the_deviations():
    """The deviation is unweighted; only ignored targets are left out."""
    features, weight, bias = head(torch.float64)
    values = [
        pf.head_flatness(
            features, weight, bias, INDICES, normalize="std",
            loss=nn.CrossEntropyLoss(weight=torch.tensor([zero, 1.0, 1.0, 1.0]).double()),
        ).value
        for zero in (0.0, 1e-300)
    ]  # fmt: skip
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_batches_without_positions_add_nothing():
    model = Tokens().double()
    empty = torch.zeros(2, 0, dtype=torch.int64)
    whole = pf.relative_flatness(model, nn.CrossEntropyLoss(), [(TOKENS, TOKEN_TARGETS)], "head")
    head_alone = [(model.embed(TOKENS), TOKEN_TARGETS), (model.embed(empty), empty)]
    values = [
        pf.relative_flatness(
            model, nn.CrossEntropyLoss(), batches, "head", forward=lambda net, b: (net.head(b[0]).transpose(1, 2), b[1])
        ).value
        for batches in (head_alone, head_alone[:1])
    ]
    assert values[0] == values[1]
    assert whole.value > 0


def test_pos_weight_of_a_squeezed_output():
    def steps(net, x):
        return net.head(x).squeeze(-1)

    model, x, y = Net(steps, head=nn.Linear(5, 1)).double(), torch.randn(4, 7, 5).double(), torch.rand(4, 7).double()
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.rand(7).double())
    assert pf.relative_flatness(model, loss, (x, y)).value == pytest.approx(truth.of_model(model, loss, x, y, "head"))

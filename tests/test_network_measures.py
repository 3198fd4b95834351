"""Measures of a network's parameters that need no sweep, against their definitions by brute force in float64."""

import math

import networks
import pytest
import torch
import truth
from cases import INDICES, LOSSES, TOKEN_TARGETS, TOKENS, C, M, N, Tokens, classifier, to
from grid import Net, normal
from residual import LOSS, residual
from residual import X as IMAGES
from residual import Y as LABELS
from test_user_state import assert_unchanged, snapshot
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import pyflatness as pf
from pyflatness.measures import MEASURES

X = normal(10, N, M)


def network(*widths, bias=True, activation=nn.ReLU, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = list(classifier(*widths, bias=bias))
        return nn.Sequential(*(activation() if isinstance(p, nn.ReLU) else p for p in parts)).double()


def one(name, model, loss, data, **options):
    report = pf.measure(model, loss, data, measures=name, **options)
    assert report.measures == (name,)
    return report[name]


# --- Fisher-Rao -------------------------------------------------------------------------------------------------------


def products(model, loss, x, y):
    """⟨θ, ∂ℓ_i/∂θ⟩ of the loss of each sample alone, by autograd."""
    found = []
    for i in range(len(x)):
        slopes = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), [*model.parameters()])
        found.append(sum((g * p).sum() for g, p in zip(slopes, model.parameters(), strict=True)))
    return torch.stack(found).detach()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU])
@pytest.mark.parametrize("loss", ["cross-entropy", "label smoothing", "squared error", "binary", "custom", "huber"])
def test_fisher_rao_by_brute_force(activation, loss):
    model = network(M, 6, 5, C, activation=activation)
    criterion, y = (to(torch.float64, part) for part in LOSSES[loss])
    expected = products(model, criterion, X, y).square().mean().sqrt()
    estimate = one("fisher_rao", model, criterion, [(X[:4], y[:4]), (X[4:], y[4:])])
    assert estimate.value == pytest.approx(float(expected), rel=1e-12)
    assert (estimate.exact, estimate.samples, estimate.method, estimate.stderr) == (True, N, "forward-mode", None)


def test_fisher_rao_weighs_terms_as_the_loss_does():
    model, weights = network(M, 6, C), torch.tensor([0.5, 2.0, 1.0, 3.0]).double()
    y = INDICES.clone()
    y[2] = -100
    plain, kept = products(model, nn.CrossEntropyLoss(), X, INDICES), y >= 0
    share = torch.where(kept, weights[INDICES], 0.0)
    expected = (share * plain.square()).sum() / share.sum()
    value = one("fisher_rao", model, nn.CrossEntropyLoss(weight=weights), (X, y)).value
    assert value == pytest.approx(math.sqrt(expected), rel=1e-12)
    summed = one("fisher_rao", model, nn.CrossEntropyLoss(weight=weights, reduction="sum"), (X, y)).value
    assert summed == pytest.approx(value * math.sqrt(share.sum()), rel=1e-12)


def test_fisher_rao_of_tokens_is_over_tokens():
    model = Tokens().double()
    terms = []
    for i, t in (TOKEN_TARGETS >= 0).nonzero().tolist():
        loss = F.cross_entropy(model(TOKENS[i : i + 1])[:, :, t], TOKEN_TARGETS[i : i + 1, t])
        slopes = torch.autograd.grad(loss, [*model.parameters()])
        terms.append(sum((g * p.detach()).sum() for g, p in zip(slopes, model.parameters(), strict=True)))
    value = one("fisher_rao", model, nn.CrossEntropyLoss(), (TOKENS, TOKEN_TARGETS)).value
    assert value == pytest.approx(float(torch.stack(terms).square().mean().sqrt()), rel=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_fisher_rao_of_relu_layers_without_bias(depth):
    """K √E⟨∂ℓ/∂f, f⟩², for K weight layers."""
    model = network(M, *[6] * (depth - 1), C, bias=False)
    f = model(X).detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(f, INDICES, reduction="sum"), f)
    expected = depth * (slope * f.detach()).sum(1).square().mean().sqrt()
    assert one("fisher_rao", model, nn.CrossEntropyLoss(), (X, INDICES)).value == pytest.approx(float(expected))


class Cubed(torch.autograd.Function):
    """An operation without forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def test_fisher_rao_without_forward_mode():
    model, other = (Net(lambda net, x, f=f: net.b(f(net.a(x))), a=nn.Linear(M, 6), b=nn.Linear(6, C)).double()
        for f in (Cubed.apply, lambda x: x**3))  # fmt: skip
    other.load_state_dict(model.state_dict())
    before = snapshot(model)
    value = one("fisher_rao", model, nn.CrossEntropyLoss(), [(X[:4], INDICES[:4]), (X[4:], INDICES[4:])]).value
    assert value == pytest.approx(one("fisher_rao", other, nn.CrossEntropyLoss(), (X, INDICES)).value, rel=1e-12)
    assert_unchanged(model, before)


def test_fisher_rao_of_a_recurrent_network():
    """Some of its kernels have no forward mode, depending on the dtype."""
    model = Net(lambda net, x: net.head(net.lstm(x)[0][:, -1]), lstm=nn.LSTM(4, 5, batch_first=True),
        head=nn.Linear(5, 3))  # fmt: skip
    data = torch.randn(6, 7, 4), torch.arange(6) % 3
    single = one("fisher_rao", model, LOSS, data).value
    model, data = model.double(), (data[0].double(), data[1])
    expected = products(model, LOSS, *data).square().mean().sqrt()
    assert one("fisher_rao", model, LOSS, data).value == pytest.approx(float(expected), rel=1e-12)
    assert single == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fisher_rao_in_half_precision(dtype):
    """The forward mode of LayerNorm overflows in float16 on inputs as small as embeddings are at first."""
    model = nn.Sequential(nn.Linear(M, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, C))
    with torch.no_grad():
        model[0].weight.mul_(0.02)
        model[0].bias.zero_()
    expected = one("fisher_rao", model, LOSS, (X.float(), INDICES)).value
    assert one("fisher_rao", model.to(dtype), LOSS, (X.to(dtype), INDICES)).value == pytest.approx(expected, rel=5e-2)


def test_fisher_rao_of_what_cannot_be_derived_says_so():
    class Once(Cubed):
        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return Cubed.backward(ctx, g)

    model = Net(lambda net, x: net.b(Once.apply(net.a(x))), a=nn.Linear(M, 6), b=nn.Linear(6, C)).double()
    with pytest.raises(
        pf.NotYetError, match="fisher_rao: the model has operations without derivatives in forward mode"
    ):
        one("fisher_rao", model, LOSS, (X, INDICES))


@pytest.mark.parametrize("policy", ["raise", "omit", "propagate"])
def test_fisher_rao_and_nan(policy):
    model, x = network(M, 6, C), X.clone()
    x[2] = torch.nan
    if policy == "raise":
        with pytest.raises(pf.NonFiniteError, match="batch 0: 1 of 6 loss terms have NaN"):
            one("fisher_rao", model, LOSS, (x, INDICES))
        return
    estimate = one("fisher_rao", model, LOSS, (x, INDICES), nan_policy=policy)
    if policy == "propagate":
        assert math.isnan(estimate.value)
        return
    kept = [0, 1, 3, 4, 5]
    assert estimate.value == pytest.approx(one("fisher_rao", model, LOSS, (X[kept], INDICES[kept])).value)
    assert (estimate.samples, estimate.omitted) == (5, 1)


# --- weight norm ------------------------------------------------------------------------------------------------------


def test_weight_norm_of_effective_weights():
    model = network(M, 6, 6, C)
    parametrizations.weight_norm(model[0])
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    report = pf.measure(model, LOSS, (X, INDICES), measures="weight_norm")
    assert report.layers == ("0", "2", "4")
    for layer in report.layers:
        weight = model.get_submodule(layer).weight
        assert report[layer, "weight_norm"].value == pytest.approx(float(weight.detach().square().sum()), rel=1e-12)
    total = sum(report[layer, "weight_norm"].value for layer in report.layers)
    assert report["weight_norm"].value == pytest.approx(total, rel=1e-12)
    some = pf.measure(model, LOSS, (X, INDICES), measures="weight_norm", layers=["0", "4"])
    assert some["weight_norm"].value == pytest.approx(total - report["2", "weight_norm"].value, rel=1e-12)


def test_weight_norm_counts_a_shared_weight_once_and_reads_no_data():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    expected = sum(float(model[k].weight.detach().double().square().sum()) for k in (0, 2))

    def untouched():
        raise AssertionError
        yield

    estimate = one("weight_norm", model, LOSS, untouched())
    assert estimate.value == pytest.approx(expected, rel=1e-12)
    assert "no data read" in repr(estimate)


# --- adaptive sharpness by Monte Carlo --------------------------------------------------------------------------------


def all_parameters_hessian(model, loss, x, y):
    names, values = zip(*((k, v.detach()) for k, v in model.named_parameters() if v.requires_grad), strict=True)
    sizes, shapes = [v.numel() for v in values], [v.shape for v in values]

    def risk(flat):
        parts = [p.view(s) for p, s in zip(flat.split(sizes), shapes, strict=True)]
        return loss(torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,)), y)

    theta = torch.cat([v.flatten() for v in values])
    return theta, truth.hessian(risk, theta)


def test_adaptive_sharpness_mc_of_a_quadratic_risk_is_the_exact_sum():
    """Of a linear model under squared error L(θ + δ) has no terms beyond the second, at any ρ."""
    model, loss, y = network(M, C), nn.MSELoss(), normal(3, N, C)
    theta, hessian = all_parameters_hessian(model, loss, X, y)
    exact = float((theta.square() * hessian.diagonal()).sum())
    for rho in (0.1, 1.0):
        estimate = pf.adaptive_sharpness_mc(model, loss, (X, y), rho=rho, draws=400)
        assert 0 < estimate.stderr < 0.1 * exact
        assert abs(estimate.value - exact) < 4 * estimate.stderr
        assert not estimate.exact


def test_adaptive_sharpness_mc_of_small_noise():
    model = network(M, 6, C, activation=nn.Tanh)
    model[0].bias.requires_grad_(False)
    theta, hessian = all_parameters_hessian(model, LOSS, X, INDICES)
    exact = float((theta.square() * hessian.diagonal()).sum())
    estimate = pf.adaptive_sharpness_mc(model, LOSS, (X, INDICES), rho=1e-3, draws=2000)
    assert estimate.stderr < 0.2 * abs(exact)
    assert abs(estimate.value - exact) < 4 * estimate.stderr


def test_adaptive_sharpness_mc_standard_error():
    """Over seeds the values scatter as their standard errors say."""
    model = network(M, 6, C)
    found = [pf.adaptive_sharpness_mc(model, LOSS, (X, INDICES), draws=16, seed=seed) for seed in range(60)]
    spread = torch.tensor([e.value for e in found]).std()
    claimed = torch.tensor([e.stderr for e in found]).square().mean().sqrt()
    assert 0.7 < float(spread / claimed) < 1.4


def test_adaptive_sharpness_mc_options():
    model, data = network(M, 6, C), (X, INDICES)
    value = pf.adaptive_sharpness_mc(model, LOSS, data, draws=4, seed=3)
    assert pf.adaptive_sharpness_mc(model, LOSS, data, draws=4, seed=3).value == value.value
    assert pf.adaptive_sharpness_mc(model, LOSS, data, draws=4, seed=4).value != value.value
    bare = pf.adaptive_sharpness_mc(model, LOSS, data, draws=4, seed=3, scaled=False)
    assert bare.value == pytest.approx(value.value * 0.1**2 / 2, rel=1e-12)
    assert bare.stderr == pytest.approx(value.stderr * 0.1**2 / 2, rel=1e-12)
    default = one("adaptive_sharpness_mc", model, LOSS, data, seed=3)
    assert default.value == pf.adaptive_sharpness_mc(model, LOSS, data, seed=3).value
    cut = pf.adaptive_sharpness_mc(model, LOSS, [(X[:5], INDICES[:5]), (X[5:], INDICES[5:])], draws=4, seed=3)
    assert cut.value == pytest.approx(value.value, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": 0.0}, "rho=0.0"),
        ({"draws": 1}, "draws=1"),
        ({"data": (X * torch.nan, INDICES), "nan_policy": "omit"}, "batch 0: .* no sample is left out"),
        ({"nan_policy": "skip"}, "nan_policy='skip' does not exist"),
        ({"data": iter([(X, INDICES)])}, "can be read once"),
        ({"data": (X * torch.nan, INDICES)}, "batch 0: the loss of the model is nan"),
    ],
)
def test_adaptive_sharpness_mc_refusals(options, message):
    data = options.pop("data", (X, INDICES))
    with pytest.raises(pf.InputError, match=message):
        pf.adaptive_sharpness_mc(network(M, 6, C), LOSS, data, **options)


def test_adaptive_sharpness_mc_may_propagate_nan():
    estimate = pf.adaptive_sharpness_mc(network(M, 6, C), LOSS, (X * torch.nan, INDICES), nan_policy="propagate")
    assert math.isnan(estimate.value)


def test_frozen_models_have_no_trainable_parameters():
    model = network(M, 6, C).requires_grad_(False)
    with pytest.raises(pf.InputError, match="none of its parameters requires gradients"):
        one("adaptive_sharpness_mc", model, LOSS, (X, INDICES))
    assert one("fisher_rao", model, LOSS, (X, INDICES)).value > 0


# --- parametrised and old-style weights -------------------------------------------------------------------------------


class Sine(nn.Module):
    def forward(self, w):
        return w.sin()


@pytest.mark.parametrize(
    "how",
    [
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Sine()),
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    ],
)
def test_weights_that_are_made_from_others_move_and_come_back(how):
    model = network(M, 6, C, activation=nn.Tanh)
    how(model[0])
    before, weight = snapshot(model), model[0].weight.detach().clone()
    theta, hessian = all_parameters_hessian(model, LOSS, X, INDICES)
    expected = float((theta.square() * hessian.diagonal()).sum())
    estimate = pf.adaptive_sharpness_mc(model, LOSS, (X, INDICES), rho=1e-3, draws=600)
    assert abs(estimate.value - expected) < 4 * estimate.stderr
    slope = products(model, LOSS, X, INDICES).square().mean().sqrt()
    assert one("fisher_rao", model, LOSS, (X, INDICES)).value == pytest.approx(float(slope), rel=1e-10)
    assert torch.equal(model[0].weight, weight)
    assert_unchanged(model, before)


# --- the user's state -------------------------------------------------------------------------------------------------

CALLS = {
    "fisher_rao": lambda *a, **o: pf.measure(*a, measures="fisher_rao", **o),
    "adaptive_sharpness_mc": lambda *a, **o: pf.adaptive_sharpness_mc(*a, draws=3, **o),
    "pac_bayes": lambda *a, **o: pf.pac_bayes(*a, steps=3, draws=2, **o),
    "weight_norm": lambda *a, **o: pf.measure(*a, measures="weight_norm", **o),
}


@pytest.fixture
def model():
    net = residual().train()
    LOSS(net(IMAGES), LABELS).backward()
    net.eval()
    net[3].conv1.weight.requires_grad_(False)
    net[8].register_forward_hook(lambda *_: None)
    return net


@pytest.mark.parametrize("name", CALLS)
def test_a_measurement_leaves_no_trace(model, name):
    before = snapshot(model)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, LABELS), batch_size=6, shuffle=True)
    CALLS[name](model, LOSS, loader)
    assert_unchanged(model, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", [*CALLS][:3])
def test_an_exception_leaves_no_trace(model, name, error):
    before, calls = snapshot(model), []

    def forward(net, batch):
        calls.append(1)
        if len(calls) > 1:
            raise error("stopped")
        return net(batch[0]), batch[1]

    batches = [(IMAGES[:10], LABELS[:10]), (IMAGES[10:], LABELS[10:])]
    with pytest.raises(error, match="stopped"):
        CALLS[name](model, LOSS, batches, forward=forward)
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", [*CALLS])
def test_values_do_not_depend_on_grad_modes_or_wrappers(model, name):
    def value(net):
        found = CALLS[name](net, LOSS, (IMAGES, LABELS))
        return (
            found.sigma
            if name == "pac_bayes"
            else found.value
            if name == "adaptive_sharpness_mc"
            else found[name].value
        )

    expected = value(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert value(model) == pytest.approx(expected, rel=1e-6)
    assert value(nn.DataParallel(model)) == pytest.approx(expected, rel=1e-6)
    assert value(torch.compile(model, backend="eager")) == pytest.approx(expected, rel=1e-6)


# --- the grid ---------------------------------------------------------------------------------------------------------

ONE_TERM = [
    name
    for name, case in networks.CASES.items()
    if isinstance(case.loss, nn.CrossEntropyLoss)
    and (case.loss.weight, case.loss.label_smoothing, case.loss.reduction) == (None, 0, "mean")
    and case.targets.shape == case.inputs.shape[:1]
    and not (case.targets == case.loss.ignore_index).any()
]


@pytest.mark.parametrize("name", ONE_TERM)
def test_fisher_rao_over_the_grid(name):
    """Per sample by autograd: ⟨θ, ∂ℓ_i/∂θ⟩ through the rows of sample i alone."""
    case = networks.CASES[name]
    model = case.build().requires_grad_(True)
    terms = F.cross_entropy(model(case.inputs), case.targets, reduction="none")
    found = []
    for term in terms:
        slopes = torch.autograd.grad(term, [*model.parameters()], retain_graph=True, allow_unused=True)
        pairs = zip(slopes, model.parameters(), strict=True)
        found.append(sum((g * p).sum() for g, p in pairs if g is not None))
    expected = float(torch.stack(found).detach().square().mean().sqrt())
    value = one("fisher_rao", model, case.loss, (case.inputs, case.targets)).value
    assert value == pytest.approx(expected, rel=1e-9)


def test_all_measures_at_once():
    model = network(M, 6, C)
    report = pf.measure(model, LOSS, (X, INDICES), measures="all")
    assert report.measures == tuple(measure.name for measure in MEASURES)
    facts = report.to_dict()
    for measure in MEASURES:
        places = {"layer" if layer else "network" for layer in facts[measure.name]}
        assert places == set(measure.granularity.split(", "))

"""Measures of all trainable parameters together, against dense Hessians in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import pyflatness as pf
from support.brute_force import X, all_parameters_hessian, diagonals, network, one
from support.cases import INDICES, C, M, N
from support.combinations import every, in_soak, in_turn
from support.convolutions import batch_norm
from support.covering import share
from support.functions import Once, Squared
from support.grid import CASES, Case, Net, classes, normal
from support.networks import SEQUENCES

LOSS = nn.CrossEntropyLoss()
MEASURED = [name for name in CASES if name not in ("gathered tokens", "frozen")]
LINEAR = [  # those of a kind that has to be certified, or an exact value would cost a product for every entry
    "mlp ReLU", "mlp LeakyReLU", "mlp PReLU", "batch norm of vectors", "gating", "siamese", "siamese, convolution",
    "tokens", "tokens, weighted sum", "windows", "flattened tokens", "pruned", "unused output", "loss: custom",
]  # fmt: skip
CURVED = ["mlp Tanh", "attention", "layer norm", "tied", "recurrent", "weight norm", "checkpointed"]


def measured(case, **options):
    names = ["sharpness", "adaptive_sharpness"]
    return pf.measure(case.build(), case.loss, (case.inputs, case.targets), measures=names, **options)


def assert_are(report, theta, diagonal):
    for name, terms in (("sharpness", diagonal), ("adaptive_sharpness", theta.square() * diagonal)):
        value, size = report[name].value, float(terms.abs().sum())
        assert value == pytest.approx(float(terms.sum()), abs=1e-10 * size + 1e-14), name


@in_turn(2, "name", MEASURED)
def test_of_every_case(name):
    report = measured(CASES[name])
    assert_are(report, *diagonals(CASES[name], "hessian"))
    assert report["sharpness"].exact
    assert report["adaptive_sharpness"].exact
    assert report["sharpness"].stderr is None
    if name in LINEAR or name.startswith("loss: "):
        assert report["sharpness"].method == "ggn"


@in_turn(2, "name", [*LINEAR[:8], *CURVED, "custom loss, Tanh"])
def test_ggn_is_exact_only_where_it_is_the_hessian(name):
    report = measured(CASES[name], curvature="ggn")
    assert_are(report, *diagonals(CASES[name], "ggn"))
    for estimate in (report["sharpness"], report["adaptive_sharpness"]):
        assert estimate.method == "ggn"
        assert estimate.exact == (name in LINEAR)


@in_turn(2, "name", [*LINEAR, *CURVED, "one output, squeezed", "tokens, binary"])
def test_interpolation_sharpness(name):
    case = CASES[name]
    estimate = one("interpolation_sharpness", case.build(), case.loss, (case.inputs, case.targets))
    assert estimate.value == pytest.approx(float(diagonals(case, "outputs")[1].sum()), rel=1e-10)
    assert estimate.exact
    assert estimate.samples == case.samples


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_interpolation_sharpness_is_the_trace_of_half_the_squares(activation):
    """Behind ReLUs at any residual, behind tanh at none."""
    model = network(M, 6, C, activation=activation)
    targets = model(X).detach() if activation is nn.Tanh else normal(3, N, C)
    _, hessian = all_parameters_hessian(model, lambda f, y: 0.5 * (f - y).square().sum() / N, X, targets)
    value = one("interpolation_sharpness", model, nn.MSELoss(), (X, targets)).value
    assert value == pytest.approx(float(hessian.trace()), rel=1e-10)


# --- parameters -------------------------------------------------------------------------------------------------------


def of(model, inputs=X, targets=INDICES, loss=LOSS):
    return Case("", lambda: model, loss, inputs, targets, (), frozenset())


class Odd(nn.Module):
    """Parameters of its own, one of which multiplies itself, and a layer whose weight is also read by other code."""

    def __init__(self):
        super().__init__()
        self.shift, self.gain = nn.Parameter(normal(1, 1, 6)), nn.Parameter(normal(2, 6))
        self.layer, self.head = nn.Linear(M, 6), nn.Linear(6, C)

    def forward(self, x):
        h = F.relu(self.layer(x) + self.shift) * self.gain.square()
        return self.head(h) + (x @ self.layer.weight.t()).abs()[:, :C]


def fully_connected(*parts):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(*(part() if isinstance(part, type) else part for part in parts)).double().eval()


class Last(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind

    def forward(self, x):
        return self.layer(x)[0][:, -1]


NETWORKS = {
    "own parameters": lambda: of(Odd().double()),
    "norms": lambda: of(
        fully_connected(nn.Conv2d(2, 4, 3, bias=False), batch_norm(4), nn.ReLU(), nn.GroupNorm(2, 4),
            nn.Conv2d(4, 3, 1), nn.InstanceNorm2d(3, affine=True), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, C)),
        normal(5, N, 2, 4, 4)),
    "grouped convolution": lambda: of(
        fully_connected(nn.Conv2d(2, 4, 3, groups=2, padding=1, stride=2), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=4),
            nn.Flatten(), nn.Linear(4, C)), normal(5, N, 2, 4, 4)),
    "lstm": lambda: of(fully_connected(Last(nn.LSTM(5, 3, batch_first=True)), nn.Linear(3, C)), SEQUENCES, INDICES[:3]),
    "attention of torch": lambda: of(
        fully_connected(nn.TransformerEncoderLayer(6, 2, 4, dropout=0.0, batch_first=True), nn.Flatten(),
            nn.Linear(18, C)), normal(6, 4, 3, 6), INDICES[:4]),
    "weight norm behind tanh": lambda: of(
        fully_connected(parametrizations.weight_norm(nn.Linear(M, 4)), nn.Tanh(), nn.Linear(4, C))),
    "pruned behind tanh": lambda: of(
        fully_connected(prune.random_unstructured(nn.Linear(M, 4), "weight", 0.3), nn.Tanh(), nn.Linear(4, C))),
    "decides by its input": lambda: of(Net(lambda net, x: net.a(x) if float(x.sum()) > 1e9 else torch.tanh(net.a(x)),
        a=nn.Linear(M, C, dtype=torch.float64))),
    "one layer": lambda: of(nn.Linear(M, C).double()),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_of_parameters_of_many_kinds(name):
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        case = NETWORKS[name]()
    report = measured(case)
    assert_are(report, *diagonals(case, "hessian"))
    assert report["sharpness"].exact
    ggn = measured(case, curvature="ggn")
    assert_are(ggn, *diagonals(case, "ggn"))


def test_embedding_bag():
    """Torch's own has no second derivative, and needs none: the model is linear in it."""
    bag, plain = nn.EmbeddingBag(7, 3, mode="sum"), nn.Embedding(7, 3)
    plain.load_state_dict(bag.state_dict())
    rest = [nn.ReLU(), nn.Linear(3, C)]
    case = of(fully_connected(Net(lambda net, x: net.all(x).sum(1), all=plain), *rest), classes(4, N, 3, of=7))
    assert_are(measured(of(fully_connected(bag, *rest), case.inputs)), *diagonals(case, "hessian"))


def test_frozen_parameters_are_left_out():
    model = network(M, 6, 5, C, activation=nn.Tanh)
    whole = diagonals(of(model), "hessian")[1]
    model[0].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    kept = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
    assert one("sharpness", model, LOSS, (X, INDICES)).value == pytest.approx(float(whole[kept].sum()), rel=1e-10)


@pytest.mark.parametrize("name", ["sharpness", "interpolation_sharpness", "adaptive_sharpness"])
def test_none_trainable(name):
    with pytest.raises(pf.errors.InputError, match="none of its parameters requires gradients"):
        one(name, network(M, 6, C).requires_grad_(False), LOSS, (X, INDICES))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_half_and_single_precision(activation):
    model = network(M, 6, C, activation=activation)
    model.insert(1, nn.LayerNorm(6).double())
    theta, diagonal = diagonals(of(model), "hessian")
    for dtype, rel in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        found = measured(of(model.to(dtype), X.to(dtype)))
        for name, terms in (("sharpness", diagonal), ("adaptive_sharpness", theta.square() * diagonal)):
            assert found[name].value == pytest.approx(float(terms.sum()), abs=rel * float(terms.abs().sum()))


@pytest.mark.parametrize(("name", "calls"), [("layer norm", 7), ("attention", 8), ("checkpointed", 12)])
def test_samples_go_together_where_the_model_takes_it(name, calls):
    """Inspection, the run (once more for attention), two looks, one for the memory, all at once, one alone."""
    case, made = CASES[name], []

    def forward(model, batch):
        made.append(1)
        return model(batch[0]), batch[1]

    one("sharpness", case.build(), case.loss, (case.inputs, case.targets), forward=forward)
    assert len(made) == calls


# --- data -------------------------------------------------------------------------------------------------------------

MIXED = ["mlp ReLU", "mlp Tanh", "layer norm", "tokens", "attention", "loss: class weights", "loss: ignored"]


@every(together=1, options=[{}, {"probes": 2}], name=[*MIXED])
def test_cuts_of_the_data_change_nothing(name, options):
    case = CASES[name]
    model, x, y = case.build(), case.inputs, case.targets
    names = ["sharpness", "interpolation_sharpness", "adaptive_sharpness"]
    whole = pf.measure(model, case.loss, (x, y), measures=names, **options)
    batches = [(x[:1], y[:1]), (x[1:], y[1:])]
    for cut in (
        pf.measure(model, case.loss, batches, measures=names, **options),
        pf.measure(model, case.loss, (x, y), measures=names, memory=1, **options),
    ):
        for measure in names:
            assert cut[measure].value == pytest.approx(whole[measure].value, rel=1e-9)
            if options:
                assert cut[measure].stderr == pytest.approx(whole[measure].stderr, rel=1e-9)


@pytest.mark.parametrize("name", MIXED)
def test_values_of_samples(name):
    case = CASES[name]
    for measure in ("sharpness", "adaptive_sharpness", "interpolation_sharpness"):
        data = case.inputs, case.targets
        estimate = one(measure, case.build(), case.loss, data, per_sample=True)
        assert estimate.per_sample.mean().item() == pytest.approx(estimate.value, rel=1e-10)
        if "loss" not in name:
            alone = one(measure, case.build(), nn.CrossEntropyLoss(), (case.inputs[:1], case.targets[:1]))
            share = estimate.per_sample[0].item()
            if case.targets.ndim == 1 or measure == "interpolation_sharpness":
                assert alone.value == pytest.approx(share, rel=1e-10)


@every(
    together=1,
    measure=["sharpness", "adaptive_sharpness", "interpolation_sharpness", "fisher_rao"],
    name=["mlp ReLU", "mlp Tanh", "layer norm"],
)
def test_nan(name, measure):
    case = CASES[name]
    model, x = case.build(), case.inputs.clone()
    x[2] = torch.nan
    kept = torch.arange(len(x)) != 2
    clean = one(measure, model, LOSS, (x[kept], case.targets[kept])).value
    by_sample = measure != "fisher_rao"
    rows = "samples" if by_sample else "loss terms have NaN"
    with pytest.raises(pf.errors.NonFiniteError, match=f"batch 0: 1 of 6 {rows}"):
        one(measure, model, LOSS, (x, case.targets))
    omitted = one(measure, model, LOSS, (x, case.targets), nan_policy="omit", per_sample=by_sample)
    assert omitted.value == pytest.approx(clean, rel=1e-10)
    assert (omitted.samples, omitted.omitted) == (5, 1)
    spread = one(measure, model, LOSS, (x, case.targets), nan_policy="propagate", per_sample=by_sample)
    assert torch.isnan(torch.tensor(spread.value))
    if not by_sample:
        return
    for estimate in (omitted, spread):
        assert estimate.per_sample.isnan().tolist() == (~kept).tolist()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = torch.nan
    with pytest.raises(
        pf.errors.NonFiniteError, match=r"(parameter '0.weight': it|layer '0': its weight) has 1 entries"
    ):
        one(measure, model, LOSS, (case.inputs, case.targets))


# --- sampled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [60, *in_soak(240)])
@pytest.mark.parametrize("name", ["mlp ReLU", *in_soak("mlp Tanh", "layer norm", "recurrent", "tokens")])
def test_coverage_of_sampled_values(name, seeds):
    """No bias, and the standard errors are what the values scatter by, to what so many seeds can tell."""
    exact, slack = measured(CASES[name]), (240 / seeds) ** 0.5
    reports = [measured(CASES[name], probes=8, seed=seed) for seed in range(seeds)]
    for measure in exact.measures:
        found = [report[measure] for report in reports]
        assert {e.method for e in found} == {("ggn" if name in LINEAR else "hessian") + "-sampled"}
        assert not any(e.exact for e in found)
        values, errors = (torch.tensor([getattr(e, what) for e in found]) for what in ("value", "stderr"))
        assert abs(float(values.mean()) - exact[measure].value) < 4 * float(values.std()) / len(found) ** 0.5
        assert float(values.std() / errors.square().mean().sqrt()) == pytest.approx(1, abs=0.15 * slack)
        assert -0.07 * slack < share((e.interval() for e in found), exact[measure].value) - 0.95 < 0.04 * slack


@pytest.mark.parametrize("seeds", [60, *in_soak(240)])
def test_coverage_of_interpolation_sharpness(seeds):
    model, data, slack = network(M, 6, C), (X, INDICES), (240 / seeds) ** 0.5
    exact = one("interpolation_sharpness", model, LOSS, data).value
    found = [one("interpolation_sharpness", model, LOSS, data, probes=8, seed=seed) for seed in range(seeds)]
    assert -0.07 * slack < share((e.interval() for e in found), exact) - 0.95 < 0.04 * slack


def test_too_many_products():
    model, data = network(M, 50, 40, C, activation=nn.Tanh), (X, INDICES)
    with pytest.raises(pf.errors.InputError, match=r"0.weight, .* takes 2340 Hessian products, .* probes="):
        one("sharpness", model, LOSS, data)
    assert one("sharpness", model, LOSS, data, probes=2).stderr > 0
    assert one("sharpness", model, LOSS, data, curvature="ggn").value > 0


# --- functions that torch did not write -------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [Squared, Once])
@pytest.mark.parametrize("layer", [nn.Linear(M, 6), nn.Sequential(nn.Linear(M, 6), nn.LayerNorm(6))])
def test_functions_that_torch_did_not_write(function, layer):
    def net(call):
        return Net(lambda net, x: net.head(call(net.first(x))), first=layer, head=nn.Linear(6, C)).double()

    model, plain = net(function.apply), net(torch.square)
    plain.load_state_dict(model.state_dict())
    with pytest.raises(pf.errors.InputError, match=r"behind parameter 'first.*weight', .* torch did not write"):
        one("sharpness", model, LOSS, (X, INDICES))
    found, expected = (measured(of(m), curvature="ggn")["sharpness"] for m in (model, plain))
    assert found.value == pytest.approx(expected.value, rel=1e-10)
    assert not found.exact
    if function is Squared:
        taken = one("sharpness", model, LOSS, (X, INDICES), curvature="hessian")
        assert taken.value == pytest.approx(one("sharpness", plain, LOSS, (X, INDICES)).value, rel=1e-10)
        assert not taken.exact
        assert "taken as they are" in repr(taken)
    else:
        with pytest.raises(pf.errors.InputError, match=r"parameter 'first.*second derivative .* is missing"):
            one("sharpness", model, LOSS, (X, INDICES), curvature="hessian")

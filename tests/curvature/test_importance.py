"""Importances of parameters: the diagonals of Hessian, GGN and empirical Fisher matrix by autograd, in float64."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.brute_force import all_parameters_hessian, diagonals
from support.combinations import every
from support.functions import Squared
from support.grid import batches, normal
from support.networks import CASES

LINEAR = [
    *("mlp ReLU", "cnn", "batch norm of vectors", "siamese", "siamese, convolution", "tokens", "pruned"),
    *("unused output", "gating", "loss: class weights sum", "loss: binary sum", "loss: squared error", "loss: custom"),
]
CURVED = ["mlp Tanh", "layer norm", "tied", "recurrent", "weight norm", "attention", "checkpointed"]


def joined(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def assert_is(found, expected, rel=1e-9):
    assert float((joined(found) - expected).abs().max()) <= rel * float(expected.abs().max()) + 1e-14


@every(name=["mlp ReLU", "mlp Tanh"], kind=["hessian", "ggn"], reduction=["mean", "sum"])
def test_a_class_without_weight_under_label_smoothing(name, kind, reduction):
    """Its samples have a part of the loss, though none of its total weight."""
    case = CASES[name]
    weight = torch.arange(case.build()(case.inputs).shape[1], dtype=torch.float64)
    case = dataclasses.replace(case, loss=nn.CrossEntropyLoss(weight, label_smoothing=0.1, reduction=reduction))
    assert bool((case.targets == 0).any())
    assert_is(pf.importance(case.build(), case.loss, batches(case), kind=kind), diagonals(case, kind)[1])


@every(together=1, name=[*LINEAR, *CURVED], kind=["hessian", "ggn"])
def test_is_the_dense_diagonal(name, kind):
    case = CASES[name]
    model = case.build()
    found = pf.importance(model, case.loss, batches(case), kind=kind)
    assert_is(found, diagonals(case, kind)[1])
    assert {key: tensor.shape for key, tensor in found.items()} == {
        key: parameter.shape for key, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert found.exact
    assert found.stderr is None
    assert found.method == ("hessian" if kind == "hessian" and name in CURVED else "ggn")
    assert found.samples == case.samples


class Lookup(nn.Module):
    """Look tokens up in a parameter by the function, with padding."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight, padding_idx=1)


@pytest.mark.parametrize("lookup", [lambda: nn.Embedding(6, 4, padding_idx=1), Lookup])
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_the_padding_of_an_embedding_has_no_derivative_at_any_sample(kind, lookup):
    torch.manual_seed(0)
    model = nn.Sequential(lookup(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))
    nn.init.normal_(model[0].weight)
    tokens, targets = torch.tensor([[1, 1, 2], [3, 0, 3], [2, 2, 2], [5, 1, 0], [4, 4, 1]]), torch.arange(5) % 3
    loss = nn.CrossEntropyLoss()
    found = pf.importance(model.double(), loss, (tokens, targets), kind=kind)
    if kind == "ggn":
        assert float(found["0.weight"][1].abs().sum()) == 0
        return
    risk, weight = loss(model(tokens), targets), model[0].weight
    (gradient,) = torch.autograd.grad(risk, weight, create_graph=True)
    rows = [torch.autograd.grad(entry, weight, retain_graph=True)[0].flatten() for entry in gradient.flatten()]
    expected = torch.stack(rows).diagonal().view(6, 4)
    torch.testing.assert_close(found["0.weight"], expected, rtol=1e-9, atol=1e-14)
    assert found.exact


class Smooth(nn.Module):
    """An embedding, a convolution, BatchNorm, and a head that is tied with the embedding."""

    def __init__(self, activation):
        super().__init__()
        self.embed, self.conv, self.norm = nn.Embedding(7, 4), nn.Conv1d(4, 4, 3, groups=2), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.activation = activation

    def forward(self, tokens):
        h = self.activation(self.norm(self.conv(self.embed(tokens).mT)))
        return self.head(h.mT).movedim(-1, 1)


def smooth(activation=F.softplus):
    torch.manual_seed(0)
    model = Smooth(activation).double()
    model.norm.running_mean.copy_(normal(1, 4))
    model.norm.running_var.copy_(normal(2, 4).square() + 0.5)
    return model.eval()


TOKENS = torch.randint(7, (6, 6), generator=torch.Generator().manual_seed(0))
NEXT = torch.randint(7, (6, 4), generator=torch.Generator().manual_seed(1))
NEXT[0, 1:] = -100
DATA = [(TOKENS[:4], NEXT[:4]), (TOKENS[4:], NEXT[4:])]
LOSS = nn.CrossEntropyLoss()


def hessian(model, x, y):
    return all_parameters_hessian(model, LOSS, x, y)[1].diagonal()


def test_a_tied_weight_counts_once_with_all_of_its_uses():
    found = pf.importance(smooth(), LOSS, DATA, kind="hessian")
    assert next(iter(found)) == "embed.weight"
    assert "head.weight" not in found
    assert_is(found, hessian(smooth(), TOKENS, NEXT))


def empirical(model, losses):
    """Σ over terms of the squared gradients of these, and the parameters they are in."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = 0
    for loss in losses:
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        total = total + torch.cat([g.flatten() for g in found]).square()
    return total


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fisher_is_of_the_gradients_of_tokens(reduction):
    model = smooth()
    weight = normal(3, 7).square() + 0.1
    loss = nn.CrossEntropyLoss(weight, ignore_index=-100, label_smoothing=0.1, reduction=reduction)
    each = F.cross_entropy(model(TOKENS), NEXT, weight, ignore_index=-100, label_smoothing=0.1, reduction="none")
    counted = NEXT.flatten() != -100
    weights = weight[NEXT.flatten()[counted]]
    terms = each.flatten()[counted] / weights.sqrt()
    expected = empirical(model, terms) / (float(weights.sum()) if reduction == "mean" else 1.0)
    found = pf.importance(model, loss, DATA, kind="fisher")
    assert_is(found, expected)
    assert found.exact
    assert found.method == "fisher"


def test_fisher_of_a_class_without_weight():
    """Its samples count for nothing; what label smoothing gives them has no finite square over their weight."""
    x, y = normal(0, 9, 4), torch.arange(9) % 3
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    weight = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight)
    terms = F.cross_entropy(model(x), y, weight, reduction="none")[y > 0] / weight[y[y > 0]].sqrt()
    assert_is(pf.importance(model, loss, (x, y), kind="fisher"), empirical(model, terms) / float(weight[y].sum()))
    for reduction in ("mean", "sum"):
        smoothed = nn.CrossEntropyLoss(weight, label_smoothing=0.1, reduction=reduction)
        for refused in (
            lambda loss: pf.importance(model, loss, (x, y), kind="fisher"),
            lambda loss: pf.measure(model, loss, (x, y), measures=["fisher_rao"]),
        ):
            with pytest.raises(pf.errors.InputError, match=r"batch 0: a loss term of weight 0 .* label_smoothing"):
                refused(smoothed)


OUTPUTS = {
    "squared error": (nn.MSELoss(), F.mse_loss),
    "squared error, sum": (nn.MSELoss(reduction="sum"), lambda f, y: F.mse_loss(f, y, reduction="sum")),
    "binary": (nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits),
    "custom": (lambda f, y: (f - y).abs().pow(3).sum(dim=1).mean(), lambda f, y: (f - y).abs().pow(3).sum()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_fisher_of_several_outputs_is_that_of_a_samples_loss(name):
    """So the same loss as a callable has the same one."""
    loss, of_one = OUTPUTS[name]
    model, x = CASES["mlp ReLU"].build(), CASES["mlp ReLU"].inputs
    y = torch.rand(len(x), model(x).shape[1], dtype=torch.float64)
    outputs = model(x)
    expected = empirical(model, [of_one(f, t) for f, t in zip(outputs, y, strict=True)])
    expected = expected / (1 if name.endswith("sum") else len(x))
    assert_is(pf.importance(model, loss, (x, y), kind="fisher"), expected)
    reduction = getattr(loss, "reduction", "mean")
    as_callable = pf.importance(model, lambda f, y: loss(f, y), (x, y), kind="fisher", reduction=reduction)
    assert_is(as_callable, expected)


def test_the_ggn_of_cross_entropy_is_the_fisher_matrix_of_the_models_own_labels():
    """The empirical one, in the mean over labels that are drawn from the model's distribution."""
    model, x = CASES["mlp ReLU"].build(), CASES["mlp ReLU"].inputs
    p = model(x).softmax(dim=1).detach()
    classes = range(p.shape[1])
    expected = 0
    for c in classes:
        log_p = model(x).log_softmax(dim=1)[:, c] * p[:, c].sqrt()
        expected = expected + empirical(model, log_p) / len(x)
    assert_is(pf.importance(model, LOSS, (x, torch.zeros(len(x)).long()), kind="ggn"), expected)


@pytest.mark.parametrize("kind", ["ggn", "fisher", "hessian"])
def test_float32_and_every_backend(kind, engine):
    expected = joined(pf.importance(smooth(F.relu), LOSS, DATA, kind=kind, backend="reference"))
    assert_is(pf.importance(smooth(F.relu), LOSS, DATA, kind=kind, backend=engine.backend, memory=1), expected)
    assert_is(pf.importance(smooth(F.relu).float(), LOSS, DATA, kind=kind, backend=engine.backend), expected, 1e-5)


@pytest.mark.parametrize("kind", ["ggn", "fisher", "hessian"])
def test_probes_are_right_in_the_mean_and_say_how_far_they_are_off(kind):
    exact = pf.importance(smooth(), LOSS, DATA, kind=kind)
    probes = 3 if kind == "fisher" else 20  # fewer than the columns
    found = pf.importance(smooth(), LOSS, DATA, kind=kind, probes=probes, seed=3)
    assert found.method == f"{kind}-sampled"
    assert not found.exact
    truth, values, errors = joined(exact), joined(found), joined(found.stderr)
    known = errors.isfinite()
    assert known.double().mean() > 0.9
    off = (values - truth)[known] / errors[known]
    assert 0.5 < float(off.square().median() / 0.455) < 2.5  # the median of χ² of one degree of freedom
    assert float((values - truth).norm() / truth.norm()) < 0.6
    many = [pf.importance(smooth(), LOSS, DATA, kind=kind, probes=3, seed=seed) for seed in range(12)]
    mean, own = sum(map(joined, many)) / 12, torch.stack([joined(each.stderr) for each in many]).square().mean(0)
    off = ((mean - truth) / (own / 12).sqrt())[own.isfinite()]
    assert 0.7 < float(off.square().mean()) < 1.5
    assert abs(float(off.mean())) < 0.6  # entries go together


def test_a_probe_alone_has_an_error_that_is_not_known():
    found = pf.importance(smooth(F.relu), LOSS, DATA, probes=1)
    assert joined(found.stderr).isnan().all()
    assert not found.exact


def test_as_many_probes_as_columns_are_exact():
    case = CASES["mlp ReLU"]
    found = pf.importance(case.build(), case.loss, batches(case), probes=100)
    assert found.stderr is None
    assert found.exact
    assert_is(found, diagonals(case, "ggn")[1])
    tanh = CASES["mlp Tanh"]
    mixed = pf.importance(tanh.build(), tanh.loss, batches(tanh), kind="hessian", probes=100)
    assert mixed.method == "hessian-sampled"


def test_values_of_a_seed_do_not_change_with_the_batches():
    one = pf.importance(smooth(), LOSS, (TOKENS, NEXT), kind="hessian", probes=3)
    other = pf.importance(smooth(), LOSS, DATA, kind="hessian", probes=3, memory=1)
    assert_is(one, joined(other))
    assert not torch.equal(joined(one), joined(pf.importance(smooth(), LOSS, DATA, kind="hessian", probes=3, seed=1)))


@pytest.mark.parametrize("probes", [None, 3])
def test_rows_are_sums_of_the_diagonal(probes):
    whole = pf.importance(smooth(F.relu), LOSS, DATA, probes=probes)
    rows = pf.importance(smooth(F.relu), LOSS, DATA, structure="rows", probes=probes)
    for name, tensor in whole.items():
        expected = tensor.flatten(1).sum(dim=1) if tensor.ndim > 1 else tensor
        torch.testing.assert_close(rows[name], expected)
        if probes:
            assert rows.stderr[name].shape == expected.shape
    model = CASES["mlp ReLU"].build()
    data = CASES["mlp ReLU"].inputs, CASES["mlp ReLU"].targets
    layer = next(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    traces = pf.block_traces(model, CASES["mlp ReLU"].loss, data, layer).diagonal()
    found = pf.importance(model, CASES["mlp ReLU"].loss, data, kind="hessian", structure="rows", layers=layer)
    torch.testing.assert_close(found[f"{layer}.weight"], traces)


def test_layers_and_frozen_parameters():
    model = smooth(F.relu)
    model.norm.requires_grad_(False)
    whole = pf.importance(model, LOSS, DATA)
    assert {*whole.uncovered} == {"norm.weight", "norm.bias"}
    found = pf.importance(model, LOSS, DATA, layers=["conv", "embed.weight"])
    assert [*found] == ["embed.weight", "conv.weight", "conv.bias"]
    assert {*found.uncovered} == {"norm.weight", "norm.bias", "head.bias"}
    total = sum(p.numel() for p in model.parameters())
    assert found.uncovered["head.bias"] == pytest.approx(7 / total)
    for name in found:
        torch.testing.assert_close(found[name], whole[name])
    with pytest.raises(pf.errors.InputError, match="layers: no parameter of 'norm' requires gradients"):
        pf.importance(model, LOSS, DATA, layers="norm")


def test_bad_input():
    for message, options in {
        "kind='trace'": {"kind": "trace"},
        "structure='columns'": {"structure": "columns"},
        "probes=0": {"probes": 0},
        "probes='adaptive'": {"probes": "adaptive"},
        "'omit': importances are of all samples together": {"nan_policy": "omit"},
        r"Hessian products.* probes=.*kind='ggn' for the GGN value": {"kind": "hessian", "max_passes": 30},
    }.items():
        with pytest.raises(pf.errors.InputError, match=message):
            pf.importance(smooth(), LOSS, DATA, **options)
    with pytest.raises(pf.errors.InputError, match=r"'conv.wieght' is not among its parameters.*conv\.weight"):
        pf.importance(smooth(), LOSS, DATA)["conv.wieght"]


def test_an_operation_without_second_derivative_is_named_by_its_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.Hardsigmoid(), nn.Linear(4, 2))
    data = normal(0, 6, 3), torch.arange(6) % 2
    message = r"parameter '0.weight', '0.bias': an operation behind it .*hardsigmoid.*; kind='ggn' gives the GGN value"
    with pytest.raises(pf.errors.InputError, match=message):
        pf.importance(model.double(), nn.CrossEntropyLoss(), data, kind="hessian")


def test_samples_that_are_not_finite():
    case = CASES["mlp ReLU"]
    x = case.inputs.clone()
    x[1, 0] = math.nan
    for kind in ("ggn", "fisher", "hessian"):
        with pytest.raises(pf.errors.NonFiniteError, match="batch 0: 1 of"):
            pf.importance(case.build(), case.loss, (x, case.targets), kind=kind)
        found = pf.importance(case.build(), case.loss, (x, case.targets), kind=kind, nan_policy="propagate")
        assert joined(found).isnan().all()
        assert not found.exact


class Gain(nn.Module):
    """A parameter without dimensions, as of a temperature."""

    def __init__(self, activation):
        super().__init__()
        self.layer, self.gain, self.activation = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0)), activation

    def forward(self, x):
        return self.activation(self.layer(x) * self.gain)


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh])
@pytest.mark.parametrize("structure", ["diagonal", "rows"])
def test_a_parameter_without_dimensions(activation, structure):
    model, data = Gain(activation).double().eval(), (normal(0, 5, 4), torch.arange(5) % 3)
    expected = hessian(model, *data)
    names = [name for name, _ in model.named_parameters()]
    sizes = [parameter.numel() for parameter in model.parameters()]
    gain = dict(zip(names, expected.split(sizes), strict=True))["gain"]
    found = pf.importance(model, LOSS, data, kind="hessian", structure=structure)
    torch.testing.assert_close(found["gain"], gain.squeeze())
    total = pf.measure(model, LOSS, data, measures="sharpness")["sharpness"]
    assert total.value == pytest.approx(float(expected.sum()))
    assert pf.importance(model, LOSS, data, kind="hessian", probes=1)["gain"].shape == ()


class Behind(nn.Module):
    def forward(self, x):
        return Squared.apply(x)


def test_a_function_that_torch_did_not_write_is_not_exact():
    model = nn.Sequential(nn.Linear(4, 3), Behind(), nn.Linear(3, 3)).double().eval()
    x, y = normal(0, 5, 4), torch.arange(5) % 3
    found = pf.importance(model, LOSS, (x, y), kind="hessian")
    assert not found.exact
    assert found.notes
    assert_is(found, hessian(model, x, y))
    assert pf.importance(model, LOSS, (x, y), kind="fisher").exact


def test_is_a_mapping_and_a_result(tmp_path):
    found = pf.importance(smooth(F.relu), LOSS, DATA, probes=2)
    assert len(found) == len([*found]) == 6
    assert {**found}.keys() == found.keys()
    assert 3 not in found
    text = str(found)
    assert "embed.weight" in text
    assert "diagonal of the GGN: not exact, method ggn-sampled, 6 samples" in text
    assert repr(found) == text
    facts = json.loads(found.to_json(tmp_path / "importance.json"))
    assert facts["values"]["conv.bias"] == found["conv.bias"].tolist()
    assert facts["kind"] == "ggn"
    assert list(found.to_frame().columns) == ["parameter", "values", "sum", "largest"]
    again = copy.deepcopy(found)
    torch.testing.assert_close(again["conv.bias"], found["conv.bias"])
    torch.save(dict(found), tmp_path / "importance.pt")
    assert torch.load(tmp_path / "importance.pt").keys() == found.keys()


@pytest.mark.parametrize("tokens", [50, 51])
def test_many_passes_say_what_probes_would_take(capsys, tokens):
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).eval()
    data = torch.arange(2 * tokens).view(2, tokens) % 7, torch.arange(2 * tokens).view(2, tokens) % 3

    def forward(model, batch):
        return model(batch[0]).mT, batch[1]

    note = f"{2 * tokens} backward passes a batch; probes=2 takes two"
    found = [
        pf.importance(model, nn.CrossEntropyLoss(), data, forward=forward, kind="ggn", probes=k) for k in (None, 2)
    ]
    shown = f"pyflatness: {note}" in capsys.readouterr().err
    assert [any(note in one for one in each.notes) for each in found] == [tokens == 51, False]
    assert shown == (tokens == 51)

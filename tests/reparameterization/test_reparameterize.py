"""Reparameterisations: the function stays, the weights move as asked for, and what cannot be followed is refused."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import pyflatness as pf
from support import networks
from support.cases import classifier
from support.combinations import in_turn
from support.convolutions import batch_norm
from support.grid import Net
from support.residual import X as IMAGES
from support.residual import residual
from support.unchanged import assert_unchanged, snapshot

FACTORS = [0.01, 0.5, 3.0, 25.0]


def positive(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 5 + 0.1


def cnn():
    """Every operation that factors go through: pooling, BatchNorm, groups, in-place and functional ones, views."""
    body = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), batch_norm(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, groups=2, padding_mode="circular"), nn.LeakyReLU(0.2, inplace=True),
        nn.ZeroPad2d(1), nn.AvgPool2d(2, ceil_mode=True), nn.Dropout(), nn.Conv2d(6, 4, 1), batch_norm(4), nn.PReLU(4),
        nn.Flatten(), nn.Linear(36, 5), batch_norm(5, 1), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip
    return body.double().eval()


X = torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LAYERS = {"0": 4, "4": 6, "9": 4, "13": 5}


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layer_wise(layer, factor):
    with torch.no_grad():
        net = cnn()
    other = pf.reparameterize(net, {layer: factor}, X)
    torch.testing.assert_close(other(X), net(X), rtol=1e-10, atol=1e-12)
    names = [*net.state_dict()]
    torch.testing.assert_close(other.get_submodule(layer).weight, factor * net.get_submodule(layer).weight)
    behind = [*LAYERS, "16"][[*LAYERS].index(layer) + 1]
    torch.testing.assert_close(other.get_submodule(behind).weight, net.get_submodule(behind).weight / factor)
    touched = {name for name in names if not torch.equal(net.state_dict()[name], other.state_dict()[name])}
    norms = {
        "0": {"1.running_mean", "1.bias"},
        "9": {"10.running_mean", "10.bias"},
        "13": {"14.running_mean", "14.bias"},
    }
    bias = {f"{layer}.bias"} if net.get_submodule(layer).bias is not None else set()
    assert touched == {f"{layer}.weight", f"{behind}.weight", *bias, *norms.get(layer, set())}


def test_neuron_wise_and_all_layers_at_once():
    with torch.no_grad():
        net = cnn()
    factors = {layer: positive(rows, seed) for seed, (layer, rows) in enumerate(LAYERS.items())}
    other = pf.reparameterize(net, factors, X)
    torch.testing.assert_close(other(X), net(X), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(other[0].weight, net[0].weight * factors["0"].view(-1, 1, 1, 1))
    taps = torch.stack([factors["4"][:3], factors["4"][3:]]).flatten().view(1, 6, 1, 1)
    torch.testing.assert_close(other[9].weight, net[9].weight * factors["9"].view(-1, 1, 1, 1) / taps)
    columns = factors["9"].repeat_interleave(9)  # channels flattened with their 3 x 3 pixels
    torch.testing.assert_close(other[13].weight, net[13].weight * factors["13"][:, None] / columns)
    again = pf.reparameterize(other, {layer: 1 / values for layer, values in factors.items()}, X)
    torch.testing.assert_close([*again.state_dict().values()], [*net.state_dict().values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_modules_as_keys_and_whole_data_sets(dtype):
    net = classifier(5, 7, 6, 4).to(dtype)
    x, y = torch.randn(9, 5, dtype=dtype), torch.arange(9) % 4
    other = pf.reparameterize(net, {net[0]: 20, "2": positive(6)}, [(x[:4], y[:4]), (x[4:], y[4:])])
    torch.testing.assert_close(other(x), net(x))
    assert not torch.equal(other[4].weight, net[4].weight)


def test_a_copy_by_default_and_in_place_on_request():
    net = classifier(5, 7, 4)
    x, before = torch.randn(3, 5), snapshot(net)
    other = pf.reparameterize(net, {"0": 2.0}, x)
    assert_unchanged(net, before)
    assert other is not net
    assert [p.requires_grad for p in other.parameters()] == [True] * 4
    assert pf.reparameterize(net, {"0": 2.0}, x, inplace=True) is net
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_layer_that_two_layers_read_and_one_that_is_called_twice():
    branches = Net(
        lambda net, x: net.one(torch.relu(net.body(x))) + net.two(F.leaky_relu(net.body(-x)).view(-1, 2, 3).flatten(1)),
        body=nn.Linear(5, 6), one=nn.Linear(6, 4), two=nn.Linear(6, 4),
    ).double()  # fmt: skip
    x = torch.randn(4, 5).double()
    for factors in (3.0, positive(6)):
        other = pf.reparameterize(branches, {"body": factors}, x)
        torch.testing.assert_close(other(x), branches(x))
        for name in ("one", "two"):
            torch.testing.assert_close(other.get_submodule(name).weight, branches.get_submodule(name).weight / factors)


def test_inside_a_residual_block():
    net = residual()
    other = pf.reparameterize(net, {"3.conv1": positive(6), "5.conv1": 4.0}, IMAGES)
    torch.testing.assert_close(other(IMAGES), net(IMAGES), rtol=1e-4, atol=1e-5)
    assert torch.equal(other[3].norm1.weight, net[3].norm1.weight)
    assert torch.equal(other[3].norm1.running_var, net[3].norm1.running_var)


def test_gates_and_scalars_and_pooled_sequences():
    gated = Net(
        lambda net, x: net.head((0.5 * torch.relu(net.body(x)) * torch.sigmoid(net.gate(x)) / 3).mean(1)),
        body=nn.Linear(5, 6), gate=nn.Linear(5, 6), head=nn.Linear(6, 4),
    ).double()  # fmt: skip
    x = torch.randn(4, 3, 5).double()
    torch.testing.assert_close(pf.reparameterize(gated, {"body": positive(6)}, x)(x), gated(x))
    with pytest.raises(pf.errors.InputError, match=r"layer 'gate': its output goes into 'sigmoid' in the model itself"):
        pf.reparameterize(gated, {"gate": 2.0}, x)


def test_gpt2_layers():
    transformers = pytest.importorskip("transformers")
    net = nn.Sequential(*(transformers.pytorch_utils.Conv1D(6, 5), nn.ReLU(), transformers.pytorch_utils.Conv1D(4, 6)))
    x = torch.randn(4, 5)
    other = pf.reparameterize(net, {"0": positive(6)}, x)
    torch.testing.assert_close(other(x), net(x))
    torch.testing.assert_close(other[2].weight, net[2].weight / positive(6).float()[:, None])


REFUSED = {
    "residual": (residual, {"3.conv2": 2.0}, IMAGES, r"layer '3.conv2': .* 'add_' \(a sum, as of a residual .* '3'"),
    "residual stream": (residual, {"0": 2.0}, IMAGES, r"layer '0': .* 'add_' \(a sum"),
    "head": (residual, {"8": 2.0}, IMAGES, "layer '8': its output is the model's"),
    "smooth": (lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)), {"0": 2.0}, torch.randn(3, 5),
        "layer '0': its output goes into 'gelu' in module '1'"),
    "ReLU6": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU6(), nn.Linear(4, 3)), {"0": 2.0}, torch.randn(3, 5),
        "'hardtanh' in module '1'"),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), {"0": 2.0},
        torch.randn(3, 5), r"'native_layer_norm' \(a LayerNorm\) in module '1'"),
    "mixed neurons": (lambda: Net(lambda net, x: net.b(torch.relu(net.a(x)).mean(1, keepdim=True)), a=nn.Linear(5, 4),
        b=nn.Linear(1, 3)), {"a": [1.0, 2, 3, 4]}, torch.randn(3, 5), "'mean' in the model itself"),
    "concatenation": (lambda: Net(lambda net, x: net.b(torch.cat([net.a(x), x], 1)), a=nn.Linear(5, 4),
        b=nn.Linear(9, 3)), {"a": 2.0}, torch.randn(3, 5), r"'cat' \(a concatenation\)"),
    "unscaled elsewhere": (lambda: Net(lambda net, x: net.b(torch.relu(net.a(x))) + net.b(x), a=nn.Linear(5, 5),
        b=nn.Linear(5, 3)), {"a": 2.0}, torch.randn(3, 5), r"'b' behind it is called 2 times"),
    "control flow": (lambda: Net(lambda net, x: net.b(torch.relu(net.a(x)) if net.a(x).std() else x),
        a=nn.Linear(5, 5), b=nn.Linear(5, 3)), {"a": 2.0}, torch.randn(3, 5), r"layer 'a': its output goes into"),
    "parametrised": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.ReLU(), nn.Linear(4, 3)),
        {"0": 2.0}, torch.randn(3, 5), "layer '0': its weight is made by a parametrisation"),
    "parametrised behind": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(4, 3))), {"0": 2.0}, torch.randn(3, 5), "layer '2': its weight is"),
    "wrong number": (lambda: classifier(5, 4, 3), {"0": [1.0, 2.0]}, torch.randn(3, 5), r"one number or 4, .*\(2,\)"),
    "negative": (lambda: classifier(5, 4, 3), {"0": -1.0}, torch.randn(3, 5), "positive numbers .* got -1.0"),
    "no number": (lambda: classifier(5, 4, 3), {"0": "x"}, torch.randn(3, 5), "numbers are wanted, got 'x'"),
    "no mapping": (lambda: classifier(5, 4, 3), 2.0, torch.randn(3, 5), "a mapping from layers to numbers"),
    "after the model": (lambda: classifier(5, 4, 3), {"2": 2.0}, torch.randn(3, 5), "layer '2': its output"),
    "twice": (lambda: classifier(5, 4, 3), {"0": 2.0, "re:0": 3.0}, torch.randn(3, 5), "layer '0' is there twice"),
    "no layer": (lambda: classifier(5, 4, 3), {"fc": 2.0}, torch.randn(3, 5), "nothing in the model matches 'fc'"),
    "idle": (lambda: Net(lambda net, x: net.b(x), a=nn.Linear(5, 4), b=nn.Linear(5, 3)), {"a": 2.0}, torch.randn(3, 5),
        "layer 'a' did not run"),
    "an unseen change": (lambda: Net(lambda net, x: net.b(torch.from_numpy(net.a(x).numpy()).tanh()), a=nn.Linear(5, 4),
        b=nn.Linear(4, 3)), {"a": [1.0, 2, 3, 4]}, torch.randn(3, 5), "layer 'a'|is another function"),
    "training": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), {"0": 2.0},
        torch.randn(3, 5), "training mode"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_place_and_change_nothing(case):
    make, factors, x, message = REFUSED[case]
    net = make()
    before = snapshot(net)
    with pytest.raises(pf.errors.InputError, match=message):
        pf.reparameterize(net, factors, x, inplace=True)
    assert_unchanged(net, before)


def test_tied_weights_are_refused():
    net = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    net[2].weight = net[0].weight
    with pytest.raises(pf.errors.InputError, match=r"layer '0': its weight is tied with 2"):
        pf.reparameterize(net, {"0": 2.0}, torch.randn(3, 5))


def test_a_model_that_cannot_be_copied():
    net = classifier(5, 4, 3)
    net.kept = (x for x in itertools.count())
    with pytest.raises(pf.errors.InputError, match="cannot be copied"):
        pf.reparameterize(net, {"0": 2.0}, torch.randn(3, 5))


def test_the_copy_is_independent():
    net = classifier(5, 4, 3)
    other = pf.reparameterize(net, {"0": 1.0}, torch.randn(3, 5))
    state = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        other[0].weight.zero_()
    assert torch.equal(net[0].weight, state["0.weight"])


def test_wrapped_models():
    net, x = classifier(5, 4, 3), torch.randn(3, 5)
    expected = pf.reparameterize(net, {"0": 3.0}, x)
    assert isinstance(expected, nn.Sequential)
    for wrapped in (nn.DataParallel(copy.deepcopy(net)), torch.compile(copy.deepcopy(net), backend="eager")):
        assert torch.equal(pf.reparameterize(wrapped, {"0": 3.0}, x)[0].weight, expected[0].weight)
        assert pf.reparameterize(wrapped, {"0": 3.0}, x, inplace=True) is wrapped
        torch.testing.assert_close(wrapped(x), net(x))


def test_inside_of_a_transformer_layer():
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)).eval()
    x = torch.randn(4, 5, 8)
    other = pf.reparameterize(net, {"0.linear1": positive(16)}, x)
    torch.testing.assert_close(other(x), net(x))
    assert not torch.equal(other[0].linear2.weight, net[0].linear2.weight)
    with pytest.raises(pf.errors.InputError, match=r"layer '0.linear2': .* 'add' \(a sum, .* in module '0'"):
        pf.reparameterize(net, {"0.linear2": 2.0}, x)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_and_pools_of_every_dimension(dims):
    conv, pool = (getattr(nn, f"{kind}{dims}d") for kind in ("Conv", "MaxPool"))
    mean, largest = (getattr(nn, f"Adaptive{kind}Pool{dims}d") for kind in ("Avg", "Max"))
    parts = conv(2, 6, 3), nn.ReLU(), pool(2), conv(6, 4, 1, groups=2), nn.ReLU(), mean(2), conv(4, 6, 1), largest(1)
    net = nn.Sequential(*parts, nn.Flatten(), nn.Linear(6, 3)).double()
    x = torch.randn(3, 2, *(8,) * dims).double()
    other = pf.reparameterize(net, {"0": positive(6), "3": positive(4, 1), "6": positive(6, 2)}, x)
    torch.testing.assert_close(other(x), net(x))
    for layer in ("0", "3", "6", "9"):
        assert not torch.equal(other.get_submodule(layer).weight, net.get_submodule(layer).weight)


def test_what_a_forward_does_behind_the_model():
    net, batch = classifier(5, 4, 3), {"x": torch.randn(3, 5), "mean": torch.randn(5)}

    def forward(model, batch):
        assert len(batch["x"]) == 3, "not to be cut"
        return model(batch["x"] - batch["mean"]) + 1, None

    other = pf.reparameterize(net, {"0": 3.0}, [batch], forward=forward)
    torch.testing.assert_close(other[0].weight, 3 * net[0].weight)
    with pytest.raises(pf.errors.InputError, match=r"layer '2': .* 'add' .* in the model itself"):
        pf.reparameterize(net, {"2": 3.0}, [batch], forward=forward)


@in_turn(2, "name", networks.CASES)
def test_every_network_of_the_grid_keeps_its_function_or_is_refused(name):
    case = networks.CASES[name]
    net = case.build()
    for layer in case.layers:
        for factor in (7.0, None):
            rows = len(net.get_submodule(layer).weight)
            try:
                other = pf.reparameterize(net, {layer: positive(rows) if factor is None else factor}, case.inputs)
            except pf.errors.InputError:
                continue
            torch.testing.assert_close(other(case.inputs), net(case.inputs), rtol=1e-8, atol=1e-10)
            moved = [k for k, value in other.state_dict().items() if not torch.equal(value, net.state_dict()[k])]
            assert moved, layer

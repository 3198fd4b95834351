"""Normalisations are layers where they are named; by default, and under patterns of other layers, nothing changes."""

import copy

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.model import kinds
from support.grid import Net, normal

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 5, 3, 4), torch.arange(5) % 3


def network(norm=None):
    torch.manual_seed(0)
    block = nn.Sequential(norm or nn.LayerNorm(4), nn.Linear(4, 4))
    return Net(
        lambda net, x: net.head(net.last(net.block(x).relu().mean(1))), block=block, last=nn.RMSNorm(4),
        head=nn.Linear(4, 3),
    ).double()  # fmt: skip


def measured(layers, norm=None, **options):
    return pf.measure(network(norm), LOSS, (X, Y), layers=layers, measures="trace", **options)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, "block.1 head"),
        ("*", "block.1 head"),
        ("block.*", "block.1"),
        ("re:.*", "block.1 head"),
        ("block.0", "block.0"),
        ("type:LayerNorm", "block.0"),
        (["type:LayerNorm", "type:RMSNorm"], "block.0 last"),
        ("l*t", "last"),
        ("re:block.0|last", "block.0 last"),
        (["last", "head", "*"], "block.1 last head"),
    ],
)
def test_a_pattern_means_normalisations_where_it_means_no_other_layer(layers, expected):
    assert measured(layers).layers == tuple(expected.split())


def test_a_module_is_a_selector_and_the_network_is_the_sum_of_what_is_named():
    net = network()
    report = pf.measure(net, LOSS, (X, Y), layers=[net.block[0], net.head], measures="sweep")
    assert report.layers == ("block.0", "head")
    parts = [report[layer, "relative_flatness"].value for layer in report.layers]
    assert report["relative_flatness"].value == pytest.approx(sum(parts))
    assert [*report.uncovered] == ["block.1.weight"]
    assert pf.relative_flatness(net, LOSS, (X, Y), "block.0").value == pytest.approx(parts[0])


class Shifted(nn.Module):
    """A norm whose weight is added to 1, as Gemma's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt() * (1 + self.weight)


class ShiftedNorm(Shifted):
    pass


class SquaredNorm(nn.Module):
    """One whose output is not linear in its weight, which is 1 as it was initialised."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight**2


class SharedNorm(SquaredNorm):
    """One that divides its weight by the mean of it."""

    def forward(self, x):
        return x * self.weight / self.weight.mean()


class LastNorm2d(nn.LayerNorm):
    """A normalisation of the last dimension whose name says otherwise."""


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (nn.LayerNorm(4, elementwise_affine=False), r"'block\.0' is a LayerNorm; what can be measured is"),
        (Shifted(), r"'block\.0' is a Shifted; what can be measured is"),
        (ShiftedNorm(), r"'block\.0' \(ShiftedNorm\): its output is not γ ∘ x̂ \+ β of its weight γ"),
        (SquaredNorm(), r"'block\.0' \(SquaredNorm\): its output is not γ ∘ x̂ \+ β of its weight γ"),
        (SharedNorm(), r"'block\.0' \(SharedNorm\): its output is not γ ∘ x̂ \+ β of its weight γ"),
        (LastNorm2d(4), r"a LastNorm2d has a weight of \(4,\) and gives \(2, 3, 4\), whose dimension 1 do not match"),
    ],
)
def test_what_is_no_scale_is_refused(norm, message):
    with pytest.raises(pf.errors.InputError, match=message):
        measured("block.0", norm)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("norm", "size"),
    [
        (nn.LayerNorm((2, 3)), (2, 3)),
        (nn.RMSNorm(5), (2, 5)),
        (nn.BatchNorm2d(3), (3, 2, 2)),
        (nn.GroupNorm(1, 3), (3, 4)),
    ],
)
def test_features_are_what_the_layer_gives_with_ones_bit_by_bit(norm, size, dtype):
    norm, x = copy.deepcopy(norm).to(dtype).eval(), normal(1, 4, *size).to(dtype)
    expected = norm(x).detach()
    with torch.no_grad():
        norm.weight.add_(torch.rand_like(norm.weight))
    assert torch.equal(kinds.find(norm).inputs_of((x,), {}).view(expected.shape), expected)


def test_a_training_batch_norm_is_refused():
    net = network(nn.BatchNorm1d(3))
    with pytest.raises(pf.errors.InputError, match=r"call model.eval\(\)"):
        pf.measure(net.train(), LOSS, (X, Y), layers="block.0", measures="trace")


def test_there_are_no_features_in_front_to_perturb_and_no_jacobian():
    with pytest.raises(pf.errors.InputError, match="layer 'last' is of type RMSNorm: there is no feature vector"):
        pf.theory.feature_robustness(network(), LOSS, (X, Y), "last", rho=[0.1], probes=2)
    with pytest.raises(pf.errors.InputError, match="'last' has an input with a derivative"):
        pf.measure(network(), LOSS, (X, Y), layers="last", measures="nmls")


def test_conv_affine_leaves_a_scale_as_it_is():
    net = Net(lambda net, x: net.head(net.norm(net.conv(x)).relu().mean(2)), conv=nn.Conv1d(3, 4, 2),
        norm=nn.BatchNorm1d(4), head=nn.Linear(4, 3)).double().eval()  # fmt: skip
    found = [
        pf.measure(net, LOSS, (X, Y), layers="norm", conv=conv)["norm", "relative_flatness"].value
        for conv in ("filter", "affine")
    ]
    assert found[0] == found[1] > 0


def test_norms_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from support import weight_truth

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    config = transformers.Qwen3Config(vocab_size=11, num_key_value_heads=1, max_position_embeddings=8, **sizes)
    model = transformers.Qwen3ForCausalLM(config).double().eval()
    ids = torch.randint(11, (3, 5))
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.rand_like(parameter)
    report = pf.measure(model, data=[{"input_ids": ids}], layers="*norm", measures=["relative_flatness", "trace"])
    assert len(report.layers) == 5  # of a block two, queries, keys; the last
    for layer in report.layers:
        expected = weight_truth.relative_flatness_and_trace(model, lambda m: m(ids, labels=ids).loss, layer)
        found = [report[layer, measure].value for measure in report.measures]
        assert found == pytest.approx(expected, rel=2e-5)  # they normalise in float32
        assert report[layer, "trace"].exact

"""nn.MultiheadAttention: its projections are layers, whole or in parts, as the forward pass uses them."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyflatness as pf
from support.grid import Net, normal
from support.parameter_truth import ParameterTruth
from support.unchanged import assert_unchanged, snapshot

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 4, 3, 4), torch.arange(4) % 3
MEASURES = ["relative_flatness", "trace", "adaptive_sharpness", "lambda_max"]
PARTS = {"[q]": slice(0, 4), "[k]": slice(4, 8), "[v]": slice(8, 12)}


def attending(attend, forward, **options):
    def run(net, x):
        return net.head(torch.tanh(forward(net.attend, x)).mean(1))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        attend, head = attend(**options), nn.Linear(4, 3)
        for parameter in attend.parameters():
            nn.init.normal_(parameter, std=0.7)
    return Net(run, attend=attend, head=head).double().eval()


def mha(**options):
    return nn.MultiheadAttention(4, 2, **options)


def itself(attend, x):
    return attend(x, x, x)[0]


def in_order_of_tokens(attend, x):
    x = x.transpose(0, 1)
    return attend(x, x, x, need_weights=False)[0].transpose(0, 1)


def on_memory(attend, x):
    memory = x.flip(1).tanh()
    return attend(x[:, :2], memory, memory)[0]


def on_three(attend, x):
    return attend(x, x.flip(1).tanh(), x.roll(1, 1).sin(), need_weights=False)[0]


def narrow(attend, x):
    return attend(x, x[..., :3], x[..., :2])[0]


WHOLE = {"in_proj_weight": ("in_proj_weight", slice(None))}
IN_PARTS = {f"in_proj_weight{label}": ("in_proj_weight", rows) for label, rows in PARTS.items()}
SEPARATE = {f"{part}_proj_weight": (f"{part}_proj_weight", slice(None)) for part in "qkv"}
CASES = {
    "packed": (attending(mha, itself, batch_first=True), WHOLE),
    "packed, tokens first": (attending(mha, in_order_of_tokens), WHOLE),
    "no biases": (attending(mha, itself, batch_first=True, bias=False), WHOLE),
    "more keys": (attending(mha, itself, batch_first=True, add_bias_kv=True, add_zero_attn=True), WHOLE),
    "cross, keys are values": (attending(mha, on_memory, batch_first=True), IN_PARTS),
    "cross": (attending(mha, on_three, batch_first=True), IN_PARTS),
    "separate": (attending(mha, narrow, batch_first=True, kdim=3, vdim=2), SEPARATE),
}


@pytest.mark.parametrize("name", CASES)
def test_projections_are_layers(name):
    model, weights = CASES[name]
    before = snapshot(model)
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    assert_unchanged(model, before)
    assert report.layers == (*(f"attend.{layer}" for layer in weights), "attend.out_proj", "head")
    assert report.uncovered == {}
    for layer, (parameter, rows) in {**weights, "out_proj": ("out_proj.weight", slice(None))}.items():
        expected = ParameterTruth(model, LOSS, X, Y, f"attend.{parameter}", rows=rows)
        for measure, value in expected.values(expected.hessian).items():
            if measure in MEASURES:
                found = report[f"attend.{layer}", measure]
                assert found.value == pytest.approx(value, rel=1e-8), (layer, measure)
                assert found.exact
    chosen = f"attend.{next(iter(weights))}"
    assert pf.verify(model, LOSS, (X, Y), chosen)
    one = pf.relative_flatness(model, LOSS, [(X[:1], Y[:1]), (X[1:], Y[1:])], chosen, per_sample=True)
    assert one.value == pytest.approx(report[chosen, "relative_flatness"].value, rel=1e-10)
    assert float(one.per_sample.mean()) == pytest.approx(one.value, rel=1e-10)


@pytest.mark.parametrize("label", PARTS)
def test_parts_of_a_weight_that_is_used_whole_on_request(label):
    model, layer = CASES["packed"][0], f"attend.in_proj_weight{label}"
    expected = ParameterTruth(model, LOSS, X, Y, "attend.in_proj_weight", rows=PARTS[label])
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES, layers=[layer, "attend.out_proj"])
    for measure in MEASURES:
        assert report[layer, measure].value == pytest.approx(expected.values(expected.hessian)[measure], rel=1e-8)
    assert report.uncovered == pytest.approx({"attend.in_proj_weight": 32 / 76, "head.weight": 12 / 76})
    assert pf.verify(model, LOSS, (X, Y), layer)


def test_all_parts_on_request_have_the_whole_trace():
    model = CASES["packed"][0]
    every = [f"attend.in_proj_weight{label}" for label in PARTS]
    parts = pf.measure(model, LOSS, (X, Y), measures=["trace"], layers=every)
    whole = pf.measure(model, LOSS, (X, Y), measures=["trace"], layers=["attend.in_proj_weight"])
    assert parts["trace"].value == pytest.approx(whole["trace"].value, rel=1e-10)


def test_whole_in_one_place_and_in_parts_in_another():
    model = attending(mha, lambda attend, x: itself(attend, x) + on_three(attend, x), batch_first=True)
    report = pf.measure(model, LOSS, (X, Y), measures=["trace"])
    for label, rows in PARTS.items():
        expected = ParameterTruth(model, LOSS, X, Y, "attend.in_proj_weight", rows=rows)
        value = expected.values(expected.hessian)["trace"]
        assert report[f"attend.in_proj_weight{label}", "trace"].value == pytest.approx(value, rel=1e-9)
    assert report.uncovered == {}
    with pytest.raises(pf.errors.InputError, match=r"on a part of it.*in_proj_weight\[q\].* may be measured instead"):
        pf.relative_flatness(model, LOSS, (X, Y), "attend.in_proj_weight")


def test_under_activation_checkpointing():
    plain = attending(mha, itself, batch_first=True)
    model = attending(mha, lambda attend, x: checkpoint(lambda x: attend(x, x, x)[0], x, use_reentrant=False),
        batch_first=True)  # fmt: skip
    for measures in (["relative_flatness", "trace"], ["lambda_max"]):
        one, other = (pf.measure(net, LOSS, (X, Y), measures=measures) for net in (plain, model))
        assert one.layers == other.layers
        for layer in one.layers:
            for measure in measures:
                assert one[layer, measure].value == pytest.approx(other[layer, measure].value, rel=1e-12)


def test_encoder_layers_take_no_fast_path_and_no_nested_tensors():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    mask = torch.tensor([[False, False, True]]).expand(4, -1)
    model = Net(lambda net, x: net.head(net.encoder(x, src_key_padding_mask=mask[: len(x)])[:, :2].mean(1)),
        encoder=encoder, head=nn.Linear(4, 3)).double().eval()  # fmt: skip
    for parameter in model.parameters():  # with gradients switched off torch would take its fused kernel
        parameter.requires_grad_(False)
    report = pf.measure(model, LOSS, (X, Y), measures=["trace"])
    assert report.uncovered == {}
    name = "encoder.layers.1.self_attn.in_proj_weight"
    model.requires_grad_()
    expected = ParameterTruth(model, LOSS, X, Y, name)
    assert report[name, "trace"].value == pytest.approx(expected.values(expected.hessian)["trace"], rel=1e-8)


def test_jacobians():
    model = CASES["packed"][0]
    found = pf.representation(model, LOSS, (X, Y))
    assert "attend.in_proj_weight" in found.layers
    assert found.uncovered == {}


def test_rescaling_refuses_uses_of_parameters():
    with pytest.raises(pf.errors.InputError, match=r"'attend.in_proj_weight' is no plain layer"):
        pf.reparameterize(CASES["packed"][0], {"attend.in_proj_weight": 2.0}, X)


def test_every_measure_there_is():
    """Those over all parameters too, which run the model at other weights while layers are measured."""
    model = CASES["packed"][0]
    report = pf.measure(model, LOSS, (X, Y), measures="all")
    separate = Net(model.run, attend=Separate(model.attend), head=model.head)
    other = pf.measure(separate, LOSS, (X, Y), measures="all")
    assert report.skipped.keys() == other.skipped.keys()
    for measure in ("sharpness", "adaptive_sharpness", "fisher_rao", "interpolation_sharpness", "mls"):
        assert report[measure].value == pytest.approx(other[measure].value, rel=1e-9), measure
    for measure in report.measures:
        if (("attend.out_proj", measure)) in report._estimates:
            ours, theirs = report["attend.out_proj", measure], other["attend.out_proj", measure]
            assert ours.value == pytest.approx(theirs.value, rel=1e-8), measure


def test_attention_may_run_by_another_kernel_in_a_later_batch():
    """Torch chooses it by shapes and masks; that of the second batch has no second derivative."""

    def forward(net, x):
        q, k, v = (layer(x).view(len(x), -1, 2, 4).transpose(1, 2) for layer in (net.q, net.k, net.v))
        fused = nn.functional.scaled_dot_product_attention
        mixed = (q @ k.mT / 2).softmax(-1) @ v if len(x) == 1 else fused(q, k, v)
        return net.head(mixed.transpose(1, 2).flatten(2).mean(1))

    torch.manual_seed(0)
    net = Net(forward, **{name: nn.Linear(8, 8) for name in ("q", "k", "v", "head")}).double().eval()
    x, y = normal(0, 3, 5, 8), torch.arange(3)
    found = pf.relative_flatness(net, nn.CrossEntropyLoss(), [(x[:1], y[:1]), (x[1:], y[1:])], "q")
    assert found.exact
    assert float(found) == pytest.approx(
        float(pf.relative_flatness(net, nn.CrossEntropyLoss(), (x, y), "q")), rel=1e-10
    )


class Separate(nn.Module):
    """The same attention, written out with layers; ``in_proj`` has the packed weight."""

    def __init__(self, attend):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(4, 12), nn.Linear(4, 4)
        with torch.no_grad():
            self.in_proj.weight, self.in_proj.bias = attend.in_proj_weight, attend.in_proj_bias
            self.out_proj.weight, self.out_proj.bias = attend.out_proj.weight, attend.out_proj.bias

    def forward(self, x, *_):
        q, k, v = (part.unflatten(2, (2, 2)).transpose(1, 2) for part in self.in_proj(x).chunk(3, dim=2))
        mixed = torch.softmax(q @ k.mT / 2**0.5, dim=3) @ v
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), None


def test_hooks_of_the_user_are_called_as_ever():
    model, called = CASES["packed, tokens first"][0], []
    handles = [module.register_forward_hook(lambda module, *_: called.append(module)) for module in model.modules()]
    model(X)
    once = called[:]
    called.clear()
    pf.measure(model, LOSS, (X, Y), measures=["trace"])
    for handle in handles:
        handle.remove()
    assert model.attend.out_proj not in once
    assert set(called) == set(once)
    assert len(called) % len(once) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_and_autocast(dtype):
    exact = pf.measure(CASES["cross"][0], LOSS, (X, Y), measures=["trace"])
    model = copy.deepcopy(CASES["cross"][0]).float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = pf.measure(model, LOSS, (X.float(), Y), measures=["trace"], curvature="ggn")
    expected = pf.measure(CASES["cross"][0], LOSS, (X, Y), measures=["trace"], curvature="ggn")
    assert found.layers == exact.layers
    for layer in found.layers:
        rel = 1e-4 if dtype == torch.float32 else 0.2
        assert found[layer, "trace"].value == pytest.approx(expected[layer, "trace"].value, rel=rel)

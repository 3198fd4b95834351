"""Quantised copies of the model as formats: a plan mixes their layers, prices the mixture, and applies it."""

import copy
import itertools

import pytest
import torch
from torch import nn

import pyflatness as pf

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
Copy = pf.changes.Copy


class Tokens(nn.Module):
    """A table, experts that are one parameter, a smooth layer, and a head that may be the table."""

    def __init__(self, tied=False):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.experts = nn.Parameter(0.5 * torch.randn(2, 4, 4))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        h = self.table(tokens)
        h = (self.inner(h) + h.mean(dim=1, keepdim=True)).tanh()
        h = h + nn.functional.linear(h, self.experts[0]).tanh() + nn.functional.linear(h, self.experts[1])
        return self.head(h).movedim(-1, 1)


def _texts(tied=False, dtype=torch.float64):
    torch.manual_seed(1)
    return Tokens(tied).to(dtype).eval(), (torch.randint(7, (12, 5)), torch.randint(7, (12, 5)))


def _images():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5), nn.Tanh(), nn.Linear(5, 4)]
    return nn.Sequential(*layers).double().eval(), (torch.randn(12, 2, 5, 5).double(), torch.randint(4, (12,)))


def _rounded(model, step, offset=0.0):
    """A copy whose weights are on a grid."""
    made = copy.deepcopy(model)
    for values in (values for values in made.parameters() if values.ndim > 1):
        values.data = ((values.data / step + offset).round() - offset) * step
    return made


def _copies(model):
    return [Copy("coarse", 3.0, _rounded(model, 0.1)), Copy("shifted", 3.5, _rounded(model, 0.1, 0.4))]


@pytest.mark.parametrize("case", [_images, _texts, lambda: _texts(tied=True)])
def test_a_mixture_is_priced_as_its_change_and_applied_to_the_bit(case):
    model, data = case()
    formats = _copies(model)
    some = pf.allocate(model, CE, data, [*formats, "int4", "keep"], bits=64, measured=False, probes=None)
    names = dict.fromkeys(some._plan.weights)
    kinds = ["coarse", "shifted", "int4", "keep"]
    fixed = {name: kinds[place % len(kinds)] for place, name in enumerate(names)}
    plan = pf.allocate(model, CE, data, [*formats, "int4", "keep"], bits=64, fixed=fixed, probes=None)
    assert {plan.choice[some._plan.weights[name].modules[0]] for name in names} >= {"coarse", "shifted"}

    mixed = plan.apply(model)
    held = {one.name: one.model for one in formats}
    changed = {}
    for name, one in fixed.items():
        weight = plan._plan.weights[name]
        if one in held:
            assert torch.equal(weight.in_model(mixed), weight.in_model(held[one]))
        changed[name] = weight.in_model(mixed).detach() - weight.in_model(model).detach()
    report = pf.cost_of_change(model, CE, data, changed, curvature="ggn")
    assert float(plan.frontier([64]).plans[0].predicted) == pytest.approx(report["predicted"].value, rel=1e-9)
    assert plan.loss_change == pytest.approx(report["loss_change"].value, rel=1e-9)
    bits = {"coarse": 3.0, "shifted": 3.5, "int4": 4, "keep": 64}
    sizes = {name: plan._plan.weights[name].matrix.numel() for name in names}
    assert plan.bits == pytest.approx(sum(bits[fixed[name]] * sizes[name] for name in names) / sum(sizes.values()))


class Sum(nn.Module):
    """Three layers beside each other: the loss is quadratic in all weights together."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 3, bias=False) for _ in "abc")

    def forward(self, x):
        return self.a(x) + self.b(x) + self.c(x)


def test_a_choice_among_two_copies_is_the_best_of_all_mixtures():
    torch.manual_seed(3)
    model, x = Sum().double().eval(), torch.randn(400, 6).double()
    data = x, model(x).detach()
    copies = {name: copy.deepcopy(model) for name in ("up", "down")}
    for name, rounding in (("up", torch.ceil), ("down", torch.floor)):
        for values in copies[name].parameters():
            values.data = 0.2 * rounding(values.data / 0.2)  # so that the errors of two layers cancel
    losses = {}
    for names in itertools.product(copies, repeat=3):
        mixed = Sum().double()
        for layer, name in zip("abc", names, strict=True):
            mixed.get_submodule(layer).weight.data.copy_(copies[name].get_submodule(layer).weight)
        losses[names] = MSE(mixed(x), data[1]).item()
    plan = pf.allocate(model, MSE, data, [Copy(name, 3, made) for name, made in copies.items()], bits=3)
    best = min(losses, key=losses.get)
    assert losses[best] < 0.7 * min(losses["up", "up", "up"], losses["down", "down", "down"])
    assert tuple(plan.choice[layer] for layer in "abc") == best
    assert plan.loss_change == pytest.approx(losses[best], rel=1e-9)


def test_layers_together_have_their_own_weights_of_one_copy():
    model, data = _images()
    plan = pf.allocate(model, CE, data, _copies(model), bits=3.5, together=[["0", "3", "5"]], fixed={"0": "shifted"})
    made, wanted = plan.apply(model), _rounded(model, 0.1, 0.4)
    assert all(torch.equal(made[place].weight, wanted[place].weight) for place in (0, 3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_state_dicts_and_half_precision(dtype):
    model, data = _texts(tied=True, dtype=dtype)
    held = _rounded(model, 0.1).state_dict()
    del held["head.weight"]  # as files have a weight that is shared under one of its names
    plan = pf.allocate(model, CE, data, [Copy("rounded", 3, held)], bits=3)
    made = plan.apply(model)
    assert torch.equal(made.head.weight, held["table.weight"])
    assert torch.equal(made.experts, held["experts"])
    assert made.head.weight is made.table.weight


def test_a_layer_that_the_copy_left_alone_takes_the_bits_of_its_dtype():
    model, data = _images()
    made = _rounded(model, 0.1)
    made[5].weight.data.copy_(model[5].weight)
    plan = pf.allocate(model, CE, data, [Copy("rounded", 3, made), "int8"], bits=64, fixed={"5": "rounded"})
    assert plan.to_frame().set_index("layer")["bits"]["5"] == 64
    with pytest.raises(pf.errors.InputError, match="the cheapest choice"):
        pf.allocate(model, CE, data, [Copy("rounded", 3, made)], bits=3)


def _wrong(kind):
    model, data = _images()
    held = _rounded(model, 0.1).state_dict()
    if kind == "no weight":
        del held["3.weight"]
    elif kind == "another shape":
        held["3.weight"] = held["3.weight"].t()
    elif kind == "packed":
        held["3.weight"] = held["3.weight"].to(torch.int8)
    elif kind == "scaled":
        held["3.weight"] = held["3.weight"].to(torch.float8_e4m3fn)
    else:
        held["3.weight"][0, 0] = torch.nan
    return model, data, held


WRONG = {
    "no weight": "layer '3': format 'mine': a weight '3.weight' of shape (5, 27) in floating point is wanted, got none",
    "another shape": "layer '3': format 'mine': a weight .* got one of shape (27, 5) and torch.float64",
    "packed": "layer '3': format 'mine': a weight .* got one of shape (5, 27) and torch.int8",
    "scaled": "layer '3': format 'mine': a weight .* torch.float8_e4m3fn",
    "NaN": "layer '3': format 'mine': .*NaN",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_copy_without_the_weight_of_a_layer_is_named_with_the_layer(kind):
    model, data, held = _wrong(kind)
    message = WRONG[kind].replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(pf.errors.InputError, match=message):
        pf.allocate(model, CE, data, [Copy("mine", 3, held), "int4"], bits=4)
    if kind != "NaN":
        plan = pf.allocate(model, CE, data, [Copy("mine", 3, held), "int4"], bits=4, fixed={"3": "int4"})
        assert plan.choice["3"] == "int4"


def test_no_tool_is_told_of_a_copy(tmp_path):
    model, data = _images()
    plan = pf.allocate(model, CE, data, [Copy("mine", 3, _rounded(model, 0.1))], bits=3)
    with pytest.raises(pf.errors.InputError, match="layer '0': torchao cannot be told of its format 'mine'"):
        plan.export("torchao", tmp_path / "plan.json")
    with pytest.raises(pf.errors.InputError, match="torchao cannot be told of the format 'mine'"):
        pf.allocate(model, CE, data, ["int4", Copy("mine", 3, model)], bits=4, tool="torchao")


def test_weights_that_torchao_packed_are_those_that_it_gives_back():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 4)).eval(), (torch.randn(20, 32), torch.randn(20, 4))
    packed = copy.deepcopy(model)
    quantization.quantize_(packed, quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4))
    made = pf.allocate(model, MSE, data, [Copy("int4 of torchao", 4, packed)], bits=4).apply(model)
    assert torch.equal(made[0].weight, packed[0].weight.dequantize())

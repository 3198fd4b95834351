"""Models and data that other people have: each is measured as what it is, or refused by an error that names it."""

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.errors import InputError
from support.combinations import every

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
Y, TOKENS = torch.arange(8) % 3, torch.arange(32).reshape(8, 4) * 5 % 7


def hessian(model, *names, x=X, y=Y, loss=F.cross_entropy):
    """The dense Hessian of the mean loss in parameters, one behind the other."""
    parameters = [model.get_parameter(name) for name in names]
    gradients = torch.autograd.grad(loss(model(x), y), parameters, create_graph=True)
    entries = [entry for gradient in gradients for entry in gradient.flatten()]
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in entries]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def small():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_causal_lm_says_what_batches_it_takes():
    with pytest.raises(InputError, match="causal_lm takes batches that are mappings with `input_ids`, got a tuple"):
        pf.measure(nn.Linear(4, 3), "cross_entropy", (TOKENS, TOKENS), forward=pf.causal_lm)


class Experts(nn.Module):
    """Two experts in products of batches, whose results it takes views of."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(*shape).double()) for shape in ((2, 6, 5), (2, 5, 3)))

    def forward(self, x):
        inner = torch.bmm(x.repeat(2, 1).view(2, -1, 6), self.up)
        return torch.bmm(inner.view(-1, 5).tanh().view(2, -1, 5), self.down).view(-1, 3).view(2, -1, 3).sum(0)


def test_views_of_products_with_experts_weights():
    model = Experts()
    report = pf.measure(model, "cross_entropy", (X, Y), measures=["trace"])
    assert report.layers == ("up", "down")
    for name in report.layers:
        assert report[name, "trace"].value == pytest.approx(float(hessian(model, name).trace()), rel=1e-10)


class Complex(nn.Module):
    """Real weights, at an odd place among all, that are used as complex numbers."""

    def __init__(self):
        super().__init__()
        self.shift, self.weight = (nn.Parameter(torch.randn(*shape).double()) for shape in ((3,), (6, 3, 2)))

    def forward(self, x):
        weight = torch.view_as_complex(self.weight)
        return (x.to(weight.dtype) @ weight).abs() + self.shift


def test_the_spectrum_of_real_weights_that_are_used_as_complex_numbers():
    model = Complex()
    largest = torch.linalg.eigvalsh(hessian(model, "shift", "weight"))[-3:].flip(0)
    found = pf.spectrum(model, "cross_entropy", (X, Y), k=3)
    assert torch.allclose(torch.tensor([*found.eigenvalues[:3]]).double(), largest, rtol=1e-8)


def test_layers_of_a_script_are_refused_by_name():
    with pytest.warns(DeprecationWarning, match="script"):
        model = torch.jit.script(nn.Sequential(nn.Linear(6, 3)))
    with pytest.raises(InputError, match="compiled by torch"):
        pf.layers(model)


class Packed(torch.Tensor):
    """A weight in eight bits that answers to few operations, as those of libraries for quantisation."""

    @staticmethod
    def __new__(cls, codes, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __init__(self, codes, scale):
        pass

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return F.linear(args[0], args[1].codes * args[1].scale, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of Packed")


def test_weights_of_a_class_of_their_own_are_left_out_by_name():
    model = small()
    codes = torch.randint(-8, 8, (5, 6), dtype=torch.int8)
    model[0].weight = nn.Parameter(Packed(codes, torch.tensor(0.1, dtype=torch.float64)), requires_grad=False)
    report = pf.measure(model, "cross_entropy", (X, Y), measures=["trace"])
    assert report.layers == ("2",)
    assert "0.weight" in report.uncovered
    assert "its Linear keeps its weight as a Packed of test_other" in report.why_uncovered["0.weight"]
    assert not report["trace"].exact
    assert report["2", "trace"].value == pytest.approx(float(hessian(model, "2.weight").trace()), rel=1e-10)
    with pytest.raises(InputError, match="keeps its weight as a Packed"):
        pf.measure(model, "cross_entropy", (X, Y), layers="0")


def lookup(module):
    return nn.Sequential(module, nn.Flatten(), nn.Linear(20, 3)).double()


@every(together=1, kind=["ggn", "hessian", "fisher"], option=["sparse", "scale_grad_by_freq"])
def test_options_of_gradients_change_no_value(kind, option):
    tokens = TOKENS % 3  # some more than once in a sample
    sparse = lookup(nn.Embedding(7, 5, **{option: True}))
    dense = copy.deepcopy(sparse)
    setattr(dense[0], option, False)
    one, other = (pf.importance(model, "cross_entropy", (tokens, Y), kind=kind) for model in (sparse, dense))
    assert float(one["0.weight"].sum()) == pytest.approx(float(other["0.weight"].sum()), rel=1e-12)
    names = ["adaptive_sharpness", "fisher_rao", "sharpness", "trace"]
    one, other = (pf.measure(model, "cross_entropy", (tokens, Y), measures=names) for model in (sparse, dense))
    for name in names:
        assert one[name].value == pytest.approx(other[name].value, rel=1e-12)
    assert getattr(sparse[0], option)


@pytest.mark.parametrize(
    "call", [pf.measure, pf.importance, pf.spectrum, pf.worst_case_sharpness, pf.verify], ids=lambda call: call.__name__
)
def test_data_that_were_made_in_inference_mode(call):
    model = small()
    with torch.inference_mode():
        data = X * 1, Y * 1
    assert str(call(model, "cross_entropy", data)) == str(call(model, "cross_entropy", (X, Y)))
    assert data[0].is_inference()


Outputs = namedtuple("Outputs", "logits features")


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x):
        features = self.body(x).tanh()
        return Outputs(self.head(features), features)


def test_a_loss_of_ones_own_is_given_all_fields_of_a_named_tuple():
    def loss(outputs, targets):
        return F.cross_entropy(outputs.logits, targets) + outputs.features.square().mean()

    model = Named()
    report = pf.measure(model, loss, (X, Y), measures=["trace"])
    for name in ("body", "head"):
        expected = float(hessian(model, f"{name}.weight", loss=loss).trace())
        assert report[name, "trace"].value == pytest.approx(expected, rel=1e-10)
    assert pf.verify(model, loss, (X, Y), layer="body")
    report = pf.measure(model, "cross_entropy", (X, Y), measures=["trace"])
    expected = float(hessian(model, "head.weight", loss=lambda o, y: F.cross_entropy(o.logits, y)).trace())
    assert report["head", "trace"].value == pytest.approx(expected, rel=1e-10)


def test_measures_that_cannot_be_had_leave_the_others():
    data = X, torch.randn(8, 3, dtype=torch.float64)
    report = pf.measure(small(), "mse_loss", data, measures=["trace", "pac_bayes", "relative_flatness"])
    assert report.measures == ("trace", "relative_flatness")
    assert "an accuracy needs classes" in report.skipped["pac_bayes"]
    assert "skipped pac_bayes: " in str(report)
    for names in (["pac_bayes"], ["pac_bayes", "pac_bayes_magnitude"]):
        with pytest.raises(InputError, match="an accuracy needs classes"):
            pf.measure(small(), "mse_loss", data, measures=names)


class Coarse(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(6, 5).double(), nn.Linear(5, 3).double(), dtype

    def forward(self, x):
        return self.last(F.softmax(self.first(x), -1, dtype=self.dtype).double())


def test_fewer_bits_inside_of_a_float64_model_have_a_note():
    def notes(dtype):
        return " ".join(pf.measure(Coarse(dtype), "cross_entropy", (X, Y), measures=["trace"])["trace"].notes)

    assert "computes in float32 in places, though its parameters are float64" in notes(torch.float32)
    assert "in places" not in notes(torch.float64)

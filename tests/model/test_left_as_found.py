"""What a model sets in itself while it runs is as it was afterwards; weights that it computes are those in question."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import pyflatness as pf
from pyflatness.errors import InputError
from pyflatness.reparameterization.reparameterize import duplicate
from support.traces import LOSS, changed, everything, of_model

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
Y = torch.arange(6) % 3


class Table(nn.Module):
    """Keeps a table that grows with its input, how long it is, and a buffer that it makes with it."""

    def __init__(self):
        super().__init__()
        self.head, self.length, self.table = nn.Linear(4, 3), 0, None

    def forward(self, x):
        if len(x) > self.length:
            self.length, self.table = len(x), torch.zeros(len(x), 1, dtype=x.dtype)
            self.register_buffer("grown", torch.zeros(len(x)))
        return self.head(x + self.table[: len(x)])


def test_attributes_that_belong_together_are_put_back_together():
    net = Table().double().eval()
    before = everything(net)
    pf.measure(net, LOSS, (X, Y), measures="sweep")
    assert changed(before, everything(net)) == []
    net(X[:2])
    before = everything(net)
    for call in (pf.relative_flatness, pf.measures.adaptive_sharpness_mc, pf.measures.pac_bayes):
        call(net, LOSS, (X, Y))
        assert changed(before, everything(net)) == []
    assert net(X).shape == (6, 3)


class Remembering(nn.Linear):
    """Computes its weight at the first call, and keeps it."""

    made = None

    def forward(self, x):
        if self.made is None:
            self.made = 2 * self.weight
        return nn.functional.linear(x, self.made, self.bias)


def test_no_weight_of_a_perturbed_run_is_kept():
    net = Remembering(4, 3).double().eval()
    expected = net(X)
    del net.made
    pf.measures.adaptive_sharpness_mc(net, LOSS, (X, Y), probes=2)
    assert "made" not in vars(net)
    assert net(X).equal(expected)


def test_the_weight_of_pruning_still_has_its_graph():
    net = nn.Sequential(nn.Linear(4, 5), prune.l1_unstructured(nn.Linear(5, 3), "weight", 2)).double().eval()
    net(X)
    weight = net[1].weight
    pf.relative_flatness(net, LOSS, (X, Y))
    assert net[1].weight is weight
    assert weight.requires_grad


def test_generators_of_the_model_s_own_are_put_back():
    class Drawing(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 0 * torch.rand(1, generator=self.generator)

    net = nn.Sequential(Drawing(4, 5), nn.Linear(5, 3)).double().eval()
    net[0].generator = torch.Generator().manual_seed(1)
    before = net[0].generator.get_state()
    pf.relative_flatness(net, LOSS, (X, Y))
    assert net[0].generator.get_state().equal(before)


@pytest.fixture
def parametrised():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), parametrizations.weight_norm(nn.Linear(5, 3))).double().eval()


def test_a_parametrised_weight_is_computed_once_and_then_again(parametrised):
    """Once while the model is measured, at every run with other parameters."""
    seen, made = [], parametrised[2].parametrizations.weight
    made.register_forward_hook(lambda *call: seen.append(call[-1]))
    pf.relative_flatness(parametrised, LOSS, (X, Y))
    assert len({id(weight) for weight in seen}) == 1
    seen.clear()
    pf.measures.adaptive_sharpness_mc(parametrised, LOSS, (X, Y), probes=2)
    assert len({tuple(weight.flatten().tolist()) for weight in seen}) == 5
    assert "forward" not in vars(made)


def test_also_in_a_call_inside_of_a_call(parametrised):
    def value():
        return pf.measure(parametrised, LOSS, (X, Y), layers="0", measures="fisher_rao")["fisher_rao"].value

    expected, before, found = value(), of_model(parametrised), []

    def forward(model, batch):
        outputs = model(batch[0])
        found.append(value())
        return outputs, batch[1]

    pf.generalization_gap(parametrised, LOSS, (X, Y), (X, Y), forward=forward)
    assert set(found) == {expected}
    assert changed(before, of_model(parametrised)) == []


def test_also_inside_of_torch_s_cache(parametrised):
    expected = pf.measures.adaptive_sharpness_mc(parametrised, LOSS, (X, Y), probes=2)
    with nn.utils.parametrize.cached():
        parametrised(X)
        assert pf.measures.adaptive_sharpness_mc(parametrised, LOSS, (X, Y), probes=2).value == expected.value


def test_copies_are_of_the_user_s_model(parametrised):
    before = of_model(parametrised)
    copied = pf.reparameterize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), *parametrised).double().eval(), {"0": 2.0}, X)
    assert [*vars(copied[4].parametrizations.weight)] == [*vars(parametrised[2].parametrizations.weight)]
    assert copied[4].weight.equal(parametrised[2].weight)
    assert pf.verify(copy.deepcopy(parametrised).float(), LOSS, (X.float(), Y))
    assert changed(before, of_model(parametrised)) == []


@pytest.mark.parametrize("elsewhere", ["closure", "list", "method"])
def test_parameters_are_others_wherever_the_model_is_called_from(elsewhere):
    """A forward that calls the model itself, modules in a list, a bound method: all run with perturbed parameters."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
            self.blocks, self.method = [self.body], self.body.forward

        def forward(self, x):
            first = {"list": self.blocks[0], "method": self.method, "closure": self.body}[elsewhere]
            return self.head(torch.tanh(first(x)))

    net = Net().double().eval()
    plain = nn.Sequential(net.body, nn.Tanh(), net.head)
    forward = (lambda model, batch: (net(batch[0]), batch[1])) if elsewhere == "closure" else None
    expected = pf.measures.adaptive_sharpness_mc(plain, LOSS, (X, Y), probes=2)
    assert pf.measures.adaptive_sharpness_mc(net, LOSS, (X, Y), probes=2, forward=forward).value == expected.value
    expected = pf.relative_flatness(plain, LOSS, (X, Y), "0")
    if elsewhere != "method":  # which no hook sees
        assert float(pf.relative_flatness(net, LOSS, (X, Y), net.body, forward=forward)) == float(expected)


class Leaky(nn.Module):
    """A neuron whose potential is kept from call to call, where spiking libraries keep theirs."""

    def __init__(self, kept, rate=0.5):
        super().__init__()
        self.kept, self.rate = kept, rate

    def forward(self, x):
        before = self.kept["v"] if isinstance(self.kept, dict) else self.kept[-1]
        v = x + (self.rate * before if isinstance(before, float) or before.shape == x.shape else 0)
        if isinstance(self.kept, dict):
            self.kept["v"] = v.detach()
        else:
            self.kept.append(v.detach())
        return v.tanh()


def leaky(kept, rate=0.5):
    return nn.Sequential(nn.Linear(4, 5), Leaky(kept, rate), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("kept", [{"v": torch.zeros(6, 5)}, [0.0], {"v": 0.0}])
def test_a_model_that_keeps_its_state_is_refused_and_left_as_it_was(kept):
    model, before = leaky(kept), kept.copy()
    name = "1.kept['v']" if isinstance(kept, dict) else "1.kept"
    with pytest.raises(InputError, match="its outputs depend on the calls before: it keeps") as why:
        pf.measure(model, LOSS, (X, Y))
    assert name in str(why.value)
    assert "from call to call (reset it in forward=" in str(why.value)
    assert len(kept) == len(before)
    assert [*map(id, kept.values() if isinstance(kept, dict) else kept)] == [
        *map(id, before.values() if isinstance(before, dict) else before)
    ]
    assert model[1].kept is kept


def test_one_that_is_reset_has_the_values_of_one_call_alone():
    def forward(model, batch):
        model[1].kept["v"] = 0.0
        return model(batch[0]), batch[1]

    model, plain = leaky({"v": torch.ones(6, 5)}), leaky({"v": 0.0}, rate=0.0)
    plain.load_state_dict(model.state_dict())
    held = model[1].kept["v"]
    found = pf.measure(model, LOSS, [(X[:4], Y[:4]), (X[4:], Y[4:])], measures=["trace"], forward=forward)
    expected = pf.measure(plain, LOSS, (X, Y), measures=["trace"])
    for layer in ("0", "2"):
        assert found[layer, "trace"].value == pytest.approx(expected[layer, "trace"].value, rel=1e-12)
    assert model[1].kept["v"] is held


def test_what_is_kept_beside_the_outputs_is_put_back_and_no_reason_to_refuse():
    class Noting(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.calls, self.log, self.sum = 0, [], torch.zeros(3, dtype=torch.float64)
            self.nested = {"of": {"rows": [1]}}

        def forward(self, x):
            y = super().forward(x)
            self.calls += 1
            self.log.append(y.detach())
            self.sum += y.detach().sum(0)
            self.nested["of"]["rows"].append(len(x))
            return y

    model = Noting().double()
    pf.measure(model, LOSS, (X, Y))
    assert (model.calls, model.log, model.nested) == (0, [], {"of": {"rows": [1]}})
    assert not model.sum.any()


class Marked(nn.Linear):
    """A layer that asks its parameters for what a library has marked them by."""

    def forward(self, x):
        return super().forward(x / self.weight.width + self.bias.shift)


@pytest.fixture
def marked():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Marked(5, 3)).double()
    model[2].weight.width, model[2].bias.shift = 2.0, 0.5
    return model


@pytest.mark.parametrize(
    "call",
    [
        pf.measure,
        functools.partial(pf.measure, measures="adaptive_sharpness"),
        functools.partial(pf.measure, measures="sharpness"),
        functools.partial(pf.measure, per_sample=True),
        functools.partial(pf.verify, layer="2"),
        pf.importance,
        functools.partial(pf.importance, kind="hessian"),
        functools.partial(pf.importance, kind="fisher"),
        pf.spectrum,
        pf.worst_case_sharpness,
    ],
)
def test_stand_ins_of_parameters_have_their_marks(marked, call):
    before = [{**vars(parameter)} for parameter in marked.parameters()]
    call(marked, LOSS, (X, Y))
    assert [vars(parameter) for parameter in marked.parameters()] == before


def test_a_copy_has_the_marks_of_parameters_too(marked):
    copied = duplicate(marked)
    assert copied[2].weight.width == 2.0
    assert torch.equal(copied(X), marked(X))


def test_marks_that_the_forward_pass_changes_are_put_back(marked):
    marked[2].weight.calls = 0

    def count(module, args):
        module.weight.calls += 1

    marked[2].register_forward_pre_hook(count)
    pf.measure(marked, LOSS, (X, Y))
    assert marked[2].weight.calls == 0

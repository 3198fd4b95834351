"""Weights of recurrent modules and cells, which are run step by step, against the dense Hessian through torch's own."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import pyflatness as pf
from support import weight_truth
from support.grid import normal
from support.unchanged import assert_unchanged, snapshot

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 4, 3, 2), torch.arange(4) % 3
MEASURES = ["relative_flatness", "trace"]


class Net(nn.Module):
    """A recurrent module, and a head over the mean of its outputs and the last state."""

    def __init__(self, cell, width):
        super().__init__()
        self.cell, self.head = cell.double(), nn.Linear(width, 3).double()
        for number, parameter in enumerate(self.parameters()):
            parameter.data = normal(10 + number, *parameter.shape) * 0.6
        self.given = None

    def forward(self, x):
        steps = x if self.cell.batch_first else x.transpose(0, 1)
        outputs, states = self.cell(steps) if self.given is None else self.cell(steps, self.given(len(x)))
        end = (states[0] if isinstance(states, tuple) else states)[-1]
        return self.head(torch.cat([outputs.mean(1 if self.cell.batch_first else 0), end], dim=1))


class Cells(nn.Module):
    """A cell that the model itself calls for each step."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell.double(), nn.Linear(2, 3).double()
        for number, parameter in enumerate(self.parameters()):
            parameter.data = normal(10 + number, *parameter.shape) * 0.6

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


MODELS = {
    "LSTM": lambda: Net(nn.LSTM(2, 2, batch_first=True), 4),
    "LSTM, steps first": lambda: Net(nn.LSTM(2, 2), 4),
    "LSTM, both ways": lambda: Net(nn.LSTM(2, 2, batch_first=True, bidirectional=True), 6),
    "LSTM, projected": lambda: Net(nn.LSTM(2, 3, batch_first=True, proj_size=2), 4),
    "LSTM, two layers": lambda: Net(nn.LSTM(2, 2, num_layers=2, batch_first=True, bias=False), 4),
    "GRU": lambda: Net(nn.GRU(2, 2, batch_first=True), 4),
    "GRU, two layers both ways": lambda: Net(nn.GRU(2, 1, num_layers=2, bidirectional=True), 3),
    "RNN": lambda: Net(nn.RNN(2, 2, batch_first=True, bias=False), 4),
    "RNN, ReLU": lambda: Net(nn.RNN(2, 2, nonlinearity="relu", num_layers=2), 4),
    "LSTMCell": lambda: Cells(nn.LSTMCell(2, 2)),
    "GRUCell": lambda: Cells(nn.GRUCell(2, 2)),
    "RNNCell": lambda: Cells(nn.RNNCell(2, 2, nonlinearity="relu")),
}


def truth(model, layer, x=X, y=Y):
    """Return κ and trace by nested autograd through torch's own operations."""
    hessian = weight_truth.hessian(model, lambda net: LOSS(net(x), y), layer)
    w = model.get_parameter(layer).detach()
    blocks = hessian.view(*w.shape, *w.shape)
    return float(torch.einsum("sm,tm,sjtj->", w, w, blocks)), float(hessian.trace())


def weights(model):
    return [name for name, parameter in model.named_parameters() if parameter.ndim == 2 and "head" not in name]


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_dense_hessian(name):
    model = MODELS[name]().eval()
    before, outputs = snapshot(model), model(X)
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    assert_unchanged(model, before)
    assert torch.equal(model(X), outputs)
    assert report.layers == (*weights(model), "head")
    assert report.uncovered == {}
    for layer in weights(model):
        found = tuple(report[layer, measure].value for measure in MEASURES)
        assert found == pytest.approx(truth(model, layer), rel=1e-8, abs=1e-12), layer
        assert report[layer, "trace"].exact


def test_one_weight_by_name_and_by_sample():
    model = MODELS["LSTM"]()
    estimate = pf.relative_flatness(model, LOSS, (X, Y), "cell.weight_hh_l0", per_sample=True)
    assert estimate.value == pytest.approx(truth(model, "cell.weight_hh_l0")[0], rel=1e-8)
    for i in range(len(X)):
        one = truth(model, "cell.weight_hh_l0", X[i : i + 1], Y[i : i + 1])[0]
        assert float(estimate.per_sample[i]) == pytest.approx(one, rel=1e-7, abs=1e-12)
    assert pf.verify(model, LOSS, (X, Y), "cell.weight_hh_l0")
    sampled = pf.relative_flatness(model, LOSS, (X, Y), "cell.weight_ih_l0", probes=200)
    assert abs(sampled.value - truth(model, "cell.weight_ih_l0")[0]) < 5 * sampled.stderr


def test_states_that_are_given():
    model = MODELS["LSTM"]()
    model.given = lambda samples: tuple(normal(number, 1, 1, 2).expand(-1, samples, -1) for number in (3, 4))
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES, forward=lambda net, batch: (net(batch[0]), batch[1]))
    assert report.layers[:2] == ("cell.weight_ih_l0", "cell.weight_hh_l0")
    found = tuple(report["cell.weight_hh_l0", measure].value for measure in MEASURES)
    assert found == pytest.approx(truth(model, "cell.weight_hh_l0"), rel=1e-8)


class OfOneSequence(nn.Module):
    """Calls its cell on sequences without a dimension for samples."""

    def __init__(self):
        super().__init__()
        self.net = MODELS["GRU, two layers both ways"]()

    def forward(self, x):
        outputs, _ = self.net.cell(x[0])
        return self.net.head(torch.cat([outputs.mean(0), outputs[0, :1]])[None])


def test_a_sequence_without_a_dimension_for_samples():
    model = OfOneSequence()
    report = pf.measure(model, LOSS, [(X[:1], Y[:1])], measures=MEASURES)
    assert report.uncovered == {}
    name = "net.cell.weight_hh_l1_reverse"
    found = tuple(report[name, measure].value for measure in MEASURES)
    assert found == pytest.approx(truth(model, name, X[:1], Y[:1]), rel=1e-8)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = MODELS["LSTM"]()

    def forward(self, x):
        packed = rnn.pack_padded_sequence(x, [3] * len(x), batch_first=True)
        outputs, _ = rnn.pad_packed_sequence(self.net.cell(packed)[0], batch_first=True)
        return self.net.head(torch.cat([outputs.mean(1), outputs[:, 0]], dim=1))


class Doubled(nn.LSTM):
    def forward(self, input, hx=None):  # noqa: A002
        outputs, state = super().forward(input, hx)
        return 2 * outputs, state


def doubled():
    model = MODELS["LSTM"]()
    model.cell.__class__ = Doubled
    return model


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (Packed, "it is called on packed sequences; pad them, or pass batches of one length"),
        (doubled, "its weight is used in lstm"),
    ],
)
def test_what_is_not_run_step_by_step_is_named(build, why):
    model = build()
    report = pf.measure(model, LOSS, (X, Y), measures=["trace"])
    assert len(report.layers) == 1
    assert {*report.why_uncovered.values()} == {why}
    assert not report["trace"].exact
    name = next(name for name in dict(model.named_parameters()) if "weight_ih" in name)
    with pytest.raises(pf.errors.InputError, match=r"packed sequences|used in lstm"):
        pf.relative_flatness(model, LOSS, (X, Y), name)


def test_dropout_between_layers_is_refused_in_training_mode_alone():
    model = Net(nn.LSTM(2, 2, num_layers=2, batch_first=True, dropout=0.5), 4).train()
    with pytest.raises(pf.errors.InputError, match="dropout"):
        pf.relative_flatness(model, LOSS, (X, Y), "cell.weight_hh_l1")
    model.eval()
    found = pf.relative_flatness(model, LOSS, (X, Y), "cell.weight_hh_l1").value
    assert found == pytest.approx(truth(model, "cell.weight_hh_l1")[0], rel=1e-8)


def test_in_single_precision_and_on_several_batches():
    model = MODELS["LSTM, both ways"]()
    expected = truth(model, "cell.weight_hh_l0_reverse")[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = [(X[:3].float(), Y[:3]), (X[3:].float(), Y[3:])]
        found = pf.measure(model.float(), LOSS, batches, layers="cell.weight_hh_l0_reverse", measures=["trace"])
    assert found["cell.weight_hh_l0_reverse", "trace"].value == pytest.approx(expected, rel=1e-4)

"""``pf.track``: a record is what ``pf.measure`` gives at that moment, and the training is the one without records."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import pyflatness as pf
from support import trainings
from support.cases import classifier

X, Y = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
LOSS = nn.CrossEntropyLoss()


class Regularised(nn.Module):
    """A network with BatchNorm and Dropout, of which one part stays in eval mode whatever ``train()`` is told."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.drop, self.head = (
            nn.Linear(5, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.3),
            nn.Linear(6, 3),
        )
        self.frozen = nn.BatchNorm1d(5).eval()

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.body(self.frozen(x))))))


def trained(record=False, epochs=2, **options):
    """The weights, buffers and states of generators after a training, and its history."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, the global one
    model = Regularised()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader = DataLoader(
        TensorDataset(X, Y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"weights": ["live", "ema"], "averaged": averaged, "measures": ["trace", "lambda_max"]} | options
    history, step = pf.track(model, LOSS, loader, **given), 0
    model.train()
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            if record:
                gradients = [parameter.grad.clone() for parameter in model.parameters()]
                modes = [module.training for module in (*model.modules(), *averaged.modules())]
                history.record(step=step, epoch=epoch)
                assert all(map(torch.equal, gradients, (parameter.grad for parameter in model.parameters())))
                assert modes == [module.training for module in (*model.modules(), *averaged.modules())]
            optimizer.step()
            averaged.update_parameters(model)
            step += 1
    states = [*model.state_dict().values(), *averaged.state_dict().values(), torch.get_rng_state()]
    return states, (random.getstate(), np.random.get_state()[1].tolist(), torch.rand(3).tolist()), history  # noqa: NPY002


def test_a_training_with_records_is_the_one_without():
    plain, numbers, _ = trained()
    states, others, history = trained(record=True)
    assert len(history) == 6
    assert numbers == others
    assert all(map(torch.equal, plain, states))


class Adapted(nn.Linear):
    """A layer that adds an adapter to its weight in eval mode, and takes it out again in training: by rounding."""

    def __init__(self):
        super().__init__(5, 3)
        self.adapter, self.merged = nn.Parameter(torch.randn(3, 5)), False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += -self.adapter if mode else self.adapter
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) + (0 if self.merged else x @ self.adapter.t())


def test_weights_that_eval_changes_are_left_alone():
    torch.manual_seed(0)
    model = Adapted()
    before = model.weight.clone()
    pf.track(model, LOSS, (X, Y), measures=["trace"]).record()
    assert torch.equal(model.weight, before)
    assert (model.merged, model.training) == (False, True)


def drawn_batches(record, **options):
    """The batches of a training loop over a loader that draws from generators of its own, measured in each epoch."""
    noisy = trainings.Noisy(12, 0)
    if "batch_sampler" in options:
        shuffled = RandomSampler(noisy, generator=torch.Generator().manual_seed(0))
        options["batch_sampler"] = BatchSampler(shuffled, 5, drop_last=False)
    else:
        options |= {"batch_size": 5, "shuffle": True, "generator": torch.Generator().manual_seed(0)}
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, the global one
    loader = DataLoader(noisy, **options)
    history = pf.track(classifier(6, 4, 3).float(), LOSS, loader)
    found = []
    for epoch in range(2):
        for x, _ in loader:
            found.append(x)
            if record and len(found) % 2:  # in the middle of an epoch
                history.record(epoch=epoch)
    assert bool(history.records) == record
    return torch.cat(found)


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_sampler": True}, {"num_workers": 1, "persistent_workers": True}],
    ids=["shuffled", "batch sampler", "workers"],
)
def test_the_loader_of_the_training_may_be_measured(options):
    assert torch.equal(drawn_batches(True, **options), drawn_batches(False, **options))


def test_a_record_is_what_measure_gives():
    model = classifier(5, 6, 4, 3)
    history = pf.track(
        model, LOSS, (X, Y), layers=["0", "4"], measures=["trace", "relative_flatness"], probes=2, seed=3
    )
    for scale in (1.0, 0.5):
        with torch.no_grad():
            model[0].weight *= scale
        record = history.record()
        expected = pf.measure(
            model, LOSS, (X, Y), layers=["0", "4"], measures=["trace", "relative_flatness"], probes=2, seed=3
        )
        assert record.reports == {"live": expected}
        assert record is history[-1]
    assert history[0].reports["live"]["0", "trace"].value != history[1].reports["live"]["0", "trace"].value


def test_relative_flatness_alone_unless_measures_are_named():
    history = pf.track(classifier(5, 6, 4, 3), LOSS, (X, Y))
    assert history.record().reports["live"].measures == ("relative_flatness",)
    every = pf.track(classifier(5, 6, 4, 3), LOSS, (X, Y), measures="sweep").record().reports["live"]
    assert {"trace", "weight_norm"} < {*every.measures}


@pytest.mark.parametrize("name", ["ema", "swa"])
@pytest.mark.parametrize("both", [True, False])
def test_averaged_weights(name, both):
    model = classifier(5, 6, 4, 3)
    averaged = AveragedModel(model)
    history = pf.track(
        model, LOSS, (X, Y), weights=["live", name] if both else name, averaged=averaged, measures=["trace"]
    )
    live = ["live"] if both else []
    assert [*history.record(step=0).reports] == live  # nothing was averaged yet
    mean = copy.deepcopy(model)
    averaged.update_parameters(model)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), mean.parameters(), strict=True):
            ours *= 3
            theirs *= 2  # (1 + 3) / 2
    averaged.update_parameters(model)
    found = history.record(step=1).reports
    assert [*found] == [*live, name]
    for layer in ("0", "2", "4"):
        expected = pf.measure(mean, LOSS, (X, Y), measures=["trace"])
        assert found[name][layer, "trace"].value == pytest.approx(expected[layer, "trace"].value, rel=1e-5)
    if both:
        assert found["live"]["0", "trace"].value != found[name]["0", "trace"].value


def test_averages_in_a_module_of_the_users_own():
    model = classifier(5, 6, 4, 3)
    averaged = copy.deepcopy(model)
    found = pf.track(model, LOSS, (X, Y), weights="ema", averaged=averaged).record()
    assert found.reports == {"ema": pf.measure(averaged, LOSS, (X, Y), measures="relative_flatness")}


def test_an_error_leaves_model_and_history_as_they_were():
    model, data = Regularised().train(), [(X, Y), (X[:, :3], Y)]
    history = pf.track(model, LOSS, data)
    before = torch.get_rng_state()
    with pytest.raises(pf.errors.InputError, match=r"\(24, 3\)"):
        history.record()
    assert len(history) == 0
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    assert torch.equal(before, torch.get_rng_state())
    data.pop()
    assert len(history.record().reports["live"].layers) == 2


def test_numbers_of_every_kind():
    history = pf.track(classifier(5, 6, 4, 3), LOSS, (X, Y))
    loss = torch.ones((), requires_grad=True) * 0.5
    record = history.record(step=np.int64(3), epoch=1, loss=loss, accuracy=np.float32(0.25), gap=record_estimate())
    assert (record.step, record.epoch) == (3, 1.0)
    assert record.numbers == {"loss": 0.5, "accuracy": 0.25, "gap": 2.0}


def record_estimate():
    return pf.results.Estimate(2.0, None, 3, "definition", exact=True, backend="reference")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"step": 1.5}, "step=1.5: a number of steps is wanted"),
        ({"step": -1}, "step=-1: a number of steps"),
        ({"epoch": "first"}, "epoch='first': a number is wanted"),
        ({"loss": [1.0]}, r"loss=\[1.0\]: a number is wanted"),
        ({"loss": torch.ones(2)}, "loss=tensor.*: a number is wanted"),
        ({"loss": None}, "loss=None: a number is wanted"),
        ({"value": 1.0}, "value= has the name of a column of the table"),
        ({"weights": 1.0}, "weights= has the name of a column of the table"),
    ],
)
def test_bad_numbers(numbers, message):
    history = pf.track(classifier(5, 6, 4, 3), LOSS, (X, Y))
    with pytest.raises(pf.errors.InputError, match=message):
        history.record(**numbers)
    assert len(history) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measures": "kappa"}, "measures: 'kappa' does not exist"),
        ({"weights": "mean"}, "weights='mean' does not exist; choose one of 'live', 'ema', 'swa'"),
        ({"weights": 3}, "weights=3"),
        ({"weights": "ema"}, "weights='ema': pass the model that holds them, averaged="),
        ({"averaged": classifier(5, 3)}, r"averaged: weights='live' do not ask for it"),
        ({"weights": ["ema", "swa"], "averaged": classifier(5, 3)}, "'ema' and 'swa' both are names"),
        ({"weights": "ema", "averaged": {}}, "averaged: a torch.nn.Module is wanted, got dict"),
        ({"model": nn.Linear}, "model: a torch.nn.Module is wanted, got the class"),
        ({"data": iter([(X, Y)])}, "data: list_iterator can be read once, and every record reads them"),
        ({"history": [1]}, r"history: a History is wanted, got list \[1\]$"),
        ({"history": "h.json"}, r"got str 'h.json'; pass pf.results.History.from_json\(path\)"),
        ({"model": LOSS, "loss": classifier(5, 3)}, r"model: one .* CrossEntropyLoss; .* \(model, loss, data\)"),
        ({"layers": "fc"}, "layer.*'fc'"),
        ({"loss": nn.CrossEntropyLoss}, "loss: .*CrossEntropyLoss"),
    ],
)
def test_bad_input_is_found_before_the_training(options, message):
    given = {"model": classifier(5, 6, 3), "loss": LOSS, "data": (X, Y)} | options
    with pytest.raises(pf.errors.InputError, match=message):
        pf.track(**given)


def test_options_of_measure_are_known_by_their_names():
    with pytest.raises(TypeError, match="track\\(\\) has no argument 'probe'; did you mean probes"):
        pf.track(classifier(5, 6, 3), LOSS, (X, Y), probe=3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'data'"):
        pf.track(classifier(5, 6, 3), LOSS)

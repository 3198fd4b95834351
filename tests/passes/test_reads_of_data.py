"""Loaders whose reads differ: other samples are an error wherever data are read twice, another order is none."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pyflatness as pf
from pyflatness.measures import named
from pyflatness.options import Options
from pyflatness.plan import plan
from support.combinations import every
from support.public_calls import CALLS, batches, network

LOSS = nn.CrossEntropyLoss()
X, Y = (torch.cat(parts) for parts in zip(*batches(samples=23), strict=True))
OTHER = "a later read gave other samples than the first"


class Reads:
    """Data that are made anew by ``make`` (number of the read) at each read; a first look is none."""

    def __init__(self, make):
        self.make, self.read = make, 0

    def __iter__(self):
        for number, batch in enumerate(self.make(self.read)):
            self.read += number == 1
            yield batch


def cut(x, y, size=5):
    return list(zip(x.split(size), y.split(size), strict=True))


def changed(part):
    """At reads after the first, one number of the data is another."""

    def make(read):
        x, y = X.clone(), Y.clone()
        if read:
            part(x, y)
        return cut(x, y)

    return make


CHANGES = {
    "an input": changed(lambda x, y: x[17, 2].add_(1e-12)),
    "a target": changed(lambda x, y: y[3].add_(1).remainder_(3)),
    "targets swapped": changed(lambda x, y: y.copy_(y.roll(1))),
    "a sample twice": changed(lambda x, y: x[4].copy_(x[5])),
    "a sample less": lambda read: cut(X[: 23 - bool(read)], Y[: 23 - bool(read)]),
}
SAME = {
    "shuffled": lambda read: cut(*(part[torch.randperm(23, generator=torch.Generator().manual_seed(read))]
                                   for part in (X, Y))),
    "cut otherwise": lambda read: cut(X, Y, 5 + read),
}  # fmt: skip


@every(together=1, name=["relative_flatness_max", "relative_flatness_std", "lambda_max"], make=CHANGES)
def test_other_samples_at_a_later_read(name, make):
    with pytest.raises(pf.errors.InputError, match=OTHER):
        pf.measure(network(), LOSS, Reads(make), measures=[name, "trace"], layers="head")


@pytest.mark.parametrize("name", ["pac_bayes", "adaptive_sharpness_mc", "feature_robustness", "generalization_bound"])
def test_calls_that_read_several_times(name):
    with pytest.raises(pf.errors.InputError, match=OTHER):
        CALLS[name](network(), LOSS, Reads(CHANGES["an input"]))


def test_options_that_read_several_times():
    with pytest.raises(pf.errors.InputError, match=OTHER):
        pf.relative_flatness(network(), LOSS, Reads(CHANGES["an input"]), "body", normalize="std")


@every(together=1, measure=["relative_flatness_std", "lambda_max", "adaptive_sharpness_mc"], make=SAME)
def test_another_order_or_cut_is_the_same_data(make, measure):
    found, expected = (pf.measure(network(), LOSS, data, measures=measure) for data in (Reads(make), cut(X, Y)))
    for key, value in expected.by_measure()[measure].items():
        assert found.by_measure()[measure][key].value == pytest.approx(value.value, rel=1e-9)


@pytest.mark.parametrize("options", [{"per_sample": True}, {"nan_policy": "omit"}])
def test_samples_that_are_told_apart_keep_their_order(options):
    net, options = network(), {"normalize": "std", **options}
    pf.relative_flatness(net, LOSS, Reads(SAME["cut otherwise"]), **options)
    with pytest.raises(pf.errors.InputError, match=r"in another order than the first.*shuffle=False"):
        pf.relative_flatness(net, LOSS, Reads(SAME["shuffled"]), **options)


def test_what_the_message_names_reads_once():
    assert plan(named("relative_flatness"), Options()).reads == plan(named(None), Options()).reads == 1
    for call in (pf.relative_flatness, pf.measure):
        call(network(), LOSS, Reads(CHANGES["an input"]))


class Augmented(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, place):
        return X[place] + 0.1 * torch.randn(4), Y[place]


def test_loaders_of_torch():
    net = network()
    with pytest.raises(pf.errors.InputError, match=r"pass the batches of one read, as list\(loader\)"):
        pf.relative_flatness(net, LOSS, DataLoader(Augmented(), batch_size=5), normalize="std")
    assert pf.relative_flatness(net, LOSS, list(DataLoader(Augmented(), batch_size=5)), normalize="std").exact
    shuffled = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True)
    expected = pf.relative_flatness(net, LOSS, (X, Y), normalize="std").value
    assert pf.relative_flatness(net, LOSS, shuffled, normalize="std").value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
def test_inputs_of_every_kind(dtype):
    """Beside the inputs, a tensor that the model does not use."""
    other = (100 * X).to(dtype) if dtype != torch.bool else X > 0

    def forward(model, batch):
        return model(batch["x"]), batch["labels"]

    def make(flip):
        def made(read):
            extra = other.clone()
            if read and flip:
                extra[7, 1] = ~extra[7, 1] if dtype == torch.bool else extra[7, 1] + 1
            order = list(range(23))
            random.Random(read).shuffle(order)
            return [{"x": X[part], "extra": extra[part], "labels": Y[part]} for part in torch.tensor(order).split(5)]

        return made

    options = {"forward": forward, "normalize": "std"}
    pf.relative_flatness(network(), LOSS, Reads(make(flip=False)), **options)
    with pytest.raises(pf.errors.InputError, match=OTHER):
        pf.relative_flatness(network(), LOSS, Reads(make(flip=True)), **options)


def test_samples_padded_to_their_batch():
    """In another order, tokens are padded to other lengths: not known to be other data."""
    net = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)).eval()
    lengths = [3, 5, 2, 4, 5, 1]

    def make(read):
        order = lengths if read == 0 else lengths[::-1]
        for part in (order[:2], order[2:4], order[4:]):
            ids = torch.zeros(2, max(part), dtype=torch.int64)
            for row, length in zip(ids, part, strict=True):
                row[:length] = 1 + torch.arange(length)
            yield ids, torch.where(ids > 0, ids % 3, -100)

    def forward(model, batch):
        return model(batch[0]).movedim(-1, 1), batch[1]

    found = pf.relative_flatness(net, LOSS, Reads(make), normalize="std", forward=forward)
    expected = pf.relative_flatness(net, LOSS, list(make(0)), normalize="std", forward=forward)
    assert found.value == pytest.approx(expected.value, rel=1e-5)

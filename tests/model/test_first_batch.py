"""Calls that look at the first batch before they read the data leave none out, and read no more."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import pyflatness as pf
from support.cases import small as network

LOSS = nn.CrossEntropyLoss()
X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3
BATCHES = list(zip(X.split(5), Y.split(5), strict=True))


class Stream:
    """Every read goes on where the one before stopped."""

    def __init__(self, batches):
        self.rest = iter(batches)

    def __iter__(self):
        return self.rest


class Streamed(IterableDataset):
    """The same below a loader."""

    def __init__(self):
        self.rest = iter(list(zip(X, Y, strict=True)))

    def __iter__(self):
        return self.rest


class Counted(list):
    """How often its iteration begins."""

    begun = 0

    def __iter__(self):
        self.begun += 1
        return super().__iter__()


@pytest.mark.parametrize("layer", ["0", "2", None])
@pytest.mark.parametrize("data", [lambda: Stream(BATCHES), lambda: DataLoader(Streamed(), batch_size=5)])
def test_a_stream_is_read_whole(data, layer):
    found, expected = (pf.relative_flatness(network(), LOSS, d, layer) for d in (data(), BATCHES))
    assert found.samples == 20
    assert found.value == expected.value


@pytest.mark.parametrize("normalize", [None, "std"])
def test_looking_at_the_first_batch_is_no_read_of_its_own(normalize):
    data = Counted(BATCHES)
    pf.relative_flatness(network(), LOSS, data, "2", normalize=normalize)
    assert data.begun == (1 if normalize is None else 2)

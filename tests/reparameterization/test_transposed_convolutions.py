"""Rows and columns of transposed convolutions are multiplied, and a BatchNorm behind one is folded into it."""

import torch
from torch import nn

import pyflatness as pf
from pyflatness.reparameterization.folding import Folding
from support.cases import C
from support.convolutions import batch_norm
from support.grid import normal

X = normal(0, 3, 2, 3, 3)


def network():
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 4, 2), nn.ReLU(), nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), batch_norm(6), nn.ReLU(),
            nn.ConvTranspose2d(6, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(108, C),
        ).double().eval()  # fmt: skip


def test_rows_of_one_are_multiplied_and_columns_of_the_next_divided():
    net, rows = network(), {"0": normal(1, 4).exp(), "2": normal(2, 6).exp()}
    other = pf.reparameterize(net, rows, X)
    torch.testing.assert_close(other(X), net(X))
    by_row = rows["2"].view(2, 1, 3, 1, 1) / rows["0"].view(2, 2, 1, 1, 1)  # groups, channels, rows
    torch.testing.assert_close(other[2].weight, net[2].weight * by_row.reshape(4, 3, 1, 1))
    torch.testing.assert_close(other[5].weight, net[5].weight / rows["2"].view(6, 1, 1, 1))


@torch.no_grad()
def test_a_batch_norm_is_folded_into_it():
    net = network()
    folding = Folding(net, (X, None), None)
    assert folding.into == {"3": "2"}
    torch.testing.assert_close(folding.of(net)(X), net(X))

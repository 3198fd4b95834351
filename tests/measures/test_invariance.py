"""What must not move where the function does not (Petzka et al. 2019, Table 1), by what the table of measures claims.

A measure that is said to be invariant keeps its value under the reparameterisation, in every layer and in the network;
one that is not said to be is moved by it somewhere, or the claim would be too weak.
"""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.measures import MEASURES
from support.convolutions import batch_norm
from support.grid import normal

X, Y = normal(4, 24, 2, 4, 4), torch.arange(24) % 3
CHEAP = [measure.name for measure in MEASURES if not measure.name.startswith("pac_bayes")]


def network(*, norms: bool):
    """With biases, and eval BatchNorm or not."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        parts = [nn.Conv2d(2, 4, 3), batch_norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), batch_norm(6, 1),
            nn.LeakyReLU(), nn.Linear(6, 3)]  # fmt: skip
        kept = [part for part in parts if norms or not isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d))]
        return nn.Sequential(*kept).double().eval()


def factors(net, how):
    first, second = (
        name for name, module in net.named_modules() if name in ("0", "3", "4") and hasattr(module, "weight")
    )
    if how == "layer-wise":
        return {first: 11.0, second: 0.07}
    return {first: [5.0, 0.2, 25.0, 1.0], second: torch.tensor([0.1, 3.0, 7.0, 1.0, 20.0, 0.5])}


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("how", ["layer-wise", "neuron-wise"])
def test_claims_of_the_table(how, norms):
    net = network(norms=norms)
    other = pf.reparameterize(net, factors(net, how), X)
    plain, changed = (
        pf.measure(model, nn.CrossEntropyLoss(), (X, Y), measures=CHEAP).to_dict() for model in (net, other)
    )
    for measure in MEASURES:
        if measure.name not in CHEAP:
            continue
        pairs = {place: (facts, changed[measure.name][place]) for place, facts in plain[measure.name].items()}
        assert pairs
        moved = [place for place, pair in pairs.items() if not _same(*pair)]
        if how in measure.invariant:
            assert not moved, (measure.name, moved)
        else:
            assert moved, measure.name


def test_pac_bayes_moves():
    net = network(norms=False)
    labels = net(X).argmax(1)
    other = pf.reparameterize(net, factors(net, "layer-wise"), X)
    one, two = (pf.measures.pac_bayes(model, nn.CrossEntropyLoss(), (X, labels)) for model in (net, other))
    assert two.sigma != pytest.approx(one.sigma, rel=0.1)


def _same(one, other):
    return one["value"] == pytest.approx(other["value"], rel=1e-7 if one["exact"] else 1e-3)

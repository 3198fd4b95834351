"""What embeddings are not measured, how that is said, and what they do not change."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.grid import Net
from support.layer_kinds import CASES, WORDS

LOSS, Y = nn.CrossEntropyLoss(), torch.tensor([0, 2, 1])


def relative(net, x):
    """Codes of pairs of positions, with heads in front, as T5 has them: there is no place for samples."""
    codes = net.bias(torch.arange(4)[:, None] - torch.arange(4) + 3).permute(2, 0, 1)
    h = net.embed(x)
    weights = torch.softmax(h @ h.mT + codes[0], 2)
    return net.head((weights @ h).flatten(1))


def test_what_is_looked_up_once_for_all_samples_may_be_left_out():
    def network():
        return Net(relative, embed=nn.Embedding(7, 3), bias=nn.Embedding(7, 2), head=nn.Linear(12, 3)).double()

    report = pf.measure(network(), LOSS, (WORDS, Y), measures="trace")
    assert report.layers == ("embed", "head")
    assert [*report.uncovered] == ["bias.weight"]
    with pytest.raises(pf.errors.InputError, match=r"layer 'bias': its rows \(4, 4, 2\) cannot be told apart"):
        pf.measure(network(), LOSS, (WORDS, Y), layers=["bias", "head"], measures="trace")
    alone = pf.measure(network(), LOSS, [(x[None], y[None]) for x, y in zip(WORDS, Y, strict=True)], measures="trace")
    assert alone.layers == ("embed", "bias", "head")
    assert alone["trace"].exact


@pytest.mark.parametrize("measures", [["nmls"], ["mls_bound"]])
def test_tokens_have_no_derivative(measures):
    case = CASES["embedding"]
    with pytest.raises(pf.errors.InputError, match="'embed' has an input with a derivative"):
        pf.measure(case.build(), case.loss, (case.inputs, case.targets), layers="embed", measures=measures)
    everything, head = (
        pf.measure(case.build(), case.loss, (case.inputs, case.targets), layers=layers, measures=measures)
        for layers in (None, "head")
    )
    assert everything.layers == head.layers
    assert [*everything.uncovered] == [*head.uncovered] == ["embed.weight"]


def test_there_are_no_features_to_perturb():
    case = CASES["embedding"]
    with pytest.raises(pf.errors.InputError, match="layer 'embed' is of type Embedding: there is no feature vector"):
        pf.theory.feature_robustness(case.build(), case.loss, (case.inputs, case.targets), "embed", rho=[0.1], probes=2)


def test_a_large_vocabulary_is_not_written_out():
    """One-hot vectors would take 160 MB in each pass; weights are of half precision."""
    words = torch.randint(10_000, (4, 500), generator=torch.Generator().manual_seed(0))
    model = Net(lambda net, x: net.head(net.embed(x).relu().mean(1)), embed=nn.Embedding(10_000, 8),
        head=nn.Linear(8, 3)).bfloat16()  # fmt: skip
    report = pf.measure(model, LOSS, (words, Y[[0, 1, 2, 1]]), layers="embed", measures=["relative_flatness", "trace"])
    in_double = pf.measure(model.double(), LOSS, (words, Y[[0, 1, 2, 1]]), layers="embed", measures="trace")
    assert report["embed", "trace"].value == pytest.approx(in_double["embed", "trace"].value, rel=0.05)


def test_tied_weights_are_two_uses():
    case = CASES["embedding that is the head too"]
    report = pf.measure(case.build(), case.loss, (case.inputs, case.targets), measures="trace")
    assert report.uncovered == {}
    assert "weight tied with head: derivative through this use only" in report["embed", "trace"].notes
    assert "weight tied with embed: derivative through this use only" in report["head", "trace"].notes

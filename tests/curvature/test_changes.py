"""Changes of weights: what w + Δ is."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.combinations import every


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)).eval()


def _changed(model, changes):
    return {name: model.get_submodule(name).weight.detach() + change for name, change in changes.items()}


@every(together=1, per=["tensor", "channel", "group"], bits=[2, 4, 8])
def test_rounded_weights_are_multiples_of_their_scale(model, bits, per):
    top = 2 ** (bits - 1)
    for name, weight in _changed(model, pf.changes.rounded(model, bits, per=per, group_size=5)).items():
        before, rows = (w.flatten(1) for w in (model.get_submodule(name).weight.detach(), weight))
        if per == "tensor":
            parts = [(before.flatten(), rows.flatten())]
        elif per == "channel":
            parts = [*zip(before, rows, strict=True)]
        else:
            parts = [
                pair for b, r in zip(before, rows, strict=True) for pair in zip(b.split(5), r.split(5), strict=True)
            ]
        for old, new in parts:
            scale = old.abs().max() / (top - 0.5)
            levels = new / scale
            torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
            assert (new - old).abs().max() <= 0.5001 * scale
            assert -top <= levels.round().min() <= levels.round().max() <= top - 1


def test_zero_weights_stay_zero(model):
    model[2].weight.data[1] = 0
    assert not pf.changes.rounded(model, 2)["2"][1].any()


def test_pruned_are_the_smallest_of_each_layer(model):
    for name, weight in _changed(model, pf.changes.pruned(model, 0.25)).items():
        before = model.get_submodule(name).weight.detach()
        gone = weight == 0
        assert gone.sum() == round(0.25 * before.numel())
        assert before[gone].abs().max() <= before[~gone].abs().min()
        assert torch.equal(weight[~gone], before[~gone])


def test_two_of_four_stay(model):
    for name, weight in _changed(model, pf.changes.pruned_2_4(model)).items():
        before, after = (w.flatten(1) for w in (model.get_submodule(name).weight.detach(), weight))
        whole = before.shape[1] // 4 * 4
        fours, old = (w[:, :whole].unflatten(1, (-1, 4)) for w in (after, before))
        assert torch.equal((fours == 0).sum(2), torch.full(fours.shape[:2], 2))
        assert torch.equal(fours.abs().sum(2), old.abs().topk(2, dim=2).values.sum(2))
        assert torch.equal(after[:, whole:], before[:, whole:])


def test_low_rank_is_the_nearest(model):
    for name, weight in _changed(model, pf.changes.of_rank(model, 2)).items():
        before = model.get_submodule(name).weight.detach().flatten(1)
        values = torch.linalg.svdvals(before)
        assert torch.linalg.matrix_rank(weight.flatten(1), rtol=1e-5) == 2
        lost = torch.linalg.norm(before - weight.flatten(1))
        torch.testing.assert_close(lost, values[2:].square().sum().sqrt())


def test_between_checkpoints_is_their_difference(model):
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    for state in (other, other.state_dict()):
        for name, weight in _changed(model, pf.changes.between(model, state)).items():
            torch.testing.assert_close(weight, other.get_submodule(name).weight.detach())
    assert [*pf.changes.between(model, {"2.weight": other[2].weight})] == ["2"]


def test_selectors_choose_layers(model):
    assert [*pf.changes.rounded(model, layers="type:Linear")] == ["2"]


BAD = {
    "bits": (lambda model: pf.changes.rounded(model, 1), "bits=1"),
    "per": (lambda model: pf.changes.rounded(model, per="row"), "'tensor', 'channel', 'group'"),
    "sparsity": (lambda model: pf.changes.pruned(model, 1.5), "sparsity=1.5"),
    "rank": (lambda model: pf.changes.of_rank(model, 0), "rank=0"),
    "no model": (lambda model: pf.changes.rounded([model]), "model: a torch.nn.Module is wanted, got list"),
    "no layer": (lambda model: pf.changes.pruned_2_4(model, layers="head"), "'head'"),
    "nothing in common": (lambda model: pf.changes.between(model, {"a": torch.ones(1)}), "has the weight of no layer"),
    "another shape": (
        lambda model: pf.changes.between(model, {"2.weight": torch.ones(2, 2)}),
        r"\(5, 16\) is wanted, got one of shape \(2, 2\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused(model, case):
    call, message = BAD[case]
    with pytest.raises(pf.errors.InputError, match=message):
        call(model)

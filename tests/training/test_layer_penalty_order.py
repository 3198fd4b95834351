"""A penalty that is called too late, or that is dropped: clear errors, and no hook that stays behind."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.cases import small as net

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)), torch.arange(6) % 3
LOSS = nn.CrossEntropyLoss()


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("layer", ["0", "2"])
def test_the_layers_weight_has_changed(layer):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pf.FlatnessPenalty(model, layer, LOSS) as penalty:
        outputs = model(X)
        LOSS(outputs, Y).backward(retain_graph=True)
        optimizer.step()
        match = rf"layer '{layer}': its weight was modified in place after the forward pass; .* optimizer\.step\(\)"
        with pytest.raises(pf.errors.InputError, match=match):
            penalty(outputs, Y)
        assert penalty(model(X), Y) > 0


def test_another_weight_has_changed():
    model = net()
    with pf.FlatnessPenalty(model, "0", LOSS) as penalty:
        outputs = model(X)
        with torch.no_grad():
            model[2].weight.mul_(2)
        with pytest.raises(pf.errors.InputError, match=r"outputs: a weight or another tensor .* was modified in place"):
            penalty(outputs, Y)


@pytest.mark.parametrize("layer", ["0", "2"])
def test_a_backward_pass_came_first(layer):
    model = net()
    with pf.FlatnessPenalty(model, layer, LOSS) as penalty:
        outputs = model(X)
        LOSS(outputs, Y).backward()
        with pytest.raises(
            pf.errors.InputError, match=r"outputs: a backward pass has freed their graph; .* before backward"
        ):
            penalty(outputs, Y)


@pytest.mark.parametrize("batch", [64, len(X)])
def test_passes_that_measure_are_not_the_users(batch):
    """A record may fall between a forward pass and its penalty, as a budget has it."""
    model, values = net(), []
    history = pf.track(model, LOSS, (torch.randn(batch, 4), torch.arange(batch) % 3))
    with pf.FlatnessPenalty(model, "0", LOSS) as penalty:
        for measures in (False, True):
            torch.manual_seed(0)
            outputs = model(X)
            if measures:
                history.record()
            values.append(penalty(outputs, Y).item())
    assert values[0] == values[1]


def test_a_penalty_that_is_dropped_takes_its_hooks_and_tensors_along():
    model = net()
    penalty, other = pf.FlatnessPenalty(model, "0", LOSS), pf.FlatnessPenalty(model, "0", LOSS)
    copied = copy.deepcopy(model)
    features = torch.randn(6, 4, requires_grad=True)
    outputs = model(features)
    total = penalty(outputs, Y)
    held = weakref.ref(features)
    before = hooks(model)
    del penalty
    gc.collect()
    assert 0 < hooks(model) < before
    (total + other(outputs, Y)).backward()
    del other, outputs, total, features
    gc.collect()
    assert hooks(model) == 0
    assert held() is None
    copied(X)

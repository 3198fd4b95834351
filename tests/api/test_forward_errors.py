"""What the user's forward pass raises comes as our error that says what was called, with the user's as its cause."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.public_calls import CALLS, batches, network

LOSS = nn.CrossEntropyLoss()
DATA = batches()
WIDE = [(torch.cat([x, x], 1), y) for x, y in DATA]


@pytest.mark.parametrize("name", CALLS)
def test_inputs_of_another_shape(name):
    message = r"model\(inputs\) on the inputs \(5, 8\) float64 raised RuntimeError: mat1 and mat2 .*forward="
    with pytest.raises(pf.errors.InputError, match=message) as caught:
        CALLS[name](network(), LOSS, WIDE)
    assert type(caught.value.__cause__) is RuntimeError


@pytest.mark.parametrize("layer", ["body", "head"])
def test_a_later_batch(layer):
    with pytest.raises(pf.errors.InputError, match=r"inputs \(2, 8\) float64 raised RuntimeError"):
        pf.relative_flatness(network(), LOSS, [*DATA[:2], WIDE[2]], layer)


@pytest.mark.parametrize("layer", ["body", "head"])
def test_a_forward_of_the_users(layer):
    def forward(model, batch):
        return model(batch["x"]), batch["y"]

    data = [{"x": x, "labels": y} for x, y in DATA]
    with pytest.raises(
        pf.errors.InputError, match=r"forward\(model, batch\) on the batch \{x: \(5, 4\).* raised KeyError: 'y'"
    ):
        pf.relative_flatness(network(), LOSS, data, layer, forward=forward)


@pytest.mark.parametrize("error", [StopIteration, ZeroDivisionError, NotImplementedError])
def test_any_exception(error):
    net = network()

    def fail(module, args):
        raise error("of the user")

    net.act.register_forward_pre_hook(fail)
    for layer in ("body", "head"):
        with pytest.raises(pf.errors.InputError, match=f"raised {error.__name__}: of the user") as caught:
            pf.relative_flatness(net, LOSS, DATA, layer)
        assert isinstance(caught.value.__cause__, error)


def test_out_of_memory_and_interrupts_stay_what_they_are():
    net = network()
    raised = [RuntimeError("DefaultCPUAllocator: not enough memory"), KeyboardInterrupt()]

    def fail(module, args):
        raise raised[0]

    net.act.register_forward_pre_hook(fail)
    for error in list(raised):
        with pytest.raises(type(error)):
            pf.relative_flatness(net, LOSS, DATA, "body")
        raised.pop(0)


def test_a_model_that_misses_an_argument():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    net = transformers.BertForSequenceClassification(config).eval()
    batch = {"attention_mask": torch.ones(2, 3), "labels": torch.tensor([0, 1])}
    message = (
        r"model\(\*\*inputs\) on the inputs \{attention_mask: \(2, 3\) float32\} \(`labels` .* raised ValueError: "
        ".*specify"
    )
    with pytest.raises(pf.errors.InputError, match=message):
        pf.relative_flatness(net, LOSS, [batch], "classifier")

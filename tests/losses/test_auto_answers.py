"""The loss "auto" of models that say where in a text an answer begins and ends."""

import pytest
import torch

import pyflatness as pf
from support import truth
from support.hugging_face import FAMILIES, LENGTH

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
LAYER = "qa_outputs"


def answers():
    net, batch = FAMILIES["BERT, answers"]()
    return net.double(), batch


def hessian_value(net, batches, terms):
    """Return κ of the layer by the dense Hessian of the model's own losses, with each batch's number of terms."""
    weight = net.get_submodule(LAYER).weight

    def risk(matrix):
        values = [
            torch.func.functional_call(net, {f"{LAYER}.weight": matrix}, (), batch, tie_weights=False).loss
            for batch in batches
        ]
        return sum(value * count for value, count in zip(values, terms, strict=True)) / sum(terms)

    return truth.relative_flatness_of(truth.hessian(risk, weight.detach()), weight.detach())


def test_values_are_of_the_models_own_loss_over_batches_of_several_lengths():
    net, batch = answers()
    first, second = ({key: part[some] for key, part in batch.items()} for some in (slice(0, 1), slice(1, 3)))
    second = {key: part[:, :4] if part.ndim == 2 else part for key, part in second.items()}
    found = pf.relative_flatness(net, data=[first, second], layer=LAYER)
    assert found.exact
    assert found.value == pytest.approx(hessian_value(net, [first, second], [2, 4]), rel=1e-6)
    report = pf.measure(net, data=[batch], probes=2, curvature="ggn", measures="relative_flatness")
    assert LAYER in report.layers


def test_positions_behind_the_text_are_ignored():
    """Of the mean of both parts the model has the whole batch's; all terms count alike here."""
    net, batch = answers()
    batch["end_positions"] = torch.tensor([4, LENGTH, 3])
    batch["start_positions"] = torch.tensor([1, LENGTH + 2, 3])
    found = pf.relative_flatness(net, data=[batch], layer=LAYER)
    assert found.value == pytest.approx(hessian_value(net, [batch], [4]), rel=1e-6)


def test_batches_without_positions_are_told_what_is_missing():
    net, batch = answers()
    del batch["end_positions"]
    with pytest.raises(pf.errors.InputError, match="'start_positions' and 'end_positions', one number for each sample"):
        pf.measure(net, data=[batch])
    labelled = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    with pytest.raises(pf.errors.InputError, match="there are input_ids, labels"):
        pf.measure(net, data=[labelled])

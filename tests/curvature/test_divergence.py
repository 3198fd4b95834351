"""Plans by the KL divergence from the unchanged model: against nested autograd, and against what it is by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.losses import SquaredError
from pyflatness.losses.divergence import Divergence

CE = nn.CrossEntropyLoss()


class Tokens(nn.Module):
    """Smooth layers over tokens, with classes in dimension 1."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head((self.inner(h) + h.mean(dim=1, keepdim=True)).tanh()).movedim(-1, 1)


def _texts(ignored=False):
    torch.manual_seed(1)
    model, tokens, targets = Tokens().double().eval(), torch.randint(7, (8, 5)), torch.randint(7, (8, 5))
    return model, (tokens, targets.where(torch.rand(8, 5) < 0.6, -100) if ignored else targets)


def _by_hand(outputs, before, targets):
    """The mean of the divergence over terms that count."""
    each = F.kl_div(outputs.log_softmax(1), before.softmax(1), reduction="none").sum(dim=1)
    return each[targets != -100].mean()


@pytest.mark.parametrize("ignored", [False, True])
def test_its_second_order_is_that_of_the_whole_hessian_and_it_has_no_first(ignored):
    model, data = _texts(ignored)
    change = pf.changes.of_format(model, "int3")
    before = model(data[0]).detach()

    def divergence(t):
        weights = {f"{name}.weight": model.get_submodule(name).weight.detach() + t * change[name] for name in change}
        return _by_hand(torch.func.functional_call(model, weights, (data[0],)), before, data[1])

    zero = torch.zeros((), dtype=torch.float64)
    assert torch.autograd.functional.jacobian(divergence, zero).abs() < 1e-15
    hessian = torch.autograd.functional.hessian(divergence, zero)
    plan = pf.allocate(model, "kl", data, ["int3"], bits=3, probes=None, measured=False)
    assert plan.predicted.value == pytest.approx(0.5 * hessian.item(), rel=1e-9)
    assert plan._plan.folds.first.abs().max() < 1e-15


@pytest.mark.parametrize("ignored", [False, True])
def test_what_is_measured_is_the_divergence_of_the_changed_model(ignored):
    model, data = _texts(ignored)
    plan = pf.allocate(model, "kl", data, ["int2", "int4"], bits=3)
    with torch.no_grad():
        wanted = _by_hand(plan.apply(model)(data[0]), model(data[0]), data[1])
    assert plan.loss_change == pytest.approx(wanted.item(), rel=1e-9)
    assert "the KL divergence from the model is" in str(plan)


def test_targets_do_not_count_and_masked_classes_do_not_either():
    model, (tokens, targets) = _texts()
    plans = [pf.allocate(model, "kl", (tokens, each), ["int2", "int4"], bits=3) for each in (targets, 6 - targets)]
    assert plans[0].choice == plans[1].choice
    assert plans[0].predicted.value == plans[1].predicted.value
    logits = torch.randn(4, 3, dtype=torch.float64).index_fill(1, torch.tensor([1]), -torch.inf)
    loss = Divergence(None, -100, 0.0, "mean", reference=logits)
    changed = logits + torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64)
    wanted = F.kl_div(changed[:, ::2].log_softmax(1), logits[:, ::2].softmax(1), reduction="sum")
    assert loss.value(changed, torch.zeros(4, dtype=torch.int64)).item() == pytest.approx(wanted.item(), rel=1e-12)


def test_a_language_model_of_transformers_is_asked_at_the_positions_of_its_labels():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes)).double().eval()
    tokens = torch.randint(11, (6, 5))
    plan = pf.allocate(model, "kl", [{"input_ids": tokens}], ["int3", "int4"], bits=3.5, probes=4)
    with torch.no_grad():
        before, after = (made(input_ids=tokens).logits[:, :-1].log_softmax(-1) for made in (model, plan.apply(model)))
    wanted = (before.exp() * (before - after)).sum(-1).mean()
    assert plan.loss_change == pytest.approx(wanted.item(), rel=1e-6)


def test_it_is_one_of_classes():
    with pytest.raises(pf.errors.InputError, match="loss='kl': it is one of probabilities of classes"):
        Divergence.of(SquaredError("mean"))

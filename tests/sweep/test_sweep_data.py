"""The sweep on data of every kind: batches, tokens, NaN and infinity, memory."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes import backward
from support.cases import TOKEN_TARGETS, TOKENS, C, Tokens, classifier
from support.grid import Net
from support.residual import LOSS, X, Y, assert_same, residual

# --- batches ----------------------------------------------------------------------------------------------------------


def test_one_shot_iterators():
    expected = pf.measure(residual(), LOSS, (X, Y), measures="sweep")
    assert_same(expected, pf.measure(residual(), LOSS, iter([(X[:9], Y[:9]), (X[9:], Y[9:])]), measures="sweep"))
    alone = pf.relative_flatness(residual(), LOSS, iter([(X[:9], Y[:9]), (X[9:], Y[9:])]), "0")
    assert alone.value == pytest.approx(expected["0", "relative_flatness"].value, rel=1e-5)
    with pytest.raises(pf.errors.InputError, match="can be read once, and 3 reads"):
        pf.measure(residual(), LOSS, iter([(X, Y)]), measures=["trace", "relative_flatness_std"])
    with pytest.raises(pf.errors.InputError, match="can be read once, and 2 reads"):
        pf.relative_flatness(residual(), LOSS, iter([(X, Y)]), "0", normalize="std")


def test_first_batches_of_one_sample():
    expected = pf.measure(residual(), LOSS, (X, Y), measures="sweep")
    assert_same(
        expected, pf.measure(residual(), LOSS, [(X[:1], Y[:1]), (X[1:2], Y[1:2]), (X[2:], Y[2:])], measures="sweep")
    )


def test_token_models_in_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, activation_function="relu", use_cache=False
    )
    torch.manual_seed(0)
    net = transformers.GPT2ForTokenClassification(config).eval()
    net.num_labels = 3
    net.classifier = nn.Linear(8, 3)
    ids, labels = torch.randint(11, (4, 6)), torch.randint(3, (4, 6))
    labels[1, 3:] = -100
    batches = [{"input_ids": ids[i : i + 2], "labels": labels[i : i + 2]} for i in (0, 2)]
    name = "transformer.h.0.mlp.c_fc"
    found = pf.relative_flatness(net, LOSS, batches, name, curvature="ggn")
    assert found.samples == 4
    assert not found.exact
    weight = net.get_submodule(name).weight  # (m, d)

    def outputs(w):
        changed = {f"{name}.weight": w}
        return torch.func.functional_call(net, changed, (ids,)).logits.transpose(1, 2)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        jacobian = torch.func.jacrev(outputs)(weight.detach())  # n, C, T, m, d
    p = torch.softmax(net(ids).logits, 2).detach()
    curvature = torch.diag_embed(p) - p.unsqueeze(3) * p.unsqueeze(2)  # n, T, C, C
    curvature = curvature * (labels != -100)[..., None, None]
    traces = torch.einsum("nctms,ntce,netmr->sr", jacobian, curvature, jacobian) / (labels != -100).sum()
    gram = (weight.t() @ weight).detach()
    assert found.value == pytest.approx(float((traces * gram).sum().detach()), rel=1e-3)


def test_causal_language_models_in_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(11, (4, 6))
    batches = [{"input_ids": ids, "labels": ids}]
    found = pf.relative_flatness(net, LOSS, batches, "lm_head", forward=pf.causal_lm)
    assert (found.method, found.exact) == ("head", True)
    assert found.notes == ("weight tied with transformer.wte: derivative through this use only",)
    hidden = net.transformer(ids).last_hidden_state[:, :-1].detach()
    expected = pf.head_flatness(hidden, net.lm_head.weight, None, ids[:, 1:])
    assert found.value == pytest.approx(expected.value, rel=1e-5)
    swept = pf.measure(net, LOSS, batches, layers="lm_head", forward=pf.causal_lm, measures="sweep")
    assert swept["lm_head", "relative_flatness"].value == pytest.approx(expected.value, rel=1e-4)


def test_heads_in_the_sweep_are_as_at_the_head():
    """Also normalised, where ignored tokens are left out of the deviations."""
    net = Tokens().double()
    for options in ({}, {"normalize": "std"}):
        head = pf.relative_flatness(net, LOSS, (TOKENS, TOKEN_TARGETS), "head", **options)
        swept = pf.measure(net, LOSS, (TOKENS, TOKEN_TARGETS), layers="head", curvature="ggn", **options)
        assert swept["head", "relative_flatness"].value == pytest.approx(head.value, rel=1e-10)
        assert swept["head", "relative_flatness"].exact


def test_padded_tokens_are_left_out_of_the_deviations():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(7, 5), nn.Linear(5, 6), nn.Linear(6, C)

        def forward(self, input_ids, attention_mask):
            h = torch.relu(self.body(self.embed(input_ids))) * attention_mask.unsqueeze(2)
            return self.head(h.sum(1))

    torch.manual_seed(0)
    net = Bag().double()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    batch = {"input_ids": TOKENS, "attention_mask": mask, "labels": torch.tensor([0, 1, 2])}
    deviation = net.embed(TOKENS)[mask != 0].detach().std(dim=0, correction=0)
    rescaled = Bag().double()
    rescaled.load_state_dict(net.state_dict())
    with torch.no_grad():
        rescaled.embed.weight.div_(deviation)
        rescaled.body.weight.mul_(deviation)
    found = pf.measure(net, LOSS, [batch], layers="body", normalize="std", measures="sweep")
    expected = pf.measure(rescaled, LOSS, [batch], layers="body", measures="sweep")
    assert found["body", "relative_flatness"].value == pytest.approx(expected["body", "relative_flatness"].value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    expected = pf.measure(residual(), LOSS, (X, Y), measures="sweep")
    with torch.autocast("cpu", dtype):
        assert_same(expected, pf.measure(residual(), LOSS, (X, Y), measures="sweep"), rel=0.1)
    assert_same(expected, pf.measure(residual().to(dtype), LOSS, (X.to(dtype), Y), measures="sweep"), rel=0.1)


def test_autocast_does_not_reach_backward_passes():
    """A model that turns it off is measured as it is without."""

    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 5))

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.body(x)

    torch.manual_seed(0)
    model, data = Off(), (torch.randn(40, 16), torch.arange(40) % 5)
    expected, blocks = pf.measure(model, LOSS, data, measures="sweep"), pf.block_traces(model, LOSS, data, "body.0")
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(expected, pf.measure(model, LOSS, data, measures="sweep"), rel=1e-9)
        torch.testing.assert_close(pf.block_traces(model, LOSS, data, "body.0"), blocks, rtol=1e-9, atol=0)


# --- NaN and infinity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [None, "std"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_samples(bad, normalize):
    x = X.clone()
    x[6, 0, 0, 0] = bad
    batches, kept = [(x[:5], Y[:5]), (x[5:], Y[5:])], torch.arange(20) != 6
    options = {"normalize": normalize, "per_sample": True, "measures": "sweep"}
    with pytest.raises(pf.errors.NonFiniteError, match=r"batch 1: 1 of 15 samples have NaN or infinity .* layer '0'"):
        pf.measure(residual(), LOSS, batches, **options)
    expected = pf.measure(residual(), LOSS, (X[kept], Y[kept]), **options)
    omitted = pf.measure(residual(), LOSS, batches, nan_policy="omit", **options)
    assert_same(expected, omitted, rel=1e-5)
    estimate = omitted["3.conv1", "trace"]
    assert (estimate.samples, estimate.omitted) == (19, 1)
    assert estimate.per_sample.isnan().tolist() == (~kept).tolist()
    assert "19 samples, 1 omitted" in str(omitted)
    if normalize is None:
        passed = pf.measure(residual(), LOSS, batches, nan_policy="propagate", **options)["0", "trace"]
        assert math.isnan(passed.value)
        assert passed.per_sample.isfinite().tolist() == kept.tolist()
        traces = pf.block_traces(residual(), LOSS, batches, "0", nan_policy="omit")
        torch.testing.assert_close(traces, pf.block_traces(residual(), LOSS, (X[kept], Y[kept]), "0"))


def test_non_finite_weights_are_named():
    net = residual()
    with torch.no_grad():
        net[5].conv2.weight[1, 2, 0, 0] = math.nan
    for policy in ("raise", "omit"):
        with pytest.raises(pf.errors.NonFiniteError, match=r"layer '5.conv2': its weight has 1 entries"):
            pf.measure(net, LOSS, (X, Y), nan_policy=policy)


def test_ignored_targets_may_hold_anything():
    net = Net(lambda self, x: self.head(torch.relu(self.body(x))), body=nn.Conv1d(2, 3, 1), head=nn.Conv1d(3, 4, 1))
    x, y = torch.randn(5, 2, 6), torch.arange(30).view(5, 6) % 4
    expected_y = y.clone()
    expected_y[2, 1], y[2, 1] = -100, -100
    expected = pf.measure(net, LOSS, (x, y), measures="sweep")
    batches = [(x, y)]
    nan_logits = pf.measure(
        net,
        LOSS,
        batches,
        forward=lambda net, b: (net(b[0]).masked_fill((b[1] == -100).unsqueeze(1), math.nan), b[1]),
        measures="sweep",
    )
    assert_same(expected, nan_logits, rel=1e-6)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_batches_are_cut_to_the_memory(monkeypatch):
    expected = pf.measure(residual(), LOSS, (X, Y), measures="sweep")
    seen = []
    forward = networks_forward(seen)
    assert_same(expected, pf.measure(residual(), LOSS, [(X, Y)], memory=200_000, forward=forward, measures="sweep"))
    sizes = seen[1:]  # the first is of the inspection
    assert sum(sizes) == 20
    assert 1 <= max(sizes) < 10
    assert max(sizes) - min(sizes) <= 1


def networks_forward(seen):
    def forward(net, batch):
        seen.append(len(batch[0]))
        return net(batch[0]), batch[1]

    return forward


def test_out_of_memory_halves_the_batch(monkeypatch):
    expected = pf.measure(residual(), LOSS, (X, Y), measures="sweep")
    gradients = backward.gradients

    def limited(outputs, *rest, **options):
        if isinstance(outputs[0], torch.Tensor) and outputs[0].ndim and len(outputs[0]) > 6:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return gradients(outputs, *rest, **options)

    monkeypatch.setattr(backward, "gradients", limited)
    seen = []
    assert_same(expected, pf.measure(residual(), LOSS, [(X, Y)], forward=networks_forward(seen), measures="sweep"))
    assert seen == [2, 20, 10, 5, 5, 5, 5]
    monkeypatch.setattr("pyflatness.messages._OUT_OF_MEMORY", ())
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        pf.measure(residual(), LOSS, [(X, Y)])


def test_batches_that_cannot_be_cut():
    """A mask of the batch's own length stays with the whole batch, or is noticed."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x, mask):
            return self.head(torch.relu(self.body(x)) @ mask)

    net = Masked()
    x, y, mask = torch.randn(6, 6), torch.arange(6) % 3, torch.rand(6, 6)
    batches = [{"x": x, "mask": mask, "labels": y}]
    report = pf.measure(net, LOSS, batches, measures="sweep")
    expected = pf.measure(
        net, LOSS, [(x, y)], forward=lambda net, batch: (net(batch[0], mask), batch[1]), measures="sweep"
    )
    assert_same(expected, report)


def test_functional_forms_of_losses():
    net, x, y = classifier(5, 6, 3), torch.randn(6, 5), torch.rand(6, 3)
    assert pf.measure(net, F.mse_loss, (x, y))["trace"].value == pytest.approx(
        pf.measure(net, lambda f, t: (f - t).square().mean(), (x, y))["trace"].value, rel=1e-5
    )

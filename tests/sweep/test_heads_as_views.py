"""The head's formula where the model's output is a view of its last layer's: language models, classes moved, slices."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth
from support.combinations import every

LOSS = nn.CrossEntropyLoss()
KAPPA = "relative_flatness"
VOCABULARY = 7
TOKENS = torch.randint(VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(2))


class LanguageModel(nn.Module):
    """A head over tokens, tied to their embedding, and something behind it."""

    def __init__(self, behind, vocabulary=VOCABULARY):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = nn.Embedding(vocabulary, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, vocabulary, bias=False)
        self.head.weight, self.behind = self.embed.weight, behind
        self.double().eval()

    def forward(self, tokens):
        return self.behind(self.head(torch.relu(self.inner(self.embed(tokens)))))


class Changed(nn.Module):
    def forward(self, z):
        z = z.transpose(1, 2)
        z.data.mul_(2)
        return z


VIEWS = {
    "moved": (lambda z: z.movedim(-1, 1), TARGETS),
    "all but the last": (lambda z: z.transpose(1, 2)[:, :, :-1], TARGETS[:, 1:]),
    "every second": (lambda z: z[:, ::2].mT, TARGETS[:, ::2]),
    "reversed positions": (lambda z: z[:, 1:3].permute(0, 2, 1).unsqueeze(3), TARGETS[:, 1:3].unsqueeze(2)),
    "one position": (lambda z: z[:, -1], TARGETS[:, -1]),
    "flattened": (lambda z: z.view(-1, VOCABULARY), TARGETS.flatten()),
}


@every(
    together=1,
    options={"exact": {}, "probes": {"probes": 2}, "one sample at a time": {"memory": 1}},
    name=[*VIEWS],
)
def test_views_of_the_head_s_output(name, options):
    behind, targets = VIEWS[name]
    if name == "flattened":
        targets = targets.view(3, 5)

    def forward(model, batch):
        return model(batch[0]), batch[1].flatten() if name == "flattened" else batch[1]

    model = LanguageModel(behind)
    measured = {"layers": "head", "measures": KAPPA, "forward": forward}
    found = pf.measure(model, LOSS, (TOKENS, targets), per_sample=True, **measured, **options)["head", KAPPA]
    assert (found.method, found.exact, found.stderr) == ("head", True, None)
    truths = []
    for i in range(3):
        alone = targets[i : i + 1].flatten() if name == "flattened" else targets[i : i + 1]
        untied = LanguageModel(behind)
        untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
        truths.append(truth.of_model(untied, LOSS, TOKENS[i : i + 1], alone, "head"))
    torch.testing.assert_close(found.per_sample, torch.tensor(truths, dtype=torch.float64), rtol=1e-9, atol=0)
    assert found.value == pytest.approx(sum(truths) / 3, rel=1e-9)


def test_targets_that_are_ignored():
    """Rows of other tokens than the first are masked, so that a sample's value is that of a classifier of one row."""
    masked = TARGETS.clone()
    masked[:, 1:] = -100
    model = LanguageModel(lambda z: z.movedim(-1, 1))
    found = pf.measure(model, LOSS, (TOKENS, masked), layers="head", measures=KAPPA)["head", KAPPA]
    features = torch.relu(model.inner(model.embed(TOKENS)))[:, 0].detach()
    expected = pf.head_flatness(features, model.head.weight.detach(), targets=masked[:, 0])
    assert found.value == pytest.approx(expected.value, rel=1e-10)
    assert found.method == "head"


@pytest.mark.parametrize(
    "behind",
    [
        lambda z: (2 * z).movedim(-1, 1),
        lambda z: z.movedim(-1, 1).contiguous(),
        lambda z: z[:, [0, 0, 1, 2, 3]].movedim(-1, 1),
        Changed(),
    ],
    ids=["scaled", "copied", "gathered", "changed where autograd does not see it"],
)
def test_what_is_no_view_takes_cotangents(behind):
    model = LanguageModel(behind)
    found = pf.measure(model, LOSS, (TOKENS, TARGETS), layers="head", measures=KAPPA)["head", KAPPA]
    assert found.method == "ggn"
    untied = LanguageModel(behind)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    if not isinstance(behind, Changed):
        assert found.value == pytest.approx(truth.of_model(untied, LOSS, TOKENS, TARGETS, "head"), rel=1e-9)


def test_all_layers_in_one_sweep():
    """By sampled factors, with the head's value exact and standard errors for the others, per sequence too."""
    model = LanguageModel(lambda z: z.transpose(1, 2)[:, :, :-1])
    data, options = [(TOKENS, TARGETS[:, 1:])], {"measures": KAPPA, "layers": ["inner", "head"], "per_sample": True}
    exact = pf.measure(model, LOSS, data, **options)
    found = pf.measure(model, LOSS, data, probes=400, **options)
    inner = found["inner", KAPPA]
    assert abs(inner.value - exact["inner", KAPPA].value) < 4 * inner.stderr
    assert inner.method == "ggn-sampled"
    assert found["head", KAPPA].value == pytest.approx(exact["head", KAPPA].value, rel=1e-12)
    assert found[KAPPA].stderr == pytest.approx(inner.stderr, rel=1e-6)
    assert inner.per_sample.shape == (3,)
    assert float(inner.per_sample.mean()) == pytest.approx(inner.value, rel=1e-12)


@pytest.mark.parametrize("layer", ["inner", "head"])
def test_values_by_token(layer):
    """A sequence's value is the sum of its tokens', each that of a copy of the sequence in which it alone counts."""
    model = LanguageModel(lambda z: z.movedim(-1, 1))
    alone = torch.full((5, 5), -100).scatter(1, torch.arange(5).unsqueeze(1), TARGETS[0].unsqueeze(1))
    options = {"measures": KAPPA, "layers": layer, "per_sample": True}
    whole = pf.measure(model, LOSS, (TOKENS[:1], TARGETS[:1]), **options)[layer, KAPPA]
    by_token = pf.measure(model, LOSS, (TOKENS[:1].expand(5, -1), alone), **options)[layer, KAPPA]
    assert float(by_token.per_sample.mean()) == pytest.approx(whole.value, rel=1e-10)
    assert float(by_token.per_sample.min()) > 0


def test_a_vocabulary_of_fifty_thousand():
    """A tied head of GPT-2's size in a sweep beside a hidden layer, against the variance of its rows by hand."""
    model = LanguageModel(lambda z: z.transpose(1, 2)[:, :, :-1], 50257)
    tokens = torch.randint(50257, (2, 6))
    report = pf.measure(model, LOSS, (tokens, tokens[:, 1:]), measures=KAPPA, probes=1)
    head = report["head", KAPPA]
    assert (head.method, head.exact, report["inner", KAPPA].method) == ("head", True, "ggn-sampled")
    features = torch.relu(model.inner(model.embed(tokens)))[:, :-1].flatten(0, 1).detach()
    weight = model.head.weight.detach()
    p = torch.softmax(features @ weight.t(), dim=1)
    spread = p @ weight.square().sum(dim=1) - (p @ weight).square().sum(dim=1)  # var_p(w), Definition 3
    assert head.value == pytest.approx(float((features.square().sum(dim=1) * spread).sum()) / 10, rel=1e-9)

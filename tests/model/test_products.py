"""Weights in products of more dimensions than two: einsum, tensordot, batches and stacks of matrices."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import weight_truth
from support.grid import normal

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 5, 3, 4), torch.arange(5) % 3
MEASURES = ["relative_flatness", "trace", "adaptive_sharpness", "lambda_max"]


class Using(nn.Module):
    """A hidden layer h (n, q, 6), by any function of x and parameters; then tanh and a head over the mean of tokens."""

    def __init__(self, hidden, *shape, **more):
        super().__init__()
        self.hidden, self.w = hidden, nn.Parameter(normal(20, *shape))
        for number, (name, other) in enumerate(more.items()):
            self.register_parameter(name, nn.Parameter(normal(21 + number, *other)))
        self.head = nn.Linear(6, 3, bias=False).double()
        self.head.weight.data.copy_(normal(1, 3, 6))

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self, x)).mean(1))


def heads(x):
    """Return (n, q, 2, 2) of tokens (n, q, 4)."""
    return x.unflatten(2, (2, 2))


def of_groups(x):
    """Return (2, n q, 2) of tokens (n, q, 4)."""
    return heads(x).flatten(0, 1).transpose(0, 1)


def of_samples(y):
    """Return (n, q, 6) of (2, n q, 3)."""
    return y.transpose(0, 1).reshape(-1, 3, 6)


def m_d(w):
    return w.flatten(1).t()[None]


def d_m(w):
    return w.flatten(0, -2)[None]


PRODUCTS = {  # by name: what is done, the weight's shape, the weight as (groups, d, m)
    "queries": (lambda net, x: torch.einsum("nqm,mhk->nqhk", x, net.w).flatten(2), (4, 2, 3), m_d),
    "queries of heads in front": (lambda net, x: torch.einsum("nqm,hmk->nqhk", x, net.w).flatten(2), (2, 4, 3),
        lambda w: w.transpose(1, 2).flatten(0, 1)[None]),
    "queries, heads first": (lambda net, x: torch.einsum("mhk,nqm->hnqk", net.w, x).permute(1, 2, 0, 3).flatten(2),
        (4, 2, 3), m_d),
    "outputs of attention": (lambda net, x: torch.einsum("nqhk,hkd->nqd", heads(x), net.w), (2, 2, 6),
        lambda w: w.flatten(0, 1).t()[None]),
    "outputs in front": (lambda net, x: torch.einsum("nqhk,dhk->nqd", heads(x), net.w), (6, 2, 2),
        lambda w: w.flatten(1)[None]),
    "of each head": (lambda net, x: torch.einsum("nqhm,hmk->nqhk", heads(x), net.w).flatten(2), (2, 2, 3),
        lambda w: w.transpose(1, 2)),
    "of each head, rows first": (
        lambda net, x: torch.einsum("hkm,hnqm->nqhk", net.w, heads(x).movedim(2, 0)).flatten(2), (2, 3, 2),
        lambda w: w),
    "a filter for each position": (lambda net, x: torch.einsum("npmk,pdmk->npd", x.unfold(1, 2, 1), net.w),
        (2, 6, 4, 2), lambda w: w.flatten(2)),
    "an ellipsis": (lambda net, x: torch.einsum("...m, dm -> ...d", x, net.w), (6, 4), d_m),
    "an ellipsis and heads": (lambda net, x: torch.einsum("mhk,...m->...hk", net.w, x).flatten(2), (4, 2, 3), m_d),
    "no result": (lambda net, x: torch.einsum("abm,mz", x, net.w), (4, 6), m_d),
    "an index of one": (lambda net, x: torch.einsum("nqm,omd->nqod", x, net.w).squeeze(2), (1, 4, 6),
        lambda w: w[0].t()[None]),
    "tensordot": (lambda net, x: torch.tensordot(x, net.w, 1), (4, 6), m_d),
    "tensordot over two": (lambda net, x: torch.tensordot(heads(x), net.w), (2, 2, 6),
        lambda w: w.flatten(0, 1).t()[None]),
    "tensordot of the weight": (lambda net, x: torch.tensordot(net.w, x, dims=([1], [2])).movedim(0, -1), (6, 4), d_m),
    "tensordot out of order": (lambda net, x: torch.tensordot(heads(x), net.w, ([3, -2], [1, 0])), (2, 2, 6),
        lambda w: w.flatten(0, 1).t()[None]),
    "baddbmm": (lambda net, x: torch.baddbmm(net.b, x, net.w.expand(len(x), -1, -1)), (4, 6), m_d),
    "baddbmm of each": (lambda net, x: of_samples(net.bias_of_each.baddbmm(of_groups(x), net.w)), (2, 2, 3),
        lambda w: w.transpose(1, 2)),
    "bmm of each": (lambda net, x: of_samples(torch.bmm(of_groups(x), net.w)), (2, 2, 3), lambda w: w.transpose(1, 2)),
    "bmm, the weight first": (lambda net, x: of_samples(torch.bmm(net.w, of_groups(x).mT).mT), (2, 3, 2), lambda w: w),
    "matmul of each head": (lambda net, x: (heads(x).transpose(1, 2) @ net.w).transpose(1, 2).flatten(2), (2, 2, 3),
        lambda w: w.transpose(1, 2)),
    "the same, with a dimension of one": (
        lambda net, x: (heads(x).transpose(1, 2) @ net.w).transpose(1, 2).flatten(2), (1, 2, 2, 3),
        lambda w: w[0].transpose(1, 2)),
    "matmul of each and one input": (lambda net, x: (x.unsqueeze(1) @ net.w).transpose(1, 2).flatten(2), (2, 4, 3),
        lambda w: w.transpose(1, 2).flatten(0, 1)[None]),
    "entry by entry": (lambda net, x: F.pad(x * net.w, (0, 2)), (3, 4), lambda w: w.reshape(12, 1, 1)),
    "a row of each feature": (lambda net, x: (net.w * x[..., None]).sum(2), (4, 6), lambda w: w[..., None]),
    "the same, with a bias": (lambda net, x: torch.addcmul(net.bias, net.w, x[..., None]).sum(2), (4, 6),
        lambda w: w[..., None]),
    "of an ensemble": (
        lambda net, x: F.pad((x[:, None].expand(-1, 2, -1, -1) * net.w[:, None]).sum(1), (0, 2)), (2, 4),
        lambda w: w.reshape(8, 1, 1)),
}  # fmt: skip
BIASES = {
    "the same, with a bias": {"bias": (4, 6)},
    "baddbmm": {"b": (6,)},
    "baddbmm of each": {"bias_of_each": (2, 1, 3)},
}


def using(name):
    hidden, shape, _ = PRODUCTS[name]
    return Using(hidden, *shape, **BIASES.get(name, {}))


def truth(model, layer, places, x=X, y=Y):
    """Return values of the measures by the dense Hessian; ``places`` (groups, d, m) are of the parameter's entries."""
    hessian = weight_truth.hessian(model, lambda net: LOSS(net(x), y), layer)
    own = hessian[places.flatten()][:, places.flatten()]
    values = dict(model.named_parameters())[layer].detach().flatten()
    kappa, adaptive = 0.0, 0.0
    for rows in places:
        w = values[rows]
        blocks = hessian[rows.flatten()][:, rows.flatten()].view(*rows.shape, *rows.shape)
        kappa += float(torch.einsum("sm,tm,sjtj->", w, w, blocks))
        adaptive += float(w.flatten().square() @ blocks.view(w.numel(), -1).diagonal())
    return {
        "relative_flatness": kappa,
        "trace": float(own.trace()),
        "adaptive_sharpness": adaptive,
        "lambda_max": float(torch.linalg.eigvalsh(own)[-1]),
    }


def entries(w):
    return torch.arange(w.numel()).view(w.shape)


@pytest.mark.parametrize("name", PRODUCTS)
def test_values_are_those_of_the_dense_hessian(name):
    model, places = using(name), PRODUCTS[name][2]
    outputs = model(X)
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    assert torch.equal(model(X), outputs)
    assert (report.layers, report.uncovered) == (("w", "head"), {})
    expected = truth(model, "w", places(entries(model.w)))
    for measure in MEASURES:
        assert report["w", measure].value == pytest.approx(expected[measure], rel=1e-8), measure
        assert report["w", measure].exact
    single = pf.relative_flatness(model, LOSS, (X, Y), "w", per_sample=True).per_sample
    one = truth(model, "w", places(entries(model.w)), X[:1], Y[:1])
    assert single[0] == pytest.approx(one["relative_flatness"], rel=1e-8)
    assert pf.verify(model, LOSS, (X, Y), "w")


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_model_computes_the_same(name):
    """Outputs of the run that is measured are those of the model by itself."""
    model, seen = using(name), []

    def forward(net, batch):
        seen.append((net(batch[0]).detach(), batch[0]))
        return net(batch[0]), batch[1]

    pf.measure(model, LOSS, (X, Y), measures=["trace"], forward=forward, curvature="ggn")
    for outputs, inputs in seen:
        assert torch.allclose(outputs, model(inputs), rtol=0, atol=1e-12)


def test_matrices_of_one_parameter():
    model = Using(lambda net, x: torch.tanh(F.linear(x, net.w[0])) @ net.w[1] @ net.last, 3, 4, 4, last=(4, 6))
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    assert report.layers == ("w[0]", "w[1]", "last", "head")
    assert [*report.uncovered] == ["w"]
    assert report.uncovered["w"] == pytest.approx(16 / (48 + 24 + 18))
    places = entries(model.w)
    for layer, some in (("w[0]", places[:1]), ("w[1]", places[1:2].transpose(1, 2))):
        expected = truth(model, "w", some)
        for measure in MEASURES:
            assert report[layer, measure].value == pytest.approx(expected[measure], rel=1e-8), (layer, measure)
    alone = pf.relative_flatness(model, LOSS, (X, Y), "w[1]")
    assert alone.value == pytest.approx(report["w[1]", "relative_flatness"].value, rel=1e-12)


def test_one_matrix_alone_is_exact_where_the_data_go_through_another():
    model = Using(lambda net, x: torch.cat([F.linear(x, w) for w in net.w], -1), 2, 3, 4)
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES, layers="w[0]")
    expected = truth(model, "w", entries(model.w)[:1])
    for measure in MEASURES:
        assert report["w[0]", measure].value == pytest.approx(expected[measure], rel=1e-8), measure
        assert report["w[0]", measure].exact, report["w[0]", measure].notes


def test_all_matrices_of_a_parameter_cover_it():
    model = Using(lambda net, x: sum(F.linear(x, w) for w in net.w), 3, 6, 4)
    report = pf.measure(model, LOSS, (X, Y), measures=["trace"])
    assert (report.layers, report.uncovered) == (("w[0]", "w[1]", "w[2]", "head"), {})


OTHERWISE = {
    "scaled": (lambda net, x: torch.baddbmm(net.b, x, net.w.expand(len(x), -1, -1), alpha=2), (4, 6),
        "baddbmm of other than inputs, a weight and its bias"),
    "of three": (lambda net, x: torch.einsum("nqm,md,nq->nqd", x, net.w, x[..., 0]), (4, 6), "einsum of 3 tensors"),
    "summed": (lambda net, x: torch.einsum("nqm,mhk->nqk", x, net.w), (4, 2, 6), "einsum over other indices"),
    "groups behind": (lambda net, x: torch.einsum("nqhm,mhk->nqhk", heads(x), net.w).flatten(2), (2, 2, 3),
        "einsum of several matrices that are not one behind the other"),
    "dots": (lambda net, x: torch.einsum("...hm,...mk->...hk", heads(x).transpose(1, 2), net.w).transpose(1, 2).flatten(
        2), (2, 2, 3), "einsum with an ellipsis for the weight"),
    "by vectors": (lambda net, x: torch.einsum("nqm,m->nq", x, net.w[0])[..., None] * net.b, (2, 4),
        "einsum over other indices"),
    "masked": (lambda net, x: x @ (net.w * torch.ones(4, 6).double()), (4, 6),
        "mul with what has no dimension for samples"),
    "columns": (lambda net, x: x @ net.w[:, :6], (4, 8), "an operation on a part of it"),
    "rows": (lambda net, x: F.linear(x, net.w[2:]), (8, 4), "an operation on a part of it"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_reason_says_why_a_weight_is_left_out(name):
    hidden, shape, why = OTHERWISE[name]
    model = Using(hidden, *shape, b=(6,))
    report = pf.measure(model, LOSS, (X, Y), measures=["trace"])
    assert report.layers == ("head",)
    assert re.search(why, report.why_uncovered["w"]), report.why_uncovered

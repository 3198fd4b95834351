"""Steps of random networks that are of other operations than layers and activations.

Products of features by einsum, gathering and scattering, sorting and running sums, distances to prototypes, experts
that rows are routed to by an index, and ``torch.func.vmap`` inside the model. The last dimension holds features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.fuzzed.drawing import Step
from support.fuzzed.functions import activation


def einsum(draw):
    """A product of a layer's features with each other, or with a weight that no module has."""
    m, tokens = draw.shape[-1], len(draw.shape) == 2
    d = draw.width(m, 1, 3)
    if draw.chance(0.5):
        equation = draw.rng.choice(("...m,dm->...d", "...m,dm->d..."))
        draw.left -= m * d

        def by_weight(net, x):
            h = torch.einsum(equation, x, net.matrix)
            return h.tanh() if equation[-1] == "d" else h.movedim(0, -1)

        step = Step(f"einsum({equation!r}) with a parameter", by_weight)
        step.matrix = nn.Parameter(torch.randn(d, m))
        return draw.add(step, *draw.shape[:-1], d)
    equation = draw.rng.choice(("...a,...b->...ab", "nta,nsa->nts" if tokens else "na,nb->nba"))
    features = len(draw.shape)  # the first dimension of these
    step = Step(f"einsum({equation!r}) of two Linear({m}, {d})",
        lambda net, x: torch.einsum(equation, net.a(x), net.b(x)).flatten(features),
        a=draw.linear(m, d), b=draw.linear(m, d))  # fmt: skip
    return draw.add(step, *draw.shape[:-1], draw.shape[0] if equation.endswith("nts") else d * d)


def gathered(draw):
    """Features of a layer taken from, or put to, other places: fixed ones, or such as depend on the sample."""
    m = draw.shape[-1]
    d = draw.width(m)
    fixed = torch.tensor([draw.rng.randrange(d) for _ in range(d)])
    name, f = draw.rng.choice((
        ("gather of fixed", lambda h: h.gather(-1, fixed.expand_as(h))),
        ("gather by rank", lambda h: h.gather(-1, h.argsort(-1).roll(1, -1))),
        ("index_select", lambda h: h.index_select(-1, fixed)),
        ("h[..., places]", lambda h: h[..., fixed] - 0.5 * h),
        ("take_along_dim", lambda h: torch.take_along_dim(h, h.argmax(-1, keepdim=True), -1) + h),
        ("scatter_add", lambda h: torch.zeros_like(h).scatter_add(-1, fixed.expand_as(h), h.tanh())),
        ("scatter", lambda h: h.scatter(-1, h.argmin(-1, keepdim=True), 2 * h.amax(-1, keepdim=True))),
        ("scatter_reduce", lambda h: h.scatter_reduce(-1, fixed.expand_as(h), h.sin(), "amax")),
        ("index_add", lambda h: h.index_add(-1, fixed, h * h)),
        ("index_copy", lambda h: h.index_copy(-1, fixed[:1], h[..., :1] * h[..., -1:])),
        ("masked_scatter", lambda h: torch.stack([one.masked_scatter(one.detach() > 0.4, 0.5 * one) for one in h])),
        ("one-hot product", lambda h: h * F.one_hot(h.argmax(-1), h.shape[-1])),
    ))  # fmt: skip
    step = Step(f"Linear({m}, {d}) {name}", lambda net, x: f(net.a(x)), a=draw.linear(m, d))
    draw.add(step, *draw.shape[:-1], d)


def ordered(draw):
    """Sorted features of a layer, some of them, or running sums, products and maxima of them."""
    m = draw.shape[-1]
    d = draw.width(m)
    some = draw.rng.randint(1, d)
    name, f, width = draw.rng.choice((
        ("sort", lambda h: h.sort(-1).values, d), ("msort", lambda h: h.sort(-1, descending=True).values.tanh(), d),
        ("topk", lambda h: h.topk(some, -1).values, some),
        ("median", lambda h: h.median(-1, keepdim=True).values + h, d),
        ("kthvalue", lambda h: h - h.kthvalue(some, -1, keepdim=True).values, d),
        ("cumsum", lambda h: h.cumsum(-1), d), ("cumprod", lambda h: (0.5 + h).cumprod(-1), d),
        ("log of cumsum", lambda h: h.exp().cumsum(-1).log(), d), ("cummax", lambda h: h.cummax(-1).values, d),
        ("cummin", lambda h: h.cummin(-1).values.sin(), d), ("diff", lambda h: h.diff(dim=-1, prepend=h[..., :1]), d),
        ("logsumexp", lambda h: h - h.logsumexp(-1, keepdim=True), d), ("prod", lambda h: h + h.prod(-1, True), d),
        ("norm", lambda h: h / (0.1 + h.norm(dim=-1, keepdim=True)), d),
        ("renormed", lambda h: F.normalize(h, dim=-1), d),
        ("var", lambda h: h * h.var(-1, keepdim=True, correction=0), d),
    ))  # fmt: skip
    draw.add(
        Step(f"{name} of Linear({m}, {d})", lambda net, x: f(net.a(x)), a=draw.linear(m, d)), *draw.shape[:-1], width
    )


def routed(draw):
    """One or two of several experts for each row of dimension 0, or token: by an index, so that some have no rows."""
    m, count = draw.shape[-1], draw.rng.randint(2, 3)
    d, chosen = draw.width(m, 1, 3), draw.rng.randint(1, 2)
    text, f = activation(draw.rng)
    style = draw.rng.choice(("modules", "modules", "stacked", "gathered weights", "dense"))
    draw.left -= count * m * d

    def forward(net, x):
        rows = x.reshape(-1, m)
        scores, experts = net.router(rows).softmax(-1).topk(chosen, dim=-1)
        given = rows.new_zeros(len(rows), d)
        if style == "gathered weights":
            return (scores[..., None] * f(torch.einsum("nm,nkdm->nkd", rows, net.matrix[experts]))).sum(1)
        for expert in range(count):
            if style == "dense":
                share = (scores * (experts == expert)).sum(1, keepdim=True)
                given = given + share * f(net.experts[expert](rows))
                continue
            row, place = (experts == expert).nonzero(as_tuple=True)
            own = rows[row]
            h = F.linear(own, net.matrix[expert]) if style == "stacked" else net.experts[expert](own)
            given = given.index_add(0, row, scores[row, place, None] * f(h))
        return given

    modules = {} if "stacked" in style or "weights" in style else {
        "experts": nn.ModuleList(nn.Linear(m, d) for _ in range(count))}  # fmt: skip
    step = Step(f"top {chosen} of {count} experts, {style}, {text} of Linear({m}, {d})",
        lambda net, x: forward(net, x).view(*x.shape[:-1], d), router=draw.linear(m, count), **modules)  # fmt: skip
    if not modules:
        step.matrix = nn.Parameter(torch.randn(count, d, m))
    draw.add(step, *draw.shape[:-1], d)


def prototypes(draw):
    """Distances or angles of a layer's output to a few centres, which are trained or fixed."""
    m, count = draw.shape[-1], draw.rng.randint(2, 3)
    d = draw.width(m, 2, 3)  # the angle between numbers is constant
    name, f = draw.rng.choice((
        ("-cdist", lambda h, c: -torch.cdist(h, c)),
        ("-cdist²", lambda h, c: -torch.cdist(h, c).square()),
        ("cdist, p = 1", lambda h, c: torch.cdist(h, c, p=1.0)),
        ("cosine", lambda h, c: F.cosine_similarity(h.unsqueeze(-2), c, dim=-1)),
        ("product of unit vectors", lambda h, c: F.normalize(h, dim=-1) @ F.normalize(c, dim=-1).t()),
        ("squared distances", lambda h, c: -(h.unsqueeze(-2) - c).square().sum(-1)),
        ("exp of them", lambda h, c: (-(h.unsqueeze(-2) - c).square().sum(-1)).exp()),
    ))  # fmt: skip
    step = Step(
        f"{name} of Linear({m}, {d}) to {count} centres", lambda net, x: f(net.a(x), net.centres), a=draw.linear(m, d)
    )
    centres = torch.randn(count, d)
    if draw.chance(0.5):
        step.centres = nn.Parameter(centres)
    else:
        step.register_buffer("centres", centres)
    draw.add(step, *draw.shape[:-1], count)


def mapped(draw):
    """``torch.func.vmap`` over the samples: of a function behind a layer, or with the layer inside of it."""
    m = draw.shape[-1]
    d = draw.width(m, 2, 4)
    inside, layer = draw.chance(0.4), draw.linear(m, d)
    name, f = draw.rng.choice((
        ("tanh", torch.tanh), ("relu", torch.relu), ("softmax", lambda h: h.softmax(-1)),
        ("outer", lambda h: h * h.sum(-1, keepdim=True)), ("sorted", lambda h: h.sort(-1).values),
    ))  # fmt: skip

    def forward(net, x):
        return torch.func.vmap(lambda row: f(net.a(row)))(x) if inside else torch.func.vmap(f)(net.a(x))

    text = f"vmap of {name} {'and' if inside else 'behind'} Linear({m}, {d})"
    draw.add(Step(text, forward, a=layer), *draw.shape[:-1], d)


@dataclass
class Parts:
    """What a step of a network hands on inside of it."""

    features: Tensor
    skip: Tensor


def structured(draw):
    """Layers in a module that returns a dictionary or a dataclass, of which the step takes the parts."""
    m = draw.shape[-1]
    d = draw.width(m, 1, 3)
    text, f = activation(draw.rng)
    make = draw.rng.choice((dict, Parts))
    inner = Step("", lambda net, x: make(features=f(net.a(x)), skip=net.b(x)), a=draw.linear(m, d), b=draw.linear(m, d))

    def forward(net, x):
        parts = net.inner(x)
        parts = parts if make is dict else vars(parts)
        return torch.cat([parts["features"], parts["skip"]], dim=-1)

    draw.add(Step(f"a {make.__name__} of {text} of Linear({m}, {d}) and of another", forward, inner=inner),
        *draw.shape[:-1], 2 * d)  # fmt: skip


STEPS = {einsum: 1, gathered: 1, ordered: 1, routed: 1, prototypes: 1, mapped: 0.7, structured: 0.5}

"""Steps of random networks on vectors (n, m) and tokens (n, T, m): the last dimension holds features."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from support.fuzzed import operations
from support.fuzzed.drawing import IMAGES, TOKENS, VECTORS, Step
from support.fuzzed.functions import activation, in_place

# --- any shape --------------------------------------------------------------------------------------------------------


def act(draw):
    text, run = activation(draw.rng)
    draw.add(Step(text, lambda net, x: run(x)))


def norm(draw):
    channels, images = draw.shape[0 if draw.kind == IMAGES else -1], draw.kind == IMAGES
    if images and draw.chance(0.5):
        groups = draw.rng.choice([g for g in (1, 2, channels) if channels % g == 0])
        layer = nn.GroupNorm(groups, channels)
    elif images or (draw.kind == VECTORS and draw.chance(0.5)):
        layer = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(draw.shape) - 1](channels)
        layer.running_mean.normal_(0, 0.3)
        layer.running_var.uniform_(0.5, 2)
    else:
        layer = nn.LayerNorm(channels)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.bias.normal_(0, 0.3)
    draw.add(Step(type(layer).__name__, lambda net, x: net.norm(x), norm=layer))


# --- vectors and tokens: the last dimension holds features ------------------------------------------------------------


def linear(draw):
    m = draw.shape[-1]
    d = draw.width(m)
    text, change = in_place(draw.rng, d, len(draw.shape) + 1) if draw.chance(0.6) else activation(draw.rng)
    step = Step(f"Linear({m}, {d}) {text}", lambda net, x: change(net.a(x)), a=draw.linear(m, d))
    draw.add(step, *draw.shape[:-1], d)
    if d == m:
        draw.reusable.append(step.a)


def residual(draw):
    m = draw.shape[-1]
    text, f = activation(draw.rng)
    style = draw.rng.choice(("x + f", "x += f", "g += h", "f += x"))
    two = style == "g += h"

    def forward(net, x):
        if two:
            g = net.a(x)
            g += f(net.b(x))
            return g
        h = f(net.a(x))
        if style == "x += f":
            x = x.clone()
            x += h
            return x
        if style == "f += x":
            h = net.a(x)
            h += x
            return f(h)
        return x + h

    layers = {"a": draw.linear(m, m)} | ({"b": draw.linear(m, m)} if two else {})
    draw.add(Step(f"residual {style}, f = {text} of Linear({m}, {m})", forward, **layers))


def gate(draw):
    m = draw.shape[-1]
    d = draw.width(m)
    text, f = activation(draw.rng)
    if draw.chance(0.5):
        both = draw.linear(m, 2 * d)

        def forward(net, x):
            a, b = net.both(x).chunk(2, dim=-1)
            return a * f(b)

        step = Step(f"Linear({m}, {2 * d}) in chunks a * {text}(b)", forward, both=both)
    else:
        step = Step(
            f"Linear({m}, {d})(x) * {text}(Linear({m}, {d})(x))", lambda net, x: net.a(x) * f(net.b(x)),
            a=draw.linear(m, d), b=draw.linear(m, d),
        )  # fmt: skip
    draw.add(step, *draw.shape[:-1], d)


def joined(draw):
    m = draw.shape[-1]
    (one, f), (other, g) = activation(draw.rng), activation(draw.rng)
    a, b = (draw.width(m, 1, 3) for _ in range(2))
    step = Step(
        f"cat({one}(Linear({m}, {a})), {other}(Linear({m}, {b})))",
        lambda net, x: torch.cat([f(net.a(x)), g(net.b(x))], dim=-1),
        a=draw.linear(m, a), b=draw.linear(m, b),
    )  # fmt: skip
    draw.add(step, *draw.shape[:-1], a + b)


def maxout(draw):
    m = draw.shape[-1]
    d = draw.width(2 * m, 2, 3)
    step = Step(f"max over pairs of Linear({m}, {2 * d})", lambda net, x: net.a(x).unflatten(-1, (d, 2)).amax(-1),
        a=draw.linear(m, 2 * d))  # fmt: skip
    draw.add(step, *draw.shape[:-1], d)


def recurrence(draw):
    m, times = draw.shape[-1], draw.rng.randint(2, 3)
    text, f = activation(draw.rng)

    def forward(net, x):
        for _ in range(times):
            x = f(net.cell(x))
        return x

    draw.add(Step(f"{times} times {text} of one Linear({m}, {m})", forward, cell=draw.linear(m, m)))


def again(draw):
    """A layer that was called before."""
    m = draw.shape[-1]
    fitting = [layer for layer in draw.reusable if layer.in_features == m]
    if not fitting:
        return linear(draw)
    text, f = activation(draw.rng)
    return draw.add(Step(f"{text} of the Linear({m}, {m}) before", lambda net, x: f(net.a(x)), a=fitting[-1]))


def tied(draw):
    m = draw.shape[-1]
    text, f = activation(draw.rng)
    a, b = nn.Linear(m, m), nn.Linear(m, m)
    b.weight = a.weight
    draw.left -= 2 * m * m
    draw.add(Step(f"Linear({m}, {m}) twice, weights tied, {text}", lambda net, x: net.b(f(net.a(x))), a=a, b=b))


def unused(draw):
    """A layer whose output is dropped, or multiplied by zero, or detached."""
    m = draw.shape[-1]
    how = draw.rng.choice(("dropped", "dropped", "times zero", "times zero", "detached"))

    def forward(net, x):
        h = net.side(x)
        if how == "times zero":
            return x + 0 * h.sum(-1, keepdim=True)
        return x + h.detach().mean(-1, keepdim=True) if how == "detached" else x

    draw.add(Step(f"Linear({m}, 2) {how}", forward, side=draw.linear(m, 2)))


def siamese(draw):
    """One encoder on both halves of the features."""
    m = draw.shape[-1] // 2
    if m == 0:
        return linear(draw)
    d = draw.width(m, 2, 4)
    text, f = activation(draw.rng)
    join = draw.rng.choice(("cat", "difference", "product"))

    def forward(net, x):
        a, b = f(net.encoder(x[..., :m])), f(net.encoder(x[..., m : 2 * m]))
        return torch.cat([a, b], dim=-1) if join == "cat" else (a - b).abs() if join == "difference" else a * b

    step = Step(f"{join} of {text} of one Linear({m}, {d}) on halves", forward, encoder=draw.linear(m, d))
    return draw.add(step, *draw.shape[:-1], 2 * d if join == "cat" else d)


# --- tokens -----------------------------------------------------------------------------------------------------------


def mix(draw):
    text, f = draw.rng.choice((
        ("x + mean over tokens", lambda x: x + x.mean(1, keepdim=True)),
        ("cumsum over tokens", lambda x: x.cumsum(1)),
        ("x - max over tokens", lambda x: x - x.amax(1, keepdim=True)),
        ("tokens turned round", lambda x: x.flip(1) + 0.5 * x),
    ))  # fmt: skip
    draw.add(Step(text, lambda net, x: f(x)))


def attention(draw):
    m = draw.shape[-1]
    d = draw.rng.randint(2, 3)
    fused, causal, slope = draw.chance(0.5), draw.chance(0.4), draw.rng.choice((1.0, 2.0))

    def forward(net, x):
        q, k, v = slope * net.q(x), net.k(x), net.v(x)
        if fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        scores = q @ k.transpose(1, 2) / math.sqrt(d)
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores.masked_fill_(mask, -torch.inf)
        return scores.softmax(-1) @ v

    text = f"{'fused' if fused else 'written out'}{', causal' if causal else ''} attention of Linear({m}, {d})"
    step = Step(text, forward, q=draw.linear(m, d), k=draw.linear(m, d), v=draw.linear(m, d))
    draw.add(step, draw.shape[0], d)


def multihead(draw):
    m = draw.shape[-1]
    heads = draw.rng.choice([h for h in (1, 2) if m % h == 0])
    weights = draw.chance(0.5)
    layer = nn.MultiheadAttention(m, heads, batch_first=True)
    step = Step(f"x + MultiheadAttention({m}, {heads}), need_weights={weights}",
        lambda net, x: x + net.attention(x, x, x, need_weights=weights)[0], attention=layer)  # fmt: skip
    draw.add(step)


def flattened(draw):
    """Tokens among the samples of dimension 0, samples or tokens running fastest."""
    t, m = draw.shape
    d = draw.width(m)
    text, change = in_place(draw.rng, d, 2)
    inner = draw.chance(0.3)

    def forward(net, x):
        h = (x.transpose(0, 1) if inner else x).flatten(0, 1)
        h = change(net.a(h)).unflatten(0, (t, -1) if inner else (-1, t))
        return h.transpose(0, 1) if inner else h

    text = f"Linear({m}, {d}) {text} on tokens{', second,' if inner else ''} flattened into dimension 0"
    draw.add(Step(text, forward, a=draw.linear(m, d)), t, d)


def batch_second(draw):
    t, m = draw.shape
    d = draw.width(m)
    text, change = in_place(draw.rng, d, 3)
    step = Step(f"Linear({m}, {d}) {text} on (T, n, m)",
        lambda net, x: change(net.a(x.transpose(0, 1))).transpose(0, 1), a=draw.linear(m, d))  # fmt: skip
    draw.add(step, t, d)


def to_vectors(draw):
    t, m = draw.shape
    how = draw.rng.choice(("mean", "max", "first", *(("flat",) if t * m <= 12 else ())))
    runs = {"mean": lambda x: x.mean(1), "max": lambda x: x.amax(1), "first": lambda x: x[:, 0],
            "flat": lambda x: x.flatten(1)}  # fmt: skip
    draw.add(Step(f"tokens to vectors: {how}", lambda net, x: runs[how](x)), t * m if how == "flat" else m,
        kind=VECTORS)  # fmt: skip


def to_images(draw):
    t, m = draw.shape
    draw.add(Step("tokens to a sequence of channels", lambda net, x: x.transpose(1, 2)), m, t, kind=IMAGES)


def vectors_to_tokens(draw):
    (m,) = draw.shape
    t = next((t for t in (2, 3) if m % t == 0), 1)
    draw.add(Step(f"vectors to {t} tokens", lambda net, x: x.reshape(len(x), t, m // t)), t, m // t, kind=TOKENS)


def vectors_to_images(draw):
    (m,) = draw.shape
    draw.add(Step("vectors to one channel", lambda net, x: x[:, None]), 1, m, kind=IMAGES)


ANYWHERE = {linear: 6, residual: 2, gate: 1, joined: 1, maxout: 1, recurrence: 1, again: 1, tied: 0.7, unused: 0.7,
            siamese: 1, act: 0.5, norm: 1.2, **operations.STEPS}  # fmt: skip
STEPS = {
    VECTORS: {**ANYWHERE, vectors_to_tokens: 0.7, vectors_to_images: 0.4},
    TOKENS: {**ANYWHERE, mix: 2, attention: 1.5, multihead: 1, flattened: 1.5, batch_second: 1, to_vectors: 2.5,
             to_images: 0.5},
}  # fmt: skip

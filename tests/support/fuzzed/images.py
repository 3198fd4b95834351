"""Steps of random networks on images (n, channels, *pixels), of one to three dimensions."""

import math

import torch
from torch import nn

from support.fuzzed.drawing import CONVOLUTIONS, LAYER, TOKENS, VECTORS, Step
from support.fuzzed.functions import activation, in_place
from support.fuzzed.steps import act, norm


def convolution(draw):
    channels, *size = draw.shape
    kind = CONVOLUTIONS[len(size) - 1]
    kernel = tuple(draw.rng.randint(1, min(3 if len(size) < 3 else 2, s)) for s in size)
    if draw.chance(0.2):
        kernel = (1,) * len(size)
    stride = tuple(draw.rng.choice((1, 1, 2)) if k > 1 or draw.chance(0.1) else 1 for k in kernel)
    dilation = tuple(draw.rng.choice((1, 1, 2)) if s > 2 * k - 2 else 1 for s, k in zip(size, kernel, strict=True))
    mode = draw.rng.choice(("zeros", "zeros", "reflect", "replicate", "circular"))
    padding = tuple(draw.rng.randint(0, max(0, min(k - 1, s - 1))) for k, s in zip(kernel, size, strict=True))
    if draw.chance(0.1) and all(s == 1 for s in stride) and all(k % 2 for k in kernel):
        padding = "same"
    groups = draw.rng.choice([g for g in (1, 1, 2, channels) if channels % g == 0])
    fits = max(1, LAYER // (math.prod(kernel) * channels // groups) // groups)
    outputs = groups * min(fits, draw.rng.randint(1, max(1, 4 // groups)))
    layer = draw.convolution(kind, channels, outputs, kernel, stride=stride, padding=padding, dilation=dilation,
        groups=groups, padding_mode=mode, bias=draw.chance(0.75))  # fmt: skip
    with torch.no_grad():
        shape = layer(torch.zeros(1, *draw.shape)).shape[1:]
    text, change = in_place(draw.rng, outputs, len(draw.shape) + 1, 1) if draw.chance(0.6) else activation(draw.rng)
    draw.add(Step(f"{layer} {text}", lambda net, x: change(net.conv(x)), conv=layer), *shape)


def residual_convolution(draw):
    channels, *size = draw.shape
    kind = CONVOLUTIONS[len(size) - 1]
    text, f = activation(draw.rng)

    def forward(net, x):
        h = net.conv(x)
        h += x
        return f(h)

    layer = draw.convolution(kind, channels, channels, 3 if len(size) == 1 else 1, padding="same")
    draw.add(Step(f"{text} of {kind.__name__}({channels}, {channels}, padding=same) += x", forward, conv=layer))


def pool(draw):
    size = draw.shape[1:]
    if min(size) < 2:
        return act(draw)
    kind = draw.rng.choice(("Max", "Avg", "AdaptiveAvg", "AdaptiveMax"))
    layer = getattr(nn, f"{kind}Pool{len(size)}d")(2)
    shape = layer(torch.zeros(1, *draw.shape)).shape[1:]
    return draw.add(Step(str(layer), lambda net, x: net.pool(x), pool=layer), *shape)


def linear_on_pixels(draw):
    channels = draw.shape[0]
    d = draw.width(channels, 2, 4)
    text, change = in_place(draw.rng, d, len(draw.shape) + 1)
    step = Step(f"Linear({channels}, {d}) {text} on pixels",
        lambda net, x: change(net.a(x.movedim(1, -1))).movedim(-1, 1), a=draw.linear(channels, d))  # fmt: skip
    draw.add(step, d, *draw.shape[1:])


def to_vectors(draw):
    total = math.prod(draw.shape)
    how = draw.rng.choice(("mean", "max", *(("flat", "flat") if total <= 16 else ())))
    runs = {"mean": lambda x: x.flatten(2).mean(2), "max": lambda x: x.flatten(2).amax(2),
            "flat": lambda x: x.flatten(1)}  # fmt: skip
    draw.add(Step(f"images to vectors: {how}", lambda net, x: runs[how](x)),
        total if how == "flat" else draw.shape[0], kind=VECTORS)  # fmt: skip


def to_tokens(draw):
    channels, *size = draw.shape
    draw.add(Step("pixels to tokens", lambda net, x: x.flatten(2).transpose(1, 2)), math.prod(size), channels,
        kind=TOKENS)  # fmt: skip


STEPS = {convolution: 6, residual_convolution: 1, pool: 1.2, norm: 1, act: 0.5, linear_on_pixels: 1, to_vectors: 2.5,
         to_tokens: 0.7}  # fmt: skip

"""Random small networks in float64, each from a seed: a chain of steps between vectors, tokens and images.

A step is a module with layers of its own and a text that says what it does. :func:`build` draws steps that fit the
shape reached so far, until a head gives outputs (n, C), (n, C, T) or (n, C, h, w). Weights are few, so that a dense
Hessian of all of them is quick. Shapes here are those of one sample: (m,), (T, m), or (channels, *pixels).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from support.fuzzed import images, steps
from support.fuzzed.drawing import CONVOLUTIONS, IMAGES, TOKENS, VECTORS, Checkpointed, Drawing, Step

WORDS = 5  # that an embedding knows
STEPS = {**steps.STEPS, IMAGES: images.STEPS}


@dataclass(frozen=True)
class Network:
    """A model, with the shapes of one sample's input (``words``: integers) and output, and what follows its head."""

    model: nn.Module
    shape: tuple[int, ...]
    words: bool
    outputs: tuple[int, ...]
    tail: str


def start(rng):
    """What a network begins with: a kind and a sample's shape."""
    kind = rng.choices((VECTORS, TOKENS, IMAGES), (4, 4, 3))[0]
    if kind == VECTORS:
        return kind, (rng.randint(1, 5),)
    if kind == TOKENS:
        return kind, (rng.randint(1, 4), rng.randint(2, 4))
    dims = rng.choices((1, 2, 3), (3, 4, 1))[0]
    return kind, (rng.randint(1, 3), *(rng.randint(2, (6, 4, 3)[dims - 1]) for _ in range(dims)))


def head(draw):
    """The last layer: scores (n, C), or for each position; at times something behind it."""
    positions = draw.kind != VECTORS and draw.chance(0.4)
    if draw.kind != VECTORS and not positions:
        (steps.to_vectors if draw.kind == TOKENS else images.to_vectors)(draw)
    m = draw.shape[0 if draw.kind == IMAGES else -1]
    outputs = draw.rng.choice((1, 2, 3, 3, 4))
    if draw.kind == IMAGES:
        layer = draw.convolution(CONVOLUTIONS[len(draw.shape) - 2], m, outputs, 1)
        draw.add(Step(str(layer), lambda net, x: net.head(x), head=layer), outputs, *draw.shape[1:])
    else:
        layer, turned = draw.linear(m, outputs), draw.kind == TOKENS
        step = Step(f"head Linear({m}, {outputs})",
            lambda net, x: net.head(x).transpose(1, 2) if turned else net.head(x), head=layer)  # fmt: skip
        draw.add(step, outputs, *draw.shape[:-1])
    tails: dict[str, Callable] = {"/= 2 in place": lambda f: f.div_(2), "3 tanh": lambda f: 3 * f.tanh(),
        "centred": lambda f: f - f.mean(1, keepdim=True), "log-softmax": lambda f: f.log_softmax(1)}  # fmt: skip
    if draw.chance(0.15):
        name = draw.rng.choice([*tails])
        draw.add(Step(name, lambda net, x: tails[name](x)))
        return name
    if draw.chance(0.3) and draw.shape == (1,):
        draw.add(Step("squeezed", lambda net, x: x.squeeze(1)))
        draw.shape = ()
    return ""


def build(rng):
    """A model in eval mode."""
    kind, shape = start(rng)
    draw = Drawing(rng, shape, kind)
    words = kind == TOKENS and draw.chance(0.15)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if words:
            embedding, (count, m) = nn.Embedding(WORDS, shape[1]), shape
            shape = (count,)
            draw.add(Step(f"Embedding({WORDS}, {m})", lambda net, x: net.embedding(x), embedding=embedding))
        for _ in range(rng.randint(1, 4)):
            if draw.left > 0:
                draw.step(STEPS[draw.kind])
                if draw.chance(0.08):
                    draw.steps[-1] = Checkpointed(draw.steps[-1])
        tail = head(draw)
        model = nn.Sequential(*draw.steps).double().eval()
    if rng.random() < 0.08:
        model.requires_grad_(False)
    elif rng.random() < 0.1:
        for parameter in model.parameters():
            parameter.requires_grad_(rng.random() < 0.6)
    return Network(model, shape, words, draw.shape, tail)

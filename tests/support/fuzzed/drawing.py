"""What random networks are made of: steps with layers of their own, and what is drawn of a network so far."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from support.grid import Net

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
VECTORS, TOKENS, IMAGES = "vectors", "tokens", "images"
LAYER = 30  # weights that a layer may have
NETWORK = 60  # and all layers together, about


class Step(Net):
    """Modules and a forward pass over them, with a text about it."""

    def __init__(self, text, forward, **modules):
        super().__init__(forward, **modules)
        self.text = " ".join(text.split())


class Checkpointed(nn.Module):
    """A step under activation checkpointing, which :attr:`on` can switch off.

    It works on a copy of what it is given: called again, a step that changes its input would find it changed.
    """

    def __init__(self, step):
        super().__init__()
        self.step, self.on, self.text = step, True, f"checkpoint({step.text})"

    def forward(self, x):
        return checkpoint(lambda x: self.step(x.clone()), x, use_reentrant=False) if self.on else self.step(x.clone())


@dataclass
class Answer:
    """What a model may return, as those of transformers do."""

    logits: Tensor
    rest: Any


class Returned(nn.Module):
    """The last step of a model that returns a tensor in a dictionary, dataclass or tuple, or as several in one.

    :attr:`on` can switch it off.
    """

    KINDS: ClassVar[dict[str, Callable[[Tensor], Any]]] = {
        "a dictionary with logits": lambda f: {"loss": None, "logits": f, "hidden": f.detach()},
        "a dataclass with logits": lambda f: Answer(f, [f.detach()]),
        "a tuple with a number": lambda f: (f, 3, None),
    }
    SEVERAL: ClassVar[dict[str, Callable[[Tensor], Any]]] = {
        "a dictionary of two": lambda f: {"first": f[:, :1], "rest": f[:, 1:]},
        "a tuple of two": lambda f: (f[:, :1], f[:, 1:]),
    }

    def __init__(self, kind):
        super().__init__()
        self.make, self.on, self.text = {**self.KINDS, **self.SEVERAL}[kind], True, f"returns {kind}"

    def forward(self, x):
        return self.make(x) if self.on else x


@dataclass
class Drawing:
    """What is drawn so far.

    Attributes:
        rng: all choices.
        shape: that of one sample, after the steps so far.
        kind: VECTORS, TOKENS or IMAGES.
        left: weights that may still be used.
        reusable: linear layers that later steps may call again.
    """

    rng: random.Random
    shape: tuple[int, ...]
    kind: str
    left: int = NETWORK
    reusable: list[nn.Linear] = field(default_factory=list)
    steps: list[nn.Module] = field(default_factory=list)

    def chance(self, probability):
        return self.rng.random() < probability

    def width(self, inputs, least=2, most=6):
        """A number of outputs for which a layer stays small."""
        return max(least, min(self.rng.randint(least, most), LAYER // max(1, inputs)))

    def linear(self, inputs, outputs, bias=None):
        """A Linear, at times without bias or parametrised."""
        self.left -= inputs * outputs
        layer = nn.Linear(inputs, outputs, bias=not self.chance(0.2) if bias is None else bias)
        return self._varied(layer)

    def convolution(self, kind, inputs, outputs, *args, **options):
        layer = kind(inputs, outputs, *args, **options)
        self.left -= layer.weight.numel()
        return self._varied(layer)

    def _varied(self, layer):
        with torch.no_grad():
            layer.weight.mul_(self.rng.choice((1.0, 1.5, 2.0)))
            if self.chance(0.06) and layer.bias is not None and len(layer.weight) > 1:
                layer.weight[0], layer.bias[0] = 0, -0.5  # dead behind a ReLU
                return layer
        if self.chance(0.06):
            return parametrizations.weight_norm(layer)
        if self.chance(0.04):
            return parametrizations.spectral_norm(layer)
        return layer

    def add(self, step, *shape, kind=None):
        self.steps.append(step)
        self.shape, self.kind = tuple(shape) if shape else self.shape, kind or self.kind

    def step(self, table):
        """Take one of the steps in a table, by their weights."""
        (take,) = self.rng.choices([*table], [*table.values()])
        take(self)

"""Losses with their options, and small models with heads of every kind."""

import contextlib
import functools
import itertools

import torch
from torch import nn
from torch.nn import functional as F

N, M, C = 6, 5, 4
INDICES = torch.tensor([0, 3, 1, 1, 2, 0])
IGNORED = torch.tensor([0, 3, -100, 1, -100, 0])
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0])
PROBABILITIES = torch.softmax(torch.randn(N, C, generator=torch.Generator().manual_seed(1)), 1)
LABELS = (PROBABILITIES > 0.2).float()


LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), INDICES),
    "cross-entropy sum": (nn.CrossEntropyLoss(reduction="sum"), INDICES),
    "cross-entropy F": (F.cross_entropy, INDICES),
    "class weights": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), INDICES),
    "class weights sum": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, reduction="sum"), INDICES),
    "a class of weight zero": (nn.CrossEntropyLoss(weight=torch.tensor([0.0, 2.0, 1.0, 3.0])), INDICES),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.3), INDICES),
    "smoothing, weights, ignored": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.3), IGNORED),
    "partial": (functools.partial(F.cross_entropy, label_smoothing=0.3, weight=CLASS_WEIGHTS), INDICES),
    "ignored": (nn.CrossEntropyLoss(), IGNORED),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=1), INDICES),
    "ignored sum": (nn.CrossEntropyLoss(reduction="sum"), IGNORED),
    "probabilities": (nn.CrossEntropyLoss(), PROBABILITIES),
    "unnormalised targets": (nn.CrossEntropyLoss(), 3 * PROBABILITIES),
    "probabilities, weights, smoothing": (
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.2),
        PROBABILITIES,
    ),
    "squared error": (nn.MSELoss(), PROBABILITIES),
    "squared error sum": (nn.MSELoss(reduction="sum"), PROBABILITIES),
    "squared error F": (F.mse_loss, PROBABILITIES),
    "binary": (nn.BCEWithLogitsLoss(), LABELS),
    "binary sum": (nn.BCEWithLogitsLoss(reduction="sum"), LABELS),
    "binary F": (F.binary_cross_entropy_with_logits, LABELS),
    "binary, soft labels": (nn.BCEWithLogitsLoss(), PROBABILITIES),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS), LABELS),
    "pos_weight and weight": (nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS, weight=CLASS_WEIGHTS.flip(0)), LABELS),
    "binary, scalar weight": (nn.BCEWithLogitsLoss(weight=torch.tensor(2.5)), LABELS),
    "custom": (lambda f, y: (torch.tanh(f) - y).pow(4).sum(1).mean(), PROBABILITIES),
    "custom, indefinite": (lambda f, y: (torch.cos(3 * f) * y).sum(1).mean(), PROBABILITIES),
    "custom, coupled outputs": (lambda f, y: (f.logsumexp(1) ** 2).mean(), INDICES),
    "custom, linear": (lambda f, y: f.sum(1).mean(), INDICES),
    "huber": (nn.HuberLoss(delta=0.7), PROBABILITIES),
    "huber sum": (nn.HuberLoss(delta=0.7, reduction="sum"), PROBABILITIES),
    "poisson": (nn.PoissonNLLLoss(), PROBABILITIES),
    "nll of a head": (nn.NLLLoss(), INDICES),
}


def to(dtype, value):
    """Tensors, loss modules and partials in another floating-point dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, functools.partial):
        return functools.partial(value.func, **{k: to(dtype, v) for k, v in value.keywords.items()})
    if isinstance(value, nn.Module):
        copy = type(value).__new__(type(value))
        copy.__dict__.update(value.__dict__)
        copy._buffers = {k: to(dtype, v) for k, v in value._buffers.items()}
        return copy
    return value


def head(dtype, scale=1.0):
    features, weight, bias = torch.randn(N, M), scale * torch.randn(C, M), torch.randn(C)
    return features.to(dtype), weight.to(dtype), bias.to(dtype)


class Tokens(nn.Module):
    """An embedding, a mixing layer and a head on every token; outputs (n, C, T) as nn.CrossEntropyLoss wants them."""

    def __init__(self, last=lambda z: z.transpose(1, 2)):
        super().__init__()
        self.embed, self.mix, self.head, self.last = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, C), last

    def forward(self, x):
        h = torch.tanh(self.mix(self.embed(x)))
        return self.last(self.head(h + h.mean(1, keepdim=True)))


class Pixels(nn.Module):
    """A segmentation network with a 1×1 convolution as its head."""

    def __init__(self, dims=2, **options):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.body, self.head = conv(2, 5, 3, padding=1), conv(5, C, 1, **options)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def classifier(*widths, bias=True):
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b, bias=bias), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Normalised(nn.Module):
    """Log-softmax by another operation."""

    def forward(self, x):
        return x - x.logsumexp(dim=1, keepdim=True)


def small(seed=0):
    """Return a network of two layers, the same one for a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


TOKENS = torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(2))
TOKEN_TARGETS = torch.tensor([[0, 1, 2, 3], [3, -100, -100, 1], [2, 2, 0, -100]])


@contextlib.contextmanager
def on_threads(count):
    """Inside, torch and the kernels have so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

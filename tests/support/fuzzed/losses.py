"""Random losses with targets for outputs (n, C), (n,), (n, C, T) or (n, C, h, w), and their terms one by one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Problem:
    """A loss with targets.

    Attributes:
        text: about it.
        loss: as it is given to the library, and E over all samples as one batch.
        targets: samples first.
        terms: (outputs, targets) -> the loss terms t (k,) of E = Σ t / Σ mass, samples first, and their mass (k,).
        total: E is Σ t, without the divisor.
        options: that the library needs for it.
        ignored: where targets are left out; None: nowhere.
        positions: the library knows what is left out, and each position as a term of its own.
    """

    text: str
    loss: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor
    terms: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    total: bool
    options: dict[str, Any]
    ignored: Tensor | None = None
    positions: bool = True


def draw(rng, generator, samples, shape, tail):
    """A problem for outputs (samples, *shape); ``tail`` is what is behind the network's last layer."""
    if tail == "log-softmax":
        return _classes(rng, generator, samples, shape, of_logarithms=True)
    kinds = {_squared: 2, _binary: 2, _callable: 2, _other: 1}
    if shape:
        kinds |= {_classes: 5, _probabilities: 1}
    return rng.choices([*kinds], [*kinds.values()])[0](rng, generator, samples, shape)


def _uniform(generator, *shape):
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _classes(rng, generator, samples, shape, of_logarithms=False):
    """Cross-entropy (or negative log-likelihood) of class indices, with its options."""
    classes, *positions = shape
    targets = torch.randint(classes, (samples, *positions), generator=generator)
    total = rng.random() < 0.25
    separable = total or not of_logarithms  # a mean of the library's callables is one over samples, all alike
    weight = _uniform(generator, classes) * 2 + 0.1 if rng.random() < 0.4 and separable else None
    if weight is not None and classes > 2 and rng.random() < 0.15:
        weight[1] = 0
        targets.view(-1)[0] = 0  # one that counts
    smoothing = rng.choice((0.0, 0.0, 0.1, 0.4)) if not of_logarithms else 0.0
    ignored = -100
    if rng.random() < 0.35 and targets.numel() > 1 and separable:
        ignored = rng.choice((-100, 255, classes - 1)) if classes > 1 else -100
        targets.view(-1)[1::3] = ignored
        targets.view(-1)[0] = 0
    keywords = {"ignore_index": ignored, "reduction": "sum" if total else "mean", "weight": weight}
    keywords |= {} if of_logarithms else {"label_smoothing": smoothing}
    function = F.nll_loss if of_logarithms else F.cross_entropy
    module = nn.NLLLoss if of_logarithms else nn.CrossEntropyLoss
    as_function = rng.random() < 0.3
    loss = functools.partial(function, **keywords) if as_function else module(**keywords)

    def terms(outputs, targets):
        each = function(outputs, targets, **{**keywords, "reduction": "none"}).flatten()
        used = (targets != ignored).flatten()
        chosen = targets.flatten().where(used, torch.zeros(()).long())
        mass = torch.ones_like(each) if weight is None else weight[chosen]
        return each, mass.detach() * used

    name = f"{'F.' if as_function else ''}{function.__name__}({_text(keywords)})"
    left_out = targets == ignored
    if of_logarithms:  # the library knows it as a callable, of which a sample is one term
        terms = _by_sample(loss, total)
    options = {"reduction": "sum"} if of_logarithms and total else {}
    return Problem(name, loss, targets, terms, total, options, left_out if left_out.any() else None, not of_logarithms)


def _probabilities(rng, generator, samples, shape):
    """Cross-entropy of probability targets, at times not normalised."""
    targets = _uniform(generator, samples, *shape)
    targets = targets / targets.sum(1, keepdim=True) if rng.random() < 0.8 else targets
    weight = _uniform(generator, shape[0]) + 0.2 if rng.random() < 0.4 else None
    total = rng.random() < 0.25
    keywords = {"label_smoothing": rng.choice((0.0, 0.2)), "reduction": "sum" if total else "mean", "weight": weight}

    def terms(outputs, targets):
        each = F.cross_entropy(outputs, targets, **{**keywords, "reduction": "none"}).flatten()
        return each, torch.ones_like(each)

    return Problem(f"cross_entropy of probabilities ({_text(keywords)})", nn.CrossEntropyLoss(**keywords), targets,
        terms, total, {})  # fmt: skip


def _by_sample(loss, total):
    """Terms of a loss that is a mean (or sum) over samples, each sample's as one."""

    def terms(outputs, targets):
        each = torch.stack([loss(f[None], y[None]) for f, y in zip(outputs, targets, strict=True)])
        return each, torch.ones_like(each)

    return terms


def _squared(rng, generator, samples, shape):
    targets, total = _uniform(generator, samples, *shape) * 2 - 1, rng.random() < 0.35
    how = "sum" if total else "mean"
    loss = nn.MSELoss(reduction=how) if rng.random() < 0.6 else functools.partial(F.mse_loss, reduction=how)
    return Problem(f"mse_loss, {how}", loss, targets, _by_sample(loss, total), total, {})


def _binary(rng, generator, samples, shape):
    targets, total = _uniform(generator, samples, *shape), rng.random() < 0.35
    if rng.random() < 0.7:
        targets = (targets > 0.5).double()
    of_classes = (shape[0], *(1,) * (len(shape) - 1)) if shape else ()
    keywords = {
        "weight": _uniform(generator, *of_classes) * 2 + 0.1 if rng.random() < 0.35 else None,
        "pos_weight": _uniform(generator, *of_classes) * 3 + 0.1 if rng.random() < 0.35 else None,
        "reduction": "sum" if total else "mean",
    }
    loss = nn.BCEWithLogitsLoss(**keywords)
    return Problem(f"binary cross-entropy ({_text(keywords)})", loss, targets, _by_sample(loss, total), total, {})


def _other(rng, generator, samples, shape):
    """Losses of torch that the library knows as callables."""
    targets, total = _uniform(generator, samples, *shape), rng.random() < 0.3
    how = "sum" if total else "mean"
    name, loss = rng.choice((
        ("huber", nn.HuberLoss(delta=0.7, reduction=how)), ("poisson", nn.PoissonNLLLoss(reduction=how)),
        ("smooth L1", nn.SmoothL1Loss(reduction=how, beta=0.5)), ("soft margin", nn.SoftMarginLoss(reduction=how)),
    ))  # fmt: skip
    return Problem(f"{name}, {how}", loss, targets, _by_sample(loss, total), total, {})


def _callable(rng, generator, samples, shape):
    """A function of the outputs that is the user's own: convex, indefinite, coupled outputs, linear."""
    targets, total = _uniform(generator, samples, *shape), rng.random() < 0.3
    each = {
        "quartic": lambda f, y: (f.tanh() - y).pow(4),
        "cosine": lambda f, y: torch.cos(3 * f) * y,
        "coupled": lambda f, y: f.flatten(1).logsumexp(1).square() + (f.flatten(1) * y.flatten(1)).sum(1),
        "linear": lambda f, y: f * y,
        "exponential": lambda f, y: (f * (0.5 - y)).exp(),
    }
    if not shape:
        del each["coupled"]
    name = rng.choice([*each])
    per_entry = each[name]

    def loss(outputs, targets):
        by_sample = per_entry(outputs, targets).reshape(len(outputs), -1).sum(1)
        return by_sample.sum() if total else by_sample.mean()

    options = {"reduction": "sum"} if total else {}
    return Problem(f"callable {name}, {'sum' if total else 'mean'}", loss, targets, _by_sample(loss, total), total,
        options)  # fmt: skip


def _text(keywords):
    return ", ".join(
        f"{key}={[round(v, 2) for v in value.flatten().tolist()] if isinstance(value, Tensor) else value}"
        for key, value in keywords.items()
        if isinstance(value, Tensor) or value not in (None, 0.0, -100)
    )

"""Functions between the layers of random networks: with kinks and smooth, out of place and in place."""

import torch
from torch.nn import functional as F

KINKED = {
    "relu": torch.relu, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "relu6": lambda x: F.relu6(4 * x),
    "hardtanh": F.hardtanh, "abs": torch.abs, "clamp": lambda x: x.clamp(-0.6, 0.8),
    "maximum": lambda x: torch.maximum(x, 0.3 * x.flip(-1)), "softshrink": lambda x: F.softshrink(x, 0.2),
    "where": lambda x: torch.where(x > 0.1, x, 0.1 * x), "identity": lambda x: x,
    "relu_": torch.relu_, "relu(inplace)": lambda x: F.relu(x, inplace=True),
    "leaky_relu_": lambda x: F.leaky_relu_(x, 0.1), "clamp_": lambda x: x.clamp_(-0.5, 0.7), "abs_": torch.abs_,
}  # fmt: skip
SMOOTH = {
    "tanh": torch.tanh, "gelu": F.gelu, "softplus": F.softplus, "silu": F.silu, "sigmoid": torch.sigmoid,
    "mish": F.mish, "elu": F.elu, "softmax": lambda x: x.softmax(-1), "square": lambda x: x * x,
    "tanh_": torch.tanh_, "sigmoid_": torch.sigmoid_, "silu(inplace)": lambda x: F.silu(x, inplace=True),
    "elu_": F.elu_,
}  # fmt: skip


def activation(rng):
    """A name and a function; what it is given is nobody else's, where it works in place."""
    name = rng.choice([*KINKED] if rng.random() < 0.6 else [*SMOOTH])
    function = KINKED.get(name) or SMOOTH[name]
    if name.endswith(("_", "(inplace)")):
        return name, lambda x: function(x if x.grad_fn is not None and not x.is_leaf else x.clone())
    return name, function


def in_place(rng, features, dims, dim=-1):
    """A text and a function that changes a layer's output in place: all of it, or some features; then an activation.

    Args:
        rng: what chooses.
        features: of the output, in dimension ``dim``.
        dims: of the output, samples included.
        dim: -1 or 1.
    """
    some = (*(slice(None),) * (1 if dim == 1 else dims - 1), slice(0, max(1, features // 2)))

    def scaled(q):
        q[some] *= 0.5
        return q

    def zeroed(q):
        q[some] = 0.25
        return q

    def rectified(q):
        q[some].relu_()
        return q

    def added(q):
        q += 0.2 * q.detach().flip(-1).sin()
        return q

    def flat(q):
        q.view(-1).mul_(1.5)
        return q

    def viewed(q):
        q.view(q.shape).relu_()
        return q

    def masked(q):
        return q.masked_fill_(torch.arange(q.shape[-1]) % 3 == 1, 0.2)

    def masked_by_value(q):
        return q.masked_fill_(q.detach() > 0.9, 0.4)

    changes = {
        "relu_": torch.relu_, "mul_": lambda q: q.mul_(0.5), "q[some] *= .5": scaled, "q[some] = .25": zeroed,
        "q[some].relu_()": rectified, "masked_fill_": masked, "masked_fill_ by value": masked_by_value,
        "+= of detached": added, "view(-1).mul_": flat, "view.relu_": viewed, "neg_": lambda q: q.neg_(),
        "tanh_": torch.tanh_, "clamp_": lambda q: q.clamp_(-0.7, 0.9), "square_": lambda q: q.square_(),
        "squeeze_": lambda q: q.unsqueeze(0).squeeze_(0), "transpose_": lambda q: q.transpose_(0, 1).transpose_(0, 1),
        "silu(inplace)": lambda q: F.silu(q, inplace=True), "sub_, div_": lambda q: q.sub_(0.1).div_(0.8),
    }  # fmt: skip
    name = rng.choice([*changes])
    text, f = activation(rng)
    if rng.random() < 0.5:
        return name, changes[name]
    return f"{name} {text}", lambda q: f(changes[name](q))

"""Autograd functions of a user's, and a network with a function behind its first layer."""

import torch
from torch import nn

from support.grid import Net


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Once(Squared):
    """Without a second derivative, and says so."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Relu(Squared):
    """Named like torch's own, and curved."""


class Opaque(torch.autograd.Function):
    """A backward pass that is not differentiable itself, and does not say so."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return g * (1 - ctx.saved_tensors[0].tanh() ** 2)


class WeightInBackward(torch.autograd.Function):
    """The identity, with a weight in its backward pass alone."""

    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(weight)
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None


def network(tail):
    torch.manual_seed(0)
    head = nn.Linear(5, 3)
    return Net(lambda self, x: self.head(tail(self.body(x)).mean((2, 3))), body=nn.Conv2d(4, 5, 1), head=head)

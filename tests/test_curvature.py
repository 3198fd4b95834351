"""What autograd's graph proves of a tail, and that nothing is proved of a curved one."""

import pytest
import torch
from grid import Net
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness import curvature
from pyflatness.tape import Tape

X, Y = torch.randn(6, 4, 4, 4), torch.arange(6) % 3


class Relu(torch.autograd.Function):
    """Named like torch's own, and curved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


PROVEN = {
    "relu": F.relu,
    "in place": lambda z: F.leaky_relu_(z).clone(),
    "pooled": lambda z: F.avg_pool2d(F.max_pool2d(z, 2, 1), 2, 1, 1),
    "padded": lambda z: F.pad(z, (1, 1, 1, 1), mode="reflect"),
    "residual": lambda z: F.relu6(z) + z * 3 - z / 2 + 1,
    "batch norm": lambda z: F.batch_norm(z, torch.ones(5), torch.full((5,), 2.0)),
    "where": lambda z: torch.where(z > 0, z, 0.1 * z),
    "upsampled": lambda z: F.interpolate(z, scale_factor=2, mode="bilinear"),
    "written into": lambda z: _written(z),
    "clamped, largest": lambda z: torch.stack([z.clamp(-1, 1), z.abs()]).amax(0),
    "convolved": lambda z: F.conv_transpose2d(z, torch.ones(5, 5, 2, 2)),
    "matrix": lambda z: z @ torch.ones(4, 4),
}
CURVED = {
    "tanh": torch.tanh,
    "square": lambda z: z * z,
    "power": lambda z: z**2,
    "inverse": lambda z: 1 / (z.abs() + 1),
    "softmax": lambda z: z.softmax(1),
    "normalised by the sample": lambda z: F.instance_norm(z),
    "product": lambda z: z @ z.mT,
    "a function of the user's": Relu.apply,
    "layer norm": lambda z: F.layer_norm(z, z.shape[1:]),
    "gelu": F.gelu,
}


def _written(z):
    out = torch.zeros_like(z)
    out[:, 1:] = z[:, :-1]
    return out


def network(tail):
    torch.manual_seed(0)
    head = nn.Linear(5, 3)
    return Net(lambda self, x: self.head(tail(self.body(x)).mean((2, 3))), body=nn.Conv2d(4, 5, 1), head=head)


def reading(tail):
    net = network(tail)
    tape = Tape({"body": net.body, "head": net.head})
    with tape.attached():
        with tape.recording():
            outputs = net(X)
        return curvature.read(outputs, tape.calls)


@pytest.mark.parametrize("name", PROVEN)
def test_linear_tails_are_proven(name):
    net = network(PROVEN[name])
    net.requires_grad_(False)
    tape = Tape({"body": net.body, "head": net.head})
    with tape.attached(), tape.recording():
        assert curvature.read(net(X), tape.calls).proven == {"body", "head"}
    assert pf.measure(network(PROVEN[name]), nn.CrossEntropyLoss(), (X, Y), layers="body")["trace"].exact


@pytest.mark.parametrize("name", CURVED)
def test_curved_tails_are_not(name):
    found = reading(CURVED[name])
    assert "body" not in found.proven
    with pytest.raises(pf.NotYetError, match="not locally linear"):
        pf.measure(network(CURVED[name]), nn.CrossEntropyLoss(), (X, Y), layers="body")


def test_operations_without_a_second_derivative_certify_nothing():
    with pytest.raises(pf.NotYetError, match="not locally linear"):
        pf.measure(network(F.hardsigmoid), nn.CrossEntropyLoss(), (X, Y), layers="body")

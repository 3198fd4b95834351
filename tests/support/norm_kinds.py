"""Networks with normalisations, each with a loss and data: :data:`CASES`, whose layers are the normalisations."""

from functools import partial

import torch
from torch import nn

from support.cases import INDICES, C
from support.grid import Case, Net, made, normal

CASES: dict[str, Case] = {}
CLASSES = INDICES[:3]


def add(name, *arguments, **options):
    """A case as in the grid, which has it not."""
    CASES[name] = made(name, *arguments, **options)


class ByItsNameNorm(nn.Module):
    """A normalisation of no class of torch's, as language models have them."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden_states):
        return self.weight * hidden_states * hidden_states.square().mean(-1, keepdim=True).add(1e-3).rsqrt()


class ChannelsNorm2d(nn.LayerNorm):
    """Channels in front of space, as in networks of images."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def varied(norm):
    """The normalisation with weights, biases and statistics that are no ones and zeros."""
    with torch.no_grad():
        for tensor in (*norm.parameters(), *(b for b in norm.buffers() if b.is_floating_point())):
            tensor.add_(torch.rand_like(tensor))
    return norm


def between(norm, activation, outputs):
    """A normalisation of the data, with an activation and a head behind it; the names are those of the modules."""
    return lambda: Net(
        lambda net, x: net.head(activation(net.norm(x)).flatten(1)), norm=varied(norm()), head=nn.Linear(outputs, C)
    )


SIZES = {  # the normalisation, and its inputs without the samples
    "layer norm": (partial(nn.LayerNorm, 4), (4,)),
    "layer norm, positions": (partial(nn.LayerNorm, 4), (3, 4)),
    "layer norm, two dimensions": (partial(nn.LayerNorm, (2, 3)), (2, 2, 3)),
    "layer norm, no bias": (partial(nn.LayerNorm, 3, bias=False), (2, 3)),
    "RMS norm": (partial(nn.RMSNorm, 4), (2, 4)),
    "norm by its name": (partial(ByItsNameNorm, 4), (2, 4)),
    "layer norm of channels": (partial(ChannelsNorm2d, 3), (3, 2, 2)),
    "batch norm, features": (partial(nn.BatchNorm1d, 4), (4,)),
    "batch norm 1d": (partial(nn.BatchNorm1d, 3), (3, 4)),
    "batch norm 2d": (partial(nn.BatchNorm2d, 3), (3, 2, 2)),
    "batch norm 3d": (partial(nn.BatchNorm3d, 2), (2, 2, 1, 2)),
    "group norm": (partial(nn.GroupNorm, 2, 4), (4, 3)),
    "group norm, features": (partial(nn.GroupNorm, 2, 4), (4,)),
    "instance norm 1d": (partial(nn.InstanceNorm1d, 3, affine=True), (3, 4)),
    "instance norm 2d, statistics": (partial(nn.InstanceNorm2d, 2, affine=True, track_running_stats=True), (2, 2, 2)),
}
for number, (name, (norm, size)) in enumerate(SIZES.items()):
    x, outputs = normal(30 + number, 3, *size), torch.Size(size).numel()
    add(name, between(norm, torch.relu, outputs), x, CLASSES, "norm")
    add(f"{name}, smooth", between(norm, torch.tanh, outputs), x, CLASSES, "norm", curved="norm")


def block(net, x):
    """A residual block behind which features are normalised again, over positions that come first."""
    h = net.first(x).transpose(0, 1)
    h = (h + net.mix(torch.relu(net.norm(h)))).transpose(0, 1)
    return net.head(net.last(h).mean(1))


def shared(net, x):
    """The same normalisation of two layers' outputs."""
    return net.head(torch.cat([torch.relu(net.norm(net.a(x))), torch.relu(net.norm(net.b(x)))], 1))


def recurrent(net, x):
    return net.head(net.norm(torch.relu(net.norm(x))))


X = normal(60, 3, 4)
add("norms in a block", lambda: Net(block, first=nn.Linear(4, 3), norm=varied(nn.LayerNorm(3)), mix=nn.Linear(3, 3),
    last=varied(nn.RMSNorm(3)), head=nn.Linear(3, C)), normal(61, 3, 2, 4), CLASSES, "norm last",
    curved="norm")  # fmt: skip
add("norm called twice", lambda: Net(shared, a=nn.Linear(4, 3), b=nn.Linear(4, 3), norm=varied(nn.LayerNorm(3)),
    head=nn.Linear(6, C)), X, CLASSES, "norm")  # fmt: skip
add("norm of its own output", lambda: Net(recurrent, norm=varied(nn.LayerNorm(4)), head=nn.Linear(4, C)), X, CLASSES,
    "norm", curved="norm")  # fmt: skip
add("norm that is the output", lambda: nn.Sequential(nn.Linear(4, C), varied(nn.LayerNorm(C))), X, CLASSES, "1")
add("norm changed in place", lambda: nn.Sequential(nn.Linear(4, 5), varied(nn.BatchNorm1d(5)), nn.ReLU(inplace=True),
    nn.Linear(5, C)), X, CLASSES, "1")  # fmt: skip

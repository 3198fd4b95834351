"""Networks of layers that are neither linear nor plain convolutions, each with a loss and data: :data:`CASES`."""

from functools import partial

import torch
from torch import nn

from support.cases import INDICES, C
from support.grid import Case, Net, made, normal

CASES: dict[str, Case] = {}


def add(name, *arguments, **options):
    """A case as in the grid, which has it not."""
    CASES[name] = made(name, *arguments, **options)


# --- transposed convolutions ------------------------------------------------------------------------------------------

GEOMETRIES = {  # the layer, the pixels that it gets, and what else its call is given
    "1d": (partial(nn.ConvTranspose1d, 2, 3, 3), (4,), {}),
    "1d, padded, no bias": (partial(nn.ConvTranspose1d, 2, 3, 3, padding=1, bias=False), (4,), {}),
    "1d, cropped": (partial(nn.ConvTranspose1d, 2, 3, 2, stride=2, padding=2), (4,), {}),
    "1d, as large as it is told": (partial(nn.ConvTranspose1d, 2, 3, 3, stride=3), (3,), {"output_size": [11]}),
    "2d, strided": (partial(nn.ConvTranspose2d, 2, 3, 2, stride=2), (2, 2), {}),
    "2d, all asymmetric": (partial(nn.ConvTranspose2d, 2, 3, (3, 2), stride=(2, 3), padding=(1, 0),
        output_padding=(1, 2), dilation=(1, 2)), (2, 2), {}),
    "2d, grouped": (partial(nn.ConvTranspose2d, 4, 6, (2, 3), groups=2, stride=(1, 2), padding=(0, 1)), (2, 2), {}),
    "2d, depthwise": (partial(nn.ConvTranspose2d, 3, 3, 3, groups=3, stride=2, padding=1), (2, 2), {}),
    "2d, 1×1": (partial(nn.ConvTranspose2d, 3, 4, 1), (2, 2), {}),
    "3d, grouped": (partial(nn.ConvTranspose3d, 4, 4, (2, 1, 2), groups=2, stride=(1, 2, 1)), (2, 1, 2), {}),
}  # fmt: skip


def upsampling(net, x, **options):
    return net.head(net.between(net.up(x, **options)).flatten(1))


def geometry(make, size, options, between):
    up = make()
    outputs = up(torch.zeros(1, up.in_channels, *size), **options).numel()
    return Net(partial(upsampling, **options), up=up, between=between(), head=nn.Linear(outputs, C))


for name, (make, size, options) in GEOMETRIES.items():
    x, linear = normal(20, 3, make.args[0], *size), not name.endswith(("strided", "is told"))
    add(f"transposed convolution {name}", partial(geometry, make, size, options, nn.ReLU if linear else nn.Tanh), x,
        INDICES[:3], "up", curved="" if linear else "up")  # fmt: skip


def twice(net, x):
    """The same layer on its own output, of another size, the second time."""
    return net.head(torch.relu(net.up(torch.relu(net.up(x)))).mean(2))


def segmentation(net, x):
    return net.up(torch.relu(net.down(x)))


add("transposed convolution on its own output", lambda: Net(twice, up=nn.ConvTranspose1d(2, 2, 3, stride=2),
    head=nn.Linear(2, C)), normal(21, 3, 2, 2), INDICES[:3], "up", curved="up")  # fmt: skip
add("segmentation by a transposed convolution", lambda: Net(segmentation, down=nn.Conv2d(2, 3, 2, stride=2),
    up=nn.ConvTranspose2d(3, C, 2, stride=2)), normal(22, 2, 2, 2, 4), torch.arange(16).view(2, 2, 4) % C,
    "down up")  # fmt: skip

# --- embeddings -------------------------------------------------------------------------------------------------------

WORDS = torch.tensor([[1, 4, 1, 0], [2, 2, 2, 5], [0, 6, 3, 4]])  # some several times, 7 tokens


def sentence(between):
    return lambda net, x: net.head(between(net.embed(x)).flatten(1))


def products(h):
    """Of neighbours, so that the outputs are linear in no position's features and quadratic in all."""
    return h * h.roll(1, dims=1)


def embedding(between, width=3, **options):
    return lambda: Net(sentence(between), embed=nn.Embedding(7, width, **options), head=nn.Linear(4 * width, C))


def in_place(h):
    h += 0.5
    return torch.relu(h)


def tied(net, x):
    """A language model whose head is its embedding."""
    return net.head(torch.relu(net.embed(x)).cumsum(1)).transpose(1, 2)


def tied_network():
    net = Net(tied, embed=nn.Embedding(7, 3), head=nn.Linear(3, 7, bias=False))
    net.head.weight = net.embed.weight
    return net


def bags(**options):
    return lambda: Net(lambda net, x: net.head(torch.relu(net.embed(x))), embed=nn.EmbeddingBag(7, 3, **options),
        head=nn.Linear(3, C))  # fmt: skip


def weighted(between):
    """Bags in which each token has a weight of its own."""
    return lambda net, x: net.head(between(net.embed(x, per_sample_weights=(x + 1.0).to(net.head.weight.dtype) / 4)))


def pairs(net, x):
    return net.head(torch.relu(net.embed(x[:, :2]).flatten(1)) + torch.relu(net.embed(x[:, 1:3]).flatten(1)))


add("embedding", embedding(torch.relu), WORDS, INDICES[:3], "embed head")
add("embedding, more features than tokens", embedding(torch.relu, 9), WORDS, INDICES[:3], "embed")
add("embedding, padding", embedding(torch.relu, padding_idx=0), WORDS.int(), INDICES[:3], "embed")
add("embedding, smooth", embedding(torch.tanh, 2), WORDS, INDICES[:3], "embed", curved="embed")
add("embedding, smooth, padding", embedding(products, 2, padding_idx=2), WORDS, INDICES[:3], "embed", curved="embed")
add("embedding, changed in place", embedding(in_place), WORDS, INDICES[:3], "embed")
add("embedding of one token", lambda: nn.Sequential(nn.Embedding(7, 3), nn.ReLU(), nn.Linear(3, C)), WORDS[:, 0],
    INDICES[:3], "0 2")  # fmt: skip
add("embedding of one token, smooth", lambda: nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, C)),
    WORDS[:, 0], INDICES[:3], "0 2", curved="0")  # fmt: skip
add("embedding called twice", lambda: Net(pairs, embed=nn.Embedding(7, 3), head=nn.Linear(6, C)), WORDS, INDICES[:3],
    "embed")  # fmt: skip
add("embedding that is the head too", tied_network, WORDS, WORDS.roll(-1, 1), "embed head")
add("embedding bag, sum", bags(mode="sum"), WORDS, INDICES[:3], "embed head")
add("embedding bag, mean", bags(mode="mean"), WORDS, INDICES[:3], "embed")
add("embedding bag, mean, padding", bags(mode="mean", padding_idx=2), WORDS, INDICES[:3], "embed")
add("embedding bag, weights", lambda: Net(weighted(torch.relu), embed=nn.EmbeddingBag(7, 3, mode="sum"),
    head=nn.Linear(3, C)), WORDS, INDICES[:3], "embed")  # fmt: skip
add("embedding bag, weights, smooth", lambda: Net(weighted(torch.tanh), embed=nn.EmbeddingBag(7, 3, mode="sum",
    padding_idx=0), head=nn.Linear(3, C)), WORDS, INDICES[:3], "embed", curved="embed")  # fmt: skip


def positions(shape):
    """Codes of the four positions that all samples share, looked up once, and added."""

    def forward(net, x):
        places = torch.arange(x.shape[1]).expand(*shape, -1)
        return net.head(net.mix(torch.tanh(net.embed(x) + net.place(places))).relu().flatten(1))

    return lambda: Net(forward, embed=nn.Embedding(7, 3), place=nn.Embedding(5, 3), mix=nn.Linear(3, 3),
        head=nn.Linear(12, C))  # fmt: skip


add("embedding of positions (T, d)", positions(()), WORDS, INDICES[:3], "embed place", curved="embed place")
add("embedding of positions (1, T, d)", positions((1,)), WORDS, INDICES[:3], "place", curved="place")
add("embedding of positions, as many as samples", positions(()), WORDS[[0, 1, 2, 1]], INDICES[:4], "place mix",
    curved="place")  # fmt: skip

# --- bilinear layers --------------------------------------------------------------------------------------------------


def pair_of(between, positions=False):
    """A bilinear layer of two layers' outputs, once for a sample or at several positions."""

    def forward(net, x):
        x = x.unflatten(1, (2, -1)) if positions else x
        return net.head(between(net.join(net.left(x).relu(), net.right(x).relu())).flatten(1))

    def make():
        m, outputs = (2, 6) if positions else (4, 3)
        return Net(forward, left=nn.Linear(m, 3), right=nn.Linear(m, 2), join=nn.Bilinear(3, 2, 3),
            head=nn.Linear(outputs, C))  # fmt: skip

    return make


def of_data(net, x):
    return net.join(input1=x[:, :2], input2=x[:, 1:])


PAIRS = normal(23, 3, 4)
add("bilinear", pair_of(torch.relu), PAIRS, INDICES[:3], "left join head")
add("bilinear, smooth", pair_of(torch.tanh), PAIRS, INDICES[:3], "join", curved="join")
add("bilinear, positions", pair_of(torch.relu, positions=True), PAIRS, INDICES[:3], "right join")
add("bilinear, positions, smooth", pair_of(torch.tanh, positions=True), PAIRS, INDICES[:3], "join", curved="join")
add("bilinear, the whole network", lambda: Net(of_data, join=nn.Bilinear(2, 3, C, bias=False)), PAIRS, INDICES[:3],
    "join")  # fmt: skip

# --- normalisations, whose weight is a diagonal matrix ----------------------------------------------------------------


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
    add(name, between(norm, torch.relu, outputs), x, INDICES[:3], "norm")
    add(f"{name}, smooth", between(norm, torch.tanh, outputs), x, INDICES[:3], "norm", curved="norm")


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
    last=varied(nn.RMSNorm(3)), head=nn.Linear(3, C)), normal(61, 3, 2, 4), INDICES[:3], "norm last",
    curved="norm")  # fmt: skip
add("norm called twice", lambda: Net(shared, a=nn.Linear(4, 3), b=nn.Linear(4, 3), norm=varied(nn.LayerNorm(3)),
    head=nn.Linear(6, C)), X, INDICES[:3], "norm")  # fmt: skip
add("norm of its own output", lambda: Net(recurrent, norm=varied(nn.LayerNorm(4)), head=nn.Linear(4, C)), X,
    INDICES[:3], "norm", curved="norm")  # fmt: skip
add("norm that is the output", lambda: nn.Sequential(nn.Linear(4, C), varied(nn.LayerNorm(C))), X, INDICES[:3], "1")
add("norm changed in place", lambda: nn.Sequential(nn.Linear(4, 5), varied(nn.BatchNorm1d(5)), nn.ReLU(inplace=True),
    nn.Linear(5, C)), X, INDICES[:3], "1")  # fmt: skip

"""Calls on models under FSDP2, by ranks that have a part of the weights and of the data each.

A case is a function (rank, size) -> what the call returned. With size 1 the model is not wrapped, and has all data.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pyflatness as pf

from . import rank_cases
from .rank_cases import LOSS, batches, part, relu

SAMPLED = {"probes": 3, "curvature": "ggn", "seed": 5}
OF_ONE_SWEEP = ["relative_flatness", "trace", "scaled_trace", "weight_norm"]
OF_GGN = [*OF_ONE_SWEEP, "largest_scaled_trace", "neuron_flatness", "normalized_sharpness", "relative_flatness_std"]


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.attention = Attention(size)
        self.up, self.down = nn.Linear(size, 2 * size + 1), nn.Linear(2 * size + 1, size)

    def forward(self, x):
        x = self.attention(x)
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """A language model whose blocks may be run again in the backward pass."""

    def __init__(self, *, again=False):
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(11, 6), nn.ModuleList([Block(6), Block(6)]), None
        self.head, self.again = nn.Linear(6, 11, bias=False), again

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x).movedim(-1, 1).contiguous()


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.second, self.head = nn.Conv2d(5, 6, 3, stride=2), nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.second(F.max_pool2d(F.relu(self.norm(self.first(x))), 2)))
        return self.head(x.mean((2, 3)))


def made(make, dtype=torch.float64):
    torch.manual_seed(1)
    return make().to(dtype).eval()


def sharded(model, size, **options):
    """Return a model of which each block, convolution and head is gathered by itself, unless there is one rank."""
    if size == 1:
        return model
    mesh = init_device_mesh("cpu", (size,))
    for name, module in model.named_modules():
        if isinstance(module, Block | nn.Conv2d) or name in ("head", "2"):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tokens():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(11, (2, rank_cases.SAMPLES, 5), generator=generator).unbind(0)


def images():
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(rank_cases.SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (rank_cases.SAMPLES,), generator=generator)


def mlp(rank, size):
    model = sharded(rank_cases.model(), size)
    return pf.measure(model, LOSS, batches(rank, size), measures=OF_ONE_SWEEP, per_sample=True, **SAMPLED)


def mlp_of_float32(rank, size):
    mine = part(rank, size, rank_cases.data(torch.float32))
    return pf.measure(sharded(rank_cases.model(torch.float32), size), LOSS, mine, measures=OF_ONE_SWEEP, **SAMPLED)


def certified(rank, size):
    return pf.relative_flatness(sharded(relu(), size), LOSS, batches(rank, size), "0", per_sample=True)


def all_of_ggn(rank, size):
    return pf.measure(sharded(relu(), size), LOSS, batches(rank, size), measures=OF_GGN, curvature="ggn")


def head(rank, size):
    return pf.relative_flatness(sharded(rank_cases.model(), size), LOSS, batches(rank, size), per_sample=True)


def head_normalized(rank, size):
    return pf.relative_flatness(sharded(rank_cases.model(), size), LOSS, part(rank, size), normalize="std")


def callable_loss(rank, size):
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets)

    return pf.relative_flatness(sharded(rank_cases.model(), size), loss, batches(rank, size), "2", **SAMPLED)


class Forces(nn.Module):
    """A network whose outputs are its gradient in the inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.head(torch.tanh(self.first(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0][:, :3]


class Outside(nn.Module):
    """A network that uses a layer's weight outside of it too."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.head(hidden) + torch.tanh(hidden) @ self.head.weight.t()


class Shared(nn.Module):
    """A network of two layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def elsewhere(rank, size):
    """Return reports of networks that use a weight outside of its layer, in two layers, in a derivative; or errors."""
    found = []
    for make in (Outside, Shared, Forces):
        model = made(make)
        if size > 1:
            fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        try:
            found.append(pf.measure(model, LOSS, part(rank, size), measures=OF_ONE_SWEEP, **SAMPLED))
        except pf.errors.InputError as error:
            found.append(str(error))
    return found


def vocabulary(rank, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 50_257)).double().eval()
    targets = torch.arange(rank_cases.SAMPLES) * 2000
    return pf.relative_flatness(sharded(model, size), LOSS, part(rank, size, (rank_cases.data()[0], targets)))


def transformer(rank, size):
    model = sharded(made(Transformer), size)
    return pf.measure(model, LOSS, part(rank, size, tokens()), measures=OF_ONE_SWEEP, memory=2**16, **SAMPLED)


def transformer_run_again(rank, size):
    model = sharded(made(lambda: Transformer(again=True)), size)
    return pf.measure(model, LOSS, part(rank, size, tokens()), measures=OF_ONE_SWEEP, **SAMPLED)


def transformer_of_bfloat16(rank, size):
    model = made(Transformer, torch.bfloat16 if size == 1 else torch.float32)
    if size > 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        model = sharded(model, size, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return pf.measure(model, LOSS, part(rank, size, tokens()), measures=OF_ONE_SWEEP[:3], **SAMPLED)


def convolutions(rank, size):
    return pf.measure(sharded(made(Images), size), LOSS, part(rank, size, images()), measures=OF_ONE_SWEEP, **SAMPLED)


def convolutions_exactly(rank, size):
    return pf.measure(sharded(made(Images), size), LOSS, part(rank, size, images()), measures=OF_GGN, curvature="ggn")


def gathered_before(rank, size):
    """A model whose own parameters are still gathered, after a forward pass without a backward pass."""
    model = sharded(rank_cases.model(), size)
    with torch.no_grad():
        model(rank_cases.data()[0])
    before = states(model)
    found = pf.relative_flatness(model, LOSS, batches(rank, size), "2", **SAMPLED)
    assert states(model) == before
    assert size == 1 or any(state["gathered"] for state in before)
    return found


def states(model):
    """Return what FSDP and torch hold of each module that must be as it was."""
    return [
        {
            "gathered": [group.is_unsharded for group in groups(module)],
            "messages": [type(group._all_gather_comm).__name__ for group in groups(module)],
            "reduces": [
                (group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward) for group in groups(module)
            ],
            "hooks": [
                len(hooks) for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            ],
            "parameters": [
                (id(p), type(p).__name__, p.requires_grad, p.grad is None)
                for p in module._parameters.values()
                if p is not None
            ],
        }
        for module in model.modules()
    ]


def groups(module):
    return module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []


def trained(model, rank, size):
    """Return the parameters after a step on this rank's samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = rank_cases.data(samples=24)
    start = 24 * rank // size
    LOSS(model(inputs[start : start + 24 // size]), targets[start : start + 24 // size]).backward()
    optimizer.step()
    return [parameter.full_tensor() if size > 1 else parameter for parameter in model.parameters()]


def left_as_found(rank, size):
    """Measure a model that has not run yet; return its states before and after, and how a step of training goes on."""
    model, other = sharded(rank_cases.model(), size), sharded(rank_cases.model(), size)
    for each in (model, other):
        each[0].weight.requires_grad_(False)
    before = states(model)
    pf.relative_flatness(model, LOSS, batches(rank, size), "0", **SAMPLED)
    after = states(model)
    return before, after, trained(model, rank, size), trained(other, rank, size)


class Failing(nn.Linear):
    """A layer that fails in the forward passes of one rank, from some call on, which all such layers count."""

    left = 10**9

    def forward(self, x):
        Failing.left -= 1
        if Failing.left <= 0:
            raise ValueError("no more")
        return super().forward(x)


def failing(rank, size):
    """Let a rank fail in the middle of the model; return the error, and a value after it."""
    model = rank_cases.model()
    weights = model[2].state_dict()
    model[2] = nn.Sequential(Failing(7, 6)).double()
    model[2][0].load_state_dict(weights)
    model = sharded(model, size)
    before, Failing.left = states(model), 4 if rank == 1 else 10**9
    try:
        pf.relative_flatness(model, LOSS, batches(rank, size), "0", **SAMPLED)
    except Exception as error:
        after, Failing.left = states(model), 10**9
        return error, before == after, pf.relative_flatness(model, LOSS, batches(rank, size), "0", **SAMPLED)


class Interrupted(nn.Linear):
    """A layer that one rank is interrupted in."""

    def forward(self, x):
        if dist.is_initialized() and dist.get_rank() == 1:
            raise KeyboardInterrupt
        return super().forward(x)


def interrupted(rank, size):
    """Interrupt a rank where others pass over errors: it is found out there whether the loss depends on parameters."""
    model = sharded(nn.Sequential(nn.Linear(5, 4), Interrupted(4, 3)).double(), size)
    try:
        pf.relative_flatness(model, lambda *pair: F.cross_entropy(*pair), batches(rank, size), "0", **SAMPLED)
    except (KeyboardInterrupt, pf.errors.RankError) as error:
        return repr(error)


def bad_data(rank, size):
    mine = batches(rank, size)
    if rank == 1:
        mine[-1] = (mine[-1][0] * float("nan"), mine[-1][1])
    return pf.measure(sharded(rank_cases.model(), size), LOSS, mine, measures=["trace"], **SAMPLED)


def other_layers(rank, size):
    layer = "0" if rank else "2"
    return pf.relative_flatness(sharded(rank_cases.model(), size), LOSS, batches(rank, size), layer, **SAMPLED)


def refused(rank, size):
    """Return by call the errors of what cannot be had of such a model."""
    model, mine, found = sharded(rank_cases.model(), size), part(rank, size), {}
    calls = {
        "second derivatives": lambda: pf.relative_flatness(model, LOSS, mine, "0"),
        "lambda_max": lambda: pf.measure(model, LOSS, mine, measures=["lambda_max"]),
        "mls": lambda: pf.measure(model, LOSS, mine, measures=["mls"]),
        "conv='affine'": lambda: pf.measure(
            sharded(made(Images), size), LOSS, part(rank, size, images()), conv="affine", **SAMPLED
        ),
        "adaptive": lambda: pf.relative_flatness(model, LOSS, mine, "0", probes="adaptive"),
        "one rank": lambda: pf.relative_flatness(model, LOSS, mine, process_group=False),
        "other calls": lambda: pf.measures.pac_bayes(model, LOSS, mine),
    }
    for name, call in calls.items():
        try:
            call()
        except pf.errors.FlatnessError as error:
            found[name] = error
    return found


def every_measure(rank, size):
    return pf.measure(sharded(relu(), size), LOSS, part(rank, size), measures="all", curvature="ggn")

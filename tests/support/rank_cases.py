"""Calls that the ranks of a process group make together, each on its part of the data: of one process, on all of them.

A case is a function (rank, size) -> what the call returned. With size 1 it is called outside of any group.
"""

import math
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pyflatness as pf

SAMPLES = 23
CUTS = {1: (0, SAMPLES), 2: (0, 9, SAMPLES), 3: (0, 4, 4, SAMPLES)}  # uneven shards, and of three ranks an empty one
REFUSED = {"relative_flatness_max"}  # measures that are not there over ranks
LOSS = nn.CrossEntropyLoss()
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]).double(), ignore_index=2)


def model(dtype=torch.float64, between=nn.Tanh):
    torch.manual_seed(1)
    layers = nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), between(), nn.Linear(6, 3)
    return nn.Sequential(*layers).to(dtype).eval()


def relu():
    return model(between=nn.ReLU)


def data(dtype=torch.float64, samples=SAMPLES):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 5, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(3, (samples,), generator=generator)


def part(rank, size, whole=None):
    start, stop = CUTS[size][rank : rank + 2]
    return tuple(held[start:stop] for held in (data() if whole is None else whole))


def batches(rank, size, length=4):
    return [*zip(*(held.split(length) for held in part(rank, size)), strict=True)] if len(part(rank, size)[0]) else []


def head(rank, size):
    return pf.relative_flatness(model(), LOSS, part(rank, size))


def head_of_weighted_terms(rank, size):
    return pf.relative_flatness(model(), WEIGHTED, part(rank, size), per_sample=True)


def head_of_float32(rank, size):
    return pf.relative_flatness(model(torch.float32), LOSS, part(rank, size, data(torch.float32)))


def head_normalized(rank, size):
    return pf.relative_flatness(model(), LOSS, batches(rank, size), normalize="std")


def head_from_tensors(rank, size):
    features, targets = part(rank, size)
    weight = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    return pf.head_flatness(features, weight, targets=targets, loss=LOSS, per_sample=True)


def hidden_layer(rank, size):
    return pf.relative_flatness(relu(), LOSS, batches(rank, size), "0", per_sample=True)


def hidden_layer_of_float32(rank, size):
    return pf.relative_flatness(model(torch.float32), LOSS, part(rank, size, data(torch.float32)), "0")


def hidden_layer_normalized(rank, size):
    return pf.relative_flatness(model(), LOSS, part(rank, size), "2", normalize="std")


def probes(rank, size):
    return pf.relative_flatness(model(), LOSS, batches(rank, size), "0", probes=3, per_sample=True)


def one_probe(rank, size):
    return pf.relative_flatness(relu(), LOSS, batches(rank, size), "0", probes=1)


def part_of_the_data(rank, size):
    return pf.relative_flatness(relu(), LOSS, batches(rank, size), "0", fraction=0.4, probes=2)


def as_large_a_part_as_it_takes(rank, size):
    own = [*zip(*(held.chunk(size)[rank].split(64) for held in data(samples=600)), strict=True)]
    return pf.measure(relu(), LOSS, own, fraction="auto", rtol=0.2)


def block_traces(rank, size):
    return pf.block_traces(model(), LOSS, part(rank, size), "2")


def every_measure(rank, size):
    return pf.measure(model(), LOSS, batches(rank, size), measures="all", curvature="ggn")


def sampled_measures(rank, size):
    return pf.measure(model(), LOSS, batches(rank, size), probes=2, measures="sweep")


def sum_of_losses(rank, size):
    return pf.measure(model(), nn.CrossEntropyLoss(reduction="sum"), part(rank, size), measures=["trace", "lambda_max"])


def representation(rank, size):
    return pf.representation(model(), LOSS, batches(rank, size), per_sample=True)


def bounds(rank, size):
    return pf.theory.bounds(model(), LOSS, batches(rank, size), sharpness="all", normalized=True)


def tracked(rank, size):
    averaged = model()
    history = pf.track(model().train(), LOSS, batches(rank, size), weights=["live", "ema"], averaged=averaged, probes=2)
    records = [history.record(step=step, train_loss=0.5).to_dict() for step in range(2)]
    return [{name: part for name, part in record.items() if name != "seconds"} for record in records]


def adaptive_sharpness_mc(rank, size):
    return pf.measures.adaptive_sharpness_mc(model(), LOSS, batches(rank, size), probes=3)


def pac_bayes(rank, size):
    return pf.measures.pac_bayes(model(), LOSS, part(rank, size), probes=3)


def feature_robustness(rank, size):
    return pf.theory.feature_robustness(model(), LOSS, part(rank, size), "0", rho=[0.1, 0.5], probes=3)


def generalization_gap(rank, size):
    train, test = part(rank, size), part(size - 1 - rank, size)
    return pf.generalization_gap(model(), LOSS, train, test)


def cost_of_change(rank, size):
    network = model()
    return pf.cost_of_change(network, LOSS, part(rank, size), pf.changes.rounded(network, 4), by_trace=True)


def allocate(rank, size):
    formats = ["int2", "int4", "int8"]
    return pf.allocate(model(), LOSS, part(rank, size), formats, bits=5, probes=None).to_dict()


def importance(rank, size):
    return {kind: dict(pf.importance(model(), LOSS, part(rank, size), kind=kind)) for kind in ("hessian", "fisher")}


def worst_cases(rank, size):
    found = pf.worst_case_sharpness(model(), LOSS, part(rank, size), adaptive=True, steps=6, starts=2, bound=True)
    box = pf.measures.keskar_sharpness(model(), LOSS, part(rank, size), rho=0.01, steps=6, starts=2)
    alone = [(x[None], y[None]) for x, y in zip(*part(rank, size), strict=True)]  # whatever the ranks: groups of one
    groups = pf.worst_case_sharpness(model(), LOSS, alone, m=1, steps=4)
    each = {"ball": found, "box": box, "groups": groups}
    return {name: {**vars(one), "notes": ()} for name, one in each.items()}


def spectrum(rank, size):
    found = pf.spectrum(model(), LOSS, part(rank, size), k=2, which="both", density=True, probes=2, steps=4)
    return {"values": found.eigenvalues, "nodes": found.density.nodes, "samples": found.samples}


def landscape(rank, size):
    found = pf.landscape(model(), LOSS, batches(rank, size), points=(5, 4))
    quadratic = {"gradient": found.quadratic.gradient, "hessian": found.quadratic.hessian}
    return {"losses": found.losses, "accuracy": found.accuracy, "samples": found.samples, **quadratic}


def linear_interpolation(rank, size):
    torch.manual_seed(1)
    networks = [
        nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double().eval() for _ in range(2)
    ]
    inputs, targets = data()
    held = [(inputs[a:b], targets[a:b]) for a, b in ((0, 5), (5, 9), (9, SAMPLES))]  # the same batches on any ranks
    start, stop = {1: [(0, 3)], 2: [(0, 2), (2, 3)], 3: [(0, 1), (1, 1), (1, 3)]}[size][rank]
    found = pf.linear_interpolation(networks[0], LOSS, held[start:stop], networks[1], test=part(rank, size), points=4)
    return {"losses": found.losses, "test": found.test_losses, "accuracy": found.accuracy, "samples": found.samples}


def tokens(rank, size):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3)).double().eval()
    whole = torch.randint(9, (SAMPLES, 3), generator=torch.Generator().manual_seed(5)), data()[1]
    return pf.measure(network, LOSS, part(rank, size, whole), normalize="std", measures=["relative_flatness"])


class Routed(nn.Module):
    """Samples go through one of two layers by the sign of their first entry, as in a mixture."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x):
        if bool((x[:, 0] > 0).all()):
            return self.last(torch.tanh(self.left(x)))
        return self.last(torch.relu(self.right(x)))


def layers_of_some_ranks(rank, size):
    torch.manual_seed(1)
    network = Routed().double().eval()
    inputs, targets = data()
    chosen = (inputs[:, 0] > 0).nonzero().flatten()[:6], (inputs[:, 0] <= 0).nonzero().flatten()[:6]
    halves = [(inputs[which], targets[which]) for which in chosen]
    mine = halves if size == 1 else halves[rank : rank + 1]
    return pf.measure(network, LOSS, mine, measures=["relative_flatness", "trace", "lambda_max", "mls"])


def with_nan(policy, call=pf.relative_flatness, **options):
    def case(rank, size):
        inputs, targets = data()
        inputs[20, 2] = math.nan  # of the last rank
        return call(model(), LOSS, part(rank, size, (inputs, targets)), nan_policy=policy, **options)

    return case


nan_propagated = with_nan("propagate", layer="0", per_sample=True)
nan_omitted = with_nan("omit", layer="0", per_sample=True)
nan_omitted_at_the_head = with_nan("omit", per_sample=True)
nan_omitted_of_every_measure = with_nan("omit", pf.measure, measures="all")
nan_omitted_normalized = with_nan("omit", normalize="std")
nan_raised = with_nan("raise", layer="0")
nan_raised_at_the_head = with_nan("raise")
nan_raised_of_every_measure = with_nan("raise", pf.measure, measures="all")


def wrapped(rank, size):
    network = model()
    return pf.measure(
        network if size == 1 else DistributedDataParallel(network), LOSS, part(rank, size), measures="sweep"
    )


def subgroup(rank, size):
    """Calls of the first two ranks alone, in a group of theirs; the other one measures by itself."""
    groups = None if size == 1 else dist.new_group([0, 1])
    if size == 1 or rank == 2:
        return pf.relative_flatness(model(), LOSS, data(), process_group=False)
    return pf.relative_flatness(model(), LOSS, part(rank, 2), process_group=groups)


def alone(rank, size):
    return pf.relative_flatness(model(), LOSS, data(), "0", process_group=False) if rank == 0 else None


def loader(rank, size, samples=24, **options):
    """Batches of a rank's samples as torch's sampler has them; of one process, of all samples in their order."""
    dataset = TensorDataset(*(held[:samples] for held in data(samples=25)))
    sampler = None if size == 1 else DistributedSampler(dataset, size, rank, shuffle=False, **options)
    return DataLoader(dataset, batch_size=4, sampler=sampler)


def by_sampler(rank, size):
    return pf.relative_flatness(model(), LOSS, loader(rank, size), "0", probes=2, per_sample=True)


def by_sampler_shuffled(rank, size):
    dataset = TensorDataset(*data(samples=24))
    sampler = DistributedSampler(dataset, size, rank, seed=2)
    return pf.relative_flatness(relu(), LOSS, DataLoader(dataset, 5, sampler=sampler), "0", probes=2, per_sample=True)


def with_repeats(rank, size):
    """The 25 samples of a sampler of 2 or 3 ranks, with those that it repeats; one process gets them by hand."""
    inputs, targets = data(samples=25)
    repeated = [*range(25), *range({2: 1, 3: 2}[max(2, size)])]
    mine = (inputs[repeated], targets[repeated]) if size == 1 else loader(rank, size, 25)
    return pf.relative_flatness(model(), LOSS, mine, "2", per_sample=True)


def without_the_rest(rank, size):
    return pf.relative_flatness(model(), LOSS, loader(rank, size, 24 if size == 1 else 25, drop_last=True))


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __iter__(self):
        return iter(zip(*self.pairs, strict=True))


def counted_first(rank, size):
    """Sampled values of data that do not say how many samples they have."""
    return pf.relative_flatness(model(), LOSS, DataLoader(Stream(part(rank, size)), 5), "0", probes=2)


def twice(rank, size):
    return [pf.measure(model(), LOSS, batches(rank, size), measures=["trace", "lambda_max"]) for _ in range(2)]


class Gated(nn.Module):
    """Outputs depend on a detached gate where an input is large."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        z = self.first(x)
        gate = torch.sigmoid(z).detach() if bool((x[:, 0] > 1.5).any()) else 1.0
        return self.last(z * gate)


def detached_on_some_ranks(rank, size):
    torch.manual_seed(1)
    inputs, targets = data()
    order = inputs[:, 0].argsort()
    whole = inputs[order], targets[order]
    pairs = [*zip(*(held.split(1) for held in part(rank, size, whole)), strict=True)]
    return pf.relative_flatness(Gated().double().eval(), LOSS, pairs, "first")


def vocabulary(classes, size=1.0, dtype=torch.float64, kind=LOSS, change=None, **options):
    """A head whose rows are spread over the ranks, each of which has all features."""

    def case(rank, ranks):
        generator = torch.Generator().manual_seed(7)
        features, weight = (torch.randn(n, 4, generator=generator, dtype=dtype) for n in (12, classes))
        bias = torch.randn(classes, generator=generator, dtype=dtype)
        targets = torch.randint(classes, (12,), generator=generator)
        if change is not None:
            change(features)
        weight = weight * size
        if ranks > 1:
            weight = distribute_tensor(weight, init_device_mesh("cpu", (ranks,)), [Shard(0)])
        return pf.head_flatness(features, weight, bias, targets, loss=kind, **options)

    return case


def one_nan(features):
    features[5, 1] = math.nan


vocabulary_of_7 = vocabulary(7, per_sample=True)
vocabulary_of_2 = vocabulary(2)  # of three ranks one has no row
vocabulary_of_many = vocabulary(50_257, dtype=torch.float32)
vocabulary_at_a_minimum = vocabulary(300, size=30.0, normalize="std")
vocabulary_of_weighted_terms = vocabulary(
    7, kind=nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 7).double(), ignore_index=2, label_smoothing=0.1)
)
vocabulary_with_nan = vocabulary(7, change=one_nan, nan_policy="omit", per_sample=True)


def streamed(rank, size, whole=None, scale=1.0, batches=None):
    from pyflatness.integrations.torchmetrics import RelativeFlatness

    weight = scale * torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    metric = RelativeFlatness(weight, loss=WEIGHTED)
    held = part(rank, size) if whole is None else whole
    for features, targets in [*zip(*(tensor.split(4) for tensor in held), strict=True)][:batches]:
        metric.update(features, targets)
    own = metric.total.item()
    value = metric.compute().item()
    return value, own == metric.total.item()


def streamed_on_one_rank(rank, size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compute() before update()
        return streamed(rank, size, data(), batches=None if rank == 0 else 0)


def streamed_with_other_weights(rank, size):
    return streamed(rank, size, scale=1.0 + rank)


def callable_loss(rank, size):
    return pf.relative_flatness(model(), lambda f, y: F.cross_entropy(f, y), part(rank, size), "2")

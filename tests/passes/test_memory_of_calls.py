"""What public calls allocate at a time beside model and data, held against ``memory=``, by torch's own count."""

import copy
import gc
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pyflatness as pf
from support.combinations import every

MIB = 2**20
LOSS = nn.CrossEntropyLoss()
N, WIDTH = 512, 16384
# Blocks of fixed sizes that sums are made by, what an operation of torch's makes for itself, and results.
REST = 4 * MIB


def network():
    """The two numbers that a sample has at each of the wide layer's outputs, in a forward pass, take 64 MiB."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2), nn.ReLU(), nn.Linear(2, 2)).eval()


def moved(model):
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.data.mul_(1.1)
    return other


CALLS = {
    "measure": lambda *given, **how: pf.measure(*given, **how),
    "sweep": lambda *given, **how: pf.measure(*given, measures="sweep", probes=1, **how),
    "probes": lambda *given, **how: pf.measure(*given, probes=2, **how),
    "adaptive": lambda *given, **how: pf.measure(*given, probes="adaptive", **how),
    "fraction": lambda *given, **how: pf.measure(*given, fraction=0.25, **how),
    "per_sample": lambda *given, **how: pf.measure(*given, per_sample=True, **how),
    "normalize": lambda *given, **how: pf.measure(*given, normalize="std", **how),
    "fisher_rao": lambda *given, **how: pf.measure(*given, measures="fisher_rao", **how),
    "sharpness": lambda *given, **how: pf.measure(*given, measures="sharpness", **how),
    "mls_adversarial": lambda *given, **how: pf.measures.mls_adversarial(*given, steps=1, **how),
    "relative_flatness": lambda *given, **how: pf.relative_flatness(*given, "2", **how),
    "block_traces": lambda *given, **how: pf.block_traces(*given, "2", **how),
    "representation": lambda *given, **how: pf.representation(*given, **how),
    "bounds": lambda *given, **how: pf.theory.bounds(*given, **how),
    "score": lambda model, *given, **how: pf.score({"a": model}, *given, **how),
    "track": lambda model, loss, data, **how: pf.track(model, loss, data, **how).record(),
    "cost_of_change": lambda model, *given, **how: pf.cost_of_change(
        model, *given, pf.changes.rounded(model, 4), probes=4, **how
    ),
    "allocate": lambda *given, **how: pf.allocate(*given, ["int4", "int8"], bits=6, probes=4, **how),
    "landscape": lambda *given, **how: pf.landscape(*given, points=3, dimensions=1, **how),
    "linear_interpolation": lambda model, *given, **how: pf.linear_interpolation(
        model, *given, moved(model), points=3, **how
    ),
    "spectrum": lambda *given, **how: pf.spectrum(*given, k=1, max_products=2, **how),
    "density": lambda *given, **how: pf.spectrum(*given, k=0, density=True, probes=1, steps=2, **how),
    "worst_case_sharpness": lambda *given, **how: pf.worst_case_sharpness(*given, steps=1, **how),
    "keskar_sharpness": lambda *given, **how: pf.measures.keskar_sharpness(*given, steps=1, **how),
}


def most_at_once(call):
    """The peak of the bytes that torch has allocated during a call, over those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate((event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), initial=0))


@every(together=1, name=[*CALLS], memory=[8, 16, 32])
def test_a_call_stays_within_its_memory(name, memory):
    model = network()
    data = [(torch.randn(N, 1), torch.arange(N) % 2)]
    CALLS[name](model, LOSS, [(data[0][0][:8], data[0][1][:8])])  # loads code
    taken = most_at_once(partial(CALLS[name], model, LOSS, data, memory=memory * MIB))
    assert taken <= memory * MIB + REST, f"{taken / MIB:.1f} MiB"


def graphs():
    """How many tensors with a graph there are."""
    return sum(type(held) is torch.Tensor and held.grad_fn is not None for held in gc.get_objects())


@pytest.mark.usefixtures("new_objects")
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_ends_with_its_run(name):
    """A cycle of references would keep those of many micro-batches until Python looks for cycles."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    data = [(torch.randn(16, 4), torch.arange(16) % 3) for _ in range(3)]
    CALLS[name](model, LOSS, data)
    gc.collect()
    gc.disable()
    try:
        before = graphs()
        CALLS[name](model, LOSS, data)
        assert graphs() == before
    finally:
        gc.enable()

"""Steps with a penalty under DistributedDataParallel have the gradients of one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import pyflatness as pf
from support.ranks import outcomes

# --- what each of the ranks does --------------------------------------------------------------------------------------

SAMPLES = 6
LOSS = nn.CrossEntropyLoss()


def _data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 2, 5, 5, generator=generator).double()
    return x, torch.arange(SAMPLES) % 3, torch.randn(SAMPLES, 3, generator=generator).sign().double()


def _step(rank, size, steps=1, **options):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    model = nn.Sequential(*layers).double()
    wrapped = DistributedDataParallel(model, **options) if size > 1 else model
    x, y, signs = (part[rank::size] for part in _data())
    with pf.FlatnessPenalty(wrapped, "2", LOSS) as penalty:
        penalty._signs = lambda like: signs
        for _ in range(steps):
            model.zero_grad()
            outputs = wrapped(x)
            (LOSS(outputs, y) + 0.3 * penalty(outputs, y)).backward()
    return [parameter.grad for parameter in model.parameters()]


def step(rank, size):
    return _step(rank, size)


def step_with_unused(rank, size):
    return _step(rank, size, steps=2, find_unused_parameters=True)


def static_step(rank, size):
    try:
        return _step(rank, size, static_graph=True)
    except pf.errors.InputError as error:
        return str(error)


def bucket_views(rank, size):
    return _step(rank, size, steps=2, gradient_as_bucket_view=True)


def accumulated(rank, size):
    """Two micro-batches without a synchronisation between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    wrapped = DistributedDataParallel(model) if size > 1 else model
    x, y, signs = (part[rank::size] for part in _data())
    with pf.FlatnessPenalty(wrapped, "0", LOSS) as penalty:
        cut = len(x) - len(x) // 3
        for number, part in enumerate((slice(0, cut), slice(cut, None))):
            context = wrapped.no_sync() if size > 1 and number == 0 else torch.enable_grad()
            with context:
                penalty._signs = lambda like, part=part: signs[part]
                outputs = wrapped(x[part].flatten(1))
                share = len(x[part]) / len(x)
                (share * (LOSS(outputs, y[part]) + 0.3 * penalty(outputs, y[part]))).backward()
    return [parameter.grad for parameter in model.parameters()]


# --- what that comes to -----------------------------------------------------------------------------------------------

NAMES = ["step", "step_with_unused", "bucket_views", "accumulated"]


@pytest.fixture(scope="module")
def found():
    return outcomes("training.test_penalty_over_ranks", [*NAMES, "static_step"], 2)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_process(found, name):
    expected = globals()[name](0, 1)
    for gradients in found[name]:
        assert not isinstance(gradients, Exception), gradients
        torch.testing.assert_close(gradients, expected)


def test_a_static_graph_is_refused(found):
    assert all("static_graph" in message for message in found["static_step"])


def test_a_head_that_is_spread_over_ranks_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.randn(3, 5), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(pf.errors.NotYetError, match="weight: it is spread over ranks"):
            pf.flatness_penalty(torch.randn(4, 5), weight)
    finally:
        dist.destroy_process_group()

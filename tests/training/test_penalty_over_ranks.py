"""Steps with a penalty under DistributedDataParallel have the gradients of one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import pyflatness as pf
from support import rank_penalty
from support.ranks import outcomes

NAMES = ["step", "step_with_unused", "bucket_views", "accumulated"]


@pytest.fixture(scope="module")
def found():
    return outcomes("support.rank_penalty", [*NAMES, "static_step"], 2)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_process(found, name):
    expected = getattr(rank_penalty, name)(0, 1)
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

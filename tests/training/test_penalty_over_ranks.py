"""Steps with a penalty under DistributedDataParallel have the gradients of one process with the whole batch."""

import pytest
import torch

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

"""Two ranks with one GPU find what one process finds on the CPU; and what NCCL sends arrives."""

import pytest
import torch

from support import rank_cuda, ranks
from support.on_cuda import assert_close, on_a_gpu

pytestmark = on_a_gpu
CASES = ("measures", "head", "probes", "spectrum", "landscape")


def test_two_ranks_with_one_gpu(cuda_device, monkeypatch):
    found = ranks.outcomes("support.rank_cuda", [*CASES], 2)
    monkeypatch.setattr(rank_cuda, "DEVICE", torch.device("cpu"))
    for name in CASES:
        for one in found[name]:
            if isinstance(one, Exception):
                raise one
            assert_close(one, getattr(rank_cuda, name)(0, 1), rel=1e-7)


def test_one_rank_with_nccl(cuda_device):
    if cuda_device.type == "cpu":
        pytest.skip("NCCL is of GPUs")
    (found,) = ranks.outcomes("support.rank_cuda", ["over_nccl"], 1)["over_nccl"]
    if isinstance(found, Exception):
        raise found
    assert found

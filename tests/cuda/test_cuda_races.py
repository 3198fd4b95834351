"""Missing barriers are found in the emulation, all others are not; ``tests/soak/barriers.py`` tries every one."""

import re

import pytest
import torch

from pyflatness.contractions.backends import cuda
from support import ROOT, emulated

CALLS = {
    "distances.cu": lambda: cuda.pair_distances(torch.randn(70, 40)),
}
BARRIERS = [
    (f"{name}:{number}", change)
    for name in CALLS
    for number, line in enumerate((ROOT / "csrc" / "cuda" / name).read_text(encoding="utf-8").splitlines(), start=1)
    if (found := re.match(r"\s*__sync(threads|warp)\(", line))
    for change in ("leave_out", "weaken")[: 2 if found[1] == "threads" else 1]
]


@pytest.mark.skipif(emulated.chosen() != "races", reason="the emulation is compiled for another check")
@pytest.mark.parametrize(("place", "change"), BARRIERS)
def test_a_missing_barrier_is_found(emulated_cuda, place, change):
    call = CALLS[place.partition(":")[0]]
    with cuda.emulated(emulated_cuda):
        getattr(emulated_cuda, change)(place)
        try:
            with pytest.raises(RuntimeError, match=r"emulated CUDA: thread .* (reads|writes) what .*: shared memory"):
                call()
        finally:
            emulated_cuda.leave_out("")
        call()
        assert place in emulated_cuda.barriers()

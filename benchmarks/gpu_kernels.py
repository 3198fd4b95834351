"""Kernels of wide heads that read rows: rows for ``benchmarks/gpu.py``.

The floor is what a kernel reads and writes, at the rate of a copy in the same run. Arrays are larger than a cache, and
times are of several calls in a graph that is replayed.
"""

from collections.abc import Callable
from functools import partial

import torch
from gpu_head import captured
from gpu_rows import Row, Works, bandwidth, milliseconds, peak_mib
from torch import Tensor

from pyflatness.contractions import Backend
from pyflatness.contractions.backends import cuda
from pyflatness.contractions.reference import ClassSums

CALLS = 5
Call = Callable[[Backend], object]


def works(device: torch.device) -> Works:
    """Return what makes each row."""
    makers: dict[str, Callable[[torch.device], tuple[Call, int]]] = {
        "exponentiate_tile, (4096, 11712), float32 to bfloat16": partial(exponentiate_tile, 4096, 11_712),
        "norms_about, (128256, 4096), bfloat16": partial(norms_about, 128_256, 4096),
        "rejoin, (4096, 4096), all rows": partial(rejoin, 4096, 4096),
        "mean_row, (4096, 4096)": partial(mean_row, 4096, 4096),
        "row_dots, (8192, 4096), float32": partial(row_dots, 8192, 4096),
        "sigmoid_curvature, (32768, 1000), float32": partial(sigmoid_curvature, 32_768, 1000),
    }
    return {f"kernel {name}": partial(row, maker, device) for name, maker in makers.items()}


def row(
    maker: Callable[[torch.device], tuple[Call, int]],
    device: torch.device,
    backend: Backend = cuda,
    rounds: int = 15,
) -> Row:
    """Return the row of a kernel; ``maker`` gives its call, and the bytes that this reads and writes."""
    call, size = maker(device)
    calls = captured(lambda _: call(backend), [torch.empty(0, device=device)] * CALLS)
    taken = milliseconds({"ours": calls}, device, rounds)["ours"] / CALLS
    extra = peak_mib(lambda: call(backend), device)
    return Row(size / bandwidth(device), taken, {}, extra, note=f"{size / taken / 1e6:.0f} GB/s")


def exponentiate_tile(n: int, d: int, device: torch.device) -> tuple[Call, int]:
    """Return the call that makes the exponentials of a tile's logits, which it leaves as they are."""
    logits, norms, sums = 3 * torch.randn(n, d, device=device), torch.rand(d, device=device), class_sums(n, device)
    out = torch.empty(n, d, dtype=torch.bfloat16, device=device)
    return lambda backend: backend.exponentiate_tile(logits, None, norms, 0, sums, out), logits.nbytes + out.nbytes


def norms_about(d: int, m: int, device: torch.device) -> tuple[Call, int]:
    """Return the call that reads a whole weight."""
    weight, centre = torch.randn(d, m, device=device).bfloat16(), torch.randn(m, device=device)
    return lambda backend: backend.norms_about(weight, centre), weight.nbytes


def rejoin(n: int, m: int, device: torch.device) -> tuple[Call, int]:
    """Return the call that adds a row of the weight to every row."""
    summed, weight = torch.randn(n, m, device=device), torch.randn(2 * n, m, device=device).bfloat16()
    top, factor = torch.randperm(n, device=device), torch.full((n,), 0.5, dtype=torch.float64, device=device)
    return lambda backend: backend.rejoin(summed, weight, None, top, factor), 2 * summed.nbytes + weight.nbytes // 2


def mean_row(n: int, m: int, device: torch.device) -> tuple[Call, int]:
    """Return the call that makes sums to means, as they are about another centre."""
    summed, weight = torch.randn(n, m, device=device), torch.randn(2 * n, m, device=device).bfloat16()
    sums, centre = class_sums(n, device), torch.randn(m, device=device)
    sums.top.copy_(torch.randperm(n, device=device)), sums.rest.fill_(1)
    return (
        lambda backend: backend.mean_row(summed, weight, centre, sums, sums.rest, False),
        2 * summed.nbytes + weight.nbytes // 2,
    )


def row_dots(n: int, m: int, device: torch.device) -> tuple[Call, int]:
    """Return the call that reads two matrices."""
    a, b = torch.randn(n, m, device=device), torch.randn(n, m, device=device)
    return lambda backend: backend.row_dots(a, b), 2 * a.nbytes


def sigmoid_curvature(n: int, d: int, device: torch.device) -> tuple[Call, int]:
    """Return the call that reads logits and coefficients."""
    logits, coefficients = torch.randn(n, d, device=device), torch.rand(n, d, device=device)
    norms = torch.rand(d, device=device)
    return lambda backend: backend.sigmoid_curvature(logits, coefficients, norms), 2 * logits.nbytes


def class_sums(n: int, device: torch.device) -> ClassSums:
    """Return sums over no class."""
    rest, moment = torch.zeros(2, n, dtype=torch.float64, device=device)
    lowest: Tensor = torch.full((n,), -torch.inf, device=device)
    return ClassSums(lowest, torch.full((n,), -1, device=device), rest, moment)

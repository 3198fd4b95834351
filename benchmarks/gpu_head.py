"""Heads on a GPU: rows for ``benchmarks/gpu.py``.

- Few classes, float32: the floor is reading the features once, at the rate of a copy in the same run; times are of a
  graph that is replayed, over so many tensors of features that none is found in a cache.
- More classes, float32: the floor is the two products of the route, φ wᵀ and its product with the matrix of distances.
- A language model's head in bfloat16, flat, with a peak before a tail of a power law, and with some rows that are
  computed by differences: the floor is two bare products in bfloat16 by chunks of rows, with the classes filled up to
  whole accesses of 16 bytes.

Beside each stands torch composed as a user would, and for the smaller heads that under ``torch.compile``.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from gpu_rows import Row, Works, bandwidth, milliseconds, peak_mib
from torch import Tensor
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.contractions import SoftmaxVariance, backends, default_memory
from pyflatness.contractions.backends import cuda

COPIES = 20  # tensors of features in one graph: together more than a cache holds
ROUNDS = 15
CHUNK = 2048  # rows of a bare product of a wide head
ACCESS = 64  # classes; rows of products begin at whole accesses of 16 bytes
Function = Callable[[Tensor], object]


def works(device: torch.device) -> Works:
    """Return what makes each row."""
    wide = 8192, 128_256, 4096
    found: dict[str, Callable[[], Row]] = {
        "head (8192, 128256, 4096), bfloat16, flat": lambda: half(*flat(*wide, device)),
        "head (8192, 50257, 4096), bfloat16, flat": lambda: half(*flat(8192, 50_257, 4096, device)),
        "head (8192, 128256, 4096), bfloat16, peaked": lambda: half(*peaked(*wide, device)),
        "head (8192, 128256, 4096), bfloat16, 1 % of rows by differences": lambda: half(*ill(*wide, 0.01, device)),
    }
    # Last, since torch.compile takes longer than all the others together.
    found["head (50000, 1000, 2048), float32, graph"] = partial(more, 50_000, 1000, 2048, device)
    found["head (50000, 10, 84), float32, graph"] = partial(few, 50_000, 10, 84, device)
    return found


def few(n: int, d: int, m: int, device: torch.device, backend: object = cuda, compiles: bool = True) -> Row:
    """Return the row of a head of few classes: one kernel."""
    weight, bias = torch.randn(d, m, device=device) / m**0.5, torch.randn(d, device=device)
    copies = [torch.randn(n, m, device=device) for _ in range(COPIES if device.type == "cuda" else 1)]
    variance = SoftmaxVariance(weight, bias, backend, rows=n)
    alternatives: dict[str, Function] = {"ours": variance, **others(weight, bias, compiles)}
    check(alternatives, copies[0])
    times = milliseconds({name: captured(work, copies) for name, work in alternatives.items()}, device, ROUNDS)
    each = {name: taken / len(copies) for name, taken in times.items()}
    floor = copies[0].nbytes / bandwidth(device)
    return Row(floor, each.pop("ours"), each, peak_mib(lambda: variance(copies[0]), device), 0.020)


def more(n: int, d: int, m: int, device: torch.device, backend: object = cuda, compiles: bool = True) -> Row:
    """Return the row of a head of more classes than one kernel has: products, and kernels behind them."""
    features, weight = torch.randn(n, m, device=device), torch.randn(d, m, device=device) / m**0.5
    bias, square = torch.randn(d, device=device), torch.randn(d, d, device=device)
    variance = SoftmaxVariance(weight, bias, backend, rows=n, memory=default_memory(device))
    alternatives: dict[str, Function] = {"ours": variance, **others(weight, bias, compiles)}
    check(alternatives, features)
    alternatives["products"] = lambda x: torch.addmm(bias, x, weight.t()) @ square
    times = milliseconds({name: captured(work, [features]) for name, work in alternatives.items()}, device, ROUNDS)
    extra, floor = peak_mib(lambda: variance(features), device), times.pop("products")
    return Row(floor, times.pop("ours"), times, extra, 1.15 * floor)


def half(features: Tensor, weight: Tensor, backend: str = "compiled") -> Row:
    """Return the row of a language model's head in bfloat16."""
    filled = F.pad(weight, (0, 0, 0, -len(weight) % ACCESS))
    chunks = features.split(CHUNK)
    beside = [name for name in backends.NAMES if name not in ("auto", backend)] if features.is_cuda else ["reference"]
    alternatives = {
        "products": lambda: bare_products(features, filled),
        "ours": lambda: pf.head_flatness(features, weight, backend=backend).value,
        "composed": lambda: [composed(x, weight, None) for x in chunks],  # all logits would not fit
    }
    ours = pf.head_flatness(features, weight, backend=backend, per_sample=True)
    for name in beside:
        other = pf.head_flatness(features, weight, backend=name, per_sample=True)
        torch.testing.assert_close(other.value, ours.value, rtol=2e-3, atol=0)
        torch.testing.assert_close(other.per_sample, ours.per_sample, rtol=1e-2, atol=0)
        alternatives[name] = partial(pf.head_flatness, features, weight, backend=name)
    times = milliseconds(alternatives, features.device, 5)
    extra, floor = peak_mib(alternatives["ours"], features.device), times.pop("products")
    return Row(floor, times.pop("ours"), times, extra, 1.15 * floor, "extra to be ≤ 512 MiB")


def flat(n: int, d: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features and weight whose probabilities are spread."""
    features, weight = torch.randn(n, m, device=device), torch.randn(d, m, device=device) / m**0.5
    return features.bfloat16(), weight.bfloat16()


def ill(n: int, d: int, m: int, share: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same, but that in some rows two nearly equal rows of the weight have all probability.

    These are computed by differences.
    """
    features, weight = flat(n, d, m, device)
    weight[1::2] = weight[: d // 2 * 2 : 2] + 1e-3 * torch.randn(d // 2, m, device=device).bfloat16()
    rows = torch.randperm(n, device=device)[: int(share * n)]
    features[rows] = 60 * weight[torch.randint(0, d, (len(rows),), device=device)]
    return features, weight


def peaked(n: int, d: int, m: int, device: torch.device, exponent: float = 1.5) -> tuple[Tensor, Tensor]:
    """Features and weight as behind a trained model: 1 - p_max of about 0.05, class 0 before a tail of a power law.

    Each row of features picks a column of the weight, which holds the logits.
    """
    tail = -exponent * torch.arange(1, d, device=device, dtype=torch.float32).log()
    weight = torch.empty(d, m, device=device, dtype=torch.bfloat16)
    for j in range(m):
        rest = 0.05 * 10 ** float(torch.rand(()) * 2 - 1)
        weight[1:, j] = tail
        weight[0, j] = weight[1:, j].double().logsumexp(0) + torch.tensor((1 - rest) / rest).log()
    features = torch.zeros(n, m, device=device, dtype=torch.bfloat16)
    features[torch.arange(n, device=device), torch.arange(n, device=device) % m] = 1
    return features, weight


def bare_products(features: Tensor, weight: Tensor) -> None:
    """Both products of a wide head, and nothing else."""
    for part in features.split(CHUNK):
        (part @ weight.t()) @ weight


def composed(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return E|w|² - |E w|² in torch, by two products with w: what a user would write."""
    z = x @ w.t() if b is None else torch.addmm(b, x, w.t())
    p = torch.softmax(z.float(), 1)
    mean = p.to(w.dtype) @ w
    variance = p @ w.float().square().sum(1) - mean.float().square().sum(1)
    return x.float().square().sum(1) * variance


def others(weight: Tensor, bias: Tensor, compiles: bool) -> dict[str, Function]:
    """Composed torch, as it is and compiled."""
    found: dict[str, Function] = {"composed": lambda x: composed(x, weight, bias)}
    if compiles:
        function = torch.compile(composed)
        found["torch.compile"] = lambda x: function(x, weight, bias)
    return found


def captured(work: Function, inputs: Sequence[Tensor]) -> Callable[[], object]:
    """Return the work on each of the inputs, as a graph where there is a GPU."""

    def all_of_them() -> list[object]:
        return [work(x) for x in inputs]

    if inputs[0].device.type != "cuda":
        return all_of_them
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_of_them()
    torch.cuda.current_stream().wait_stream(stream)
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        results.append(all_of_them())  # their memory is the graph's as long as it is replayed
    return graph.replay


def check(works: dict[str, Function], features: Tensor) -> None:
    """Raise unless all give the same values."""
    first, *rest = (torch.as_tensor(work(features)).double() for work in works.values())
    for values in rest:
        torch.testing.assert_close(values, first, rtol=1e-2, atol=1e-6)

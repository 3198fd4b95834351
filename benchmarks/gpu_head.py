"""Heads on a GPU: rows for ``benchmarks/gpu.py``. Not yet run on one.

- Few classes, float32: the floor is reading the features once, at the rate of a copy in the same run; times are of a
  graph that is replayed, over so many tensors of features that none is found in a cache.
- More classes, float32: the floor is the two products of the route, φ wᵀ and its product with the matrix of distances.
- A language model's head in bfloat16, flat and with a peak before a tail of a power law: the floor is two bare products
  in bfloat16 by chunks of rows. With ``rtol`` the last column says what was kept of the second and what is guaranteed.

Each work has a row against torch composed as a user would, and one against that under ``torch.compile``.
"""

from collections.abc import Callable, Sequence
from unittest import mock

import torch
from gpu_rows import Row, milliseconds, peak_mib
from torch import Tensor

import pyflatness as pf
from pyflatness.contractions import SoftmaxVariance, cuda, default_memory, wide

COPIES = 20  # tensors of features in one graph: together more than a cache holds
ROUNDS = 15
CHUNK = 2048  # rows of a bare product of a wide head
Function = Callable[[Tensor], object]


def rows(device: torch.device | None = None) -> list[Row]:
    """Return all rows, on the GPU."""
    device = device or torch.device("cuda")
    found = few(50_000, 10, 84, device) + more(50_000, 1000, 2048, device)
    found += flat(8192, 128_256, 4096, device)
    for exponent in (1.0, 1.5):
        for alike in (True, False):
            found.append(peaked(8192, 128_256, 4096, exponent, alike, 1e-3, device))
    return found


def few(n: int, d: int, m: int, device: torch.device, backend: object = cuda, compiles: bool = True) -> list[Row]:
    """Return the rows of a head of few classes: one kernel."""
    weight, bias = torch.randn(d, m, device=device) / m**0.5, torch.randn(d, device=device)
    copies = [torch.randn(n, m, device=device) for _ in range(COPIES if device.type == "cuda" else 1)]
    variance = SoftmaxVariance(weight, bias, backend, rows=n)
    works: dict[str, Function] = {"ours": variance, **others(weight, bias, compiles)}
    check(works, copies[0])
    times = milliseconds({name: captured(work, copies) for name, work in works.items()}, device, ROUNDS)
    floor = copies[0].nbytes / bandwidth(device)
    extra = peak_mib(lambda: variance(copies[0]), device)
    each = {name: taken / len(copies) for name, taken in times.items()}
    return against(f"head ({n}, {d}, {m}), float32, graph", floor, each, extra, "≤ 0.020 ms")


def more(n: int, d: int, m: int, device: torch.device, backend: object = cuda, compiles: bool = True) -> list[Row]:
    """Return the rows of a head of more classes than one kernel has: products, and kernels behind them."""
    features, weight = torch.randn(n, m, device=device), torch.randn(d, m, device=device) / m**0.5
    bias, square = torch.randn(d, device=device), torch.randn(d, d, device=device)
    variance = SoftmaxVariance(weight, bias, backend, rows=n, memory=default_memory(device))
    works: dict[str, Function] = {
        "products": lambda x: torch.addmm(bias, x, weight.t()) @ square,
        "ours": variance,
        **others(weight, bias, compiles),
    }
    check({name: work for name, work in works.items() if name != "products"}, features)
    times = milliseconds({name: captured(work, [features]) for name, work in works.items()}, device, ROUNDS)
    extra = peak_mib(lambda: variance(features), device)
    return against(f"head ({n}, {d}, {m}), float32, graph", times.pop("products"), times, extra, "≤ 1.15 × the floor")


def flat(n: int, d: int, m: int, device: torch.device, backend: str = "compiled", compiles: bool = True) -> list[Row]:
    """Return the rows of a language model's head, its probabilities spread: everything is computed."""
    features = torch.randn(n, m, device=device).bfloat16()
    weight = (torch.randn(d, m, device=device) / m**0.5).bfloat16()
    works: dict[str, Function] = {
        "products": lambda x: bare_products(x, weight),
        "ours": lambda x: pf.head_flatness(x, weight, backend=backend).value,
        **{name: by_chunks(work) for name, work in others(weight, None, compiles).items()},
    }
    times = milliseconds({name: lambda work=work: work(features) for name, work in works.items()}, device, 5)
    extra = peak_mib(lambda: works["ours"](features), device)
    target = "≤ 1.15 × the floor, ≤ 512 MiB extra"
    return against(f"head ({n}, {d}, {m}), bfloat16, flat", times.pop("products"), times, extra, target)


def peaked(
    n: int, d: int, m: int, exponent: float, alike: bool, rtol: float, device: torch.device, backend: str = "compiled"
) -> Row:
    """The same behind a trained model: 1 - p_max of about 0.05, tails of one order or of one of each row's own."""
    features, weight = zipf(n, d, m, exponent, alike, device)
    exact = pf.head_flatness(features, weight, backend=backend)
    kept, near = counted(lambda: pf.head_flatness(features, weight, backend=backend, rtol=rtol), m)
    if near.bound is not None and abs(near.value - exact.value) > near.bound + 1e-5 * exact.value:
        raise AssertionError(f"off by {abs(near.value - exact.value)}, the bound says {near.bound}")
    works = {
        "products": lambda: bare_products(features, weight),
        "ours": lambda: pf.head_flatness(features, weight, backend=backend, rtol=rtol),
    }
    times = milliseconds(works, device, 5)
    name = f"head ({n}, {d}, {m}), bfloat16, tail {exponent:g}, {'alike' if alike else 'independent'}, rtol {rtol:g}"
    share, bound = kept / (n * d), (near.bound or 0.0) / exact.value
    said = f"kept {share:.0%} of the second product; off by ≤ {bound:.1e} of the value"
    return Row(name, times["products"], times["ours"], None, peak_mib(works["ours"], device), said)


def zipf(n: int, d: int, m: int, exponent: float, alike: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features that each pick a column of the weight, which holds the logits: class 0 before a tail of a power law."""
    tail = -exponent * torch.arange(1, d, device=device, dtype=torch.float32).log()
    weight = torch.empty(d, m, device=device, dtype=torch.bfloat16)
    for j in range(m):
        rest = 0.05 * 10 ** float(torch.rand(()) * 2 - 1)
        weight[1:, j] = tail if alike else tail[torch.randperm(d - 1, device=device)]
        weight[0, j] = weight[1:, j].double().logsumexp(0) + torch.tensor((1 - rest) / rest).log()
    features = torch.zeros(n, m, device=device, dtype=torch.bfloat16)
    features[torch.arange(n, device=device), torch.arange(n, device=device) % m] = 1
    return features, weight


def counted(call: Callable[[], pf.Estimate], m: int) -> tuple[int, pf.Estimate]:
    """Return a call, and how many entries of probabilities its second products were over."""
    entries, right = [0], wide._product

    def product(a: Tensor, b: Tensor) -> Tensor:
        entries[0] += a.numel() if b.shape[1] == m and a.shape[1] != m else 0
        return right(a, b)

    with mock.patch.object(wide, "_product", product):
        estimate = call()
    return entries[0], estimate


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


def others(weight: Tensor, bias: Tensor | None, compiles: bool) -> dict[str, Function]:
    """Composed torch, as it is and compiled."""
    found: dict[str, Function] = {"composed": lambda x: composed(x, weight, bias)}
    if compiles:
        function = torch.compile(composed)
        found["torch.compile"] = lambda x: function(x, weight, bias)
    return found


def by_chunks(work: Function) -> Function:
    """Return the same on chunks of rows, where all logits would not fit."""
    return lambda x: [work(part) for part in x.split(CHUNK)]


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


def bandwidth(device: torch.device) -> float:
    """Return how many bytes are read in a millisecond, of a large copy: half of what it moves."""
    source = torch.empty(2**28 if device.type == "cuda" else 2**20, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    taken = milliseconds({"copy": lambda: target.copy_(source)}, device, ROUNDS)["copy"]
    return 2 * source.nbytes / taken


def against(name: str, floor: float, times: dict[str, float], extra: float, target: str) -> list[Row]:
    """Return a row for each alternative."""
    ours = times.pop("ours")
    return [
        Row(name if other == "composed" else f"{name}; against {other}", floor, ours, taken, extra, target)
        for other, taken in times.items()
    ]


def check(works: dict[str, Function], features: Tensor) -> None:
    """Raise unless all give the same values."""
    first, *rest = (torch.as_tensor(work(features)).double() for work in works.values())
    for values in rest:
        torch.testing.assert_close(values, first, rtol=1e-2, atol=1e-6)

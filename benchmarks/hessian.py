"""Hessian values behind smooth activations: pyflatness against bare Hessian products and other libraries' estimators.

Run from the project's root: ``python benchmarks/hessian.py [tanh] [transformer]``; both unless one is named. Every
figure is a ratio within one run, alternatives in turn. curvlinops and PyHessian are optional (``pip install
'.[peers]' pyhessian``); a row says if one is missing.

``tanh``: the exact relative flatness of one layer of a tanh network takes rank(w) Hessian products of what is behind
it. ``products`` takes these alone, from that layer's outputs, one after the other; ``forward`` is one forward pass.

``transformer``: the trace of one layer's Hessian to a standard error of 1 %: by ``probes="adaptive", rtol=0.01``, the
time of what came out times (error / 1 %)² where it is above. The others' estimators draw one direction for all samples
together: ``draws`` is what 1 % takes by the deviation of 64 draws, and their time that many times a draw's.

Notes, experiments (transformer, layers up and qkv; probes for each of 256 sequences that 1 % takes, by the deviations
of 48 probes, all probes counted):
- as many probes of the whole Hessian for every sample: 187 and 458; allotted by their deviations: 30 and 60.
- by deviations that a pilot of two probes found: 223 and 280 (a sample whose two probes agree gets none).
- by 1 - |p|², the trace of the loss's own curvature: 187 and 307; by |p - y|: 40 and 106.
- the GGN exactly and probes of the rest: 1.8 and 5.7; allotted by their deviations 0.3 and 1.0, by |p - y| 0.3 and 1.1,
  by the GGN's traces 0.4 and 1.1, by a pilot of two 1.3 and 2.6.
- before training the GGN's part is small and nothing helps: 3.0 and 1,960 either way; after 25 of the 60 steps 24 and
  187, and the rest by |p - y| 8.6 and 61.
- of the variance that is allowed, 0.1, 0.25 and 0.5 for the GGN: 101, 103 and 110 ms; 212, 233 and 250.

Notes, experiments (tanh network, products of layers 0 and 2, n = 256, time over that of one product after the other):
- ``torch.func.vmap`` of them in parts of 4 MiB, as it is done: 0.6 and 0.3; in parts of 1 MiB 0.9 and 0.5.
- ``is_grads_batched``, whose vmap has no rule for tanh's derivative: 0.8 and 0.6.
- forward over reverse, ``jvp`` of ``grad``: 1.4 and 0.9; forward over forward, ``jvp`` of ``jvp``: 2.3 and 1.1. Both
  run the tail anew for every part. Collapsed Taylor mode needs a rule for every operation, which torch does not have.
- the sweep's signals by ``is_grads_batched``: LeNet5, n = 256, 3.4 times one after the other; ResNet-18, n = 8, 1.4.
"""

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from timing import Timing, in_turn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyflatness as pf

LOSS = nn.CrossEntropyLoss()
WIDTHS = (784, 512, 128, 16, 8, 2)
DRAWS = 64  # by which the deviation of other libraries' draws is known


def tanh_network() -> nn.Sequential:
    """Return the network of the table."""
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(WIDTHS):
        parts += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*parts[:-1]).eval()


def products(model: nn.Sequential, place: int, z: Tensor, y: Tensor) -> Callable[[], None]:
    """Return Hessian products of what is behind the layer at ``place``, as many as its weight has ranks."""
    tail, directions = model[place + 1 :], torch.eye(z.shape[1])[: min(model[place].weight.shape)]
    tail.requires_grad_(False)

    def run() -> None:
        outputs = z.detach().requires_grad_()
        value = F.cross_entropy(tail(outputs), y, reduction="sum")
        (gradient,) = torch.autograd.grad(value, outputs, create_graph=True)
        for u in directions:
            torch.autograd.grad(gradient, outputs, u.expand_as(outputs), retain_graph=True)

    return run


def tanh_layers(n: int = 256) -> Iterator[tuple[int, int, dict[str, Callable[[], object]]]]:
    """Yield the place of each layer, its rank, and what is timed: ``pyflatness`` and its two floors."""
    model, x, y = tanh_network(), torch.randn(n, WIDTHS[0]), torch.randint(2, (n,))
    for place in range(0, 2 * len(WIDTHS) - 4, 2):
        with torch.no_grad():
            z = model[: place + 1](x)
        ways: dict[str, Callable[[], object]] = {
            "pyflatness": lambda place=place: pf.relative_flatness(model, LOSS, (x, y), str(place)),
            "products": products(model, place, z, y),
            "forward": lambda: torch.no_grad()(model)(x),
        }
        yield place, min(model[place].weight.shape), ways


def of_both(timings: dict[str, Timing]) -> float:
    """Return the ratio of pyflatness to the products and a forward pass together."""
    each = zip(*(timings[name].seconds for name in ("pyflatness", "products", "forward")), strict=True)
    return statistics.median(whole / (floor + forward) for whole, floor, forward in each)


def tanh(rounds: int) -> Table:
    """Return exact values of each layer."""
    table = _table("tanh network, exact", "layer", "rank", "pyflatness ms", "products ms", "forward ms", "ratio")
    table.add_column("pyflatness / (products + forward)")
    for place, rank, ways in tanh_layers():
        timings = in_turn(ways, rounds, repeats=1)
        cells = [f"{1e3 * timing.median:.1f}" for timing in timings.values()]
        ratio = timings["pyflatness"].ratio(timings["products"])
        table.add_row(str(place), str(rank), *cells, f"{ratio:.2f}", f"{of_both(timings):.2f}")
    return table


class Block(nn.Module):
    """A transformer block on token embeddings, with a linear classifier on its mean."""

    def __init__(self, width: int = 64, heads: int = 4, tokens: int = 50) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(tokens, width), heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.head = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (n, 10) of tokens (n, T)."""
        h = self.embed(tokens)
        q, k, v = self.qkv(self.norm1(h)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        return self.head(h.mean(dim=1))


def trained_block(n: int, length: int) -> tuple[Block, Tensor, Tensor]:
    """Return a block that has learnt which of ten tokens comes most often."""
    model, x = Block(), torch.randint(50, (n, length))
    y = F.one_hot(x, 50).sum(dim=1)[:, :10].argmax(dim=1)
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(60):
        optimiser.zero_grad()
        LOSS(model(x), y).backward()
        optimiser.step()
    return model.eval(), x, y


def by_curvlinops(model: nn.Module, weight: Tensor, x: Tensor, y: Tensor) -> Callable[[], float]:
    """Return one draw of the trace of curvlinops' Hessian operator."""
    import curvlinops

    operator = curvlinops.HessianLinearOperator(model, LOSS, [weight], [(x, y)], check_deterministic=False)

    def draw() -> float:
        v = torch.randint(2, (weight.numel(),)) * 2.0 - 1
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            return float(v @ (operator @ v))

    return draw


def by_pyhessian(model: nn.Module, weight: Tensor, x: Tensor, y: Tensor) -> Callable[[], float]:
    """Return one draw of PyHessian's trace, of the parameters that require a gradient."""
    import pyhessian

    for parameter in model.parameters():
        parameter.requires_grad_(parameter is weight)
    warnings.filterwarnings("ignore", message="Using backward.. with create_graph")
    with sdpa_kernel(SDPBackend.MATH):
        computation = pyhessian.hessian(model, LOSS, data=(x, y), cuda=False)
    return lambda: computation.trace(maxIter=1, tol=0)[-1]


@dataclass(frozen=True)
class Estimator:
    """The time of a way to the trace of a layer to 1 %; ``over`` is that over pyflatness's, None for that itself."""

    layer: str
    what: str
    seconds: float | None = None
    draws: float | None = None
    over: float | None = None

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        milliseconds = "" if self.seconds is None else f"{1e3 * self.seconds:.0f}"
        draws, over = ("" if x is None else f"{x:.{d}f}" for x, d in ((self.draws, 0), (self.over, 1)))
        return [self.layer, self.what, draws, milliseconds, over]


def estimators(rounds: int, n: int = 256, length: int = 16) -> Iterator[Estimator]:
    """Yield the ways to the trace of some layers of a transformer block to 1 %."""
    model, x, y = trained_block(n, length)
    for name in ("up", "qkv"):
        weight = model.get_submodule(name).weight
        exact = _reference(model, x, y, name)
        target = 0.01 * exact

        def ours(name: str = name, **options: object) -> pf.results.Estimate:
            return pf.measure(model, LOSS, (x, y), layers=name, measures="trace", **options)[name, "trace"]

        found = [ours(probes="adaptive", rtol=0.01, seed=seed) for seed in range(rounds)]
        assert all(abs(one.value - exact) <= 5 * one.stderr for one in found)
        error = (sum(one.stderr**2 for one in found) / rounds) ** 0.5 / target
        seconds = statistics.median(
            _seconds(lambda seed=seed: ours(probes="adaptive", rtol=0.01, seed=seed)) for seed in range(rounds)
        ) * max(1.0, error**2)
        yield Estimator(name, f"pyflatness, adaptive, ± {error:.2f} %", seconds)
        for title, make in (("curvlinops", by_curvlinops), ("PyHessian", by_pyhessian)):
            try:
                draw = make(model, weight, x, y)
            except ImportError:
                yield Estimator("", f"{title}: not installed")
                continue
            start = time.perf_counter()
            drawn = [draw() for _ in range(DRAWS)]
            each = (time.perf_counter() - start) / DRAWS
            count = (statistics.stdev(drawn) / target) ** 2
            assert abs(statistics.mean(drawn) - exact) <= 5 * statistics.stdev(drawn) / DRAWS**0.5
            yield Estimator("", title, each * count, count, each * count / seconds)
            model.requires_grad_(True)


def transformer(rounds: int) -> Table:
    """Return the trace of some layers to 1 %."""
    table = _table("transformer block, trace to 1 %", "layer", "what", "draws", "ms", "it / pyflatness")
    for estimator in estimators(rounds):
        table.add_row(*estimator.cells())
    return table


def _reference(model: nn.Module, x: Tensor, y: Tensor, name: str) -> float:
    options = {"layers": name, "measures": "trace", "probes": "adaptive", "rtol": 0.002, "seed": 2**20}
    return pf.measure(model, LOSS, (x, y), **options)[name, "trace"].value


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title)


def _tables(names: Sequence[str], rounds: int) -> Iterator[Table]:
    for name, make in {"tanh": tanh, "transformer": transformer}.items():
        if not names or name in names:
            yield make(rounds)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tanh, transformer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    console = Console()
    for table in _tables(options.names, options.rounds):
        console.print(table)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()

"""What a user would write himself: relative flatness and trace of all layers in plain torch, beside ``pf.measure``.

Run from the project's root: ``python benchmarks/plain_torch.py [--rounds N]``, which takes about a minute on one
thread. :func:`measure` is the plain version: hooks on Linear and Conv2d, one forward pass, a backward pass for each of
the C − 1 columns of the softmax's square-root factor, ``unfold`` and ``bmm``. It holds for ReLU networks in eval mode
with cross-entropy, of which all samples fit into memory at a time, and checks none of that. Both ways have to give the
same values, to 1e-6.

Times are of the processor, on one thread, alternatives in turn. ``outside`` is what ``pf.measure`` takes outside of the
forward pass, the backward passes and the contractions, by what runs every millisecond. The first call
of a process is one on the smaller perceptron, the imports of torch and pyflatness not counted. Modules are loaded as
bytecode, which pip makes when it installs a package.
"""

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from networks import images, resnet18, settled
from rich.console import Console
from rich.table import Table
from timing import in_turn, shares
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf

MEASURES = ["relative_flatness", "trace"]
AGREEMENT = 1e-6  # relative, of every value
FIRST_CALL = """
import time, torch, pyflatness as pf
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).eval()
data = torch.randn(64, 32), torch.arange(64) % 10
start = time.process_time()
pf.measure(model, torch.nn.CrossEntropyLoss(), data, measures=["relative_flatness", "trace"], progress=False)
print(time.process_time() - start)
"""


def measure(model: nn.Module, x: Tensor) -> dict[str, tuple[float, float]]:
    """Return relative flatness and trace of every linear layer and convolution, for cross-entropy."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))}
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def keep(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[layer], outputs[layer] = args[0].detach(), output

    handles = [layer.register_forward_hook(keep) for layer in layers.values()]
    logits = model(x)
    for handle in handles:
        handle.remove()

    phi, gram, sums = {}, {}, {}
    for name, layer in layers.items():
        weight = layer.weight.detach().flatten(1)
        gram[name] = weight @ weight.t()
        sums[name] = torch.zeros(2, len(x))
        if isinstance(layer, nn.Conv2d):  # patches by position, (n, P, m)
            patches = F.unfold(inputs[layer], layer.kernel_size, layer.dilation, layer.padding, layer.stride)
            phi[name] = patches.transpose(1, 2)
        else:  # |φ|² of each sample
            phi[name] = inputs[layer].square().sum(dim=1)

    for column in columns(logits.detach().softmax(dim=1)):
        cotangents = torch.autograd.grad(
            logits, [outputs[layer] for layer in layers.values()], column, retain_graph=True
        )
        for (name, layer), delta in zip(layers.items(), cotangents, strict=True):
            if isinstance(layer, nn.Conv2d):  # M = Σ_p δ_p φ_pᵀ of each sample
                gradient = torch.bmm(delta.flatten(2), phi[name])
                sums[name][0] += ((gram[name] @ gradient) * gradient).sum(dim=(1, 2))
                sums[name][1] += gradient.square().sum(dim=(1, 2))
            else:
                sums[name][0] += ((delta @ gram[name]) * delta).sum(dim=1) * phi[name]
                sums[name][1] += delta.square().sum(dim=1) * phi[name]
    means = {name: found.double().mean(dim=1).tolist() for name, found in sums.items()}
    return {name: (flatness, trace) for name, (flatness, trace) in means.items()}


def columns(p: Tensor) -> list[Tensor]:
    """Return the C − 1 columns of a lower triangular S with S Sᵀ = diag(p) − p pᵀ, each (n, C)."""
    tails = p.flip(1).cumsum(dim=1).flip(1)  # Σ_{j ≥ c} p_j
    found = []
    for c in range(p.shape[1] - 1):
        column = torch.zeros_like(p)
        column[:, c] = (p[:, c] * tails[:, c + 1] / tails[:, c]).sqrt()
        column[:, c + 1 :] = -p[:, c + 1 :] * (p[:, c] / (tails[:, c] * tails[:, c + 1])).sqrt().unsqueeze(1)
        found.append(column)
    return found


def perceptron(*widths: int) -> nn.Sequential:
    """Return a perceptron with ReLUs between its layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


@dataclass(frozen=True)
class Row:
    """Hold what was measured of a work, what it is to reach at most, and the milliseconds that this stands for."""

    what: str
    unit: str
    measured: float
    limit: float
    plain: float = math.nan
    ours: float = math.nan


Works = dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], float]]
WORKS: Works = {
    "perceptron 32-64-10, n = 64": (lambda: perceptron(32, 64, 10), lambda: torch.randn(64, 32), 1.0),
    "perceptron 256-256-128-10, n = 256": (lambda: perceptron(256, 256, 128, 10), lambda: torch.randn(256, 256), 0.8),
    "ResNet-18's graph, width / 16, 8 × 8, n = 8": (
        lambda: settled(resnet18(channels=4)),
        lambda: images(8)[:, :, ::4, ::4].contiguous(),
        0.7,
    ),
}
PARTS = {  # of a call's time, those of its passes over few samples too; hooks are none of the forward pass
    "hooks": [("recorder.py", "alias"), ("recorder.py", "keep")],
    "backward": [("autograd/graph.py", "_engine_run_backward")],
    "contraction": [("routes.py", "forms"), ("routes.py", "__init__"), ("factor.py", "gram_factor")],
    "forward": [("calling.py", "_run")],
}


def rows(rounds: int) -> Iterator[Row]:
    """Yield the rows of the table; raise if the two ways differ in a value by more than :data:`AGREEMENT`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for what, (network, data, limit) in WORKS.items():
            torch.manual_seed(0)
            model, x = network(), data()
            y, loss = torch.arange(len(x)) % 10, nn.CrossEntropyLoss()
            plain = partial(measure, model, x)
            ours = partial(pf.measure, model, loss, (x, y), measures=MEASURES, progress=False)
            check(ours(), plain())
            timings = in_turn({"plain": plain, "ours": ours}, rounds, repeats=5, clock=time.process_time)
            seconds = [timing.median for timing in timings.values()]
            yield Row(
                what, "× plain torch", timings["ours"].ratio(timings["plain"]), limit, *(1e3 * s for s in seconds)
            )
        parts = shares(ours, PARTS)
        outside = 1e3 * timings["ours"].median * (parts["hooks"] + parts["the rest"])
        yield Row("the same, outside of passes and contractions", "ms", outside, 10, ours=outside)
        milliseconds = 1e3 * first_call(rounds)
        yield Row("first call of a process", "ms", milliseconds, 350, ours=milliseconds)
    finally:
        torch.set_num_threads(threads)


def check(ours: pf.results.Report, plain: dict[str, tuple[float, float]]) -> None:
    """Raise if the two ways differ by more than :data:`AGREEMENT`, relative to a value."""
    for name, values in plain.items():
        for quantity, value in zip(MEASURES, values, strict=True):
            found = ours[name, quantity].value
            if abs(found - value) > AGREEMENT * abs(value):
                raise AssertionError(f"{quantity} of layer {name!r}: {value:.9g} in plain torch, {found:.9g} of ours")


def first_call(times: int) -> float:
    """Return the median processor seconds of a process's first call."""
    command = [sys.executable, "-c", FIRST_CALL]
    with tempfile.TemporaryDirectory() as folder:
        of_bytecode = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        runs = [subprocess.run(command, capture_output=True, check=True, env=of_bytecode) for _ in range(times + 1)]
    return statistics.median(float(run.stdout) for run in runs[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    table = Table("work", "plain torch, ms", "pf.measure, ms", "unit", "measured", "to reach", "reached")
    for row in rows(options.rounds):
        milliseconds = ["–" if math.isnan(one) else f"{one:.2f}" for one in (row.plain, row.ours)]
        reached = "yes" if row.measured <= row.limit else "NO"
        table.add_row(row.what, *milliseconds, row.unit, f"{row.measured:.3g}", f"≤ {row.limit:g}", reached)
    Console(width=150).print(table)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread")


if __name__ == "__main__":
    main()

"""Run ``pyflatness doctor``: what is installed, what this machine can run, and whether its numbers are right.

The self-check measures small random heads on every route, in both precisions, with every instruction set of this
processor, and holds the results against the formula written out in float64:

    |φ|² var_p(w) = |φ|² Σ_{s<t} p_s p_t |w_s - w_t|²,   p = softmax(w φ + b)

Heads come flat (p spread over the classes) and peaked (1 - p_max down to 1e-6, as at a trained minimum, where the
difference E|w|² - |E w|² would have lost every digit in float32). Then |wᵀ M|², M = Σ_p δ_p φ_pᵀ, of a random
convolution on every route.
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import click
import numpy
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .. import __version__
from ..contractions import DEFAULT_MEMORY, Backend, Geometry, LayerContraction, SoftmaxVariance, layer
from ..contractions.backends import compiled, cuda, reference
from .options import Json, command
from .output import show, show_json

BUDGETS = {torch.float32: 1e-5, torch.float64: 1e-12}
ROUTES = ("fused", "pairs", "rows")
_SHAPES = ((5, 2, 3), (37, 10, 19), (21, 61, 50))  # rows, outputs, features: none a multiple of a vector's length


@dataclass(frozen=True)
class EngineCheck:
    """Hold the largest relative error of one engine in one precision, over all heads and routes."""

    engine: str  # an instruction set of the compiled kernels, or ``"reference"``
    dtype: torch.dtype  # of features and weights
    error: float  # the largest relative error of a row; infinite if a value is not a number
    route: str  # where it occurred
    budget: float  # what it may be

    @property
    def ok(self) -> bool:
        """Return whether the error is within the budget."""
        return self.error <= self.budget


@command()
def doctor(*, as_json: Json = False) -> None:
    """Show versions and engines, and check that they compute the right numbers.

    Exits with status 1 if the check fails.
    """
    if not as_json:  # what is found is printed as soon as it is
        show(_environment())
        if not compiled.engines():
            click.echo("Warning: there are no compiled kernels; everything runs, slower, on the reference")
    checks = self_check()
    passed = all(check.ok for check in checks)
    if as_json:
        rows = [{**vars(check), "dtype": _name(check.dtype), "ok": check.ok} for check in checks]
        show_json({"environment": _facts(), "checks": rows, "ok": passed})
    else:
        show(_table(checks))
        failed = "Self-check FAILED: this machine computes wrong numbers; please report this table"
        click.echo("Self-check: all OK" if passed else failed)
    if not passed:
        raise SystemExit(1)


def self_check(seed: int = 0) -> list[EngineCheck]:
    """Hold every engine of this machine, in float32 and float64, against the formula in float64.

    They are the compiled kernels by instruction set, then those on CUDA where they can run, then the reference.
    """
    checks = []
    for backend in (compiled, cuda, reference):
        for engine in backend.engines():
            with backend.forced(engine):
                checks += [_check(engine, backend, dtype, seed) for dtype in BUDGETS]
    return checks


def _check(engine: str, backend: Backend, dtype: torch.dtype, seed: int) -> EngineCheck:
    device, generator = backend.device, torch.Generator().manual_seed(seed)
    errors = []
    for n, d, m in _SHAPES:
        for peak in (0.0, 14.0):
            features, weight, bias = _head(n, d, m, peak, dtype, generator)
            truth = _truth(features.double(), weight.double(), bias.double())
            for route in ROUTES:
                head = SoftmaxVariance(weight.to(device), bias.to(device), backend, rows=n, route=route)
                errors.append((_largest_error(head(features.to(device)), truth), route))
    for route in layer.ROUTES:
        errors.append((_layer_error(backend, dtype, route, generator), f"layers, {route}"))
    error, route = max(errors)
    return EngineCheck(engine, dtype, error, route, BUDGETS[dtype])


def _layer_error(backend: Backend, dtype: torch.dtype, route: str, generator: torch.Generator) -> float:
    """Return the error for a 3 × 3 convolution in two groups, against patches written out in float64."""
    geometry = Geometry(groups=2, kernel=(1, 3, 3), stride=(1, 2, 1))
    shapes = (3, 10, 1, 9, 8), (3, 14, 1, 4, 6), (2, 7, 45)
    inputs, cotangent, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    gradients = geometry.rows(cotangent).mT @ geometry.patches(inputs)
    truth = (weight.mT @ gradients).square().sum(dim=(1, 2, 3))
    inputs, cotangent, weight = (t.to(backend.device, dtype) for t in (inputs, cotangent, weight))
    contraction = LayerContraction(weight, geometry, backend, ("gram_weighted",), memory=DEFAULT_MEMORY, route=route)
    (values,) = contraction.at([inputs], 1).of([cotangent]).values
    return _largest_error(values, truth)


def _head(
    n: int, d: int, m: int, peak: float, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, weight and bias whose logits have unit deviation, with class 0 ahead by ``peak``.

    The lead is in the bias: logits that are large sums would round by more than the float32 budget before any kernel
    sees them.
    """
    features = torch.randn(n, m, generator=generator, dtype=torch.float64)
    weight = torch.randn(d, m, generator=generator, dtype=torch.float64) / m**0.5
    bias = torch.zeros(d, dtype=torch.float64)
    bias[0] = peak
    return features.to(dtype), weight.to(dtype), bias.to(dtype)


def _truth(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the formula at the top of this file, for all pairs at once."""
    probabilities = (features @ weight.t() + bias).softmax(dim=1)
    distances = (weight.unsqueeze(1) - weight).square().sum(dim=2)
    pairs = torch.einsum("ns,nt,st->n", probabilities, probabilities, distances) / 2
    return features.square().sum(dim=1) * pairs


def _largest_error(values: Tensor, truth: Tensor) -> float:
    return float(((values.cpu() - truth) / truth).abs().nan_to_num(nan=torch.inf).max())


def _environment() -> Table:
    table = Table("what", "found", title="pyflatness doctor", title_justify="left")
    for name, value in _facts().items():
        table.add_row(name, value)
    return table


def _facts() -> dict[str, str]:
    kernels = compiled.unavailable(torch.device("cpu"), torch.float32)
    if available := compiled.engines():
        forced = f"PYFLATNESS_ISA={available[-1]}"
        kernels = f"{', '.join(available)}; in use: {compiled.instruction_set()} (force one: {forced})"
    return {
        "pyflatness": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "compiled kernels": kernels,
        "CUDA kernels": f"not built ({cuda.missing})" if cuda.missing else "built",
        "CUDA in torch": _cuda(),
        "NVIDIA driver": _driver(),
        "threads": f"{torch.get_num_threads()} (torch) of {os.cpu_count()} processors",
    }


def _cuda() -> str:
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    if not torch.cuda.is_available():
        return f"{torch.version.cuda}, not available"
    return f"{torch.version.cuda}, {', '.join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))}"


def _driver() -> str:
    """Return the version of the loaded kernel module, which also a torch without CUDA can see (on Linux)."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none found"
    version = re.search(r"\s(\d+\.[\d.]+)\s", text)
    return version[1] if version else "found, of unknown version"


def _table(checks: list[EngineCheck]) -> Table:
    table = Table(
        "engine", "dtype", "relative error", "on route", "budget", "", title="self-check", title_justify="left"
    )
    for check in checks:
        verdict = Text("OK", "green") if check.ok else Text("FAILED", "red")
        table.add_row(
            check.engine, _name(check.dtype), f"{check.error:.1e}", check.route, f"{check.budget:.0e}", verdict
        )
    return table


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The grid of public calls whose values :mod:`support.values` records: pairs of a name and a call.

Measures, losses, kinds of layers, backends and options, in pairwise combinations where all would be too many. Only the
public interface of the package is used. Every entry makes its own model, data and loss, so it may run in any order.
"""

import contextlib
import io
import itertools
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import pyflatness as pf
from support import combinations, larger_networks, refusals, whole_networks
from support.cases import LOSSES, head, to
from support.grid import Case
from support.networks import CASES

Entry = tuple[str, Callable[[], Any]]
BACKENDS = "reference", "compiled"

# Each choice has a name and the keyword arguments that it stands for; "data" and "dtype" are of the grid itself.
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "curvature": {name: {"curvature": name} for name in ("auto", "ggn", "hessian")},
    "draws": {
        "exact": {},
        "exact again": {},
        "1 probe": {"probes": 1},
        "3 probes": {"probes": 3, "seed": 7},
        "adaptive": {"probes": "adaptive", "seed": 1},
    },
    "conv": {name: {"conv": name} for name in ("filter", "affine")},
    "normalize": {"plain": {}, "std": {"normalize": "std"}},
    "per_sample": {"total": {}, "by sample": {"per_sample": True}},
    "nan_policy": {name: {"nan_policy": name} for name in ("raise", "propagate", "omit")},
    "memory": {"roomy": {}, "tight": {"memory": 1}, "cut": {"memory": 40_000}},
    "dtype": {"float64": {}, "float32": {"dtype": torch.float32}},
    "data": {"tuple": {}, "batches of 2": {"data": 2}},
}


TRACES: list[dict[str, Any]] = [
    {},
    {"conv": "affine"},
    {"normalize": "std", "nan_policy": "omit"},
    {"memory": 1, "data": 2},
    {"conv": "affine", "curvature": "ggn", "normalize": "std"},
    {"curvature": "hessian", "dtype": torch.float32},
]


def options_of(row: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments of a row of choices."""
    chosen = zip(CHOICES.values(), row, strict=True)
    return {key: value for table, name in chosen for key, value in table[name].items()}


class Counted(list):
    """Batches that count how often they are read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


def on_case(case: Case, call: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.float64, data: int = 0,
            **options: Any) -> Any:  # fmt: skip
    """Call with a case's model, loss and data in a dtype; of data in batches also say how often they are read."""
    model, loss = case.build().to(dtype), to(dtype, case.loss)
    inputs, targets = to(dtype, case.inputs), to(dtype, case.targets)
    if not data:
        return call(model, loss, (inputs, targets), *args, **options)
    batches = Counted(zip(inputs.split(data), targets.split(data), strict=True))
    return {"result": call(model, loss, batches, *args, **options), "reads of the data": batches.reads}


def of_layers() -> Iterator[Entry]:
    """Yield relative flatness of every layer of every network, with options in turn; and default reports."""
    rows = combinations.covering({name: list(table) for name, table in CHOICES.items()})
    turn = itertools.cycle(rows)
    for case in CASES.values():
        for layer in case.layers:
            name = f"relative_flatness | {case.name} | layer {layer}"
            for backend in BACKENDS:
                yield (
                    f"{name} | defaults | {backend}",
                    partial(on_case, case, pf.relative_flatness, layer, backend=backend),
                )
            for row in itertools.islice(turn, 3):
                for backend in BACKENDS:
                    call = partial(on_case, case, pf.relative_flatness, layer, backend=backend, **options_of(row))
                    yield f"{name} | {', '.join(row)} | {backend}", call
        row = next(turn)
        for backend in BACKENDS:
            call = partial(on_case, case, pf.measure, backend=backend, measures="sweep")
            yield f"measure | {case.name} | defaults | {backend}", call
            call = partial(on_case, case, pf.measure, backend=backend, **{"measures": "sweep", **options_of(row)})
            yield f"measure | {case.name} | {', '.join(row)} | {backend}", call
        memory = (1, None)[len(case.name) % 2]
        yield f"block_traces | {case.name}", partial(on_case, case, pf.block_traces, case.layers[0], memory=memory)
        for place, layer in enumerate(case.layers):
            options = TRACES[(len(case.name) + place) % len(TRACES)]
            call = partial(on_case, case, pf.block_traces, layer, backend=BACKENDS[place % 2], **options)
            yield f"block_traces | {case.name} | layer {layer}", call


def _at_head(loss: str, dtype: torch.dtype, **options: Any) -> pf.results.Estimate:
    features, weight, bias = head(dtype)
    function, targets = (to(dtype, value) for value in LOSSES[loss])
    return pf.head_flatness(features, weight, bias, targets, loss=function, **options)


def of_heads() -> Iterator[Entry]:
    """Yield values of heads as tensors, for every loss."""
    dtypes = torch.float64, torch.float32, torch.bfloat16
    for loss, dtype, backend in itertools.product(LOSSES, dtypes, BACKENDS):
        name = f"head_flatness | {loss} | {str(dtype).removeprefix('torch.')} | {backend}"
        yield name, partial(_at_head, loss, dtype, backend=backend, per_sample=True)
        yield f"{name} | std", partial(_at_head, loss, dtype, backend=backend, normalize="std", nan_policy="omit")


def command_line(*arguments: str) -> str:
    """Return what the command line prints."""
    before, out = sys.argv, io.StringIO()
    sys.argv = ["pyflatness", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            runpy.run_module("pyflatness", run_name="__main__")
    finally:
        sys.argv = before
    return out.getvalue()


def measure_names() -> list[str]:
    """Return the names of the public table of measures."""
    rows = command_line("measures", "--markdown").splitlines()
    return [row.split("`")[1] for row in rows if row.startswith("| `")]


MEASURED = ("mlp ReLU", "mlp Tanh", "cnn", "attention", "segmentation", "siamese", "tied", "loss: squared error",
    "loss: class weights sum", "loss: binary", "loss: custom", "batch norm of vectors", "recurrent")  # fmt: skip
FEW = MEASURED[:5]
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "by sample": {"per_sample": True},
    "std": {"normalize": "std"},
    "sampled": {"probes": 2, "seed": 3},
    "adaptive": {"probes": "adaptive", "rtol": 0.2},
    "ggn": {"curvature": "ggn"},
    "hessian, tight, batches": {"curvature": "hessian", "memory": 1, "data": 2},
    "affine": {"conv": "affine"},
    "omit": {"nan_policy": "omit"},
    "sum": {"reduction": "sum"},
}


def of_measures() -> Iterator[Entry]:
    """Yield every measure alone with each variant of the options in turn, and all of them together."""
    alone = "defaults", "compiled"
    turn = itertools.cycle([pair for pair in itertools.product(VARIANTS, BACKENDS) if pair != alone])
    for name, case in itertools.product(measure_names(), FEW):
        for variant, backend in (alone, next(turn)):
            call = partial(on_case, CASES[case], pf.measure, measures=name, backend=backend, **VARIANTS[variant])
            yield f"measure {name} | {case} | {variant} | {backend}", call
    for case, backend in itertools.product(MEASURED, BACKENDS):
        call = partial(on_case, CASES[case], pf.measure, measures="all", backend=backend)
        yield f"measure all | {case} | {backend}", call
    for (variant, options), case in itertools.product(VARIANTS.items(), FEW):
        call = partial(on_case, CASES[case], pf.measure, measures="all", **options)
        yield f"measure all | {case} | {variant}", call


def entries() -> list[Entry]:
    """Return the whole grid."""
    parts = of_layers(), of_heads(), of_measures(), larger_networks.entries(), whole_networks.entries(on_case)
    return [*itertools.chain(*parts, refusals.entries())]

"""The grid of public calls whose values :mod:`support.values` records: pairs of a name and a call.

Measures, losses, kinds of layers, backends and options, in pairwise combinations where all would be too many. Only the
public interface of the package is used. Every entry makes its own model, data and loss, so it may run in any order.
"""

import contextlib
import hashlib
import io
import itertools
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
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


def _between(model: torch.nn.Module, loss: Any, data: Any, **options: Any) -> Any:
    """Return the losses between a network and one of nine tenths of its weights, on the data and half of these."""
    other = {name: 0.9 * held if held.is_floating_point() else held for name, held in model.state_dict().items()}
    half = tuple(held[: len(held) // 2] for held in data)
    found = pf.linear_interpolation(model, loss, data, other, test=half, **options)
    return found, str(found), found.barrier, found.test_barrier, found.error_barrier


def _slice(model: torch.nn.Module, loss: Any, data: Any, **options: Any) -> Any:
    """Return a slice of the loss, what it prints, and what a file of it has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slice.npz"
        found = pf.landscape(model, loss, data, out=path, **options)
        content, again = path.read_bytes(), pf.results.Landscape.from_npz(path)
    return found, str(found), hashlib.sha256(content).hexdigest(), again


def _changed(model: torch.nn.Module, loss: Any, data: Any) -> Any:
    weights = {name: held.detach() for name, held in model.named_parameters() if name.endswith(".weight")}
    changes = {name.removesuffix(".weight"): -held / 10 for name, held in weights.items() if held.ndim > 1}
    return pf.cost_of_change(model, loss, data, changes)


def _quantised(model: torch.nn.Module, loss: Any, data: Any) -> Any:
    found = pf.allocate(model, loss, data, ["int2", "int4", "int8"], bits=5)
    return found.to_dict(), str(found)


def of_curvature() -> Iterator[Entry]:
    """Yield slices, lines between networks, spectra, worst cases, costs of changes and importances."""
    calls: dict[str, Callable[..., Any]] = {
        "landscape, plane": partial(_slice, points=(4, 3), span=0.2),
        "landscape, line": partial(_slice, dimensions=1, points=5, normalization="layer", quadratic=False, seed=3),
        "landscape, eigenvectors": partial(_slice, directions="eigenvectors", points=3, span=(-0.1, 0.2)),
        "linear_interpolation": partial(_between, points=4),
        "spectrum": partial(pf.spectrum, k=2, density=True),
        "worst_case_sharpness": partial(pf.worst_case_sharpness, rho=0.05),
        "cost_of_change": _changed,
        "importance": pf.importance,
        "allocate": _quantised,
    }
    for (name, call), case in itertools.product(calls.items(), FEW):
        yield f"curvature | {name} | {case}", partial(on_case, CASES[case], call)


def _table() -> dict[str, list[Any]]:
    """Return a table of 24 networks: three settings, two measures that have to do with the gap, and a loss."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 24, generator=draw, dtype=torch.float64)
    rows = [*itertools.product([2, 4, 8], [0.1, 0.3], ["sgd", "adam"], [0, 1])]
    depth, rate, optimizer, seed = map(list, zip(*rows, strict=True))
    gap = noise[0] + torch.tensor(depth) / 4
    columns = {"kappa": gap + noise[1], "trace": (noise[2] - gap / 2).round(), "gap": gap, "loss": noise[3].exp() / 9}
    settings = {"depth": depth, "rate": rate, "optimizer": optimizer, "seed": seed}
    return {"name": [f"n{place}" for place in range(24)], **settings} | {k: v.tolist() for k, v in columns.items()}


def of_statistics() -> Iterator[Entry]:
    """Yield correlations over a table of networks, with intervals and p-values of each kind, and those of pairs."""
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "fisher": {"interval": "fisher"},
        "given": {"given": ["loss", "optimizer"], "permutations": 99},
        "clusters": {"settings": ["depth", "rate", "optimizer"], "permutations": 99, "exclude": ["n3"]},
        "within": {"settings": "depth", "permutations": 99, "within": True, "seed": 5},
        "strata": {"strata": "optimizer"},
        "seeds": {"settings": "rate", "seeds": "seed", "interval": "fisher"},
    }
    for name, options in variants.items():
        call = partial(pf.statistics.correlations, _table(), ["kappa", "trace"], **options)
        yield f"statistics | correlations | {name}", call
    pairs = pf.statistics.granulated_kendall, pf.statistics.sign_error, pf.statistics.conditional_mutual_information
    for function, measure in itertools.product(pairs, ("kappa", "trace")):
        call = partial(function, _table(), measure, "gap", ["depth", "rate", "optimizer"])
        yield f"statistics | {function.__name__} | {measure}", call


def entries() -> list[Entry]:
    """Return the whole grid."""
    parts = of_layers(), of_heads(), of_measures(), of_curvature(), of_statistics(), larger_networks.entries()
    return [*itertools.chain(*parts, whole_networks.entries(on_case), refusals.entries())]

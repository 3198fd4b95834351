"""Small networks with losses and data, for measures of any layer: CASES, each with the layers in which f is linear.

``linear`` are the layers in whose weight the outputs are locally linear, so that the GGN is the Hessian; the others of
``layers`` have another GGN. Everything is float64, in eval mode, and the same at every call.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyflatness as pf
from pyflatness.model import layers
from support import truth
from support.cases import C, to

CROSS_ENTROPY = nn.CrossEntropyLoss()


@dataclass(frozen=True, eq=False)
class Case:
    """A network to measure; ``convex`` says that its loss is, in the outputs."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    layers: tuple[str, ...]
    linear: frozenset[str]
    convex: bool = True

    @property
    def samples(self) -> int:
        return len(self.inputs)


@functools.cache
def network(case: Case) -> nn.Module:
    """Return a case's network to look at: the same one at every call."""
    return case.build()


@functools.cache
def weight_of(case: Case, layer: str) -> Tensor:
    """Return the weight of a case's layer as a matrix (d, m)."""
    return truth.weight_of(network(case), layer)


@functools.cache
def hessian(case: Case, layer: str) -> Tensor:
    """Return the truth of a case's layer, (d, m, d, m)."""
    return truth.layer_hessian(case.build(), case.loss, case.inputs, case.targets, layer)


@functools.cache
def ggn(case: Case, layer: str) -> Tensor:
    """Return the Gauss-Newton matrix of a case's layer, (d, m, d, m)."""
    return truth.layer_ggn(case.build(), case.loss, case.inputs, case.targets, layer)


CURVATURES = {"auto": hessian, "hessian": hessian, "ggn": ggn}


def values_of(matrix: Tensor, weight: Tensor, groups: int = 1, taps: int = 1) -> dict[str, Any]:
    """Return what a layer's matrix says of its measures by name: a number, or one of each neuron, or column."""
    flat = matrix.flatten(2).flatten(0, 1)
    rows = torch.linalg.eigvalsh(torch.einsum("sjsk->sjk", matrix))[:, -1]
    kappa = truth.relative_flatness_of(matrix, weight, groups)
    columns, norm = truth.columns_of(matrix, weight, groups, taps), float(weight.square().sum())
    of_rows, trace = truth.rows_of(matrix, weight), truth.trace_of(matrix)
    return {
        "relative_flatness": kappa,
        "relative_flatness_columns": truth.relative_flatness_columns_of(matrix, weight, groups),
        "relative_flatness_per_feature": kappa / (2 * weight.shape[1]),
        "trace": trace,
        "adaptive_sharpness": truth.adaptive_sharpness_of(matrix, weight),
        "neuron_flatness": columns,
        "neuron_flatness_max": columns,
        "neuron_flatness_rows": of_rows,
        "neuron_flatness_rows_max": of_rows,
        "lambda_max": float(torch.linalg.eigvalsh(flat)[-1]),
        "relative_flatness_max": float(weight.square().sum(dim=1) @ rows),
        "scaled_trace": norm * trace,
        "weight_norm": norm,
    }


def checked(model: nn.Module, loss: Any, data: Any, measures: Any = ("relative_flatness", "trace"), *,
            rel: float = 1e-9, **options: Any) -> pf.results.Report:  # fmt: skip
    """Measure layers of any network, hold each value against the dense matrix over all data, and return the report."""
    x, y = data if isinstance(data, tuple) else (torch.cat(parts) for parts in zip(*data, strict=True))
    matrix_of = truth.layer_ggn if options.get("curvature") == "ggn" else truth.layer_hessian
    report = pf.measure(model, loss, data, measures=measures, **options)
    for layer in report.layers:
        groups = getattr(truth.place_of(model, layer)[0], "groups", 1)
        true = values_of(matrix_of(model, loss, x, y, layer), truth.weight_of(model, layer), groups)
        for measure in report.measures:
            found, value = report[layer, measure], true[measure]
            if isinstance(value, Tensor):
                torch.testing.assert_close(found.per_neuron, value, rtol=rel, atol=1e-12)
                value = float(value.sum())
            assert found.value == pytest.approx(value, rel=rel), (layer, measure)
    return report


@functools.cache
def expected(case: Case, layer: str, curvature: str = "auto") -> dict[str, Any]:
    """Return the true value of every measure of a case's layer."""
    taps = torch.Size(getattr(network(case).get_submodule(layer), "kernel_size", ())).numel()
    return values_of(CURVATURES[curvature](case, layer), weight_of(case, layer), groups(case, layer), taps)


@functools.cache
def head(case: Case) -> str:
    """Return the layer whose only call gives the model's outputs, in the same memory, rows as the loss reads them.

    It is empty if none does. Squared errors of images are read along their last dimension, and a convolution's rows are
    in the second.
    """
    if isinstance(case.loss, nn.MSELoss) and case.name.startswith("segmentation"):
        return ""
    model, outputs = case.build(), {}
    for name in case.layers:
        found = outputs.setdefault(name, [])
        model.get_submodule(name).register_forward_hook(lambda _, args, output, found=found: found.append(output))
    result = model(case.inputs)
    read = result.unsqueeze(1) if result.ndim == 1 else result
    read = read.movedim(1 if isinstance(case.loss, nn.CrossEntropyLoss) else -1, -1)
    for name, made in outputs.items():
        if len(made) != 1:
            continue
        rows = made[0].movedim(layers.kind_of(model.get_submodule(name)).class_dim, -1)
        same = (rows.shape[-1], rows.stride(-1)) == (read.shape[-1], read.stride(-1))
        if same and rows.untyped_storage().data_ptr() == read.untyped_storage().data_ptr():
            return name
    return ""


def method(case: Case, layer: str, measure: str, curvature: str = "auto") -> str:
    """Return by which method a sweep measures a case's layer."""
    if measure in ("relative_flatness", "relative_flatness_columns") and layer == head(case):
        return "head"
    return "ggn" if layer in case.linear or curvature == "ggn" else "hessian"


def groups(case: Case, layer: str) -> int:
    return truth.groups_of(network(case).get_submodule(layer))


def batches(case: Case, size: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Return a case's data in batches of that many samples; of one where samples could not be told apart else."""
    size = 1 if case.name == "gathered tokens" else size
    return list(zip(case.inputs.split(size), case.targets.split(size), strict=True))


CASES: dict[str, Case] = {}


def add(name, *arguments, **options):
    """A case of the grid; see :func:`made`."""
    CASES[name] = made(name, *arguments, **options)
    return CASES[name]


def made(name, make, inputs, targets, layers, *, curved="", loss=CROSS_ENTROPY, convex=True, seed=0):
    """A case from a function that makes its model; ``layers`` and those among them with another GGN, by spaces."""

    def build():
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch warns, once, of an even kernel with padding="same"
            torch.manual_seed(seed)
            model = make().double().eval()
            model(inputs)
        return model

    names, inputs = tuple(layers.split()), to(torch.float64, inputs)
    linear = frozenset(names) - frozenset(curved.split())
    loss, targets = to(torch.float64, loss), to(torch.float64, targets)
    return Case(name, build, loss, inputs, targets, names, linear, convex)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(seed, *shape, of=C):
    return torch.randint(of, shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Modules by name, and a forward pass over them."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.run(self, x)

"""Compute how important every parameter is to a network's loss: the diagonal of a curvature matrix.

    E(θ + Δ) ≈ E(θ) + ½ Σ_j D_j Δ_j²        at a minimum, with D a diagonal

- D = diag ∂²E/∂θ², the Hessian, or the diagonal of its GGN. For cross-entropy on logits the GGN is the Fisher matrix of
  the model's own distribution over classes (Kunstner et al. 2019, "Limitations of the empirical Fisher approximation"),
  for squared error a multiple of it.
- D = Σ_t ω_t (∂ℓ_t/∂θ)² / Σ_t ω_t, of the empirical Fisher matrix: the gradients are those at the targets. Much code
  of elastic weight consolidation takes it (Kirkpatrick et al. 2017, "Overcoming catastrophic forgetting in neural
  networks", have the Fisher matrix). Merging has been done with either (Matena and Raffel 2022, "Merging models with
  Fisher-weighted averaging").

How D is computed: :mod:`pyflatness.sweep.diagonal`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Column, Table
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError
from ..losses import loss_notes
from ..losses.empirical import empirical_fisher
from ..messages import check_choice, instead
from ..model import parameters, uses
from ..model.selectors import Selector
from ..numerics.accumulate import omits
from ..options import CALL, How, Options, check_probes
from ..passes import linearity
from ..passes.task import Task
from ..report import views
from ..report.result import Result
from ..session import public, session
from ..sweep import diagonal

KINDS = ("hessian", "ggn", "fisher")
STRUCTURES = ("diagonal", "rows")
_MOST_ROWS = 40  # of a table


@dataclass(frozen=True, repr=False, eq=False)
class Importance(Result, Mapping[str, Tensor]):
    """Hold the importance of every parameter, a mapping from names to tensors; ``str(importance)`` is a table.

    ``importance["fc1.weight"]`` is float64 on the CPU, of the parameter's shape, or with ``structure="rows"`` (rows,).

    Attributes:
        kind: ``"hessian"``, ``"ggn"`` or ``"fisher"``.
        structure: ``"diagonal"`` or ``"rows"``.
        stderr: standard errors of the same shapes, given the data; None where no probes were drawn. NaN where it is
            unknown: with one probe, or where all probes agree.
        method: ``"ggn"``, ``"hessian"`` or ``"fisher"``, with ``"-sampled"`` behind it where probes were drawn. The
            Hessian of a model that is locally linear in every parameter is the GGN, and is computed as such.
        exact: whether the values are those of their kind up to rounding.
        samples: of the data.
        uncovered: parameters of the model without a value (frozen, or of layers that were not chosen), each with its
            share of all entries.
        notes: what a reader of the values should know.
    """

    kind: str
    structure: str
    _values: Mapping[str, Tensor]
    stderr: Mapping[str, Tensor] | None
    method: str
    exact: bool
    samples: int
    uncovered: Mapping[str, float]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Tensor:
        """Return a parameter's importances.

        Raises:
            InputError: no parameter of this name has any.
        """
        if name not in self._values:
            raise InputError(f"importance: {name!r} is not among its parameters; {instead(name, self._values)}")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        """Return whether a parameter has importances."""
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names of the parameters, in the model's order."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return how many parameters have importances."""
        return len(self._values)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and the importances as plain numbers, strings, lists and dicts."""
        facts = super().to_dict()
        return {"values": facts.pop("_values"), **facts}

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"parameter": name, "values": tensor.numel(), "sum": float(tensor.sum()), "largest": float(tensor.max())}
            for name, tensor in self.items()
        ]

    def __str__(self) -> str:
        columns = (Column(name, justify="right") for name in ("values", "sum", "mean", "largest"))
        table = Table(Column("parameter", no_wrap=True), *columns, box=box.SIMPLE_HEAD)
        for row in self._rows()[:_MOST_ROWS]:
            numbers = (row["sum"], row["sum"] / row["values"], row["largest"])
            table.add_row(row["parameter"], str(row["values"]), *(f"{number:.4g}" for number in numbers))
        more = [f"and {len(self) - _MOST_ROWS} more"] if len(self) > _MOST_ROWS else []
        what = {"hessian": "Hessian", "ggn": "GGN", "fisher": "empirical Fisher matrix"}[self.kind]
        how = "exact" if self.exact else f"not exact, method {self.method}"
        told = f"diagonal of the {what}{' by row' if self.structure == 'rows' else ''}: {how}, {self.samples} samples"
        return "\n".join([*views.text(table, 100), *more, told, *self.notes])


@public(*CALL, "backend", "nan_policy", "memory", "seed", "max_passes")
def importance(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    kind: str = "ggn",
    structure: str = "diagonal",
    layers: Selector | Sequence[Selector] | None = None,
    probes: int | None = None,
    **how: Unpack[How],
) -> Importance:
    """Return the importance of every parameter to the loss: the diagonal of its Hessian, GGN or Fisher matrix.

    Elastic weight consolidation penalises ½ Σ_j D_j (θ_j - θ*_j)² with it, merging takes means weighted by it, and
    pruning removes the weights of the least ½ D_j θ_j². Parameters are all that require gradients: weights, biases,
    those of normalisations. A tied one counts once, with all of its uses. Of a parametrised weight
    (``torch.nn.utils.parametrizations``) they are the originals.

    Args:
        model: …
        loss: …
        data: … They are read once.
        kind: ``"hessian"``: ∂²E/∂θ_j², which may be negative. ``"ggn"``: the diagonal of the GGN, which is not: for
            cross-entropy the Fisher matrix of the model's distribution over classes (Kunstner et al. 2019), and the
            Hessian's too where the model is locally linear in θ_j. ``"fisher"``: that of the *empirical* Fisher
            matrix, Σ_t ω_t (∂ℓ_t/∂θ_j)² over the loss terms (samples, or tokens of these) at the targets, divided by
            Σ_t ω_t unless the loss has ``reduction="sum"``: what much code of elastic weight consolidation takes
            (Kirkpatrick et al. 2017). Where the loss is near zero it is near zero, whatever the curvature is. Squared
            error and binary cross-entropy have one term a sample, the mean over its outputs.
        structure: ``"rows"``: sums over all dimensions of a parameter but its first. For a linear layer or convolution
            these are the traces of the blocks of its outputs, for an embedding those of its tokens.
        layers: selectors of layers whose parameters are wanted; None: all parameters.
        probes: k random signs of each sample, with a standard error of every entry. None: exact, by a backward pass for
            each column of the loss's square-root factor, C - 1 for cross-entropy with C classes, one for
            ``"fisher"``, each times the loss terms of a sample; of ``"hessian"`` a Hessian product for each entry of
            the parameters in which the model is not certified to be locally linear. Where all columns are no more than
            k, they are sent and there is no error.
        nan_policy: ``"raise"`` or ``"propagate"``: no sample can be left out.
        memory: bytes to hold at a time beside model, data and result. The result is a float64 tensor of each
            parameter's size, and there are about three more meanwhile, with k probes k + 4.

    Returns:
        A mapping from the names of parameters to float64 tensors on the CPU, of the parameters' shapes or (rows,), in
        units of the loss over those of θ_j². ``.stderr`` has their standard errors by the same names, ``.exact`` says
        whether there are none, ``.uncovered`` lists parameters that have no value.

    Raises:
        InputError: a choice that does not exist; chosen layers without a parameter that requires gradients; an
            operation without a second derivative, or more Hessian products than ``max_passes=``, of ``"hessian"``; see
            :func:`pyflatness.relative_flatness`.
        NonFiniteError: NaN or infinity, under ``nan_policy="raise"``.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> data = torch.randn(100, 4), torch.randint(3, (100,))
        >>> found = pf.importance(model, torch.nn.CrossEntropyLoss(), data, kind="fisher")
        >>> [*found], found["0.weight"].shape, found.exact
        (['0.weight', '0.bias', '2.weight', '2.bias'], torch.Size([8, 4]), True)
    """
    check_choice("kind", kind, KINDS)
    check_choice("structure", structure, STRUCTURES)
    probes = None if probes is None else check_probes("probes", probes, 1)
    options = Options.of(how, curvature="hessian" if kind == "hessian" else "ggn", probes=probes)
    if omits(options.nan_policy):
        raise InputError("nan_policy='omit': importances are of all samples together, none can be left out")
    with session(model, loss, data, options, how) as task:
        theta, uncovered = _chosen(task, layers)
        task = replace(task, loss=empirical_fisher(task.loss)) if kind == "fisher" else task
        try:
            found = diagonal.by_parameter(task, theta, rows=structure == "rows", certify=kind == "hessian")
        except InputError as error:  # its message names curvature=, which is kind= here
            message = str(error).replace("curvature=", "kind=")
            raise type(error)(message).about(error.layers) from error
        task.unite()
        if kind == "ggn":
            loss_notes.refuse_without_curvature(task.forward.notes, "an importance of kind='ggn'")
        total = task.noted(found.total)
    method = total.method.replace("ggn", "fisher") if kind == "fisher" else total.method
    doubtful = task.forward.doubts or linearity.TAKEN_AS_THEY_ARE in total.notes
    return Importance(
        kind=kind,
        structure=structure,
        _values=found.values,
        stderr=found.errors,
        method=method,
        exact=found.errors is None and not doubtful and not math.isnan(total.value),
        samples=total.samples,
        uncovered=uncovered,
        notes=total.notes,
    )


def _chosen(task: Task, layers: Selector | Sequence[Selector] | None) -> tuple[parameters.Parameters, dict[str, float]]:
    """Return the chosen parameters, and for each other parameter of the model its share of all entries."""
    theta = parameters.trainable(task.model)
    if layers is not None:
        selection = task.of(layers).selection.modules
        held = {id(module._parameters[key]) for module, key in uses.covered_entries(selection.values())}
        own = {name for name, parameter in task.model.named_parameters() if id(parameter) in held}
        theta = {name: values for name, values in theta.items() if name in own}
        if not theta:
            listed = ", ".join(map(repr, selection))
            raise InputError(f"layers: no parameter of {listed} requires gradients; call .requires_grad_(True) first")
    sizes = {name: values.numel() for name, values in parameters.every(task.model).items()}
    every = sum(sizes.values())
    return theta, {name: size / every for name, size in sizes.items() if name not in theta}

"""Holding a measurement against nested autograd, on a slice of the user's own data."""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import capture, layers, losses
from .contractions import compiled
from .data import Batches, first, map_tensors
from .errors import InputError
from .head import Head
from .pipeline import relative_flatness

_DEFINITION_ENTRIES = 4096  # weights up to which the definition's one backward pass per weight is affordable
# The forward pass's own rounding is in these.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Check:
    """One way to the value, and how far it is from the truth."""

    path: str
    value: float
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the relative error is within tolerance."""
        return self.error <= self.tolerance

    @property
    def verdict(self) -> str:
        """The same in a word."""
        return "within" if self.ok else "ABOVE"


@dataclass(frozen=True, repr=False)
class Verification:
    """Relative flatness of a slice of data by every path, against nested autograd in float64; true if all agree."""

    layer: str
    samples: int
    truth: float
    method: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every path is within its tolerance."""
        return all(check.ok for check in self.checks)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        lines = [
            f"relative flatness of {self.layer!r} on {self.samples} samples",
            f"  {self.method:<22} {self.truth:<14.9g} (truth)",
            *(
                f"  {c.path:<22} {c.value:<14.9g} off by {c.error:.1e}, {c.verdict} {c.tolerance:.0e}"
                for c in self.checks
            ),
            "verdict: " + ("all paths agree" if self.ok else "THE PATHS DISAGREE; please report this"),
        ]
        return "\n".join(lines)


@capture.eager
def verify(
    model: nn.Module,
    loss: Any,
    data: Any,
    layer: str | nn.Module | None = None,
    *,
    samples: int = 32,
    reduction: str | None = None,
    forward: capture.Forward | None = None,
) -> Verification:
    """Compare the compiled and reference values with nested autograd, on the first samples of ``data``.

    Truth is the definition Σ ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s') in float64, a copy of the model and the user's own loss
    differentiated once per weight; for layers of more than 4,096 weights the Laplacian in the layer's input,
    Σ_i |φ_i|² Δ_φ ℓ_i, the same number at a head.

    Args:
        model: as for :func:`pyflatness.relative_flatness`, like all that follow but one.
        loss: its options count.
        data: only its first batch is used.
        layer: None takes the last Linear that ran.
        samples: how many samples to take from the first batch.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say.
        forward: ``(model, batch) -> (outputs, targets)``.

    Returns:
        The values and a verdict; ``bool()`` of it says whether all paths agree.

    Raises:
        FlatnessError: as :func:`pyflatness.relative_flatness` would.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(3, 2).double()
        >>> bool(pf.verify(model, torch.nn.CrossEntropyLoss(), (torch.eye(3).double(), torch.tensor([0, 1, 1]))))
        True
    """
    if samples < 1:
        raise InputError(f"samples={samples}: at least one is wanted")
    with capture.observing(model) as module:
        batch = next(iter(Batches(data, capture.device(module))))
        batch = first(batch, samples)
        head = Head(module, layer, losses.resolve(loss, reduction), Batches([batch], capture.device(module)), forward)
        count = sum(rows.samples for rows in head.batches())
        double = copy.deepcopy(module).double()
        batch64 = map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)
        risk = functools.partial(_risk, double, _double_loss(loss, reduction), batch64, forward)
        name = head.name
        small = layers.matrix(module.get_submodule(name))[0].numel() <= _DEFINITION_ENTRIES
        _untie(double.get_submodule(name))
        with torch.enable_grad():
            truth = (_definition if small else _laplacian)(double.get_submodule(name), risk)
    dtype = layers.matrix(module.get_submodule(name))[0].dtype
    measured = {dtype: (model, loss, batch), torch.float64: (double, _double_loss(loss, None), batch64)}
    checks = []
    for dtype, (net, criterion, part) in measured.items():
        for backend in ("compiled", "reference"):
            if backend == "compiled" and compiled.unavailable(capture.device(double), dtype):
                continue
            estimate = relative_flatness(
                net, criterion, [part], name, backend=backend, reduction=reduction, forward=forward, progress=False
            )
            error = abs(estimate.value - truth) / abs(truth) if truth else abs(estimate.value)
            path = f"{backend}, {str(dtype).removeprefix('torch.')}"
            checks.append(Check(path, estimate.value, error, _TOLERANCE[dtype]))
    return Verification(name, count, truth, "definition" if small else "laplacian in the input", tuple(checks))


def _risk(model: nn.Module, loss: Any, batch: Any, forward: capture.Forward | None) -> Tensor:
    outputs, targets = capture.run(model, batch, forward)
    value: Tensor = loss(outputs, targets)
    return value


def _double_loss(loss: Any, reduction: str | None) -> Any:
    """The user's loss, able to take float64 outputs."""
    if isinstance(loss, str):
        loss = getattr(nn.functional, loss)
    if isinstance(loss, functools.partial):
        keywords = {k: v.double() if isinstance(v, Tensor) else v for k, v in loss.keywords.items()}
        loss = functools.partial(loss.func, *loss.args, **keywords)
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).double()
        if reduction and hasattr(loss, "reduction"):
            loss.reduction = reduction
    return loss


def _untie(layer: nn.Module) -> None:
    """Give the layer a weight of its own: derivatives are through this use only."""
    weight = layer._parameters.get("weight")
    if weight is not None:
        layer._parameters["weight"] = nn.Parameter(weight.detach().clone())


def _definition(layer: nn.Module, risk: Any) -> float:
    """Σ_{s,s'} ⟨w_s, w_s'⟩ Σ_j ∂²E/∂w_sj ∂w_s'j by a backward pass for every weight."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    weight.requires_grad_()
    (slope,) = torch.autograd.grad(risk(), weight, create_graph=True)
    matrix = weight.detach().flatten(1)
    gram = matrix @ matrix.t()
    total = 0.0
    if not slope.requires_grad:
        return total
    for s in range(len(matrix)):
        for j in range(matrix.shape[1]):
            (row,) = torch.autograd.grad(slope.flatten(1)[s, j], weight, retain_graph=True)
            total += float(gram[s] @ row.flatten(1)[:, j])
    return total


def _laplacian(layer: nn.Module, risk: Any) -> float:
    """Σ over positions of |φ|² Δ_φ E: second derivatives along an orthonormal basis of the rows of w."""
    inputs: list[Tensor] = []

    def leaf(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs.append(args[0].detach().requires_grad_())
        return (inputs[-1], *args[1:])

    handle = layer.register_forward_pre_hook(leaf)
    try:
        value = risk()
    finally:
        handle.remove()
    (slope,) = torch.autograd.grad(value, inputs[0], create_graph=True)
    if not slope.requires_grad:
        return 0.0
    rows = layers.input_rows(layer, inputs[0])
    total = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
    for direction in torch.linalg.qr(layers.matrix(layer)[0].t()).Q.t():
        step = direction.expand_as(rows).reshape(slope.movedim(layers.class_dim(layer), -1).shape)
        (turn,) = torch.autograd.grad(slope, inputs[0], step.movedim(-1, layers.class_dim(layer)), retain_graph=True)
        total = total + layers.input_rows(layer, turn) @ direction
    return float(rows.square().sum(dim=1) @ total)

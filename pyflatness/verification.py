"""Compare a measurement with nested autograd, on a slice of the user's own data."""

import contextlib
import copy
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from typing_extensions import Unpack

from . import losses, private
from . import progress as progress_bar
from .api import relative_flatness
from .contractions import backends, promoted_dtype
from .errors import InputError
from .losses import auto, risk
from .messages import check_tensor
from .model import calling, layers, state, uses
from .model.data import copied, first, leaves, map_tensors
from .model.outputs import meant
from .model.uses import experts
from .numerics.normal_vectors import NormalVectors
from .numerics.process_groups import refuse
from .options import CALL, How, check_count, check_number
from .passes.linearity import users_of
from .reparameterization.reparameterize import duplicate
from .report import Estimate
from .session import public, session

Item = TypeVar("Item")

_TIMED = 3  # backward passes after which the time of all is estimated
_DEFINITION_ENTRIES = 4096  # weights up to which the definition's one backward pass per weight is affordable
_STEP, _HALVINGS, _EPS = 4e-3, 8, torch.finfo(torch.float64).eps  # of differences, relative to the weight
_CLASSES = (torch.int8, torch.int16, torch.int32)  # dtypes of labels that torch's losses do not take
# Tolerances include the rounding of the forward pass.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Check:
    """Hold the value by one way of computing, and its relative error."""

    path: str
    value: float
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Return whether the relative error is within tolerance."""
        return self.error <= self.tolerance

    @property
    def verdict(self) -> str:
        """Return ``"within"`` or ``"ABOVE"``, for the relative error and the tolerance."""
        return "within" if self.ok else "ABOVE"


@dataclass(frozen=True)
class Difference:
    """Hold ⟨D, H D⟩ along a direction D = wU: by autograd, and by central differences of E, which need no gradient.

    ``bound`` is the change when the step is halved, with rounding; None if that does not converge, as beside a kink.
    """

    autograd: float
    value: float
    bound: float | None

    @property
    def ok(self) -> bool:
        """Return whether the two agree within the bound; True if there is no bound."""
        return self.bound is None or abs(self.value - self.autograd) <= self.bound

    def __str__(self) -> str:
        verdict = "kink nearby" if self.bound is None else f"{'within' if self.ok else 'ABOVE'} {self.bound:.0e}"
        return f"{self.value:<14.9g} for {self.autograd:.9g} by autograd, {verdict}"


@dataclass(frozen=True, repr=False)
class Verification:
    """Hold relative flatness of a slice of data by every path, against nested autograd; true if all agree.

    The truth is computed in float64. ``differences`` compare the loss itself with its derivatives by autograd, along
    two random directions.
    """

    layer: str
    samples: int
    truth: float
    method: str
    checks: tuple[Check, ...]
    differences: tuple[Difference, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether every path is within its tolerance, and the loss changes as its derivatives say."""
        return all(check.ok for check in self.checks) and all(difference.ok for difference in self.differences)

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
            *(f"  {'differences of E':<22} {difference}" for difference in self.differences),
            f"verdict: {self._verdict()}",
        ]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if not all(check.ok for check in self.checks):
            return "THE PATHS DISAGREE; please report this"
        if not self.ok:
            return "ALL PATHS AGREE, BUT THE GRADIENTS THAT THE MODEL DEFINES ARE NOT THOSE OF ITS LOSS"
        return "all paths agree"


@public(*CALL)
def verify(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    layer: str | nn.Module | None = None,
    *,
    samples: int = 32,
    seconds: float | None = 60.0,
    **how: Unpack[How],
) -> Verification:
    """Compare the compiled and reference values with nested autograd, on the first samples of ``data``.

    Truth is the definition Σ ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s') in float64, a copy of the model and the user's own loss
    differentiated once per weight; for layers of more than 4,096 weights the Laplacian in the layer's input,
    Σ_i |φ_i|² Δ_φ ℓ_i, the same number at a head and for layers of one position. A model that computes a part in
    float32 whatever its dtype, as many normalisations do, is held to what that rounds.

    Args:
        data: … Only the first batch is used.
        layer: None takes the last Linear that ran.
        samples: how many samples to take from the first batch.
        seconds: how long the truth may take. One that would take longer, going by its first backward passes, is an
            error that says how long; None: no limit.
        progress: show a bar of the truth's backward passes.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        The values and a verdict; ``bool()`` of it says whether all paths agree.

    Raises:
        FlatnessError: as :func:`pyflatness.relative_flatness` would; a truth that would take too long.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(3, 2).double()
        >>> bool(pf.verify(model, torch.nn.CrossEntropyLoss(), (torch.eye(3).double(), torch.tensor([0, 1, 1]))))
        True
    """
    refuse(how.get("process_group"), "verify")
    samples = check_count("samples", samples, 1, "a number of samples")
    if seconds is not None:
        seconds = check_number("seconds", seconds, "a number of seconds, 0 or more,", lambda given: given >= 0)
    with session(model, loss, data, how={**how, "process_group": False}) as task:
        module = task.model
        batch = task.batches.peek()
        for leaf in leaves(batch):
            if isinstance(leaf, Tensor):  # of which some samples will be cut, and copied in float64
                check_tensor("data: batch 0", leaf)
        batch = first(batch, samples)
        calling.run(module, batch, task.forward)  # with the checks, which the copy in float64 does not make
        double = _in_double(module)
        truth_loss = _double_loss(_of_resolved(task.loss) if auto.is_auto(loss) else loss, how.get("reduction"))
    batch64 = map_tensors(_doubled, batch)
    measured = [(model, loss, batch), (double, loss if auto.is_auto(loss) else _double_loss(loss, None), batch64)]
    found = []
    if all(not parameter.is_floating_point() or parameter.dtype == torch.float64 for parameter in module.parameters()):
        del measured[0]
    for net, criterion, part in measured:
        dtype = next(parameter.dtype for parameter in net.parameters() if parameter.is_floating_point())
        kernels = not backends.compiled.unavailable(state.device(double), promoted_dtype(dtype))
        for backend in ("compiled", "reference") if kernels else ("reference",):
            estimate = relative_flatness(
                net,
                criterion,
                [part],
                layer,
                backend=backend,
                reduction=how.get("reduction"),
                forward=how.get("forward"),
                eval=how.get("eval", False),
                progress=False,
                process_group=False,
            )
            found.append((dtype, estimate))
    estimate = found[0][1]
    with state.observing(double) as (module, random):
        target = uses.layer(module, estimate.layer)
        _untie(target)

        def risk() -> Tensor:
            with random.watched():
                return _risk(module, truth_loss, batch64, calling.of_user(how.get("forward")), known=task.loss.known)

        if isinstance(target, uses.Use):
            with uses.attached({estimate.layer: target}):
                risk()  # after which it knows what it stands for
        # The other kernels of attention have no second derivative.
        with calling.differentiated(), _differentiable(target), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            coarsest = _coarsest(risk())
            method, truth = _truth(estimate, target, risk, _Passes(estimate, target, seconds, how.get("progress")))
            differences = _differences(target, risk, max(1.0, coarsest / _TOLERANCE[torch.float64]))
    checks = []
    for dtype, estimate in found:
        error = abs(estimate.value - truth) / abs(truth) if truth else abs(estimate.value)
        path = f"{estimate.backend}, {str(dtype).removeprefix('torch.')}"
        checks.append(Check(path, estimate.value, error, max(_TOLERANCE[dtype], coarsest)))
    return Verification(estimate.layer, estimate.samples, truth, method, tuple(checks), differences)


def _coarsest(value: Tensor) -> float:
    """Return the tolerance of the coarsest dtype that a float64 model computes in, as normalisations do in float32."""
    nodes = [value.grad_fn, *users_of(value)]
    dtypes = {entry.dtype for node in nodes if node is not None for entry in private.results_of(node)}
    return max((_TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _doubled(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _in_double(module: nn.Module) -> nn.Module:
    """Return a copy of a module in float64.

    Weights that hooks of the older weight_norm and spectral_norm make are parameters in it.
    """
    double = duplicate(module)
    double._apply(_doubled)  # .double() leaves complex numbers as they are
    for part in double.modules():
        for hook in [*part._forward_pre_hooks.values()]:
            if isinstance(hook, WeightNorm):
                remove_weight_norm(part, hook.name)
            elif isinstance(hook, SpectralNorm):
                remove_spectral_norm(part, hook.name)
        experts.compute_plainly(part)
    return double


class _Passes:
    """Run the backward passes of the truth with a progress bar, unless they would take too long."""

    def __init__(self, estimate: Estimate, layer: nn.Module, seconds: float | None, shown: bool | None) -> None:
        self._estimate, self._seconds, self._shown = estimate, seconds, shown
        self._weights = layers.matrix(layer)[0].numel()

    def over(self, items: Iterable[Item], total: int) -> Iterator[Item]:
        """Yield the items, one for each pass."""
        start = time.monotonic()
        for done, item in enumerate(progress_bar.track(items, total, "backward passes", self._shown)):
            expected = (time.monotonic() - start) / max(1, done) * total
            if self._seconds is not None and done == min(_TIMED, total - 1) and expected > self._seconds:
                raise InputError(
                    f"layer {self._estimate.layer!r} of {self._weights} weights: the truth of {self._estimate.samples} "
                    f"samples takes {total} backward passes, about {expected:.2g} s, more than "
                    f"seconds={self._seconds:g}; pass fewer samples=, a smaller layer of the same kind, or seconds=None"
                )
            yield item


def _truth(estimate: Estimate, layer: nn.Module, risk: Callable[[], Tensor], passes: _Passes) -> tuple[str, float]:
    """Return which form of the truth is affordable, and its value."""
    entries = layers.matrix(layer)[0].numel()
    if entries <= _DEFINITION_ENTRIES:
        return "definition", _definition(layer, risk, passes)
    value = _laplacian(layer, risk, passes, at_head=estimate.method == "head", samples=estimate.samples)
    if value is not None:
        return "laplacian in the input", value
    raise InputError(
        f"layer {estimate.layer!r} has {entries} weights, more than the {_DEFINITION_ENTRIES} for which nested "
        "autograd is quick, and several positions in a sample; verify a smaller layer of the same kind"
    )


def _risk(model: nn.Module, loss: Any, batch: Any, forward: calling.Forward | None, *, known: bool) -> Tensor:
    def taken(returned: Any) -> Any:
        """Return what the user's loss is called on: all outputs, where it is not clear which one is meant."""
        one = meant(returned, known)
        return returned if one is None else one

    outputs, targets = calling.run(model, copied(batch), forward, taken)  # which it may change in place
    if isinstance(targets, Tensor) and targets.dtype in _CLASSES:
        targets = targets.long()
    value: Tensor = loss(outputs, targets)
    return value


def _of_resolved(loss: losses.Loss) -> Callable[[Tensor, Tensor], Tensor]:
    def called(outputs: Tensor, targets: Tensor) -> Tensor:
        weight = risk.weight(outputs, targets, loss, 0) if loss.reduction == "mean" else 1.0
        return loss.value(outputs, targets) / weight

    return called


def _double_loss(loss: Any, reduction: str | None) -> Any:
    """Return the user's loss in a form that takes float64 outputs."""
    if isinstance(loss, str):
        loss = getattr(nn.functional, loss)
    if isinstance(loss, functools.partial):
        keywords = {k: v.double() if isinstance(v, Tensor) else v for k, v in loss.keywords.items()}
        loss = functools.partial(loss.func, *loss.args, **keywords)
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).double()
        if reduction and losses.resolve(loss, reduction).known:
            loss.reduction = reduction  # of another it says what the loss is, and changes nothing
    return loss


def _differentiable(layer: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a layer has second derivatives, also where torch's own forward has none."""
    if layers.kind_of(layer).twice_differentiable:
        return contextlib.nullcontext()

    return calling.replaced_forward(layer, layers.with_weight(layer, lambda weight: weight))


def _untie(layer: nn.Module) -> None:
    """Give the layer a copy of its weight, so that derivatives are those of this use alone."""
    weight = layer._parameters.get("weight")
    if weight is not None:
        layer._parameters["weight"] = untied = nn.Parameter(weight.detach().clone())
        vars(untied).update(vars(weight))


def _definition(layer: nn.Module, risk: Callable[[], Tensor], passes: _Passes) -> float:
    """Return Σ_{s,s'} ⟨w_s, w_s'⟩ Σ_j ∂²E/∂w_sj ∂w_s'j, within each group, by a backward pass for every weight."""
    weight, run = _leaf(layer)
    (gradient,) = torch.autograd.grad(run(risk), weight, create_graph=True, materialize_grads=True)
    total = 0.0
    if not gradient.requires_grad:
        return total
    blocks = layers.matrix(layer)[0].chunk(layers.kind_of(layer).groups)
    gram = torch.block_diag(*(block @ block.t() for block in blocks))
    gradient = _as_matrix(layer, gradient)
    d, m = gradient.shape
    for s, j in passes.over(itertools.product(range(d), range(m)), d * m):
        (row,) = torch.autograd.grad(gradient[s, j], weight, retain_graph=True)
        total += float(gram[s] @ _as_matrix(layer, row)[:, j])
    return total


def _differences(layer: nn.Module, risk: Callable[[], Tensor], rounding: float) -> tuple[Difference, ...]:
    """Return ⟨D, H D⟩ along two random directions D = wU by both ways; ``rounding`` is that of E over float64's."""
    weight, run = _leaf(layer)
    matrix, random = layers.matrix(layer)[0], NormalVectors()
    (gradient,) = torch.autograd.grad(run(risk), weight, create_graph=True, materialize_grads=True)
    along: list[tuple[Tensor, float]] = []
    for _ in range(2):
        mixed = matrix @ random.like(matrix.new_empty(matrix.shape[1], matrix.shape[1])) / matrix.shape[1] ** 0.5
        direction, form = _as_leaf(layer, mixed, weight), 0.0
        owners = [module for module, _ in layer.source.places] if isinstance(layer, uses.Use) else [layer]
        for padding in (getattr(module, "padding_idx", None) for module in owners):
            if padding is not None:  # torch takes no derivative in it, and the loss changes with it
                direction[padding] = 0.0
        if gradient.requires_grad:
            (product,) = torch.autograd.grad(gradient, weight, direction, retain_graph=True, materialize_grads=True)
            form = float((product * direction).sum())
        along.append((direction, form))
    # The weight is changed in place, when nothing is differentiated any more.
    return tuple(_difference(weight, direction, lambda: run(risk), form, rounding) for direction, form in along)


def _difference(
    weight: Tensor, direction: Tensor, risk: Callable[[], Tensor], along: float, rounding: float
) -> Difference:
    """Return the difference quotient of the largest step at which halving converges, or else of the smallest."""
    before, middle, last = weight.detach().clone(), float(risk().detach()), math.nan
    for step in (_STEP / 2**halving for halving in range(_HALVINGS)):
        ends = []
        for sign in (1, -1):
            weight.detach().copy_(before + sign * step * direction)
            ends.append(float(risk().detach()))
        weight.detach().copy_(before)
        value, rounded = (ends[0] - 2 * middle + ends[1]) / step**2, 4 * rounding * _EPS * abs(middle) / step**2
        change, last = abs(value - last), value
        if change <= 1e-3 * abs(value) + rounded:
            return Difference(along, value, change + 8 * rounded)
    return Difference(along, last, None)


def _as_leaf(layer: nn.Module, matrix: Tensor, weight: Tensor) -> Tensor:
    """Return a matrix (d, m) of the layer's as a tensor of the shape that :func:`_leaf` returns; undoes _as_matrix."""
    own = layers.as_weight(layer, matrix)
    if not isinstance(layer, uses.Use) or layer.source.effective:
        return own
    whole = torch.zeros_like(weight)
    whole.view(-1)[layer.entries.start : layer.entries.stop] = own.flatten()
    return whole


def _leaf(layer: nn.Module) -> tuple[Tensor, Callable[[Callable[[], Tensor]], Tensor]]:
    """Return the weight, or the parameter that has it, as a leaf, and what runs a function in which it is used.

    Where the layer's value is of its calls alone, these alone have the leaf.
    """
    if isinstance(layer, uses.Use) and not layer.source.effective:
        return layer.source.parameter.requires_grad_(), lambda risk: risk()
    if not isinstance(layer, uses.Use) and not uses.elsewhere(layer):
        assert isinstance(layer.weight, Tensor)
        return layer.weight.requires_grad_(), lambda risk: risk()
    leaf = layers.weight_of(layer).clone().requires_grad_()

    def run(risk: Callable[[], Tensor]) -> Tensor:
        forward = layers.with_weight(layer, lambda weight: leaf)
        with calling.replaced_forward(layer, forward), uses.attached({getattr(layer, "name", ""): layer}):
            return risk()

    return leaf, run


def _as_matrix(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Return a gradient in the leaf of :func:`_leaf` as a gradient in the layer's matrix (d, m)."""
    if isinstance(layer, uses.Use) and not layer.source.effective:
        gradient = gradient.flatten()[layer.entries.start : layer.entries.stop].view(layer.weight.shape)
    return layers.as_matrix(layer, gradient)


def _laplacian(
    layer: nn.Module, risk: Callable[[], Tensor], passes: _Passes, *, at_head: bool, samples: int
) -> float | None:
    """Return Σ over rows of |φ|² Δ_φ E, by second derivatives along an orthonormal basis of the rows of w.

    It is None where second derivatives of a row would mix with those of others: for several positions in a sample,
    except at a head.
    """
    if not layers.kind_of(layer).has_input:
        return None
    inputs: list[Tensor] = []

    def leaf(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs.append(args[0].detach().requires_grad_())
        return (inputs[-1], *args[1:])

    handle = layer.register_forward_pre_hook(leaf)
    try:
        with uses.attached({"": layer}):
            value = risk()
    finally:
        handle.remove()
    if not at_head and (len(inputs) > 1 or inputs[0].shape[:-1] != (samples,)):
        return None
    (gradient,) = torch.autograd.grad(value, inputs[0], create_graph=True, materialize_grads=True)
    if not gradient.requires_grad:
        return 0.0
    rows = layers.input_rows(layer, inputs[0])
    total = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
    directions = torch.linalg.qr(layers.matrix(layer)[0].t()).Q.t()
    for direction in passes.over(directions, len(directions)):
        step = direction.expand_as(rows).reshape(gradient.movedim(layers.kind_of(layer).class_dim, -1).shape)
        (second,) = torch.autograd.grad(
            gradient, inputs[0], step.movedim(-1, layers.kind_of(layer).class_dim), retain_graph=True
        )
        total = total + layers.input_rows(layer, second) @ direction
    return float(rows.square().sum(dim=1) @ total)

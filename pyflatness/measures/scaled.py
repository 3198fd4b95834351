"""Compute the norm of the weights, and measures that are scaled with it.

    ‖w‖² = Σ_sj w_sj²        of a layer's effective weight, whatever a parametrisation makes it of

is ``weight_norm`` (Petzka et al. 2021, section 6). A network's value is the sum over the weights of its chosen layers,
a weight that two layers share counted once. No data is read for it: asked for beside measures of a sweep it is of the
layers that ran, by itself of all that were chosen. Which of the parameters outside of layers are weights takes a sweep
to know; by itself it is of those that were named. It is not invariant to rescalings.

    κ^l = |w_l|_F² λ_max(∂²E/∂w_l²)        κ_τ^l = |w_l|_F² Tr(∂²E/∂w_l²)        of a layer
    κ^Σ = Σ_l κ^l,  κ^max = max_l κ^l       κ_τ^Σ, κ_τ^max likewise                of a network, its measured layers

are ``scaled_…`` and ``largest_scaled_…`` (Petzka et al. 2019, Definition 1, Section 2 and Table 1). Each is the
unscaled measure's value times a number that the weights alone give, so both together cost one of them. w is the
effective weight. The values are invariant to layer-wise rescalings of ReLU networks.

    κ_l / (2 m_l)        of a layer with the weight w_l (d, m_l); of a network their sum

is ``relative_flatness_per_feature``. It is what the bound of Petzka et al. 2021 (Theorem 5) takes of relative flatness
κ: the mean change of the loss is δ²κ/(2m) where the m features are rotated and scaled by δ. κ grows with the number of
features, and this compares layers of several widths. Of a convolution's filters m counts the entries of a patch. It is
invariant to layer-wise rescalings.

    Σ_l ‖W_l‖₂ √Tr(∂²E/∂w_l²)        and with ‖W_l‖_F

over the measured layers is ``matrix_normalized_sharpness`` (Tsuzuku et al. 2019; C24, Eq. 35), W_l the effective weight
matrix: of a convolution its flattened filters, of a grouped one block-diagonal. Each layer's trace is that of the
measure ``trace``, which costs nothing more. It has no value where a layer's trace is negative. It is invariant to
layer-wise rescalings.

C24: "From Loss Flatness to Compressed Representations".
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..contractions.factor import lower_gram
from ..errors import InputError, NotYetError
from ..model import layers, uses
from ..model.uses import Use
from ..numerics import lanczos
from ..numerics.accumulate import raises
from ..numerics.normal_vectors import NormalVectors
from ..options import Options
from ..report import Estimate
from ..report.intervals import together
from .base import LARGEST, Estimates, Measure, Task
from .relative_flatness import RELATIVE_FLATNESS
from .trace import LAMBDA_MAX, TRACE

_ENTRIES = 2**18  # of a weight that are converted to float64 at a time
_WRITTEN_OUT = 1024  # rows of a Gram matrix that is written out, at most
_TOLERANCE, _PRODUCTS, _BASIS = 1e-11, 2000, 64


def squared_norm(module: nn.Module) -> float:
    """Return |w|² of the layer's effective weight."""
    weight = layers.matrix(module)[0]
    return sum(float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2 for rows in _pieces(weight))


def spectral_norm(module: nn.Module) -> float:
    """Return the largest singular value of the layer's weight matrix, or over a grouped convolution's groups.

    It is computed from the smaller Gram matrix, whose largest eigenvalue is as accurate, or for many rows by Lanczos,
    without that matrix. It is NaN for a weight with NaN or infinity.
    """
    weight = layers.matrix(module)[0].unflatten(0, (layers.kind_of(module).groups, -1))
    size = min(weight.shape[1:])
    if size > _WRITTEN_OUT:
        found = [_by_products(matrix) for matrix in weight]
        if None not in found:
            return max(value for value in found if value is not None)
    gram = lower_gram(weight if weight.shape[1] == size else weight.mT)
    if not bool(gram.isfinite().all()):  # for which there are no eigenvalues
        return math.nan
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram).max())))


def _by_products(matrix: Tensor) -> float | None:
    """Return the root of the largest eigenvalue of wᵀw; None if Lanczos does not find it up to rounding."""
    start = NormalVectors().like(matrix.new_empty(1, matrix.shape[1], dtype=torch.float64))

    def times(vectors: Tensor) -> Tensor:
        total = torch.zeros_like(vectors[0])
        for piece in _pieces(matrix):
            rows = piece.double()
            total += rows.t() @ (rows @ vectors[0])
        return total.unsqueeze(0)

    search = lanczos.largest(start, tolerance=_TOLERANCE, max_products=_PRODUCTS, size=_BASIS)
    ritz = lanczos.solved(search, times)
    return math.sqrt(max(0.0, float(ritz.values))) if ritz.converged else None


def _pieces(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of a matrix in pieces that are small enough to be copied."""
    rows: tuple[Tensor, ...] = weight.split(max(1, _ENTRIES // max(1, weight.shape[1])))
    return rows


def _values(task: Task) -> Estimates:
    found, squares = {}, {}
    for name, module in task.selection.modules.items():
        if isinstance(module, Use) and not module.ran:
            if name not in task.selection.named:
                continue  # it may be no weight at all, or have parts that are layers
            if module.source.effective:
                raise InputError(
                    f"layer {name!r} computes its weight in its forward pass, and weight_norm by itself does without "
                    "one; ask for another measure beside it, such as trace"
                )
        layers.check_measurable(name, module)
        norm = squared_norm(module)
        if not math.isfinite(norm) and raises(task.options.nan_policy):
            layers.check_finite({name: module})
        shared = module._parameters.get("weight")
        squares[id(module if shared is None else shared)] = norm
        found[name] = _norm(norm, name)
    found[""] = _norm(sum(squares.values()), "")
    return found


def _norm(value: float, layer: str) -> Estimate:
    return Estimate(value, None, samples=0, method="weights", exact=True, backend="reference", layer=layer)


WEIGHT_NORM = Measure(
    name="weight_norm",
    formula="‖w‖²",
    source="Petzka et al. 2021, section 6",
    compute=_values,
    cost="no data is read",
    reads=0,
    network_of="the sum over layers, a shared weight once",
)


def scaled(times: Callable[[nn.Module], float], model: nn.Module, options: Options, values: Estimates) -> Estimates:
    """Return each layer's value times a function of its weight, and their sum for the network."""
    found = _by_layer(times, model, options, values)
    contributions = [estimate.per_sample for estimate in found.values() if estimate.per_sample is not None]
    stderr, dof = together([*found.values()])
    network = replace(
        next(iter(found.values())),
        value=sum(estimate.value for estimate in found.values()),
        stderr=stderr,
        dof=dof,
        exact=all(estimate.exact for estimate in found.values()),
        per_sample=torch.stack(contributions).sum(dim=0) if contributions else None,
        layer="",
        notes=(),
    )
    return {**found, "": network}


def largest_scaled(measure: str, model: nn.Module, options: Options, values: Estimates) -> Estimates:
    """Return the largest of the layers' scaled values for the network, with a note of which layer it is."""
    found = _by_layer(squared_norm, model, options, values)
    if any(estimate.stderr is not None for estimate in found.values()):
        raise InputError(
            f"{measure} has no sampled value: the largest of several is too large in the mean; pass probes=None, or "
            "leave it out of measures="
        )
    sizes = torch.tensor([estimate.value for estimate in found.values()], dtype=torch.float64, device="cpu")
    place = int(sizes.argmax())  # of a NaN, if there is one
    name, largest = [*found.items()][place]
    exact = all(estimate.exact for estimate in found.values())
    return {"": replace(largest, exact=exact, layer="", notes=(f"{measure}: that of layer {name!r}",))}


def _by_layer(times: Callable[[nn.Module], float], model: nn.Module, options: Options, values: Estimates) -> Estimates:
    found = {}
    for name in [name for name in values if name] or [""]:  # a model that is a layer itself has no other name
        module, estimate = uses.layer(model, name), values[name]
        check_own_weights(name, module, options)
        factor = times(module)
        found[name] = replace(
            estimate,
            value=factor * estimate.value,
            stderr=None if estimate.stderr is None else factor * estimate.stderr,
            per_sample=None if estimate.per_sample is None else factor * estimate.per_sample,
        )
    return found


def check_own_weights(name: str, module: nn.Module, options: Options) -> None:
    """Raise a NotYetError for options under which a layer's values are of another matrix than its weight."""
    if options.normalize is not None:
        raise NotYetError(
            f"measures scaled with a number of the weight are defined for the weights as they are; normalize="
            f"{options.normalize!r} is not there for them"
        )
    if options.conv == "affine" and layers.is_convolution(module):
        raise NotYetError(
            f"layer {name!r}: measures scaled with a number of a convolution's dense matrix (conv='affine') are not "
            "there yet; conv='filter' gives those of its filters"
        )


RELATIVE_FLATNESS_PER_FEATURE = Measure(
    name="relative_flatness_per_feature",
    formula="κ / (2m) for a weight w (d, m); network: their sum",
    source="Petzka et al. 2021, Theorem 5",
    base=RELATIVE_FLATNESS.name,
    derive=functools.partial(scaled, lambda module: 1 / (2 * layers.matrix(module)[0].shape[-1])),
    invariant="layer-wise, attention rows",
)
SCALED_LAMBDA_MAX = Measure(
    name="scaled_lambda_max",
    formula="κ^l = |w|² λ_max(∂²E/∂w²); network: their sum κ^Σ",
    source="Petzka et al. 2019, Definition 1, Table 1",
    base=LAMBDA_MAX.name,
    derive=functools.partial(scaled, squared_norm),
    invariant="layer-wise",
    reads=LAMBDA_MAX.reads,
)
LARGEST_SCALED_LAMBDA_MAX = Measure(
    name="largest_scaled_lambda_max",
    formula="κ^max = max_l |w_l|² λ_max(∂²E/∂w_l²)",
    source="Petzka et al. 2019, Table 1",
    base=LAMBDA_MAX.name,
    derive=functools.partial(largest_scaled, "largest_scaled_lambda_max"),
    granularity="network",
    invariant="layer-wise",
    reads=LAMBDA_MAX.reads,
    network_of=LARGEST,
)
SCALED_TRACE = Measure(
    name="scaled_trace",
    formula="κ_τ^l = |w|² Tr(∂²E/∂w²); network: their sum κ_τ^Σ",
    source="Petzka et al. 2019, Section 2, Table 1",
    base=TRACE.name,
    derive=functools.partial(scaled, squared_norm),
    invariant="layer-wise",
)
LARGEST_SCALED_TRACE = Measure(
    name="largest_scaled_trace",
    formula="κ_τ^max = max_l |w_l|² Tr(∂²E/∂w_l²)",
    source="Petzka et al. 2019, Table 1",
    base=TRACE.name,
    derive=functools.partial(largest_scaled, "largest_scaled_trace"),
    granularity="network",
    invariant="layer-wise",
    network_of=LARGEST,
)


def summed(norm: Callable[[nn.Module], float], model: nn.Module, options: Options, values: Estimates) -> Estimates:
    """Return Σ_l norm(W_l) √trace_l, the value of the network.

    The standard error is that of the roots to first order, and a bound, see
    :func:`pyflatness.report.intervals.together`.
    """
    roots = []
    every = [name for name in values if name] or [""]  # a model that is a layer itself has no other name
    for name in every:
        module, trace = uses.layer(model, name), values[name]
        check_own_weights(name, module, options)
        if trace.value < 0:
            raise InputError(
                f"layer {name!r}: the trace of its Hessian is {trace.value:.3g}, of which there is no root; the "
                "matrix-normalised sharpness of these layers does not exist"
            )
        size, root = norm(module), trace.value**0.5
        stderr = trace.stderr
        if stderr is not None:
            stderr = size * stderr / (2 * root) if root else float("inf")
        roots.append(replace(trace, value=size * root, stderr=stderr))
    value, exact = sum(root.value for root in roots), all(values[name].exact for name in every)
    stderr, dof = together(roots)
    return {"": replace(values[""], value=value, stderr=stderr, dof=dof, exact=exact, per_sample=None)}


_MATRIX_NORMALIZED = "From Loss Flatness to Compressed Representations, Eq. 35"

MATRIX_NORMALIZED_SHARPNESS = Measure(
    name="matrix_normalized_sharpness",
    formula="Σ_l ‖W_l‖₂ √Tr(∂²E/∂w_l²)",
    source=_MATRIX_NORMALIZED,
    base=TRACE.name,
    derive=functools.partial(summed, spectral_norm),
    granularity="network",
    invariant="layer-wise",
)
MATRIX_NORMALIZED_SHARPNESS_FROBENIUS = Measure(
    name="matrix_normalized_sharpness_frobenius",
    formula="Σ_l ‖W_l‖_F √Tr(∂²E/∂w_l²)",
    source=_MATRIX_NORMALIZED,
    base=TRACE.name,
    derive=functools.partial(summed, lambda module: math.sqrt(squared_norm(module))),
    granularity="network",
    invariant="layer-wise",
)

"""Scale measures with the weight's norm (Petzka et al. 2019, Definition 1, Section 2 and Table 1).

    κ^l = |w_l|_F² λ_max(∂²E/∂w_l²)        κ_τ^l = |w_l|_F² Tr(∂²E/∂w_l²)        of a layer
    κ^Σ = Σ_l κ^l,  κ^max = max_l κ^l       κ_τ^Σ, κ_τ^max likewise                of a network, its measured layers

Each is the unscaled measure's value times a number that the weights alone give, so both together cost one of them. w is
the effective weight. The values are invariant to layer-wise rescalings of ReLU networks.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..errors import InputError, NotYetError
from ..model import layers, norms, uses
from ..options import Options
from ..report import Estimate
from .base import Measure, Values
from .lambda_max import LAMBDA_MAX
from .trace import TRACE


def scaled(model: nn.Module, options: Options, values: Values) -> Values:
    """Return |w_l|² times each layer's value, and their sum for the network.

    Raises:
        NotYetError: options under which the values belong to other matrices than the layers' weights.
    """
    found = _by_layer(model, options, values)
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


def together(terms: Sequence[Estimate]) -> tuple[float | None, float | None]:
    """Return a bound of the standard error of a sum of estimates from the same draws, and its degrees of freedom.

    Errors from the same draws may go together, so that theirs add up; the fewest degrees of freedom of them all count.
    """
    sampled = [estimate for estimate in terms if estimate.stderr is not None]
    if not sampled:
        return None, None
    dofs = [estimate.dof for estimate in sampled if estimate.dof is not None]
    stderr = sum(estimate.stderr or 0.0 for estimate in sampled)
    return stderr, min(dofs) if len(dofs) == len(sampled) else None


def largest_scaled(measure: str, model: nn.Module, options: Options, values: Values) -> Values:
    """Return the largest of the layers' scaled values, for the network, and which that is in the name of the measure.

    Raises:
        NotYetError: see :func:`scaled`.
        InputError: the values are sampled.
    """
    found = _by_layer(model, options, values)
    if any(estimate.stderr is not None for estimate in found.values()):
        raise InputError(
            f"{measure} has no sampled value: the largest of several is too large in the mean; pass probes=None and "
            "target_stderr=None, or leave it out of measures="
        )
    sizes = torch.tensor([estimate.value for estimate in found.values()], dtype=torch.float64, device="cpu")
    place = int(sizes.argmax())  # that of a NaN, if there is one
    name, largest = [*found.items()][place]
    exact = all(estimate.exact for estimate in found.values())
    return {"": replace(largest, exact=exact, layer="", notes=(f"{measure}: that of layer {name!r}",))}


def _by_layer(model: nn.Module, options: Options, values: Values) -> Values:
    found = {}
    for name in [name for name in values if name] or [""]:  # a model that is a layer itself has no other name
        module, estimate = uses.layer(model, name), values[name]
        check_own_weights(name, module, options)
        norm = norms.squared(module)
        found[name] = replace(
            estimate,
            value=norm * estimate.value,
            stderr=None if estimate.stderr is None else norm * estimate.stderr,
            per_sample=None if estimate.per_sample is None else norm * estimate.per_sample,
        )
    return found


def check_own_weights(name: str, module: nn.Module, options: Options) -> None:
    """Raise a NotYetError for options under which a layer's values belong to another matrix than its weight."""
    if options.normalize is not None:
        raise NotYetError(
            f"measures scaled with the weight's norm are defined for the weights as they are; normalize="
            f"{options.normalize!r} is not there for them"
        )
    if options.conv == "affine" and layers.is_convolution(module):
        raise NotYetError(
            f"layer {name!r}: measures scaled with the norm of a convolution's dense matrix (conv='affine') are not "
            "there yet; conv='filter' gives those of its filters"
        )


SCALED_LAMBDA_MAX = Measure(
    name="scaled_lambda_max",
    formula="κ^l = |w|² λ_max(∂²E/∂w²); network: their sum κ^Σ",
    source="Petzka et al. 2019, Definition 1, Table 1",
    base=LAMBDA_MAX.name,
    derive=scaled,
    invariant="layer-wise",
    cost="that of lambda_max, shared",
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
    cost="that of lambda_max, shared",
    reads=LAMBDA_MAX.reads,
)
SCALED_TRACE = Measure(
    name="scaled_trace",
    formula="κ_τ^l = |w|² Tr(∂²E/∂w²); network: their sum κ_τ^Σ",
    source="Petzka et al. 2019, Section 2, Table 1",
    base=TRACE.name,
    derive=scaled,
    invariant="layer-wise",
    cost="that of trace, shared",
)
LARGEST_SCALED_TRACE = Measure(
    name="largest_scaled_trace",
    formula="κ_τ^max = max_l |w_l|² Tr(∂²E/∂w_l²)",
    source="Petzka et al. 2019, Table 1",
    base=TRACE.name,
    derive=functools.partial(largest_scaled, "largest_scaled_trace"),
    granularity="network",
    invariant="layer-wise",
    cost="that of trace, shared",
)

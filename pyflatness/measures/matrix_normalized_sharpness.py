"""Compute matrix-normalised sharpness: norms of the weights times roots of traces.

It is defined by Tsuzuku et al. (2019), and by C24 in Eq. 35.

    Σ_l ‖W_l‖₂ √Tr(∂²E/∂w_l²)        and with ‖W_l‖_F

over the measured layers, W_l the effective weight matrix: of a convolution its flattened filters, of a grouped one
block-diagonal. Each layer's trace is that of the measure ``trace``, which costs nothing more. It has no value where a
layer's trace is negative. It is invariant to layer-wise rescalings.

C24: "From Loss Flatness to Compressed Representations".
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from ..errors import InputError
from ..model import norms, uses
from ..options import Options
from .base import Measure, Values
from .scaled import check_own_weights, together
from .trace import TRACE


def summed(norm: Callable[[nn.Module], float], model: nn.Module, options: Options, values: Values) -> Values:
    """Return Σ_l norm(W_l) √trace_l, the value of the network.

    The standard error is that of the roots to first order, and a bound, see :func:`.scaled.together`.

    Raises:
        InputError: a negative trace.
        NotYetError: options under which the traces are of other matrices than the layers' weights.
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


def _frobenius(module: nn.Module) -> float:
    return math.sqrt(norms.squared(module))


_SOURCE = "From Loss Flatness to Compressed Representations, Eq. 35"

MATRIX_NORMALIZED_SHARPNESS = Measure(
    name="matrix_normalized_sharpness",
    formula="Σ_l ‖W_l‖₂ √Tr(∂²E/∂w_l²)",
    source=_SOURCE,
    base=TRACE.name,
    derive=functools.partial(summed, norms.spectral),
    granularity="network",
    invariant="layer-wise",
    cost="that of trace, shared",
)
MATRIX_NORMALIZED_SHARPNESS_FROBENIUS = Measure(
    name="matrix_normalized_sharpness_frobenius",
    formula="Σ_l ‖W_l‖_F √Tr(∂²E/∂w_l²)",
    source=_SOURCE,
    base=TRACE.name,
    derive=functools.partial(summed, _frobenius),
    granularity="network",
    invariant="layer-wise",
    cost="that of trace, shared",
)

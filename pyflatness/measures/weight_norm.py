"""Compute the squared norm of the weights (Petzka et al. 2021, section 6).

    ‖w‖² = Σ_sj w_sj²        of a layer's effective weight, whatever a parametrisation makes it of

A network's value is the sum over the weights of its chosen layers, a weight that two layers share counted once. No data
is read for it: asked for beside measures of a sweep it is of the layers that ran, by itself of all that were chosen.
Which of the parameters outside of layers are weights takes a sweep to know; by itself it is of those that were named.
It is not invariant to rescalings.
"""

from ..errors import InputError
from ..model import layers, norms
from ..model.uses import Use
from ..report import Estimate
from .base import Measure, Task, Values


def _values(task: Task) -> Values:
    found, squares = {}, {}
    for name, module in task.selection.modules.items():
        if isinstance(module, Use) and not module.ran:
            if name not in task.selection.named:
                continue  # it may be the weight of nothing, or have parts that are layers
            if module.source.effective:
                raise InputError(
                    f"layer {name!r} computes its weight in its forward pass, and weight_norm by itself does without "
                    "one; ask for another measure beside it, such as trace"
                )
        layers.check_measurable(name, module)
        norm = norms.squared(module)
        shared = module._parameters.get("weight")
        squares[id(module if shared is None else shared)] = norm
        found[name] = _estimate(norm, name)
    found[""] = _estimate(sum(squares.values()), "")
    return found


def _estimate(value: float, layer: str) -> Estimate:
    return Estimate(value, None, samples=0, method="weights", exact=True, backend="reference", layer=layer)


WEIGHT_NORM = Measure(
    name="weight_norm",
    formula="‖w‖²",
    source="Petzka et al. 2021, section 6",
    compute=_values,
    cost="no data is read",
    reads=0,
)

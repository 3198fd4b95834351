"""Find the critical sharpness along a step: at what length of the step the loss starts to rise.

    λ_c = 2 / η_c,    η_c the smallest η > 0 with E(θ + η Δ) > E(θ)

For Δ = -∇E and a quadratic loss it is ⟨∇E, H ∇E⟩ / |∇E|², which lies between the eigenvalues of H. It takes forward
passes alone (Kalra et al. 2026, "A Scalable Measure of Loss Landscape Curvature for Analyzing the Training Dynamics of
LLMs", https://arxiv.org/abs/2601.16979).
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError, NonFiniteError
from ..messages import shown
from ..model import calling, directions, parameters
from ..options import CALL, How, check_number
from ..passes.task import Risk
from ..report import Estimate
from ..session import public, session

_DOUBLINGS, _HALVINGS = 60, 20


@public(*CALL)
def critical_sharpness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    step: Mapping[str, Tensor] = ...,  # type: ignore[assignment]
    *,
    start: float = 1e-3,
    **how: Unpack[How],
) -> Estimate:
    """Return the critical sharpness λ_c = 2 / η_c along a step Δ of the parameters.

    η_c is the smallest length η > 0 with E(θ + η Δ) > E(θ). It is looked for by doubling η from ``start``, or halving
    it, and by bisection of the last interval, to a relative width of 2^-20.

    Args:
        data: … They are read once for each η, some dozens of times.
        step: Δ by the names of parameters, or of layers whose weight is meant, of their shapes: what an optimiser adds
            to them for a learning rate of 1. Names are those of the model, with or without its wrappers
            (``torch.compile``, DDP). Other parameters stay.
        start: the first η.

    Returns:
        λ_c, of method ``"definition"``; ``exact`` is False, since the search misses a loss that rises and falls again
        between two lengths. It is 0 if the loss does not rise up to 2^60 times ``start``.

    Raises:
        InputError: a step of no parameter, of another shape or zero; one along which the loss rises from the start.
        NonFiniteError: a loss of NaN; one of infinity is a rise.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(3.0)
        >>> data = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
        >>> found = pf.measures.critical_sharpness(model, torch.nn.MSELoss(), data, {"weight": torch.tensor([[-6.0]])})
        >>> round(found.value, 4)
        2.0
    """
    start = check_number("start", start)
    if not isinstance(step, Mapping) or not step:
        raise InputError(f"step={shown(step)}: a mapping from names of parameters to their changes is wanted")
    with session(model, loss, data, how=how, reads=3) as task:
        direction = directions.given(task.model, _unwrapped(task.model, model, step), "step", "it")
        theta = directions.origin(task.model, [direction])
        change = {name: values.double() for name, values in direction.values.items()}

        def at(eta: float) -> Risk:
            elsewhere = calling.dry_run() if eta else contextlib.nullcontext()
            with elsewhere, torch.no_grad():
                (found,) = task.risks([parameters.displaced(theta, change, lambda _: eta)], "propagate")
            if math.isnan(found.value):
                raise NonFiniteError(f"the loss is NaN at {eta:.3g} times the step")
            return found

        own = at(0.0)
        value = 2 / _first_rise(lambda eta: at(eta).value - own.value, start)
        estimate = Estimate(value, None, own.samples, "definition", exact=False, backend="reference")
        task.unite()
        return task.noted(estimate)


def _first_rise(rise: Callable[[float], float], eta: float) -> float:
    """Return the smallest length at which the loss rises; the search begins with ``eta``."""
    low, high = 0.0, math.inf
    for _ in range(_DOUBLINGS):
        found = rise(eta)
        if found > 0:
            high = eta
            if low:
                break
            eta /= 2
        elif high < math.inf:
            low = eta if found < 0 else 0.0  # a loss that does not change at all is rounding
            break
        else:
            low, eta = eta, 2 * eta
    if not low:
        raise InputError("step: the loss rises along it from the start: it is no step of descent on these data")
    if high == math.inf:
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rise(middle) > 0 else (middle, high)
    return (low + high) / 2


def _unwrapped(model: nn.Module, wrapped: nn.Module, step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step by the names of the unwrapped module, where it came by those of the wrapper (DDP, …)."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    outer = {n: own[id(p)] for n, p in wrapped.named_parameters(remove_duplicate=False) if id(p) in own}
    return {outer.get(name, name): change for name, change in step.items()}

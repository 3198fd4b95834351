"""Search for the worst rise of the loss that a change of the weights within a ball gives.

    max_{|T⁻¹ δ| ≤ ρ} E(θ + δ) - E(θ),    |·| the Euclidean or the maximum norm, over all trainable parameters

- T = 1: the sharpness that SAM minimises (Foret et al. 2021), of all data or of groups of m samples;
- T = diag |θ|: adaptive sharpness (Kwon et al. 2021), invariant to rescalings of weights;
- T = diag (|θ| + 1), the maximum norm: Keskar's ε-sharpness (Keskar et al. 2017, Eq. 3), in percent of 1 + E.

The search is an ascent, see :mod:`.ascent`; what it finds is a lower bound of the maximum.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from ..errors import InputError
from ..messages import check_choice
from ..options import CALL, How, Options, check_count, check_flag, check_number
from ..session import public, session
from .ascent import Ascent, WorstCase

NORMS = ("l2", "linf")


@public(*CALL, "seed", "memory")
def worst_case_sharpness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    rho: float = 0.05,
    norm: str = "l2",
    adaptive: bool = False,
    m: int | None = None,
    steps: int = 20,
    starts: int = 1,
    bound: bool = False,
    normalize_logits: bool = False,
    **how: Unpack[How],
) -> WorstCase:
    """Return the worst rise of the loss within a ball around the weights, found by projected gradient ascent.

    max_{|T⁻¹ δ| ≤ ρ} E(θ + δ) - E(θ) over all trainable parameters, T = 1 or diag |θ|   (Foret et al. 2021, Eq. 1;
    Kwon et al. 2021, Definition 2; Andriushchenko et al. 2023, Eq. 1).

    Args:
        data: … Every step reads them once; of groups they are read twice.
        rho: ρ, the radius of the ball.
        norm: ``"l2"`` or ``"linf"``.
        adaptive: relative to the weights, |δ_j / θ_j|; weights that are zero stay so.
        m: samples of a group that has a maximum of its own (m-sharpness): batches are cut into groups of so many, a
            batch's last one may be smaller, and the value is their mean by samples. None: one maximum for all data.
        steps: of each ascent, a forward and a backward pass each.
        starts: ascents: the first from next to θ, others from random points of the ball.
        bound: also return what the quadratic model allows (``norm="l2"``): some dozens of Hessian products.
        normalize_logits: divide each sample's outputs f by the root mean square of f - mean(f), so that their scale
            does not count (Andriushchenko et al. 2023, section 3.3).
        memory: … Seven vectors of the parameters' size come on top, in their dtype or float32.
        process_group: … A group of samples is one rank's.

    Returns:
        The rise; it has no standard error: more steps and starts improve it.

    Raises:
        InputError: options that do not fit, or see :func:`pyflatness.relative_flatness`; no trainable parameter; a
            group of samples none of whose targets counts.
        NonFiniteError: a loss, or a gradient at the weights, with NaN or infinity.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0]]))
        >>> data = torch.eye(2).double(), torch.tensor([[1.0], [0.0]]).double()
        >>> found = pf.worst_case_sharpness(model, torch.nn.MSELoss(), data, rho=0.1, starts=2, bound=True)
        >>> round(found.value, 6), round(found.bound, 6)
        (0.005, 0.005)
    """
    adaptive, bound = check_flag("adaptive", adaptive), check_flag("bound", bound)
    check_choice("norm", norm, NORMS)
    if bound and norm == "linf":
        raise InputError("bound=True is for norm='l2': a maximum norm of ρ allows a Euclidean one of ρ √N")
    scale = torch.abs if adaptive else torch.ones_like
    ascent = Ascent(
        scale=scale,
        rho=check_number("rho", rho),
        euclidean=norm == "l2",
        steps=check_count("steps", steps, 1, "a number of steps"),
        starts=check_count("starts", starts, 1, "a number of ascents"),
        seed=how.get("seed", 0),
    )
    m = None if m is None else check_count("m", m, 1, "a number of samples")
    with session(model, loss, data, Options.of(how), how, reads=3) as task:
        return ascent.of(task, m, normalized=check_flag("normalize_logits", normalize_logits), bounded=bound)


@public(*CALL, "seed", "memory")
def keskar_sharpness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    rho: float = 1e-3,
    steps: int = 20,
    starts: int = 1,
    **how: Unpack[How],
) -> WorstCase:
    """Return the ε-sharpness of Keskar et al.: the worst rise within a box, in percent.

    100 (max_{|δ_j| ≤ ε (|θ_j| + 1)} E(θ + δ) - E(θ)) / (1 + E(θ)) over all trainable parameters   (Keskar et al. 2017,
    Metric 2.1, in the whole space).

    Args:
        rho: ε.
        steps: of each ascent.
        starts: ascents.
        memory: … See :func:`pyflatness.worst_case_sharpness`.

    Returns:
        The value in percent, a lower bound; ``loss`` is E(θ).

    Raises:
        InputError: see :func:`pyflatness.worst_case_sharpness`.
        NonFiniteError: see :func:`pyflatness.worst_case_sharpness`.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(1.0)
        >>> data = torch.ones(1, 1).double(), torch.ones(1, 1).double()
        >>> round(pf.measures.keskar_sharpness(model, torch.nn.MSELoss(), data, rho=0.1, starts=2).value, 6)
        4.0
    """
    ascent = Ascent(
        scale=lambda w: w.abs() + 1,
        rho=check_number("rho", rho),
        euclidean=False,
        steps=check_count("steps", steps, 1, "a number of steps"),
        starts=check_count("starts", starts, 1, "a number of ascents"),
        seed=how.get("seed", 0),
    )
    with session(model, loss, data, Options.of(how), how, reads=3) as task:
        found = ascent.of(task, None)
    percent = 100 / (1 + found.loss)
    return replace(found, value=found.value * percent, starts=found.starts * percent)

"""Estimate average-case elementwise adaptive sharpness by Monte Carlo.

It is defined by Andriushchenko et al. (2023), and by C24 in Eq. 38 and appendix F.

    S_ρ = (2/ρ²) E_δ[L(θ + δ) - L(θ)],   δ ~ N(0, ρ² diag θ²),   ρ = 0.1

over all trainable parameters; for ρ → 0 it is Σ_j θ_j² H_jj (C24 Eq. 40). Probes come in pairs ±δ, which removes the
odd terms of the expansion. With u_k = (L(θ + δ_k) + L(θ - δ_k)) / 2 - L(θ) the value is (2/ρ²) mean_k u_k. Its standard
error is (2/ρ²) std_k u_k / √K, of K - 1 degrees of freedom. C24's Eq. 46, mean_k u_k, lacks the factor. Invariant to
layer-wise and neuron-wise rescalings for every δ, which is scaled as θ is.

The limit is that of twice differentiable models. Behind a ReLU kinks keep the value from it: a sample whose distance to
a kink is about ρ adds a rise of order ρ/n, and so one of order 1/(ρn) to S_ρ, which no Hessian sees. A smaller ρ may
make it worse until ρ is small against the distance of every sample. A network of 16 ReLU units on 40 samples has S_ρ =
5.6 at ρ = 1e-3, 12.7 at 1e-4 and 0.34 at 1e-6, for Σ_j θ_j² H_jj = 0.344.

C24: "From Loss Flatness to Compressed Representations".
"""

from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from ..model import calling, parameters, state
from ..numerics.variances import standard_error
from ..options import CALL, How, Options, check_flag, check_number, check_probes
from ..report import Estimate
from ..session import public, session
from .base import Measure, Task

RHO, PROBES = 0.1, 32


@public(*CALL, "seed", "nan_policy")
def adaptive_sharpness_mc(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    rho: float = RHO,
    probes: int = PROBES,
    scaled: bool = True,
    **how: Unpack[How],
) -> Estimate:
    """Return a network's average-case adaptive sharpness: the mean rise of the loss under noise of size ρ |θ_j|.

    (2/ρ²) E[L(θ + δ) - L(θ)], δ ~ N(0, ρ² diag θ²), over all trainable parameters   ("From Loss Flatness to Compressed
    Representations", Eq. 38). ``pf.measure(…, measures="adaptive_sharpness_mc")`` is this with its defaults.

    As ρ → 0 it is Σ_j θ_j² H_jj (``adaptive_sharpness``) where the model is twice differentiable. Behind a ReLU it is
    that only if ρ is small against the distance of every sample to a kink: near ones add a rise of their own.

    Args:
        data: … They are read once per probe, and once more.
        rho: ρ, the relative size of the noise.
        probes: pairs ±δ.
        scaled: False leaves out the factor 2/ρ², as Eq. 46 does.
        seed: of the noise; another device gives other noise for it.
        nan_policy: ``"raise"`` or ``"propagate"``; no sample can be left out.

    Returns:
        The value with its standard error over probes, of ``probes - 1`` degrees of freedom.

    Raises:
        InputError: options that do not fit, or see :func:`pyflatness.relative_flatness`; no trainable parameter.
        NonFiniteError: a loss that is NaN or infinite, but under ``nan_policy="propagate"``.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(4, 3)
        >>> data = torch.randn(100, 4), torch.randint(3, (100,))
        >>> value = pf.measures.adaptive_sharpness_mc(model, torch.nn.CrossEntropyLoss(), data, probes=8)
        >>> value.samples, value.stderr > 0
        (100, True)
    """
    rho, probes, scaled = check_number("rho", rho), check_probes("probes", probes, 2), check_flag("scaled", scaled)
    with session(model, loss, data, Options.of(how), how, reads=probes + 1) as task:
        estimate = _estimate(task, rho, probes, scaled=scaled)
        task.unite()
        return task.noted(estimate)


def _estimate(task: Task, rho: float = RHO, probes: int = PROBES, *, scaled: bool = True) -> Estimate:
    policy = task.options.nan_policy
    theta = parameters.trainable(task.model)
    generator = torch.Generator(state.device(task.model)).manual_seed(task.options.seed)
    (own,) = task.risks([{}], policy)
    rises = []
    for _ in range(probes):
        noise = parameters.noise(theta, generator)
        spreads = (lambda w: rho * w), (lambda w: -rho * w)
        points = [parameters.displaced(theta, noise, spread) for spread in spreads]
        with calling.dry_run():
            up, down = task.risks(points, policy)
        rises.append((up.value + down.value) / 2 - own.value)
    rise, factor = torch.tensor(rises, dtype=torch.float64, device="cpu"), 2 / rho**2 if scaled else 1.0
    return Estimate(
        value=factor * float(rise.mean()),
        stderr=float(standard_error(rise, factor)),
        samples=own.samples,
        method="monte-carlo",
        exact=False,
        backend="reference",
        notes=(f"adaptive_sharpness_mc: ρ = {rho}, {probes} pairs of probes",),
        dof=probes - 1,
    )


ADAPTIVE_SHARPNESS_MC = Measure(
    name="adaptive_sharpness_mc",
    formula="(2/ρ²) E[L(θ + δ) - L(θ)], δ ~ N(0, ρ² diag θ²), ρ = 0.1, all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Eq. 38 and appendix F",
    of_network=_estimate,
    invariant="layer-wise, neuron-wise",
    cost=f"{2 * PROBES + 1} forward passes",
    reads=PROBES + 1,
)

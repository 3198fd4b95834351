"""Compute the constants of the representativeness bound (Petzka et al. 2021, Proposition 12 and its proof).

    |E_Rep| ≤ (C_1 + C_2/√Δ) n^(-2/(4+m)) + O(n^(-3/(4+m)))        with probability 1 - Δ,  δ = n^(-1/(4+m))
    C_1 = τ_2 L ∫ |∇²(p(z) |z|²)| dz      C_2 = √(α β) L √Vol
    τ_2 = ∫ |z|² k_1(0, z) dz      β = ∫ k_1(0, z)² dz      α = ∫ p(z)/|z|^m dz

for a loss of at most L, features of density p on a set of volume Vol, and the kernel k_1(0, z) ∝ exp(-|z|²/2) on
|z| < 1. τ_2 and β are the kernel's alone: with radius r they are ratios of ∫_0^1 r^(a-1) exp(-b r²/2) dr, incomplete
gamma functions. α is the mean of |φ_i|^-m, in logarithms. p is not known; ∫ |∇²(p|z|²)| is taken for the normal density
of the features' mean μ and covariance Σ, as a mean over draws of it of the absolute value of

    ∇²(p|z|²)/p = |z|² (|s|² - Tr Σ⁻¹) + 4 ⟨z, s⟩ + 2m,     s = ∇ log p = -Σ⁻¹ (z - μ)

Vol is that of the ball around the features' mean that holds them all. The proof's step before the last has τ_2/2, the
statement τ_2, as here. In more than a few dimensions the constants are astronomical, and the bound says nothing: that
is what the logarithms are for. α is infinite for every density that does not vanish at 0, whatever its sample mean is.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..messages import check_tensor, in_words
from ..model import layers
from ..options import check_draws, check_number, check_seed
from ..session import public


@dataclass(frozen=True)
class DensityConstants:
    """Hold what the bound of representativeness is made of.

    Attributes:
        tau: τ_2.
        log_beta: log β.
        log_alpha: log α.
        curvature: ∫ |∇²(p |z|²)| dz.
        log_volume: log Vol.
        log_first: log C_1.
        log_second: log C_2.
        features: m.
        samples: n.
    """

    tau: float
    log_beta: float
    log_alpha: float
    curvature: float
    log_volume: float
    log_first: float
    log_second: float
    features: int
    samples: int

    def __repr__(self) -> str:
        return in_words(
            self,
            f"log C_1 = {self.log_first:.6g}",
            f"log C_2 = {self.log_second:.6g}",
            f"τ_2 = {self.tau:.4g}",
            f"log α = {self.log_alpha:.4g}",
            f"log β = {self.log_beta:.4g}",
            f"∫ |∇²(p |z|²)| = {self.curvature:.4g}",
            f"log Vol = {self.log_volume:.4g}",
            f"m = {self.features}",
            f"n = {self.samples}",
        )

    def log_bound(self, failure: float) -> float:
        """Return the logarithm of (C_1 + C_2/√Δ) n^(-2/(4+m)).

        Args:
            failure: Δ, the probability in (0, 1) with which it need not hold.

        Raises:
            InputError: no such probability.
        """
        failure = check_number("failure", failure, "a number between 0 and 1", lambda given: 0 < given < 1)
        terms = torch.tensor(
            [self.log_first, self.log_second - math.log(failure) / 2], dtype=torch.float64, device="cpu"
        )
        return float(terms.logsumexp(dim=0)) - 2 / (4 + self.features) * math.log(self.samples)


@public
def density_constants(
    features: Tensor, largest_loss: float, *, volume: float | None = None, draws: int = 10_000, seed: int = 0
) -> DensityConstants:
    """Return the constants C_1 and C_2 of the representativeness bound, with a normal density of the features.

    They are those of Petzka et al. (2021), Proposition 12; see the module for their formulas.

    Args:
        features: φ, (n, m) with n > m.
        largest_loss: L, positive.
        volume: Vol of the set in which features lie; None: of the ball around their mean that holds them.
        draws: of the normal density, for the integral.
        seed: of the draws.

    Returns:
        The constants, most of them as logarithms.

    Raises:
        InputError: features of one point or on a subspace, where they have no density; numbers that do not fit.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> found = pf.density_constants(torch.randn(1000, 2) + 3, 2.0)
        >>> round(found.tau, 4), found.log_bound(0.1) > found.log_bound(0.5)
        (0.4585, True)
    """
    features = check_tensor("features", features).detach()
    layers.check_dtype("features", features.dtype)
    largest_loss, draws = check_number("largest_loss", largest_loss), check_draws("draws", draws, 2)
    if features.ndim != 2 or len(features) <= features.shape[1]:
        raise InputError(f"features: (n, m) with n > m is wanted, got shape {tuple(features.shape)}")
    phi = features.double().cpu()
    n, m = phi.shape
    log_kernel = _log_radial(m, 1.0)
    tau = math.exp(_log_radial(m + 2, 1.0) - log_kernel)
    log_beta = _log_radial(m, 2.0) - 2 * log_kernel - _log_sphere(m)
    log_alpha = float((-m * phi.norm(dim=1).log()).logsumexp(dim=0)) - math.log(n)
    mean = phi.mean(dim=0)
    radius = float((phi - mean).norm(dim=1).max())
    if volume is None:
        log_volume = _log_sphere(m) - math.log(m) + m * math.log(radius) if radius else -math.inf
    else:
        log_volume = math.log(check_number("volume", volume))
    curvature = _curvature(phi, mean, draws, check_seed("seed", seed))
    log_first = math.log(tau * largest_loss * curvature)
    log_second = (log_alpha + log_beta + log_volume) / 2 + math.log(largest_loss)
    return DensityConstants(tau, log_beta, log_alpha, curvature, log_volume, log_first, log_second, m, n)


def _log_sphere(m: int) -> float:
    """Return the logarithm of the area of the unit sphere of R^m."""
    return math.log(2) + m / 2 * math.log(math.pi) - math.lgamma(m / 2)


def _log_radial(a: int, b: float) -> float:
    """Return the logarithm of ∫_0^1 r^(a-1) exp(-b r²/2) dr."""
    half = torch.tensor([a / 2, b / 2], dtype=torch.float64, device="cpu")
    inner = float(torch.special.gammainc(*half).log())
    if math.isfinite(inner):
        return inner + math.lgamma(a / 2) - math.log(2) - a / 2 * math.log(b / 2)
    return -b / 2 - math.log(a)  # the first term of the series in 1/a; gammainc has underflowed


def _curvature(phi: Tensor, mean: Tensor, draws: int, seed: int) -> float:
    m = phi.shape[1]
    factor, info = torch.linalg.cholesky_ex(torch.cov(phi.t()).view(m, m))
    if bool(info):
        raise InputError(f"features: they lie on a subspace of the {m} dimensions, where they have no density")
    generator = torch.Generator("cpu").manual_seed(seed)
    normal = torch.randn(draws, m, generator=generator, dtype=torch.float64, device="cpu")
    z = mean + normal @ factor.t()
    score = -torch.linalg.solve_triangular(factor.t(), normal.t(), upper=True).t()
    trace = torch.cholesky_inverse(factor).diagonal().sum()
    laplacian = z.square().sum(dim=1) * (score.square().sum(dim=1) - trace) + 4 * (z * score).sum(dim=1) + 2 * m
    return float(laplacian.abs().mean())

"""Compute confidence intervals of sampled values by Student's t.

A value with the standard error s of ν degrees of freedom lies within t s of the truth with probability ``level``, where
t is the quantile for which a variable of Student's t distribution with ν degrees of freedom has P(|T| ≤ t) = level.

Standard errors here are roots of sums V = Σ_i v_i of independent variances, each estimated from a few draws with ν_i
degrees of freedom, of which a few may carry the sum. V has those of the chi-squared distribution with its mean and
variance (Satterthwaite 1946, Welch 1947), V² / Σ_i (v_i² / ν_i): ν_i where v_i is all of V, n ν_i for n equal ones.
"""

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from .report import Estimate

AGREEING = 1e-6  # of a value: probes that differ by less agree by chance or up to rounding, and show no error
_LARGE = 1e4  # degrees of freedom from which an expansion in their inverse is exact to 1e-11


def interval(value: float, stderr: float, dof: float | None, level: float = 0.95) -> tuple[float, float] | None:
    """Return the ends of value ± t stderr, t Student's quantile; None where they are not known."""
    quantile = student_t(level, dof or math.inf)
    if not dof or not math.isfinite(stderr) or not math.isfinite(value):
        return None
    return value - quantile * stderr, value + quantile * stderr


def together(terms: Sequence["Estimate"]) -> tuple[float | None, float | None]:
    """Return a bound of the standard error of a sum of estimates from the same draws, and its degrees of freedom.

    Errors from the same draws may be correlated, so that theirs add up. The fewest degrees of freedom count.
    """
    sampled = [estimate for estimate in terms if estimate.stderr is not None]
    if not sampled:
        return None, None
    dofs = [estimate.dof for estimate in sampled if estimate.dof is not None]
    stderr = sum(estimate.stderr or 0.0 for estimate in sampled)
    return stderr, min(dofs) if len(dofs) == len(sampled) else None


def shown(value: float, ends: Sequence[float] | None) -> str:
    """Return a value and interval as "1.066 [1.046, 1.086]", to two digits of half its length; "1.06608 [–]"."""
    if ends is None:
        return f"{value:.6g} [–]"
    half = (ends[1] - ends[0]) / 2
    places = 1 - math.floor(math.log10(half)) if 0 < half < math.inf else None

    def rounded(number: float) -> str:
        if places is None or number == 0:
            return f"{number:.6g}"
        digits = places + 1 + math.floor(math.log10(abs(number)))
        return f"{round(number, places) + 0.0:.{max(6, digits)}g}"  # no -0

    return f"{rounded(value)} [{rounded(ends[0])}, {rounded(ends[1])}]"


@functools.lru_cache(maxsize=1024)
def student_t(level: float, dof: float) -> float:
    """Return t with P(|T| ≤ t) = ``level`` for Student's t distribution; of infinite ``dof`` the normal one.

    P(|T| > t) is convex in t > 0, so that Newton's steps from 0 come up to the root from one side.
    """
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 < level < 1:
        raise InputError(f"level={level!r}: a probability between 0 and 1 is wanted, 0.95 for a 95 % interval")
    if dof >= _LARGE:
        return _near_normal(level, dof)
    t = 0.0
    while True:
        beyond, density = _tail(t, dof)
        step = (beyond - (1 - level)) / (2 * density)
        t += step
        if step <= 1e-14 * t:
            return t


def _near_normal(level: float, dof: float) -> float:
    """Return the quantile by its expansion in 1/ν (Abramowitz and Stegun 1964, 26.7.5)."""
    z = -NormalDist().inv_cdf((1 - level) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / dof + second / dof**2 + third / dof**3


def _tail(t: float, dof: float) -> tuple[float, float]:
    """Return P(|T| > t) = I_x(ν/2, 1/2) with x = ν / (ν + t²), and the density at t."""
    a, b, square = dof / 2, 0.5, t * t
    log_density = math.lgamma(a + b) - math.lgamma(a) - 0.5 * math.log(dof * math.pi)
    density = math.exp(log_density - (a + b) * math.log1p(square / dof))
    x = dof / (dof + square)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - 2 * t * density * _fraction(b, a, square / (dof + square)), density
    return 2 * t * density * _fraction(a, b, x) * b / a, density


def _fraction(a: float, b: float, x: float) -> float:
    """Return a I_x(a, b) B(a, b) / (x^a (1 - x)^b): a continued fraction (Abramowitz and Stegun, 26.5.8), by Lentz."""
    tiny = 1e-300
    value, c, d, m = 1.0, 1.0, 0.0, 0
    while True:
        for odd in (False, True) if m else (True,):
            k = a + 2 * m
            factor = -(a + m) * (a + b + m) * x / (k * (k + 1)) if odd else m * (b - m) * x / ((k - 1) * k)
            d = 1 / (1 + factor * d or tiny)
            c = 1 + factor / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            return 1 / value
        m += 1

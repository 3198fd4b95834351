"""Choose which columns of a sample's square-root factor go backward together, from the outputs alone.

A sample's columns s_c of all its loss terms, of weights w_c ≈ |s_c|² (cross-entropy: scale · p_c), are cut into groups
of about equal weight τ, and the probe of a group g is one cotangent Σ_{c∈g} r_c s_c with random signs r: fewer
cotangents than columns. Different groups have no cross terms; a column heavier than τ is alone in its group and so
exact; one group is plain sampling, τ → 0 the exact sweep.

In units of weights the variance of a group's value is v_g = 2 [(Σ_{c∈g} w_c)² - Σ_{c∈g} w_c²].

The true variance is measured: the probes of some groups have a replicate with independent signs. If a
group is replicated with probability π, the mean of both values counts, and for their difference d

    (d²/2) (1/π - ½)   if it was replicated, else 0

is an unbiased estimate of the variance v (1 - π/2).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RTOL = 0.01  # of a value's standard error, unless the user gives one
REPLICATED = 0.15  # groups that have a replicate, per sample
_AT_LEAST = 64  # replicates over all data, if there are as many groups, in the first micro-batch
_FIRST = 16, 64  # samples in the first micro-batch, at least and at most
_RATIO, _PRIOR = 0.25, 8  # prior ratio of the variance to Σ v_g, and its weight in replicates
_STEPS = 12  # of bisection, by which six decades give τ to 0.4 %
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Groups:
    """Hold the probe groups of samples, numbered from 0 in each, heavy columns first."""

    of: Tensor  # (n, columns) int64, the group of each column; -1 for weight 0, which is not sent
    counts: Tensor  # (n,) int64, groups of each sample
    variances: Tensor  # (n, largest count) float64, v_g; 0 for a group of one column, and without a group


@dataclass(frozen=True)
class Probes:
    """Hold the probes to send backward: one for each group of each sample in turn, then the replicates; (s,) each."""

    samples: Tensor  # places of the samples
    groups: Tensor  # of the sample
    replicates: Tensor  # 0, or 1 for a replicate
    rounds: Tensor  # places among the sample's probes, from 0
    pairs: Tensor  # number of the pair of probe and replicate, or -1
    chances: Tensor  # (pairs,) float64, π

    @property
    def fractions(self) -> Tensor:
        """Return the fraction of a group's value that each probe gives, (s,) float64."""
        return torch.where(self.pairs >= 0, 0.5, 1.0).double()

    def common_rounds(self, having: float) -> int:
        """Return how many rounds have probes of at least ``having`` samples, or 1; later rounds have fewer."""
        return max(1, int((self.rounds.bincount() >= having).sum()))


class Tolerance:
    """Allow micro-batches a variance such that values have a relative standard error of about ``rtol``.

    The variance of a layer's value is Σ v_g, in units of weights, times a factor of the layer. The factor
    is measured by the replicates of earlier micro-batches, so that a sample's own probes do not influence their number;
    the layer that allows least decides. Before there are replicates, values are taken as proportional to weights.
    """

    def __init__(self, rtol: float, samples: int) -> None:
        self._rtol, self._samples = rtol, samples
        self._weight, self._bound, self._seen = 0.0, 0.0, 0
        self._sums = torch.zeros(3, 1, 1, dtype=torch.float64, device="cpu")  # values, their variances, and squares
        self.replicates = 0

    @property
    def first(self) -> int:
        """Return the number of samples of the first micro-batch, before anything is known."""
        return min(_FIRST[1], max(_FIRST[0], self._samples // 8)) if self._samples else _FIRST[1]

    def allowed(self, weights: Tensor, share: float = 1.0) -> float:
        """Return the largest Σ v_g for n samples of ``weights`` (n, columns), which have a ``share`` of the variance.

        With K the value of the N samples as those so far say, V = (1 + 4/ν) Σ v_i the variance by ν = (Σ v_i)² / Σ v_i²
        degrees of freedom, and k the replicates so far, it is

            ((rtol K)² - V) n / (samples to come) / c        c = (K / R)² (k ρ + k₀ ρ₀) / (k + k₀)

        where R is the weight of K, and ρ = (V / B) / (K / R)² is what a unit of Σ v_g costs, in units of the value:
        B is Σ v_g (1/π - ½) over the replicates. The v_i are those of replicates. Where few have most of the variance,
        ν is small and Σ v_i by itself mostly too small: of one in proportion to χ²_ν the inverse is ν/(ν - 2) times too
        large in the mean. The largest of many layers' ρ is mostly one that came out too large. So each ρ is brought
        nearer to their mean, by the fraction that its noise has in how they vary over layers (empirical Bayes: Efron &
        Morris, https://doi.org/10.1080/01621459.1975.10479864). The relative variance of the noise is 2/3 Σ v_i² /
        (Σ v_i)². A part of the data that spent too much does not leave less than half of what is due to the others.
        """
        samples, seen = len(weights), self._seen
        total = self.expected(samples)
        if self._bound:
            values, variances, squares = self._sums
            spent = variances + 4 * (squares / variances).nan_to_num(0.0)
            every = values.abs() * total / seen
            whole = share * (self._rtol * every).square()
            due = torch.maximum((whole - spent) / (total - seen), whole / (2 * total))
            unit = (values / self._weight).square()
            ratios = _towards_the_mean(spent / self._bound / unit, 2 / 3 * squares / variances.square())
            ratios = (self.replicates * ratios + _PRIOR * _RATIO) / (self.replicates + _PRIOR)
            found = float((samples * due / (ratios * unit)).where(variances > 0, torch.inf).min())
            if found < math.inf:
                return found
        mean = (self._weight + float(weights.sum())) / (seen + samples)
        return share * (self._rtol * mean) ** 2 * total * samples / _RATIO

    def expected(self, more: int) -> int:
        """Return the samples of all data, or those so far and ``more`` if their number is not known."""
        return max(self._samples, self._seen + more)

    def add(self, weights: Tensor, values: Tensor, variances: Tensor, replicated: Tensor) -> None:
        """Add a micro-batch: values (layers, quantities, n), variances as :meth:`.Grouped.variances`, v_g (1/π - ½)."""
        found = torch.cat([values.unsqueeze(0), variances[:2]])
        found = found.where(found.isfinite().all(dim=0), 0.0)
        self._sums = self._sums.to(found.device) + found.sum(dim=3)
        self._weight, self._seen = self._weight + float(weights.sum()), self._seen + len(weights)
        self._bound, self.replicates = self._bound + float(replicated.sum()), self.replicates + len(replicated)


def _towards_the_mean(found: Tensor, noise: Tensor) -> Tensor:
    """Return estimates (layers, quantities), each nearer to the mean over layers by its noise in how they vary.

    ``noise`` are their variances over their squares; estimates that are NaN or 0 have no say.
    """
    known = found > 0
    count = known.sum(dim=0)
    mean = found.where(known, 0.0).sum(dim=0) / count
    deviations = (found - mean).where(known, 0.0)
    variances = (noise * found.square()).where(known, 0.0)
    between = (deviations.square().sum(dim=0) / (count - 1) - variances.sum(dim=0) / count).clamp_min(0.0)
    return torch.where(count > 1, mean + deviations * (between / (between + variances)).nan_to_num(1.0), found)


def group(weights: Tensor, allowed: float) -> Groups:
    """Group columns by weights (n, columns), in groups as large as Σ v_g ≤ ``allowed`` permits, about."""
    numbers = cut(weights, threshold(weights, allowed))
    counts = numbers.amax(dim=1) + 1
    size, index = int(counts.max()), numbers.clamp_min(0)
    none = weights.new_zeros(len(weights), max(1, size))
    weight, squares, columns = (
        none.scatter_add(1, index, part) for part in (weights, weights.square(), (numbers >= 0).to(weights.dtype))
    )
    least = torch.finfo(weight.dtype).eps * weight.square()  # smaller differences are rounding
    variances = torch.where(columns > 1, 2 * torch.maximum(weight.square() - squares, least), 0.0)
    return Groups(numbers, counts, variances)


def threshold(weights: Tensor, allowed: float) -> float:
    """Return about the largest weight τ of groups with 2 Σ_i [m_i min(m_i, τ) - Σ_{c: w_c < τ} w_c²] ≤ ``allowed``.

    m_i is the weight of sample i's columns below τ, which fall into about m_i / τ groups. Since the sum is at most
    2 τ Σ m_i, τ is ``allowed`` / (2 Σ m_i) at least.
    """
    sums = weights.sum(dim=1)
    low, high = allowed / (2 * max(float(sums.sum()), _TINY)), 1.0001 * float(sums.max())

    def predicted(tau: float) -> float:
        below = weights.where(weights < tau, 0.0)
        light = below.sum(dim=1)
        return 2 * float((light * light.clamp(max=tau) - below.square_().sum(dim=1)).clamp_min(0).sum())

    if high <= max(low, _TINY) or predicted(high) <= allowed:
        return high or 1.0
    for _ in range(_STEPS if low else 0):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (middle, high) if predicted(middle) <= allowed else (low, middle)
    return max(low, _TINY)


def cut(weights: Tensor, tau: float) -> Tensor:
    """Return the group of each column, (n, columns) int64, -1 for weights 0.

    Columns of at least τ come first, each alone; the others in their order.
    """
    heavy = weights >= tau
    filled = (weights / tau).masked_fill_(heavy, 0.0)
    light = (filled.cumsum(1) - filled / 2).floor_().long() + heavy.sum(dim=1, keepdim=True)
    return torch.where(heavy, heavy.cumsum(1) - 1, light).masked_fill_(weights == 0, -1)


def chances(variances: Tensor, replicates: int) -> Tensor:
    """Return π for each group, (n, groups), proportional to √v: enough of them, given the ``replicates`` so far."""
    roots = variances.sqrt()
    wanted = max(REPLICATED * len(variances), _AT_LEAST - replicates)
    return (wanted * roots / roots.sum().clamp_min(torch.finfo(roots.dtype).tiny)).clamp(max=1)


def probes(groups: Groups, probabilities: Tensor, uniform: Tensor) -> Probes:
    """Return a probe of every group, and a replicate where ``uniform`` in [0, 1) is below π; both (n, groups)."""
    replicated = uniform < probabilities
    samples, numbers = (
        (torch.arange(replicated.shape[1], device=replicated.device) < groups.counts.unsqueeze(1)).nonzero().t()
    )
    again, repeated = replicated.nonzero().t()
    rounds = groups.counts[again] + (replicated.long().cumsum(1) - 1)[again, repeated]
    pairs = torch.full_like(replicated, -1, dtype=torch.long)
    pairs[again, repeated] = torch.arange(len(again), device=replicated.device)
    first = torch.cat([samples, again]), torch.cat([numbers, repeated])
    return Probes(
        samples=first[0],
        groups=first[1],
        replicates=torch.cat([torch.zeros_like(samples), torch.ones_like(again)]),
        rounds=torch.cat([numbers, rounds]),
        pairs=pairs[first],
        chances=probabilities[again, repeated],
    )

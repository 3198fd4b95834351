"""Bound feature robustness and the generalisation gap (Petzka et al. 2021, Theorems 5, 6 and 14, Figure 4).

    E_gen = E_Rep + E_F ≤ δ² κ / (2m) + |E_Rep|,   δ = n^(-1/(4+m))

to second order in δ, with labels locally constant. The first term bounds E_F on average over rO, r ≤ δ. |E_Rep| depends
on the distribution of the data; it is replaced by its plug-in estimate by folds (:mod:`.sampling`). So this is an
approximation of the bound, as in the paper's Figure 4, and not a bound: ψ has seen the folds that are held out, and
where it has fitted them better than new data the measured gap is larger. The plug-in estimate with a ψ fitted on each
fold's sample is :func:`pyflatness.theory.representativeness` with ``fit=``, for a head. Uniform bounds over all
|A| ≤ δ, at a minimum and to second order, follow from other measures:

    E_F ≤ δ² d/2 κ^φ (Theorem 14)         E_F ≤ δ²/2 |w|² λ_max (Petzka et al. 2019, appendix C.1)

With the first of them the gap is bounded for every distribution of feature matrices |A| < δ, so that the most
representative one can be taken (Theorem 15; ``uniform=True``). Here it is chosen among the kernels of bandwidth rδ|φ|,
r = ¼, ½, ¾, 1. The theorem's statement has a sum over the rows in front of κ^φ that is not in its proof.

**The constants of the representativeness bound** (Proposition 12 and its proof).

    |E_Rep| ≤ (C_1 + C_2/√Δ) n^(-2/(4+m)) + O(n^(-3/(4+m)))        with probability 1 - Δ,  δ = n^(-1/(4+m))
    C_1 = τ_2 L ∫ |∇²(p(z) |z|²)| dz      C_2 = √(α β) L √Vol
    τ_2 = ∫ |z|² k_1(0, z) dz      β = ∫ k_1(0, z)² dz      α = ∫ p(z)/|z|^m dz

for a loss of at most L, features of density p on a set of volume Vol, and the kernel k_1(0, z) ∝ exp(-|z|²/2) on
|z| < 1. τ_2 and β depend on the kernel alone: with radius r they are ratios of ∫_0^1 r^(a-1) exp(-b r²/2) dr,
incomplete gamma functions. α is the mean of |φ_i|^-m, computed in logarithms. p is unknown; ∫ |∇²(p|z|²)| is taken for
the normal density with the features' mean μ and covariance Σ, as a mean over samples of this density of the absolute
value of

    ∇²(p|z|²)/p = |z|² (|s|² - Tr Σ⁻¹) + 4 ⟨z, s⟩ + 2m,     s = ∇ log p = -Σ⁻¹ (z - μ)

Vol is that of the ball around the features' mean that holds them all. The last step but one of the proof has τ_2/2, the
statement τ_2, as here. In more than a few dimensions the constants are astronomical, hence the logarithms, and the
bound says nothing. α is infinite for every density that does not vanish at 0, whatever its sample mean is.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError
from ..losses import Loss
from ..measures import RELATIVE_FLATNESS
from ..measures.relative_flatness import relative_flatness_max
from ..messages import check_tensor, in_words
from ..model import data, layers
from ..model.data import Batches
from ..model.selectors import Selector
from ..numerics.process_groups import refuse
from ..options import CALL, How, Options, check_count, check_flag, check_number, check_probes
from ..plan import of_layer
from ..report import Estimate
from ..session import public, session
from .gap import GeneralizationGap, performance
from .perturbed import Perturbed, kernel_noise
from .sampling import FOLDS, PROBES, NoiseSums, Representativeness, assigned, default_rho, summary

_FRACTIONS = (0.25, 0.5, 0.75, 1.0)  # of δ, the bandwidths that Theorem 15 chooses among


def uniform_robustness_bound(rho: float, rows: int, maximal_flatness: float) -> float:
    """Return δ² d/2 κ^φ, a bound of E_F over all feature matrices |A| ≤ δ at a minimum, up to O(δ³).

    It is Theorem 14 of Petzka et al. (2021).

    Args:
        rho: δ.
        rows: d, rows of the weight matrix.
        maximal_flatness: κ^φ = Σ_s |w_s|² λ_max(H_ss)   (Definition 13).

    Returns:
        The bound, in units of the loss.

    Raises:
        InputError: numbers that do not fit.

    Example:
        >>> import pyflatness as pf
        >>> round(pf.theory.uniform_robustness_bound(0.1, 2, 1.286842), 8)
        0.01286842
    """
    rho, rows = check_number("rho", rho), check_count("rows", rows, 1)
    return rho**2 * rows / 2 * _number("maximal_flatness", maximal_flatness)


def spectral_robustness_bound(rho: float, weight_norm: float, lambda_max: float) -> float:
    """Return δ²/2 |w|² λ_max, a bound of E_F over all |A| ≤ δ at a minimum, up to O(δ³).

    It is found in Petzka et al. (2019), appendix C.1.

    Args:
        rho: δ.
        weight_norm: |w|², the squared Frobenius norm, as the measure ``weight_norm``.
        lambda_max: the largest eigenvalue of the Hessian in w.

    Returns:
        The bound, in units of the loss.

    Raises:
        InputError: numbers that do not fit.

    Example:
        >>> import pyflatness as pf
        >>> round(pf.theory.spectral_robustness_bound(0.1, 5.0, 0.514737), 8)
        0.01286843
    """
    rho = check_number("rho", rho)
    return rho**2 / 2 * _number("weight_norm", weight_norm) * _number("lambda_max", lambda_max)


@dataclass(frozen=True, repr=False)
class GeneralizationBound:
    """Hold the approximate bound of a network's generalisation gap with its terms, and the gap on test data.

    Attributes:
        bound: ``flatness`` + ``representativeness.magnitude``.
        flatness: δ² κ / (2m); of the uniform bound δ² d/2 κ^φ.
        representativeness: by folds; its ``test`` is E_gen = E_Rep + E_F with the test data.
        kappa: κ, or κ^φ of the uniform bound, of the mean loss.
        rho: δ of the first term. ``representativeness`` has δ of the noise, which may be smaller for the uniform bound.
        features: m.
        samples: n.
        layer: the name of the layer whose inputs are the features.
        measured: loss and accuracy on training and test data; None without test data.
    """

    bound: float
    flatness: float
    representativeness: Representativeness
    kappa: float
    rho: float
    features: int
    samples: int
    layer: str
    measured: GeneralizationGap | None = None

    def __repr__(self) -> str:
        terms = f"{self.flatness:.4g} flatness + {self.representativeness.magnitude:.4g} representativeness"
        facts = [
            f"{self.bound:.6g} = {terms}",
            f"layer {self.layer!r}",
            f"κ = {self.kappa:.6g}",
            f"δ = {self.rho:.4g}",
            f"m = {self.features}",
            f"{self.samples} samples",
        ]
        test = self.representativeness.test
        if test is not None:
            split = f"{test.representativeness:.4g} representativeness + {test.robustness:.4g} robustness"
            facts.insert(1, f"measured gap {test.gap:.6g} = {split}")
        return in_words(self, *facts)


@public(*CALL, "seed")
def generalization_bound(
    model: nn.Module,
    loss: Any = "auto",
    train: Any = ...,
    layer: Selector | None = None,
    *,
    test: Any = None,
    uniform: bool = False,
    rho: float | None = None,
    kappa: Estimate | float | None = None,
    folds: int = FOLDS,
    probes: int = PROBES,
    **how: Unpack[How],
) -> GeneralizationBound:
    """Return the approximate bound of the generalisation gap by relative flatness and representativeness.

    δ² κ/(2m) + |E_Rep|, δ = n^(-1/(4+m)), |E_Rep| a mean over folds   (Petzka et al. 2021, Theorem 6 and Figure 4).
    Labels are taken as constant around the features of each sample. Do not rely on it as a bound: the model has been
    trained on the folds that are held out, so that an overfitted network can have a larger gap. ``test=`` shows the
    measured gap beside it.

    Args:
        loss: … All values are means over its terms.
        train: the training data: a tuple of tensors (inputs, targets), or an iterable of such batches that can be read
            several times.
        layer: a Linear layer that gets one feature vector a sample; None takes the last Linear that ran.
        test: test data, for the measured gap and its decomposition E_gen = E_Rep + E_F.
        uniform: take the bound of Theorem 15: δ² d/2 κ^φ in place of δ² κ/(2m), at a minimum, and the smallest |E_Rep|
            among four bandwidths of the noise. It needs Lanczos iterations, and four times the noise.
        rho: δ; None: n^(-1/(4+m)).
        kappa: κ, or κ^φ with ``uniform=True``, of the same loss and reduction, if you know it or measured it with
            options of your own.
        folds: of the training data, for representativeness.
        probes: pairs ±ξ of noise for each sample, at least 2.
        seed: of folds and noise. Noise differs between devices.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        The bound, its terms, and the gap beside it.

    Raises:
        FlatnessError: see :func:`pyflatness.relative_flatness`; features that are not one vector a sample.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(600, 8).double()
        >>> y, model = (x[:, 0] > 0).long(), torch.nn.Linear(8, 2).double()
        >>> data = (x[:300], y[:300]), (x[300:], y[300:])
        >>> found = pf.theory.generalization_bound(model, torch.nn.CrossEntropyLoss(), data[0], test=data[1])
        >>> parts = found.representativeness.test
        >>> abs(parts.gap - found.measured.gap) < 1e-12, found.rho == 300 ** (-1 / 12)
        (True, True)
    """
    refuse(how.get("process_group"), "generalization_bound", "generalization_gap and relative_flatness are, ")
    folds, probes = check_count("folds", folds, 2), check_probes("probes", probes, 2)
    seed = Options.of(how).seed
    kappa, uniform = None if kappa is None else _number("kappa", kappa), check_flag("uniform", uniform)
    rho = None if rho is None else check_number("rho", rho)
    with session(model, loss, train, how=how, reads=3) as task:
        perturbed = Perturbed(task, layer)
        name, m = perturbed.name, _features(perturbed)
        samples = sum(data.size(batch) for batch in task.batches)
        rho = default_rho(samples, m) if rho is None else rho
        places = assigned(samples, folds, seed)
        fractions = _FRACTIONS if uniform else (1.0,)
        every = [
            (_sums(perturbed, task.loss, task.batches, places, (folds, probes), fraction * rho, seed), fraction * rho)
            for fraction in fractions
        ]
        measured = None if test is None else GeneralizationGap(performance(task), performance(task.on(test)))
        if kappa is None:
            if uniform:
                kappa = relative_flatness_max(task.of(name))[name]
            else:
                measurement, _ = of_layer(RELATIVE_FLATNESS, task, name)
                kappa = measurement.estimates()[name, RELATIVE_FLATNESS.name]
    mean_kappa = float(kappa) / (1.0 if task.loss.reduction == "mean" else every[0][0].normaliser())
    found = min(
        (
            summary(
                [sums.without(k) for k in range(folds)],
                None if measured is None else sums.against(measured.test.loss),
                rho=bandwidth,
                features=m,
                samples=samples,
                probes=probes,
                refitted=False,
            )
            for sums, bandwidth in every
        ),
        key=lambda candidate: candidate.magnitude,
    )
    rows = perturbed.matrix.shape[1]
    flatness = uniform_robustness_bound(rho, rows, mean_kappa) if uniform else rho**2 * mean_kappa / (2 * m)
    return GeneralizationBound(flatness + found.magnitude, flatness, found, mean_kappa, rho, m, samples, name, measured)


def _features(perturbed: Perturbed) -> int:
    if layers.is_convolution(perturbed.layer):
        raise InputError(
            f"layer {perturbed.name!r} is a {type(perturbed.layer).__name__}: its patches overlap, so that there is no "
            "one feature vector for a sample; pf.theory.feature_robustness takes it"
        )
    features: int = perturbed.matrix.shape[2]
    return features


def _sums(
    perturbed: Perturbed, loss: Loss, batches: Batches, places: Tensor, counts: tuple[int, int], rho: float, seed: int
) -> NoiseSums:
    """Return the sums of the loss over each fold, both without noise on the layer's features and with it."""
    (folds, probes), start = counts, 0
    sums = NoiseSums(loss, folds, probes)
    weight = layers.as_weight(perturbed.layer, layers.matrix(perturbed.layer)[0])
    generator: torch.Generator | None = None
    for number, batch in enumerate(batches):
        outputs, targets = perturbed.outputs(batch)
        inputs, count = perturbed.inputs(), data.size(batch)
        if inputs.ndim != 2 or len(inputs) != count:
            raise InputError(
                f"batch {number}: one feature vector a sample is wanted, ({count}, m), and the layer's input is "
                f"{tuple(inputs.shape)}"
            )
        generator = generator or torch.Generator(inputs.device).manual_seed(seed)
        noise = kernel_noise(inputs, rho, probes, generator)
        noisy = (each for xi in noise for each in perturbed.displaced(weight.to(xi.dtype), (1.0, -1.0), xi))
        sums.add(outputs, targets, places[start : start + count], noisy, number)
        start += count
    return sums


def _number(name: str, value: Any) -> float:
    return check_number(name, value, "a number", lambda given: not math.isnan(given))


@dataclass(frozen=True)
class DensityConstants:
    """Hold the constants of the bound of representativeness.

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
            failure: Δ, the probability in (0, 1) that the bound does not hold.

        Raises:
            InputError: a number that is not between 0 and 1.
        """
        failure = check_number("failure", failure, "a number between 0 and 1", lambda given: 0 < given < 1)
        terms = torch.tensor(
            [self.log_first, self.log_second - math.log(failure) / 2], dtype=torch.float64, device="cpu"
        )
        return float(terms.logsumexp(dim=0)) - 2 / (4 + self.features) * math.log(self.samples)


@public("seed")
def density_constants(
    features: Tensor, largest_loss: float, *, volume: float | None = None, probes: int = 10_000, **how: Unpack[How]
) -> DensityConstants:
    """Return the constants C_1 and C_2 of the representativeness bound, with a normal density of the features.

    They are those of Petzka et al. (2021), Proposition 12; see the module for their formulas.

    Args:
        features: φ, (n, m) with n > m.
        largest_loss: L, positive.
        volume: Vol of the set in which features lie; None: the volume of the ball around their mean that holds them.
        probes: samples of the normal density that estimate the integral.

    Returns:
        The constants, most of them as logarithms.

    Raises:
        InputError: features of one point or on a subspace, where they have no density; numbers that do not fit.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> found = pf.theory.density_constants(torch.randn(1000, 2) + 3, 2.0)
        >>> round(found.tau, 4), found.log_bound(0.1) > found.log_bound(0.5)
        (0.4585, True)
    """
    features = check_tensor("features", features).detach()
    layers.check_dtype("features", features.dtype)
    largest_loss, probes = check_number("largest_loss", largest_loss), check_probes("probes", probes, 2)
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
    curvature = _curvature(phi, mean, probes, Options.of(how).seed)
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


def _curvature(phi: Tensor, mean: Tensor, probes: int, seed: int) -> float:
    m = phi.shape[1]
    factor, info = torch.linalg.cholesky_ex(torch.cov(phi.t()).view(m, m))
    if bool(info):
        raise InputError(f"features: they lie on a subspace of the {m} dimensions, where they have no density")
    generator = torch.Generator("cpu").manual_seed(seed)
    normal = torch.randn(probes, m, generator=generator, dtype=torch.float64, device="cpu")
    z = mean + normal @ factor.t()
    score = -torch.linalg.solve_triangular(factor.t(), normal.t(), upper=True).t()
    trace = torch.cholesky_inverse(factor).diagonal().sum()
    laplacian = z.square().sum(dim=1) * (score.square().sum(dim=1) - trace) + 4 * (z * score).sum(dim=1) + 2 * m
    return float(laplacian.abs().mean())

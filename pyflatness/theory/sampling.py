"""Compute representativeness (Petzka et al. 2021, Eq. 3) of a sample in feature space, by k-fold plug-in.

For a fold T of the data, S the rest, and ξ of the truncated normal kernel of bandwidth δ|φ_i| (Eq. 6),

    E_Rep = mean_T ℓ(ψ(φ_j), y_j) - (1/|S|) Σ_{i∈S} E_ξ ℓ(ψ(φ_i + ξ), y_i)
    E_F   = (1/|S|) Σ_{i∈S} E_ξ [ℓ(ψ(φ_i + ξ), y_i) - ℓ(ψ(φ_i), y_i)]
    E_gen = mean_T ℓ - mean_S ℓ = E_Rep + E_F                                                   (Eq. 5)

E_ξ is a mean over probes in pairs ±ξ. If all folds have the same ψ, their E_gen cancel, and the mean of E_Rep is -E_F
whatever the data. Informative are then the mean of |E_Rep| (``magnitude``), a ψ that is fitted on each S (``fit=``, as
in the authors' experiment), or data that ψ has not seen (``test=``). Means weight terms as the user's loss does, and
they are means for the reduction ``"sum"`` too.

**What the authors' code calls representativeness** is not Eq. 3:

    mean_{j∈T} [ ℓ(ψ(φ_j), y_j) - (1/|S|) Σ_{i∈S} v_i K(φ_j, φ_i) ℓ(ψ(φ_i), y_j) ]
    v_i = δ|φ_i| / Σ_S δ|φ|,   K(a, b) = exp(-|a - b|/2) / √(2π)

averaged over folds T. The δ|φ_i| are meant as bandwidths. The code passes them as weights to a density estimate of
bandwidth 1, which normalises them, so that δ cancels. The kernel takes √|a - b| as the distance and is normalised for
one dimension, and the sum is divided by |S| once more. The term that is subtracted from the mean loss of T is therefore
of order 1/|S|, and the value is nearly that loss. See ``SyntheticExperiments/interpolatingness.py`` in the authors'
published code.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import losses
from ..contractions import product, promoted
from ..errors import InputError
from ..losses import Loss, risk
from ..measures import tensor_head
from ..messages import check_tensor, in_words, shown
from ..numerics import accumulate
from ..numerics.process_groups import refuse
from ..numerics.variances import standard_error
from ..options import How, Options, check_count, check_function, check_number, check_probes
from ..report import intervals
from ..session import public
from .perturbed import kernel_noise

FOLDS, PROBES = 3, 32
_TOGETHER = 2**18  # entries of the outputs of all probes whose losses are computed together
_PAIRS = 2**18  # pairs of samples whose losses are computed together

Fit = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]  # (features, targets) -> (weight, bias)


@dataclass(frozen=True)
class Decomposition:
    """Hold E_gen = E_Rep + E_F (Petzka et al. 2021, Eq. 5) of held-out data and a sample.

    Attributes:
        gap: E_gen, the mean loss of the held-out data less that of the sample.
        representativeness: E_Rep.
        robustness: E_F, averaged over the kernel.
        stderr: standard error of ``representativeness`` and of ``robustness`` over the probes ξ, given the data, with
            ``probes - 1`` degrees of freedom.
    """

    gap: float
    representativeness: float
    robustness: float
    stderr: float


@dataclass(frozen=True, repr=False)
class Representativeness:
    """Hold how well samples with noise on their features represent held-out data.

    Attributes:
        value: the mean of E_Rep over the folds.
        stderr: standard error of ``value`` over the probes ξ, given the data, with ``probes - 1`` degrees of freedom.
        magnitude: the mean over the folds of |E_Rep|.
        folds: E_gen = E_Rep + E_F of each fold.
        test: the same for test data and the whole sample; None without test data.
        rho: δ.
        features: m.
        samples: n, of the whole sample.
        probes: pairs ±ξ for each sample.
        refitted: whether ψ was fitted on each fold's sample.
    """

    value: float
    stderr: float
    magnitude: float
    folds: tuple[Decomposition, ...]
    test: Decomposition | None
    rho: float
    features: int
    samples: int
    probes: int
    refitted: bool

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Return the interval that holds the mean of E_Rep over all ξ with probability ``level``, given data and folds.

        It is value ± t ``stderr``, with t the quantile of Student's t distribution.

        Args:
            level: in (0, 1).

        Raises:
            InputError: a level that is not between 0 and 1.
        """
        return intervals.interval(self.value, self.stderr, self.probes - 1, level)

    def __repr__(self) -> str:
        facts = [
            f"{intervals.shown(self.value, self.interval())} (95 % interval)",
            f"magnitude {self.magnitude:.6g}",
            f"{len(self.folds)} folds{', refitted' if self.refitted else ''}",
            f"δ = {self.rho:.4g}",
            f"m = {self.features}",
            f"{self.samples} samples",
        ]
        if self.test is not None:
            gap, first, second = self.test.gap, self.test.representativeness, self.test.robustness
            facts.append(f"test: gap {gap:.4g} = {first:.4g} + {second:.4g}")
        return in_words(self, *facts)


@public("reduction", "seed", "process_group")
def representativeness(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    loss: Any = "cross_entropy",
    rho: float | None = None,
    folds: int = FOLDS,
    probes: int = PROBES,
    fit: Fit | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    **how: Unpack[How],
) -> Representativeness:
    """Return the representativeness of a sample in the feature space of a linear head (plug-in of equation 3).

    mean_T ℓ(ψ(φ), y) - (1/|S|) Σ_S E_ξ ℓ(ψ(φ_i + ξ), y_i), ψ(φ) = wφ + b, over k folds T; ξ of
    :func:`pyflatness.theory.truncated_normal_noise`   (Petzka et al. 2021, Eq. 3, 5 and 6).

    Args:
        features: φ, (n, m), of any floating-point dtype.
        weight: w, (d, m).
        bias: (d,) or None.
        targets: what ``loss`` takes, one per sample.
        loss: ``"cross_entropy"``, ``"mse_loss"``, ``"binary_cross_entropy_with_logits"``, the ``F`` function, an ``nn``
            loss module with its options, or a callable (outputs, targets) -> scalar.
        rho: δ; None: n^(-1/(4+m)), as in Theorem 6.
        folds: k, at least 2.
        probes: pairs ±ξ for each sample, at least 2.
        fit: (features, targets) -> (weight, bias), called on the sample of each fold. None keeps w and b; the mean over
            folds of equal size is then -E_F whatever the data, so read ``magnitude``, or pass ``test``.
        test: features and targets that w was not fitted to, for E_gen = E_Rep + E_F of the whole sample.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        The value, and the decomposition of each fold.

    Raises:
        InputError: shapes, dtypes, targets or options that do not fit.
        NonFiniteError: NaN or infinity in a loss.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> phi, w = torch.randn(600, 8).double(), torch.randn(2, 8).double()
        >>> y = (phi @ w.t()).argmax(1)
        >>> found = pf.theory.representativeness(phi[:300], w, targets=y[:300], test=(phi[300:], y[300:]))
        >>> parts = found.test
        >>> abs(parts.gap - parts.representativeness - parts.robustness) < 1e-12
        True
    """
    refuse(how.get("process_group"), "representativeness")
    resolved = losses.resolve(loss, how.get("reduction"))
    folds, probes = check_count("folds", folds, 2), check_probes("probes", probes, 2)
    seed = Options.of(how).seed
    rho = None if rho is None else check_number("rho", rho)
    if test is not None and (not isinstance(test, (tuple, list)) or len(test) != 2):
        raise InputError(f"test={shown(test)}: a pair (features, targets) is wanted")
    with torch.inference_mode(False), torch.no_grad():
        psi = Psi(features, weight, bias, targets, resolved)
        n, m = psi.features.shape
        rho = default_rho(n, m) if rho is None else rho
        places = assigned(n, folds, seed)
        whole = _sums(psi, places, folds, rho, probes, seed)
        if fit is None:
            held_out = [whole.without(k) for k in range(folds)]
        else:
            refitted = [psi.refitted(fit, places != k) for k in range(folds)]
            held_out = [
                _sums(psi_k, (places == k).long(), 2, rho, probes, seed).without(1) for k, psi_k in enumerate(refitted)
            ]
        tested = None
        if test is not None:
            psi = Psi(test[0], weight, bias, test[1], resolved)
            one_group = torch.zeros(len(psi.features), dtype=torch.int64, device="cpu")
            tested = whole.against(_sums(psi, one_group, 1, rho, 0, seed).mean())
    return summary(held_out, tested, rho=rho, features=m, samples=n, probes=probes, refitted=fit is not None)


def default_rho(samples: int, features: int) -> float:
    """Return n^(-1/(4+m)) (Petzka et al. 2021, Theorem 6)."""
    return float(samples ** (-1 / (4 + features)))


def assigned(samples: int, folds: int, seed: int) -> Tensor:
    """Return the number of a random fold for each sample, (samples,); sizes of folds differ by at most one."""
    if samples < folds:
        raise InputError(f"folds={folds}: there are {samples} samples")
    order = torch.randperm(samples, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return order % folds


def summary(
    held_out: Sequence[tuple[Decomposition, Tensor]],
    test: tuple[Decomposition, Tensor] | None,
    *,
    rho: float,
    features: int,
    samples: int,
    probes: int,
    refitted: bool,
) -> Representativeness:
    """Return the result over folds, given for each held-out fold its decomposition, and E_Rep by probe (probes,)."""
    values = torch.stack([by_probe for _, by_probe in held_out])
    return Representativeness(
        value=float(values.mean()),
        stderr=float(standard_error(values.mean(dim=0))),
        magnitude=float(values.mean(dim=1).abs().mean()),
        folds=tuple(decomposition for decomposition, _ in held_out),
        test=None if test is None else test[0],
        rho=rho,
        features=features,
        samples=samples,
        probes=probes,
        refitted=refitted,
    )


class NoiseSums:
    """Sum the loss over groups of samples, without noise and for each probe of it."""

    def __init__(self, loss: Loss, groups: int, probes: int) -> None:
        self._loss = loss
        self._own, self._weights = (torch.zeros(groups, dtype=torch.float64, device="cpu") for _ in range(2))
        self._noisy = torch.zeros(probes, groups, dtype=torch.float64, device="cpu")

    def add(self, outputs: Tensor, targets: Any, groups: Tensor, noisy: Iterator[Tensor], number: int = 0) -> None:
        """Add a batch; ``noisy`` yields outputs with noise, two of opposite signs for each probe."""
        weights = risk.rows(outputs, targets, self._loss, number).terms.weights.double().cpu()
        if len(outputs) != len(groups) or len(targets) != len(groups) or len(weights) % len(groups):
            raise InputError(
                f"batch {number}: outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} do not hold "
                f"{len(groups)} samples in dimension 0"
            )
        self._weights.index_add_(0, groups, weights.view(len(groups), -1).sum(dim=1))
        order = groups.argsort(stable=True).to(outputs.device)
        sizes: list[int] = groups.bincount(minlength=len(self._own)).tolist()
        chosen = targets[order.to(targets.device)].split(sizes)
        self._own += self._values(outputs[None, order].split(sizes, dim=1), chosen, number)[0]
        together, start = 2 * max(1, _TOGETHER // outputs.numel()), 0
        while displaced := [*itertools.islice(noisy, together)]:
            values = self._values(torch.stack(displaced)[:, order].split(sizes, dim=1), chosen, number)
            self._noisy[start : start + len(displaced) // 2] += values.view(-1, 2, len(sizes)).mean(dim=1)
            start += len(displaced) // 2

    def _values(self, outputs: Sequence[Tensor], targets: Sequence[Tensor], number: int) -> Tensor:
        """Return sums of the loss, (probes, groups), of the outputs (probes, samples, …) of each group."""
        columns = [_by_probe(self._loss, f, t) for f, t in zip(outputs, targets, strict=True)]
        values = torch.stack(columns, dim=1).cpu()
        if not bool(values.isfinite().all()):
            raise risk.not_finite(number, float(values.sum()))
        return values

    def mean(self) -> float:
        """Return the mean over all samples, without noise."""
        return float(self._own.sum() / self.normaliser())

    def normaliser(self) -> float:
        """Return the normaliser of all loss terms."""
        return accumulate.normaliser(float(self._weights.sum()))

    def without(self, group: int) -> tuple[Decomposition, Tensor]:
        """Return the decomposition with one group held out and the others as the sample, and E_Rep by probe."""
        normaliser = accumulate.normaliser(float(self._weights[group]))
        return self.against(float(self._own[group]) / normaliser, torch.arange(len(self._own), device="cpu") != group)

    def against(self, held_out: float, sample: Tensor | None = None) -> tuple[Decomposition, Tensor]:
        """Return the decomposition of some groups, or all, against the mean loss of other data, and E_Rep by probe."""
        sample = torch.ones(len(self._own), dtype=torch.bool, device="cpu") if sample is None else sample
        normaliser = accumulate.normaliser(float(self._weights[sample].sum()))
        own, noisy = float(self._own[sample].sum()) / normaliser, self._noisy[:, sample].sum(dim=1) / normaliser
        smooth = float(noisy.mean())
        stderr = float(standard_error(noisy))
        return Decomposition(held_out - own, held_out - smooth, smooth - own, stderr), held_out - noisy


class Psi:
    """Hold a linear head ψ given as tensors, checked, and the data that it is evaluated on."""

    def __init__(self, features: Tensor, weight: Tensor, bias: Tensor | None, targets: Any, loss: Loss) -> None:
        targets = check_tensor("targets", targets)
        tensor_head.from_tensors(features, weight, bias, targets, loss).batch.make_terms()  # which checks them
        if features.ndim != 2:
            raise InputError(f"features: one vector a sample, (n, m), is wanted, got shape {tuple(features.shape)}")
        self.loss, self.features, self.targets = loss, promoted(features.detach()), targets.detach().to(features.device)
        self.weight = promoted(weight.detach()).t()
        self._bias = None if bias is None else promoted(bias.detach())

    def outputs(self, features: Tensor | None = None) -> Tensor:
        """Return the outputs (n, d), of other features (n, m) if these are given."""
        features = self.features if features is None else features
        outputs: Tensor = product(features, self.weight) + (0 if self._bias is None else self._bias)
        return outputs

    def noisy(self, outputs: Tensor, rho: float, probes: int, seed: int) -> Iterator[Tensor]:
        """Yield outputs with noise, two of opposite signs for each probe."""
        generator = torch.Generator(outputs.device).manual_seed(seed)
        for xi in kernel_noise(self.features, rho, probes, generator):
            change = product(xi, self.weight)
            yield outputs + change
            yield outputs - change

    def refitted(self, fit: Fit, sample: Tensor) -> "Psi":
        """Return ψ with the weight and bias that the user's function fits to some samples, and all samples as data."""
        check_function("fit", fit, "(features, targets) -> (weight, bias)")
        index = sample.to(self.features.device)
        with torch.enable_grad():
            result = fit(self.features[index], self.targets[index])
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(f"fit: a pair (weight, bias) is wanted, got {type(result).__name__}")
        weight, bias = (None if tensor is None else tensor.detach() for tensor in result)
        if weight is None:
            raise InputError("fit: a pair (weight, bias) is wanted, got None for the weight")
        return Psi(self.features, weight, bias, self.targets, self.loss)


def _sums(psi: Psi, groups: Tensor, count: int, rho: float, probes: int, seed: int) -> NoiseSums:
    sums, outputs = NoiseSums(psi.loss, count, probes), psi.outputs()
    sums.add(outputs, psi.targets, groups, psi.noisy(outputs, rho, probes, seed))
    return sums


def _by_probe(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sums of the loss, (probes,), of outputs (probes, samples, …)."""
    if outputs.shape[1] == 0:
        return outputs.new_zeros(len(outputs), dtype=torch.float64)
    if not loss.known:  # it may do what vmap does not take
        return torch.stack([loss.value(each, targets) for each in outputs])
    values: Tensor = torch.func.vmap(lambda each: loss.value(each, targets))(outputs)
    return values


@public("reduction", "seed", "process_group")
def authors_representativeness(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    loss: Any = "cross_entropy",
    folds: int = FOLDS,
    fit: Fit | None = None,
    **how: Unpack[How],
) -> float:
    """Return the quantity that the authors' code calls representativeness, to compare with published figures.

    mean_T [ℓ(ψ(φ_j), y_j) - (1/|S|) Σ_S v_i K(φ_j, φ_i) ℓ(ψ(φ_i), y_j)], v_i = |φ_i| / Σ|φ|, K a kernel of the square
    root of the distance. It has no δ, which cancels. For Eq. 3 see :func:`pyflatness.theory.representativeness`.

    Args:
        features: φ, (n, m).
        weight: w, (d, m).
        bias: (d,) or None.
        targets: one per sample.
        loss: ``"cross_entropy"``, ``"mse_loss"``, ``"binary_cross_entropy_with_logits"``, the ``F`` function, an ``nn``
            loss module with its options, or a callable (outputs, targets) -> scalar; every sample counts
            the same.
        folds: k, at least 2.
        fit: (features, targets) -> (weight, bias) on the sample of each fold, as in the authors' notebook.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        The mean over the folds.

    Raises:
        InputError: shapes, dtypes, targets or options that do not fit.

    Example:
        >>> import torch, pyflatness as pf
        >>> phi, w = torch.ones(4, 2), torch.zeros(2, 2)
        >>> value = pf.theory.authors_representativeness(phi, w, targets=torch.tensor([0, 1, 0, 1]), folds=2)
        >>> abs(value - 0.693147 * (1 - 0.398942 / 2)) < 1e-6  # log 2, and K = 1/√(2π) divided by |S| = 2
        True
    """
    refuse(how.get("process_group"), "authors_representativeness")
    folds, seed = check_count("folds", folds, 2), Options.of(how).seed
    resolved = losses.resolve(loss, how.get("reduction"))
    with torch.inference_mode(False), torch.no_grad():
        psi = Psi(features, weight, bias, targets, resolved)
        places = assigned(len(psi.features), folds, seed).to(psi.features.device)
        values = [_fold(psi if fit is None else psi.refitted(fit, places != k), places == k) for k in range(folds)]
    return sum(values) / folds


def _fold(psi: Psi, held_out: Tensor) -> float:
    loss, outputs, targets = psi.loss, psi.outputs(), psi.targets
    sample, other = psi.features[~held_out].double(), psi.features[held_out].double()
    norms = sample.norm(dim=1)
    weights = norms / norms.sum() / len(sample)
    own = float(_losses(loss, outputs[held_out], targets[held_out]).mean())
    total, rows = 0.0, max(1, _PAIRS // len(sample))
    for some, labels in zip(other.split(rows), targets[held_out].split(rows), strict=True):
        kernel = torch.exp(-torch.cdist(some, sample) / 2) / math.sqrt(2 * math.pi)
        crossed = _losses(loss, outputs[~held_out].repeat(len(some), 1), labels.repeat_interleave(len(sample), 0))
        total += float((kernel * crossed.view(len(some), -1)) @ weights @ kernel.new_ones(len(some)))
    return own - total / len(other)


def _losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of each row, (rows,) float64."""
    dim = loss.class_dim(outputs)
    weights = loss.terms(outputs, targets, dim).weights.view(len(outputs), -1).sum(dim=1)
    values = torch.func.vmap(lambda f, t: loss.value(f[None], t[None]))(outputs, targets)
    return torch.where(weights > 0, values / weights, 0.0)

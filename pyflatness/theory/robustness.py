"""Compute feature robustness: how much the loss rises when Aφ, times α, is added to a layer's features φ.

After Petzka et al. (2021), Definition 1 and Eq. 4 and 7, labels unchanged:

    E_F(f, S, αA) = E(w + αwA) - E(w)

**On average.** For A Haar-distributed on O(m), at any w, m columns of w,

    E_A E_F = α² κ / (2m) + O(α⁴)                                                               (Theorem 5)

The terms of odd order vanish, since A and -A are equally likely; a minimum is not needed. Every probe is taken with
both signs, u_k(α) = (E(w + αwA_k) + E(w - αwA_k)) / 2 - E(w). The value is their mean, with the standard error std_k
u_k / √K of K - 1 degrees of freedom, given the data. Each group of a convolution has a matrix of its own, as in κ.

Theorem 5 assumes a twice differentiable model. Behind a ReLU the parabola holds as long as no sample crosses a kink.
With many samples some kink is near, and each kink that is crossed adds a rise of order α² that no Hessian sees.

**To one matrix, and to the worst.** f is ((δ, S, A), ε)-feature robust for ε = max_{0 ≤ α ≤ δ} |E_F(f, S, αA)|. The
worst A of norm at most 1 is the left side of Theorem 14, whose right side is δ² d/2 κ^φ + O(δ³) at a minimum
(:func:`.gap_bounds.uniform_robustness_bound`). With w = Rᵀ Q, Q of orthonormal rows, wA = Rᵀ B for B = QA, and the B
that belong to |A| ≤ 1 are those with |B| ≤ 1. Over these a linear function ⟨G, B⟩ is largest at the polar factor U Vᵀ
of G = U S Vᵀ. The search goes from B to the polar factor of the gradient at B, again and again (the method of Frank and
Wolfe with whole steps): where E is convex in w, as at a head, each step raises E. The result is a lower bound of the
maximum; several starts say how far to trust it.

**Labels that are not constant** (Definition 9 and Corollary 10).

    D(δ) = (1/|S|) Σ_i sup_{|Δ_i| ≤ δ|φ_i|} |ℓ(ψ(φ_i + Δ_i), y[φ_i + Δ_i]) - ℓ(ψ(φ_i + Δ_i), y_i)|  ≤  C δ³

for labels that are approximately locally constant of order three. Then a minimum is feature robust on average over
orthogonal matrices for ε = δ² κ/(2m) + C δ³ up to O(δ³), where Theorem 5 takes C = 0. The supremum is taken over probes
of Δ, half of them on the sphere and half uniform in the ball, so D is found from below.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import losses
from ..contractions import product
from ..errors import InputError
from ..measures import RELATIVE_FLATNESS
from ..messages import check_tensor, in_words, span
from ..model import layers
from ..model.selectors import Selector
from ..numerics.accumulate import omits
from ..numerics.process_groups import refuse
from ..numerics.variances import standard_error
from ..options import CALL, How, Options, check_count, check_function, check_number, check_numbers, check_probes
from ..plan import of_layer
from ..report import Estimate, intervals, views
from ..session import public, session
from .perturbed import Perturbed, orthonormal, turns
from .sampling import Psi

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RHO = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
PROBES = 16
_MEMORY = 2**28  # bytes of the weights wA that are kept for one read of the data
_RISE = 1e-9  # the least relative rise of the loss in a step after which the search goes on

Labels = Callable[[Tensor], Tensor]  # features (n, m) -> targets as the loss takes them, (n, …)


@dataclass(frozen=True, repr=False, eq=False)
class FeatureRobustness:
    """Hold how much the loss rises when rotated features, times α, are added to a layer's features.

    Attributes:
        rho: α, (k,) float64.
        rises: E_A E_F(f, S, αA), (k,) float64, in units of the loss.
        stderr: standard errors of ``rises`` over the probes of A, given the data, (k,) float64, each with
            ``probes - 1`` degrees of freedom.
        parabola: α² κ / (2m), (k,) float64.
        kappa: κ.
        features: m.
        loss: E(w).
        probes: the number of pairs ±A.
        samples: the number of samples.
        layer: the layer's qualified name.
    """

    rho: Tensor
    rises: Tensor
    stderr: Tensor
    parabola: Tensor
    kappa: float
    features: int
    loss: float
    probes: int
    samples: int
    layer: str

    def interval(self, level: float = 0.95) -> Tensor:
        """Return the ends of the intervals that hold E_A E_F, each with probability ``level``, (k, 2) float64.

        They are rises ± t ``stderr``, with t the quantile of Student's t distribution, and NaN where a rise is not
        finite.

        Args:
            level: in (0, 1).

        Raises:
            InputError: a level that is not between 0 and 1.
        """
        half = intervals.student_t(level, self.probes - 1) * self.stderr
        return torch.stack([self.rises - half, self.rises + half], dim=1)

    def __repr__(self) -> str:
        facts = f"layer {self.layer!r}, κ = {self.kappa:.6g}, m = {self.features}, {self.probes} pairs of probes"
        columns = self.rho, self.rises, self.interval(), self.parabola
        rows = zip(*(column.tolist() for column in columns), strict=True)
        lines = [f"  α = {a:g}: {intervals.shown(rise, ends)}, parabola {p:.4g}" for a, rise, ends, p in rows]
        return "\n".join([f"FeatureRobustness({facts}, {self.samples} samples, 95 % intervals:", *lines]) + ")"

    def plot(self, path: str | Path | None = None, *, axes: "Axes | None" = None) -> "tuple[Figure, Axes]":
        """Draw the curve with its 95 % intervals, and the parabola.

        Args:
            path: where the figure is written too; its ending is its format.
            axes: matplotlib's, to draw into; None: those of a new figure.

        Returns:
            Figure and axes of matplotlib, outside of pyplot.

        Raises:
            MissingExtraError: without matplotlib.
        """
        figure, axes = views.onto(axes)
        steps = torch.linspace(0, float(self.rho.abs().max()), 101, dtype=torch.float64, device="cpu")
        parabola = steps.square() * self.kappa / (2 * self.features)
        axes.plot(steps.tolist(), parabola.tolist(), color="0.4", label="α² κ / 2m")
        half = (self.interval()[:, 1] - self.rises).tolist()
        columns = self.rho.abs().tolist(), self.rises.tolist(), half
        axes.errorbar(*columns, fmt="o", markersize=4, capsize=2, label=f"mean of {self.probes} pairs ±A")
        axes.set_xlabel("α")
        axes.set_ylabel("rise of the loss, features φ + αAφ")
        axes.grid(alpha=0.3)
        axes.legend()
        views.save(figure, path)
        return figure, axes


@public(*CALL, "seed", "nan_policy")
def feature_robustness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    layer: Selector | None = None,
    *,
    rho: Iterable[float] = RHO,
    probes: int = PROBES,
    kappa: Estimate | float | None = None,
    **how: Unpack[How],
) -> FeatureRobustness:
    """Return feature robustness of a layer, averaged over orthogonal matrices, beside the parabola that κ predicts.

    E_A[E(w + αwA) - E(w)], A Haar on O(m), in pairs ±A; α² κ/(2m)   (Petzka et al. 2021, Eq. 4 and Theorem 5).

    Args:
        data: … They are read twice or more.
        layer: a Linear layer or a convolution, whose rows are its filters; None takes the last Linear that ran.
        rho: α of the curve.
        probes: pairs ±A, at least 2. At a head the model runs once a batch; elsewhere 2 · probes · rho times.
        kappa: κ of the layer, if you know it or measured it with options of your own; None: it is measured as by
            :func:`pyflatness.relative_flatness`.
        nan_policy: ``"raise"`` or ``"propagate"``; no sample can be left out.

    Returns:
        The curve, its standard errors, and the parabola.

    Raises:
        FlatnessError: options that do not fit, or see :func:`pyflatness.relative_flatness`.
        NonFiniteError: a loss that is NaN or infinite, but under ``nan_policy="propagate"``.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double().eval()
        >>> data = torch.randn(100, 4).double(), torch.randint(3, (100,))
        >>> found = pf.theory.feature_robustness(model, torch.nn.CrossEntropyLoss(), data, rho=[0.1], probes=200)
        >>> (low, high), = found.interval(0.99).tolist()
        >>> low < float(found.parabola) < high
        True
    """
    steps = check_numbers("rho", rho)
    probes = check_probes("probes", probes, 2)
    kappa = None if kappa is None else check_number("kappa", kappa, "a number", math.isfinite)
    options = Options.of(how)
    if omits(options.nan_policy):
        raise InputError("nan_policy='omit': no sample can be left out of feature robustness; 'raise' or 'propagate'")
    with session(model, loss, data, options, how, reads=2) as task:
        perturbed, risks = Perturbed(task, layer), []
        scales = [sign * alpha for alpha in steps for sign in (1.0, -1.0)]
        draws = itertools.islice(turns(perturbed.layer, torch.Generator("cpu").manual_seed(options.seed)), probes)
        kept = max(1, _MEMORY // (4 * perturbed.matrix.numel()))  # probes in one read of the data
        while turned := [*itertools.islice(draws, kept)]:
            found, at_weights = perturbed.risks(turned, scales)
            risks.append(found)
        if kappa is None:
            measurement, name = of_layer(RELATIVE_FLATNESS, task, perturbed.name)
            kappa = measurement.estimates()[name, RELATIVE_FLATNESS.name]
    rises = torch.cat(risks).view(probes, -1, 2).mean(dim=2) - at_weights.value
    grid, columns = torch.tensor(steps, dtype=torch.float64, device="cpu"), perturbed.matrix.shape[2]
    return FeatureRobustness(
        rho=grid,
        rises=rises.mean(dim=0),
        stderr=standard_error(rises),
        parabola=grid.square() * float(kappa) / (2 * columns),
        kappa=float(kappa),
        features=columns,
        loss=at_weights.value,
        probes=probes,
        samples=at_weights.samples,
        layer=perturbed.name,
    )


@dataclass(frozen=True, eq=False)
class MatrixRobustness:
    """Hold how much the loss rises when the features Aφ, times α, are added to a layer's features φ.

    Attributes:
        rho: α, (k,) float64.
        rises: E_F(f, S, αA), (k,) float64, in units of the loss.
        loss: E(w).
        layer: the layer's qualified name.
        samples: the number of samples.
    """

    rho: Tensor
    rises: Tensor
    loss: float
    layer: str
    samples: int

    def __repr__(self) -> str:
        return in_words(
            self,
            f"rises {span(self.rises, '.4g')} for α {span(self.rho, 'g')}",
            f"ε = {self.epsilon:.6g}",
            f"loss {self.loss:.6g}",
            f"layer {self.layer!r}",
            f"{self.samples} samples",
        )

    @property
    def epsilon(self) -> float:
        """Return ε, the largest absolute E_F over the given α."""
        return float(self.rises.abs().max())


@dataclass(frozen=True, eq=False)
class LargestRobustness:
    """Hold the feature matrix of norm 1 that was found to raise the loss most.

    Attributes:
        rise: E_F(f, S, δA), in units of the loss; a lower bound of the maximum over |A| ≤ 1.
        matrix: A, (m, m); (groups, m, m) of a convolution with groups.
        rho: δ.
        rises: E_F where each start ended, (starts,) float64.
        loss: E(w).
        layer: the layer's qualified name.
        samples: the number of samples.
    """

    rise: float
    matrix: Tensor
    rho: float
    rises: Tensor
    loss: float
    layer: str
    samples: int

    def __repr__(self) -> str:
        return in_words(
            self,
            f"{self.rise:.6g}",
            f"{len(self.rises)} starts {span(self.rises)}" if len(self.rises) > 1 else "1 start",
            f"δ = {self.rho:g}",
            f"matrix {' × '.join(map(str, self.matrix.shape))}",
            f"loss {self.loss:.6g}",
            f"layer {self.layer!r}",
            f"{self.samples} samples",
        )


@public(*CALL)
def matrix_robustness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    layer: Selector | None = None,
    *,
    matrix: Tensor,
    rho: Iterable[float],
    **how: Unpack[How],
) -> MatrixRobustness:
    """Return feature robustness of a layer to a feature matrix A, at some α.

    E(w + αwA) - E(w)   (Petzka et al. 2021, Definition 1 and Eq. 4). :func:`pyflatness.theory.feature_robustness` has
    its mean over orthogonal A.

    Args:
        data: …
        layer: a Linear layer or a convolution, whose rows are its filters; None takes the last Linear that ran.
        matrix: A, (m, m) for m columns of the weight; of a convolution with groups also (groups, m, m).
        rho: α, of any sign.

    Returns:
        The rises, and ε.

    Raises:
        InputError: a matrix or options that do not fit.
        NonFiniteError: a loss that is NaN or infinite.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
        >>> data = torch.eye(2).double(), model(torch.eye(2).double()).detach()
        >>> found = pf.theory.matrix_robustness(model, torch.nn.MSELoss(), data, matrix=torch.eye(2), rho=[0.1, 0.2])
        >>> [round(rise, 6) for rise in found.rises.tolist()], round(found.epsilon, 6)
        ([0.025, 0.1], 0.1)
    """
    steps = check_numbers("rho", rho, "numbers", math.isfinite)
    matrix = check_tensor("matrix", matrix)
    with session(model, loss, data, how=how) as task:
        perturbed = Perturbed(task, layer)
        task.forward.compare_by_itself()
        groups, _, m = perturbed.matrix.shape
        if tuple(matrix.shape) not in ((m, m), (groups, m, m)):
            raise InputError(
                f"matrix: layer {perturbed.name!r} has {m} columns, ({m}, {m}) is wanted, got {tuple(matrix.shape)}"
            )
        turned = product(perturbed.matrix, matrix.detach().to(perturbed.matrix).expand(groups, m, m))
        values, own = perturbed.risks([layers.as_weight(perturbed.layer, turned.flatten(0, 1))], steps)
    grid = torch.tensor(steps, dtype=torch.float64, device="cpu")
    return MatrixRobustness(grid, values[0] - own.value, own.value, perturbed.name, own.samples)


@public(*CALL, "seed")
def largest_robustness(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    layer: Selector | None = None,
    *,
    rho: float,
    starts: int = 4,
    steps: int = 50,
    **how: Unpack[How],
) -> LargestRobustness:
    """Return the feature matrix of norm 1 to which a layer is least robust, and the rise of the loss with it.

    max_{|A| ≤ 1} E(w + δwA) - E(w), the left side of Theorem 14 (Petzka et al. 2021), by ascent from random orthogonal
    matrices: a lower bound of the maximum.

    Args:
        data: … They are read up to ``starts * (steps + 1)`` times.
        layer: a Linear layer or a convolution, whose rows are its filters; None takes the last Linear that ran.
        rho: δ, positive.
        starts: random matrices that an ascent starts from.
        steps: of each ascent, at most; an ascent ends where the loss rises no more.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        The rise, A, and the rise that each start reached.

    Raises:
        InputError: options that do not fit.
        NonFiniteError: a loss that is NaN or infinite.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> data = torch.eye(2).double(), model(torch.eye(2).double()).detach()
        >>> found = pf.theory.largest_robustness(model, torch.nn.MSELoss(), data, rho=0.1)
        >>> round(found.rise, 6)  # |δwA|² / 2 at |wA| = 5
        0.125
    """
    refuse(how.get("process_group"), "largest_robustness", "matrix_robustness is, ")
    rho, starts = check_number("rho", rho), check_count("starts", starts, 1)
    steps, options = check_count("steps", steps, 1), Options.of(how)
    with session(model, loss, data, options, how, reads=1 + starts * (steps + 1)) as task:
        perturbed = Perturbed(task, layer)
        task.forward.compare_by_itself()
        w = perturbed.matrix
        q, r = torch.linalg.qr(w.transpose(1, 2))  # w = Rᵀ Qᵀ of the QR decomposition's Q
        _, own = perturbed.risks(())
        generator, found = torch.Generator("cpu").manual_seed(options.seed), []
        for _ in range(starts):
            turned = orthonormal(len(r), r.shape[1], w.shape[2], generator, w)
            found.append(_ascent(perturbed, r.transpose(1, 2), turned, rho, steps))
    values = torch.tensor([value - own.value for value, _ in found], dtype=torch.float64, device="cpu")
    matrix = q @ found[int(values.argmax())][1]
    rise = float(values.max())
    return LargestRobustness(
        rise, matrix[0] if len(matrix) == 1 else matrix, rho, values, own.value, perturbed.name, own.samples
    )


def _ascent(perturbed: Perturbed, left: Tensor, turned: Tensor, rho: float, steps: int) -> tuple[float, Tensor]:
    """Return the largest loss that an ascent meets, and B there; ``left`` is Rᵀ, ``turned`` the first B."""
    best, at, layer = -math.inf, turned, perturbed.layer
    for _ in range(steps + 1):
        change = layers.as_weight(layer, (rho * left @ turned).flatten(0, 1)).detach().requires_grad_()
        value = float(perturbed.risks([change])[0])
        if not value > best + _RISE * abs(best if math.isfinite(best) else 0.0):
            break
        best, at = value, turned
        assert change.grad is not None
        gradient = layers.as_matrix(layer, change.grad).unflatten(0, (len(left), -1))
        u, _, v = torch.linalg.svd(left.transpose(1, 2) @ gradient, full_matrices=False)
        turned = u @ v
    return best, at


@dataclass(frozen=True, eq=False)
class LabelConstancy:
    """Hold how much the loss around the features of a sample changes with labels that are not constant there.

    Attributes:
        rho: δ, (k,) float64.
        changes: D(δ), (k,) float64, in units of the loss; a lower bound of the supremum.
        features: m.
        samples: n.
        probes: the number of Δ for each sample and δ.
    """

    rho: Tensor
    changes: Tensor
    features: int
    samples: int
    probes: int

    @property
    def constant(self) -> float:
        """Return C, the largest of D(δ)/δ³."""
        return float((self.changes / self.rho**3).max())

    def __repr__(self) -> str:
        return in_words(
            self,
            f"D(δ) {span(self.changes, '.4g')} for δ {span(self.rho, 'g')}",
            f"C = {self.constant:.4g}",
            f"m = {self.features}",
            f"{self.samples} samples",
            f"{self.probes} probes",
        )

    def epsilon(self, kappa: float) -> Tensor:
        """Return δ² κ/(2m) + D(δ) for each δ, (k,): feature robustness by Corollary 10.

        Args:
            kappa: κ, relative flatness of the head on this sample.
        """
        return self.rho.square() * float(kappa) / (2 * self.features) + self.changes


@public("seed")
def label_constancy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    labels: Labels,
    loss: Any = "cross_entropy",
    rho: Sequence[float],
    probes: int = 64,
    **how: Unpack[How],
) -> LabelConstancy:
    """Return how much a linear head's loss changes where labels are not constant around the features of a sample.

    (1/n) Σ_i max_Δ |ℓ(ψ(φ_i + Δ), y[φ_i + Δ]) - ℓ(ψ(φ_i + Δ), y_i)|, |Δ| ≤ δ|φ_i|   (Petzka et al. 2021, Definition 9).

    Args:
        features: φ, (n, m).
        weight: w, (d, m).
        bias: (d,) or None.
        targets: y_i, what ``loss`` takes, one per sample; None: ``labels(features)``.
        labels: y[·], a function from features (n, m) to targets.
        loss: ``"cross_entropy"``, ``"mse_loss"``, ``"binary_cross_entropy_with_logits"``, the ``F`` function, or an
            ``nn`` loss module with its options; not a callable.
        rho: δ, positive.
        probes: of Δ for each sample, at least 2; more probes come nearer to the supremum.

    Returns:
        D(δ) for each δ, and C.

    Raises:
        InputError: shapes, targets or options that do not fit.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> phi, w = torch.randn(50, 2), torch.eye(2)
        >>> found = pf.theory.label_constancy(phi, w, labels=lambda x: (x[:, 0] < x[:, 1]).long(), rho=[1e-6, 0.5])
        >>> float(found.changes[0]), bool(found.changes[1] > 0.01)
        (0.0, True)
    """
    resolved = losses.known(loss, "loss of a single sample")
    radii = check_numbers("rho", rho)
    probes, seed = check_probes("probes", probes, 2), Options.of(how).seed
    check_function("labels", labels, "of features (n, m) that returns their targets")
    psi = Psi(features, weight, bias, labels(features) if targets is None else targets, resolved)
    phi, generator = psi.features, torch.Generator(psi.features.device).manual_seed(seed)
    changes = []
    with torch.no_grad():
        for radius in radii:
            largest = torch.zeros(len(phi), dtype=torch.float64, device=phi.device)
            for draw in range(probes):
                moved = phi + radius * _within(phi, generator, on_sphere=draw % 2 == 0)
                outputs = psi.outputs(moved)
                each = [
                    resolved.each(outputs, y).double().view(len(outputs), -1).mean(dim=1)  # over a sample's terms
                    for y in (labels(moved.to(features.dtype)), psi.targets)
                ]
                largest = torch.maximum(largest, (each[0] - each[1]).abs())
            changes.append(float(largest.mean()))
    grid = torch.tensor(radii, dtype=torch.float64, device="cpu")
    found = torch.tensor(changes, dtype=torch.float64, device="cpu")
    return LabelConstancy(grid, found, phi.shape[1], len(phi), probes)


def _within(phi: Tensor, generator: torch.Generator, *, on_sphere: bool) -> Tensor:
    """Return Δ with |Δ_i| = |φ_i|, or uniform in the ball |Δ_i| ≤ |φ_i|."""
    normal: Tensor = torch.randn(phi.shape, generator=generator, dtype=phi.dtype, device=phi.device)
    length = phi.norm(dim=1, keepdim=True)
    if not on_sphere:
        uniform = torch.rand(len(phi), 1, generator=generator, dtype=phi.dtype, device=phi.device)
        length = length * uniform ** (1 / phi.shape[1])
    scale: Tensor = length / normal.norm(dim=1, keepdim=True)
    return normal * scale

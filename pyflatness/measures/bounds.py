"""Bound the representation's measures by derivatives in the weights (C24, Propositions 3.4 to 3.10).

For layer l with weight W and input x_i: J_i = ∂f_i/∂x_i through everything behind, s = s_max(J_i), g_i = |∂f_i/∂W|_F,
and N outputs. S is the sharpness at an interpolation, (1/n) Σ_i |∂f_i/∂θ|_F² (Eq. 3), θ the chosen layers' weights:

    mls_bound         |W|₂ √(mean 1/|x_i|²) √(mean g_i²)  ≥ mls                                  C of Eq. 48
    nmls_bound        √(mean_i Σ_l |W_l|₂²/|x_i^l|²) √S  ≥ nmls                                  Eq. 12
    log_volume_bound  log of (1/n) √(Σ_i |W|₂^2N/|x_i|^2N) (nS/N)^(N/2)  ≥ log of volume         Eq. 9; network: Eq. 10
    mls_sharpness_bound  |W|₂ √(mean 1/|x_i|²) √S, S over all trainable parameters  ≥ mls        Eq. 11, D of Eq. 48;
                         of the network √(mean_i Σ_l |W_l|₂²/|x_i^l|²) √S  ≥ nmls                Eq. 12

``pf.theory.bounds`` lists all of the paper's steps with their left sides. The paper's S is over all parameters, which
are more: the S here gives smaller right-hand sides for which the proofs hold as well; ``sharpness="all"`` takes theirs.
With ``normalized=True`` Eq. 37 is there for the scales σ, σ' of Eq. 36 too, at which its right-hand side is least, with
``adaptive=True`` Eq. 44, and Eq. 6 for other powers than 2 with ``powers=``. A convolution's W has a filter to a row,
its groups are matrices of their own, and |W|₂ is the largest of theirs. Where an input is zero the right-hand sides are
infinite.

The inequalities rest on J = (∂f/∂z) W and g = |∂f/∂z|_F |x| at the layer's output z. They hold for Linear layers with
one position, called once, whose input goes nowhere else; elsewhere (tokens, convolutions, shortcuts) there is **no
guarantee**, and the values say so.

Eq. 17 is for a layer whose input goes past it too, as at the start of a residual block: s_max(J) - s_max(J') ≤ |W|₂ g /
|x|. Here J' = J - (∂f/∂z) W is the derivative by the other ways. Behind a plain shortcut, x + h(Wx), that is the
derivative at the input of what follows the sum, for branches of any depth. It is guaranteed for Linear layers with one
position, called once. Of a layer without another way the next layer's s_max is taken off. Its sum over layers is
guaranteed where it leads from the first layer to the last. So it does where each J' on the way is no larger than J at a
later layer's input, as where that input is the sum.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..errors import InputError
from ..model import layers as layer_weights
from ..report import Estimate
from ..sweep.jacobians import Samples
from .base import OF_JACOBIANS, TOGETHER, Estimates, Measure, Task
from .sharpness import of_outputs

NEEDS = ("log_volume", "weights", "past", "rescaled")
NO_GUARANTEE = "no guarantee"
_ROUNDING = 1e-5  # relative error allowed of a largest singular value; in half precision it may be larger


class LayerTerms:
    """Hold the terms in the inequalities of one layer; tensors are (n,) float64, norms are not squared."""

    def __init__(self, samples: Samples, name: str) -> None:
        self.rows = layer_weights.matrix(samples.task.selection.modules[name])[0].shape[0]
        self.name, self.apart, self.passed = name, samples.apart[name], name in samples.passed
        self.caveat = self.apart or ("its input goes another way too" if self.passed else "")
        module = samples.task.selection.modules[name]
        weight = layer_weights.matrix(module)[0].double().unflatten(0, (layer_weights.kind_of(module).groups, -1))
        self.frobenius = float(weight.norm())
        self.spectral = float(torch.linalg.matrix_norm(weight, 2).max()) if math.isfinite(self.frobenius) else math.nan
        self.x = samples.counted(name, "size").sqrt()
        self.s = samples.counted(name, "largest")
        self.jacobian = samples.counted(name, "trace").sqrt()
        self.log_volume = samples.counted(name, "log_volume")
        self.g = samples.counted(name, "weights").sqrt()
        self.past = samples.counted(name, "past")
        self.scaled = samples.counted(name, "scaled") if samples.has(name, "scaled") else None
        self.rescaled = samples.counted(name, "rescaled").sqrt() if samples.has(name, "rescaled") else None

    @property
    def sensitivity(self) -> float:
        """Return the mean of |W|₂ g / |x|, which is B of Eq. 48."""
        return mean(torch.where(self.x > 0, self.ratios * self.g, torch.inf))

    @property
    def ratios(self) -> Tensor:
        """Return |W|₂ / |x|, infinite if an input is zero."""
        return torch.where(self.x > 0, self.spectral / self.x, torch.inf)

    @property
    def spread(self) -> float:
        """Return √(mean 1/|x|²)."""
        return math.sqrt(mean(self.x.pow(-2)))

    @property
    def weights(self) -> float:
        """Return √(mean g²)."""
        return math.sqrt(mean(self.g.square()))

    @property
    def mls_bound(self) -> float:
        """Return C of Eq. 48."""
        return product(self.spread, self.spectral, self.weights)

    def sharpness_bound(self, sharpness: float) -> float:
        """Return D of Eq. 48, for the S given."""
        return product(self.spread, self.spectral, math.sqrt(sharpness))


class NetworkTerms:
    """Hold the terms of all layers together."""

    def __init__(self, samples: Samples, sharpness: float | None = None) -> None:
        self.layers = [LayerTerms(samples, name) for name in samples.layers]
        self.outputs, self.samples = samples.width, int(samples.kept.sum())
        own = sum(layer.weights**2 for layer in self.layers)
        if sharpness is not None and not sharpness >= own * (1 - 1e-4):
            raise InputError(f"sharpness={sharpness}: of the chosen layers' weights alone it is {own:.6g} already")
        self.sharpness = own if sharpness is None else sharpness
        apart = [f"{layer.name!r}: {layer.caveat}" for layer in self.layers if layer.caveat]
        self.caveat = "; ".join(apart[:2]) + ("; …" if len(apart) > 2 else "")

    @property
    def telescopes(self) -> bool:
        """Return whether the sum of Eq. 17 over some layers leads from the first layer's input to the last's."""
        reached = [self.layers[-1]]
        for layer in reversed(self.layers[:-1]):
            if not layer.apart and any(bool((layer.past <= later.s * (1 + _ROUNDING)).all()) for later in reached):
                reached.append(layer)
        return self.layers[0] in reached

    @property
    def squares(self) -> Tensor:
        """Return |∂f_i/∂θ|_F² of each sample, θ the chosen layers' weights, (n,)."""
        return torch.stack([layer.g.square() for layer in self.layers]).sum(dim=0)

    def nmls(self) -> float:
        """Return the right-hand side of Eq. 12."""
        ratios = torch.stack([layer.ratios.square() for layer in self.layers])
        return math.sqrt(product(mean(ratios.sum(dim=0)), self.sharpness))

    def log_volume(self, layers: Sequence[LayerTerms]) -> float:
        """Return the logarithm of the right-hand side of Eq. 9 for one layer, of Eq. 10 for all."""
        n, N = self.samples, self.outputs
        ratios = torch.stack([layer.ratios for layer in layers]).flatten()
        if bool(ratios.isinf().any()):
            return math.inf
        sharpness = math.log(n * self.sharpness / N) if self.sharpness else -math.inf
        return 0.5 * float((2 * N * ratios.log()).logsumexp(dim=0)) - math.log(n) + N / 2 * sharpness

    def log_norms(self, layers: Sequence[LayerTerms]) -> float:
        """Return the log of N^(-N/2) (1/n) Σ |J|_F^N over layers: the middle of Eq. 9 and 10."""
        N = self.outputs
        logs = torch.stack([layer.jacobian.log() for layer in layers]).flatten()
        return float((N * logs).logsumexp(dim=0)) - math.log(self.samples) - N / 2 * math.log(N)

    def log_volumes(self, layers: Sequence[LayerTerms]) -> float:
        """Return the log of the sum over layers of the mean volumes."""
        logs = torch.stack([layer.log_volume for layer in layers]).flatten()
        return float(logs.logsumexp(dim=0)) - math.log(self.samples)


def mean(values: Tensor) -> float:
    """Return the mean over samples."""
    return float(values.mean())


def product(factor: float, *others: float) -> float:
    """Return a product of factors that is infinite if the first is: a sample whose input is zero has no bound."""
    return factor if math.isinf(factor) else factor * math.prod(others)


def at_interpolation(task: Task, *, adaptive: bool = False, per_sample: bool = False) -> Estimate:
    """Return the exact interpolation sharpness over all trainable parameters, whatever is sampled of other measures."""
    options = replace(task.options, probes=None, per_sample=per_sample)
    return of_outputs(replace(task, options=options), adaptive=adaptive)


def _values(
    of_layer: Callable[[NetworkTerms, LayerTerms], float] | None,
    of_network: Callable[[NetworkTerms], float] | None,
    samples: Samples,
    sharpness: float | None = None,
) -> Estimates:
    """Return the values of a bound for each layer, and for the network; None where there is none."""
    net, found = NetworkTerms(samples, sharpness), {}
    if of_layer is not None:
        for layer in net.layers:
            found[layer.name] = samples.estimate(of_layer(net, layer), layer.name, _notes(layer.caveat))
    if of_network is not None:
        found[""] = samples.estimate(of_network(net), "", _notes(net.caveat))
    return found


def _notes(caveat: str) -> list[str]:
    return [f"bounds: {NO_GUARANTEE}, {caveat}"] if caveat else []


def _sharpness_bounds(samples: Samples) -> Estimates:
    sharpness = at_interpolation(samples.task).value
    return _values(lambda net, layer: layer.sharpness_bound(net.sharpness), NetworkTerms.nmls, samples, sharpness)


MLS_BOUND = Measure(
    name="mls_bound",
    formula="|W|₂ √(mean_i 1/|x_i|²) √(mean_i |∂f_i/∂W|_F²)",
    source="From Loss Flatness to Compressed Representations, Eq. 48, C",
    of_jacobians=partial(_values, lambda net, layer: layer.mls_bound, None),
    needs=NEEDS,
    granularity="layer",
)
NMLS_BOUND = Measure(
    name="nmls_bound",
    formula="√(mean_i Σ_l |W_l|₂²/|x_i^l|²) √(mean_i Σ_l |∂f_i/∂W_l|_F²)",
    source="From Loss Flatness to Compressed Representations, Eq. 12",
    of_jacobians=partial(_values, None, NetworkTerms.nmls),
    needs=NEEDS,
    granularity="network",
    network_of=TOGETHER,
)
LOG_VOLUME_BOUND = Measure(
    name="log_volume_bound",
    formula="log of (1/n) √(Σ_i |W|₂^2N/|x_i|^2N) (nS/N)^(N/2), S = mean_i Σ_l |∂f_i/∂W_l|_F²",
    source="From Loss Flatness to Compressed Representations, Eq. 9 and 10",
    of_jacobians=partial(_values, lambda net, layer: net.log_volume([layer]), lambda net: net.log_volume(net.layers)),
    needs=NEEDS,
    network_of=TOGETHER,
)
MLS_SHARPNESS_BOUND = Measure(
    name="mls_sharpness_bound",
    formula="|W|₂ √(mean_i 1/|x_i|²) √S; network: √(mean_i Σ_l |W_l|₂²/|x_i^l|²) √S; S = mean_i |∂f_i/∂θ|_F², all θ",
    source="From Loss Flatness to Compressed Representations, Eq. 11 (Eq. 48, D) and 12",
    of_jacobians=_sharpness_bounds,
    needs=NEEDS,
    cost=f"{OF_JACOBIANS}; and a sweep for S, one backward pass per output",
    reads=2,
    network_of=TOGETHER,
)
ROWS = (MLS_BOUND, NMLS_BOUND, LOG_VOLUME_BOUND, MLS_SHARPNESS_BOUND)

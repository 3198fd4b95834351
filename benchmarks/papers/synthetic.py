"""Make the synthetic data of Petzka et al. 2021, appendix C.1: Gaussians in feature space, and a ridge head.

Four centroids are corners of a hypercube in R⁶ of side c, the class separation; each has a random covariance, and two
clusters make a class, with labels 1 and -1. Two redundant features are random combinations of the six. The head is
fitted by ridge regression with scikit-learn's default penalty, 1.

The inputs are what a random tanh network 784-512-128-16-8 takes to the features, layer by layer backward. The features
of these inputs are the features again, up to rounding, which is why all is computed on the features;
:func:`round_trip` says up to how much. As tanh ends at ±1, features are multiplied by 0.02 for it, and the head's
weight divided by that, which leaves relative flatness and all losses as they are.
"""

import itertools

import numpy as np
import torch
from torch import Tensor, nn

_WIDTHS = (784, 512, 128, 16, 8)
_SHRUNK = 0.02
_PENALTY = 1.0


def dataset(separation: float, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return features (count, 8) and labels (count, 1), float64."""
    rng = np.random.default_rng([seed, round(1000 * separation)])
    corners = rng.permutation([*itertools.product([-1.0, 1.0], repeat=6)])[:4] * separation / 2
    mixing, redundant = rng.uniform(-1, 1, (4, 6, 6)), rng.uniform(-1, 1, (6, 2))
    cluster = rng.integers(4, size=count)
    informative = corners[cluster] + np.einsum("ni,nij->nj", rng.normal(size=(count, 6)), mixing[cluster])
    features = np.concatenate([informative, informative @ redundant], axis=1)
    return torch.tensor(features), torch.tensor(np.where(cluster < 2, 1.0, -1.0))[:, None]


def ridge(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight (1, m) and intercept (1,) of ridge regression, whose penalty leaves the intercept out."""
    center, mean = features.mean(dim=0), targets.mean(dim=0)
    x = features - center
    gram = x.t() @ x + _PENALTY * torch.eye(x.shape[1]).to(x)
    weight = torch.linalg.solve(gram, x.t() @ (targets - mean)).t()
    return weight, mean - weight @ center


@torch.no_grad()
def round_trip(features: Tensor, seed: int) -> float:
    """Return by how much features differ at most after the way to the inputs and back, as a part of their largest."""
    generator = torch.Generator().manual_seed(seed)
    shrunk = features * _SHRUNK
    layers = [torch.empty(after, before, dtype=features.dtype) for before, after in itertools.pairwise(_WIDTHS)]
    for weight in layers:
        nn.init.xavier_uniform_(weight, generator=generator)
    layers = [weight.to(features.device) for weight in layers]
    there = shrunk
    for weight in reversed(layers):
        there = torch.linalg.lstsq(weight, torch.atanh(there).t()).solution.t()
    for weight in layers:
        there = torch.tanh(there @ weight.t())
    return ((there - shrunk).abs().max() / shrunk.abs().max()).item()

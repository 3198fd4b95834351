"""Draw random directions in feature space: orthogonal matrices, and noise with a truncated normal law.

The kernel k_h(0, z) ∝ exp(-|z|²/2h²) on |z| < h (Petzka et al. 2021, Eq. 6, with a width of 1 in units of h = δ|φ|) is
induced by matrices A = rO, O Haar-distributed on the orthogonal group (Proposition 2): ξ = Aφ = r |φ| u with u uniform
on the sphere and r = δt, t of density proportional to t^(m-1) exp(-t²/2) on (0, 1].
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import interrupts
from ..contractions import promoted_dtype
from ..errors import InputError
from ..messages import check_tensor
from ..model import layers
from ..options import check_draws, check_number, check_seed

_TOGETHER = 2**18  # numbers


def truncated_normal_noise(features: Tensor, delta: float, *, draws: int = 1, seed: int = 0) -> Tensor:
    """Return feature noise ξ of the truncated normal kernel with bandwidth δ|φ|.

    The kernel is that of Petzka et al. (2021), Eq. 6 and Proposition 2.

    ξ = r |φ| u, u uniform on the unit sphere of R^m, r on (0, δ] of density proportional to (r/δ)^(m-1) exp(-(r/δ)²/2).

    Args:
        features: φ, (…, m), floating-point.
        delta: δ, positive.
        draws: how many for each feature vector.
        seed: of a generator of its own on the features' device, where another device has other numbers; the global
            random state is left alone.

    Returns:
        (draws, …, m), of the features' dtype (at least float32) and device; 0 where φ is.

    Raises:
        InputError: no such tensor, or numbers that do not fit.

    Example:
        >>> import torch, pyflatness as pf
        >>> phi = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> noise = pf.truncated_normal_noise(phi, 0.1, draws=1000)
        >>> noise.shape, bool((noise.norm(dim=-1) <= 0.1 * phi.norm(dim=-1)).all())
        (torch.Size([1000, 2, 2]), True)
    """
    check_tensor("features", features)
    if features.ndim == 0 or features.shape[-1] == 0:
        raise InputError(f"features: a tensor of shape (…, m) is wanted, got {tuple(features.shape)}")
    layers.check_dtype("features", features.dtype)
    delta, draws = check_number("delta", delta), check_draws("draws", draws, 1)
    generator = torch.Generator(features.device).manual_seed(check_seed("seed", seed))
    return torch.stack([*kernel_noise(features.detach(), delta, draws, generator)])


def kernel_noise(features: Tensor, delta: float, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield draws of ξ for each feature vector of (…, m), in at least float32; small ones are made together."""
    together = max(1, _TOGETHER // max(1, features.numel()))
    for start in range(0, draws, together):
        interrupts.check()
        yield from _noise(features.expand(min(together, draws - start), *features.shape), delta, generator)


def _noise(features: Tensor, delta: float, generator: torch.Generator) -> Tensor:
    dtype = promoted_dtype(features.dtype)
    features = features.to(dtype)
    direction: Tensor = torch.randn(features.shape, generator=generator, dtype=torch.float32, device=features.device)
    direction = direction.to(dtype)  # a direction in steps of float32 is random enough, and its numbers come faster
    lengths = direction.norm(dim=-1, keepdim=True)
    radius = radii(lengths.numel(), features.shape[-1], generator).to(dtype).view_as(lengths)
    scale: Tensor = delta * radius * features.norm(dim=-1, keepdim=True) / lengths
    return direction * scale


def radii(count: int, m: int, generator: torch.Generator) -> Tensor:
    """Return t (count,) float64 on (0, 1] of density proportional to t^(m-1) exp(-t²/2), by exact rejection.

    A proposal u^(1/m) has density m t^(m-1) and is kept with probability exp(-t²/2), 0.61 or more for every m; the
    inverse of the distribution function would underflow from a few hundred features on.
    """
    kept: list[Tensor] = []
    missing = count
    while missing > 0:
        size = int(1.7 * missing) + 16
        u = torch.rand(2, size, generator=generator, dtype=torch.float64, device=generator.device)
        t = (1 - u[0]) ** (1 / m)
        kept.append(t[u[1] < (-t.square() / 2).exp()][:missing])
        missing -= len(kept[-1])
    return torch.cat(kept) if kept else torch.empty(0, dtype=torch.float64, device=generator.device)


def orthonormal(groups: int, rows: int, m: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Return the first rows (groups, rows, m) of Haar-distributed orthogonal matrices, independent by group.

    The Q factor of a Gaussian matrix, with the signs of R's diagonal fixed: QR alone is not uniform. Its numbers are of
    the dtype of ``like``, and go from the generator's device to that of ``like``.
    """
    normal = torch.randn(groups, m, rows, generator=generator, dtype=like.dtype, device=generator.device)
    q, r = torch.linalg.qr(normal.to(like.device))
    signs = torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0).to(like.dtype)
    rows_of: Tensor = (q * signs.unsqueeze(1)).transpose(1, 2)
    return rows_of

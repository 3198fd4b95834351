"""Define the kernels in plain torch: any dtype, any device, the truth that the compiled ones are held to.

Axes of the head's: ``n`` rows (one loss term each), ``d`` outputs, ``m`` features. Those of the layers': see
:mod:`.geometry`, and M = Σ_p δ_p φ_pᵀ (d, m), a sample's weight gradient for one cotangent. Per-row and per-sample
results are float64.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .centre import centre, shifted
from .class_sums import ClassSums, MeanRow, RowSlopes, add_tile, mean_row_by, softmax_variance_gradient_by
from .geometry import Geometry, Triple
from .precision import product, promoted

_PROMOTED = 2**20  # elements of a weight that are promoted at once

# torch's first exp of a process, if several threads make it at once, can be right to 1e-4 only (seen in one process
# of ten with torch 2.13's CPU build, MKL behind it). One serial call beforehand settles it.
torch.zeros(1, dtype=torch.float32, device="cpu").exp_()


def pair_distances(weight: Tensor) -> Tensor:
    """Return ``|w_s - w_t|²`` for all pairs of rows of ``weight`` (d, m), as (d, d), from the differences."""
    return torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist").square()


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
    """Return ``|φ_i|² Σ_{s<t} p_s p_t distances[s, t]`` with p = softmax(W φ_i + b), as (n,)."""
    logits = product(features, weight.t(), bias)
    maximum = logits.new_full((len(logits),), -torch.inf)
    rest, _, _ = exponentiate(logits, None, 1.0, maximum)
    pairs = row_dots(logits, product(logits, distances)) / 2
    return row_dots(features, features) * pairs / (1 + rest).square()


class RowSum(NamedTuple):
    """Hold a sum over the rows of a head.

    Attributes:
        total: the sum of the values of the rows that count.
        counted: how many they are.
        prepared: what depends on the weight alone, in the backend's own layout, for further calls.
    """

    total: float
    counted: int
    prepared: Tensor


def softmax_variance_sum(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prepared: Tensor | None,
    labels: Tensor | None,
    ignored: int,
    values: Tensor | None,
) -> RowSum | None:
    """Return the sum over rows of :func:`softmax_variance` with the weight and bias centred, distances made here.

    Args:
        features: (n, m).
        weight: (d, m).
        bias: (d,); None: 0.
        prepared: of an earlier call with this weight and bias; None in the first one.
        labels: (n,) int64, class indices; None: all rows count.
        ignored: the label of rows that do not count: they add 0.
        values: (n,) float64, takes the values; None: they are not kept.

    Returns:
        None if a row that counts has a label that is no class.
    """
    d, m = weight.shape
    if prepared is None:
        parts = weight - centre(weight), shifted(bias, weight), pair_distances(weight)
        prepared = torch.cat([part.flatten() for part in parts])
    centred, offsets, distances = prepared.split([d * m, d, d * d])
    found = softmax_variance(features, centred.view(d, m), offsets, distances.view(d, d))
    kept = torch.ones_like(found, dtype=torch.bool) if labels is None else labels != ignored
    if labels is not None and bool((kept & ((labels < 0) | (labels >= d))).any()):
        return None
    found = torch.where(kept, found, 0.0)
    if values is not None:
        values.copy_(found)
    return RowSum(float(found.sum()), int(kept.sum()), prepared)


def softmax_variance_gradient(features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor) -> RowSlopes:
    """Return the sum over rows of ``shares_i |φ_i|² var_{p_i}(w)``, and its slopes in the logits."""
    return softmax_variance_gradient_by(pair_distances, row_dots, features, weight, bias, shares)


def exponentiate(
    logits: Tensor, row_norms: Tensor | None, top_value: float, maximum: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Replace a block of each row's logits (n, d) by ``exp(z - maximum)``, in place.

    ``maximum`` (n,), the largest of the blocks before (-inf for the first), is raised to this block's largest logit
    first, in place. Where that raises it, the place of that logit takes ``top_value`` and stays out of the sums.

    Returns:
        ``rest`` (n,), the row sums; the same sums weighted by ``row_norms`` (d,), or None; the places of the maxima
        (n,), -1 where an earlier block has it.
    """
    largest, top = logits.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf).max(dim=1)
    raised = largest > maximum
    maximum.copy_(torch.where(raised, largest, maximum))
    logits.sub_(torch.where(maximum > -torch.inf, maximum, 0.0).unsqueeze(1)).exp_()
    top, hidden = top.unsqueeze(1), (raised & largest.isfinite()).unsqueeze(1)
    logits.scatter_(1, top, torch.where(hidden, 0.0, logits.gather(1, top)))
    rest = logits.sum(dim=1, dtype=torch.float64)
    moment = None if row_norms is None else row_dots(logits, row_norms.expand_as(logits))
    logits.scatter_(1, top, torch.where(raised.unsqueeze(1), top_value, logits.gather(1, top)))
    return rest, moment, torch.where(raised, top.squeeze(1), -1)


def exponentiate_tile(
    logits: Tensor,
    bias: Tensor | None,
    norms: Tensor,
    first: int,
    sums: ClassSums,
    rounded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Replace a tile of each row's logits by e = exp(z - maximum), in place, and add it to the row's sums.

    Where the tile has a larger logit than the tiles before, its class becomes the row's most probable one: e is 0 at
    its place, and the class that was the most probable one before joins the others.

    Args:
        logits: (n, width), of the classes from ``first`` on; its rows may be apart.
        bias: (d,) of all classes, which is added to the logits; None: 0.
        norms: ``|w_s|²`` of all classes, (d,).
        first: the tile's first class.
        sums: over the tiles before, (n,) each; takes the tile in, in place.
        rounded: (n, width) bfloat16, takes e in place of the logits, which are lost; sums are those of what it takes.

    Returns:
        What :func:`rejoin` takes: the classes (n,) that joined the others, -1 where none did, and the factors (n,) from
        the old maximum to the new one, float64.
    """
    return add_tile(exponentiate, logits, bias, norms, first, sums, rounded)


def norms_about(weight: Tensor, centre: Tensor) -> Tensor:
    """Return ``|w_s - centre|²``, (d,) in the dtype of ``centre`` (m,); ``weight`` (d, m) may be in half precision."""
    parts = weight.split(max(1, _PROMOTED // max(1, weight.shape[1])))
    return torch.cat([_squares(promoted(part) - centre) for part in parts]).to(centre.dtype)


def rejoin(summed: Tensor, weight: Tensor, centre: Tensor | None, top: Tensor, factor: Tensor) -> None:
    """Set ``summed_i = factor_i (summed_i + w_t - centre)`` in place, t = ``top_i``; a row of -1 is left alone.

    Args:
        summed: (n, m).
        weight: (d, m), may be in half precision.
        centre: (m,); None: 0.
        top: (n,) int64.
        factor: (n,) float64.
    """
    index = (top >= 0).nonzero().squeeze(1)
    if len(index):
        rows = promoted(weight[top[index]])
        rows = rows if centre is None else rows - centre
        summed[index] = (summed[index] + rows) * factor[index].unsqueeze(1).to(summed.dtype)


def mean_row(
    summed: Tensor, weight: Tensor, centre: Tensor, sums: ClassSums, uncentred: Tensor | None, reach: bool
) -> MeanRow:
    """Turn ``Σ e_s w_s`` over all classes but t into the mean of the rows of the weight, in place.

    The lengths are those of rows less ``centre``.

    Args:
        summed: (n, m).
        weight: (d, m), may be in half precision.
        centre: (m,).
        sums: those of each row over the same classes.
        uncentred: (n,) float64, ``Σ e_s`` of what is in ``summed``, if that is of the rows as they are, and so will the
            mean be; None: both are of the rows less the centre.
        reach: whether that is wanted.
    """
    return mean_row_by(row_dots, summed, weight, centre, sums, uncentred, reach)


def spread(
    features: Tensor, maximum: Tensor, mean: Tensor, weight: Tensor, centre: Tensor | None, bias: Tensor, chosen: Tensor
) -> Tensor:
    """Return ``Σ_s exp(⟨φ_i, w_s - centre⟩ + b_s - maximum_i) |w_s - centre - mean_i|²``, (n,), 0 in rows not chosen.

    An error in ``mean`` (n, m) enters squared. ``weight`` (d, m) may be in half precision; ``centre`` None: 0.
    """
    total = torch.zeros(len(features), dtype=torch.float64, device=features.device)
    index = chosen.nonzero().squeeze(1)
    if len(index):
        rows = promoted(weight) if centre is None else promoted(weight) - centre
        scores = product(features[index], rows.t(), bias).sub_(maximum[index].unsqueeze(1)).exp_()
        distances = torch.cdist(mean[index], rows, compute_mode="donot_use_mm_for_euclid_dist").square()
        total[index] = row_dots(scores, distances)
    return total


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return ``Σ_j a_ij b_ij`` as (n,)."""
    return (a * b).sum(dim=1, dtype=torch.float64)


def sigmoid_curvature(logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
    """Return ``Σ_s coefficients[i, s] row_norms[s] σ'(logits[i, s])``, (n,), σ' from the tail that does not cancel."""
    small = logits.abs().neg().exp()
    return row_dots(coefficients * small / (1 + small).square(), row_norms.expand_as(logits))


class Products(NamedTuple):
    """Hold what is made of each sample's M, (n, …) float64; None where not asked for."""

    squares: Tensor | None
    """``|M|²``, (n,)."""
    gram_weighted: Tensor | None
    """``|R M|²``, (n,)."""
    weighted: Tensor | None
    """``|w ∘ M|²``, (n,)."""
    by_column: Tensor | None
    """``Σ w ∘ M`` over the rows, and the kernel elements, of each input channel, (n, G c)."""
    by_row: Tensor | None
    """``Σ w ∘ M`` over the columns of each row, (n, G d)."""


def direct(
    inputs: Tensor, cotangent: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None
) -> Products:
    """Make each sample's M, group by group, and return what is asked of it; M is written out.

    Args:
        inputs: (n, G c, s0, s1, s2), padded.
        cotangent: (n, G d, p0, p1, p2).
        geometry: which inputs a position sees.
        factor: R, (G, r, d); None if ``|R M|²`` is not wanted.
        weight: w, (G, d, m); None if nothing with ``w ∘ M`` is wanted.
    """
    gradients = product(geometry.rows(cotangent).mT, geometry.patches(inputs))  # n, G, d, m
    return products(gradients, geometry, factor, weight)


def direct_gathered(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    geometry: Geometry,
    factor: Tensor | None,
    positions: Tensor | None = None,
) -> Products:
    """Return ``|M|²`` and ``|R M|²`` by :func:`direct` of several cotangents, one's samples behind another's.

    Args:
        inputs: as for :func:`direct`, like what follows.
        cotangents: (n, G d, p0, p1, p2) each, or with ``positions`` (n, G d, …).
        geometry: of the layer.
        factor: R or None.
        positions: (n, G d, elements) int32: the position that each element of a row of a cotangent is at, -1 for one
            that counts nowhere.
    """
    if positions is not None:
        cotangents = [_placed(cotangent, positions, geometry.places(inputs.shape[2:])) for cotangent in cotangents]
    found = [direct(inputs, cotangent, geometry, factor, None) for cotangent in cotangents]
    return Products(*(None if part[0] is None else torch.cat(part) for part in zip(*found, strict=True)))


def _placed(cotangent: Tensor, positions: Tensor, places: Triple) -> Tensor:
    """Return the whole of a cotangent, (n, G d, p0, p1, p2)."""
    whole = cotangent.new_zeros(*positions.shape[:2], math.prod(places))
    elements = torch.where(positions < 0, 0.0, cotangent.flatten(2))
    placed: Tensor = whole.scatter_add_(2, positions.clamp_min(0).long(), elements).unflatten(2, places)
    return placed


def products(gradients: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None) -> Products:
    """Return what :func:`direct` does for M itself, (n, G, d, m)."""
    gram_weighted = None if factor is None else _squares(product(factor, gradients))
    if weight is None:
        return Products(_squares(gradients), gram_weighted, None, None, None)
    weighted = (weight * gradients).double()
    n, groups, d, m = weighted.shape
    by_column = (
        weighted.view(n, groups, d, m // geometry.kernel_elements, geometry.kernel_elements).sum(dim=(2, 4)).flatten(1)
    )
    return Products(_squares(gradients), gram_weighted, _squares(weighted), by_column, weighted.sum(dim=3).flatten(1))


def patches(inputs: Tensor, geometry: Geometry) -> Tensor:
    """Return patches φ_p, (n, G, P, m), of any strides."""
    return geometry.patches(inputs)


def patch_gram(inputs: Tensor, geometry: Geometry) -> Tensor:
    """Return ``⟨φ_p, φ_p'⟩`` for all pairs of positions, (n, G, P, P) in the inputs' dtype."""
    rows = geometry.patches(inputs)
    return product(rows, rows.mT)


def gram(rows: Tensor, patch_gram: Tensor) -> Tensor:
    """Return ``Σ_pp' ⟨a_p, a_p'⟩ patch_gram[p, p']``, (n,): ``|R M|²`` for a = R δ, ``|M|²`` for a = δ.

    Args:
        rows: a, (n, G, P, r).
        patch_gram: (n, G, P, P), symmetric.
    """
    pairs = product(rows, rows.mT)
    return (pairs * patch_gram).sum(dim=(1, 2, 3), dtype=torch.float64)


def small_eigenvalues(matrices: Tensor) -> Tensor:
    """Return eigenvalues of symmetric matrices (n, N, N), ascending, (n, N); float64, N at most 32.

    A matrix that is not finite has NaN for eigenvalues.
    """
    finite = matrices.isfinite().all(dim=2).all(dim=1)
    values: Tensor = torch.linalg.eigvalsh(torch.where(finite[:, None, None], matrices, 0.0))
    return torch.where(finite[:, None], values, torch.nan)


def _squares(matrices: Tensor) -> Tensor:
    return matrices.square().flatten(1).sum(dim=1, dtype=torch.float64)

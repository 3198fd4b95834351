"""Define the operations of a backend, in plain torch; tests compare the kernels with these.

Axes of the head's operations: ``n`` rows (one loss term each), ``d`` outputs, ``m`` features. For the axes of layers
see :mod:`.geometry`; M = Σ_p δ_p φ_pᵀ (d, m) is a sample's weight gradient for one cotangent. Results by row and by
sample are float64.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .geometry import Geometry, Triple
from .precision import product, promoted, promoted_dtype
from .quantities import Forms
from .routes import LibraryRoutes

DEFAULT_MEMORY = 24 * 2**20  # bytes that working buffers may take, about the size of a processor's caches

FUSED_OUTPUTS = 64  # outputs of a head whose curvature one kernel computes

_PROMOTED = 2**20  # elements of a weight that are promoted at once
_ALIGNED = 64  # classes, see `_aligned`
_CENTRE_ROWS = 31  # as in csrc/cpu/kernels.h

# The first exp of a process, if several threads compute it at once, can have a relative error of 1e-4 (in one process
# of ten with torch 2.13's CPU build, which calls MKL). One serial call beforehand prevents that.
torch.zeros(1, dtype=torch.float32, device="cpu").exp_()


def centre(weight: Tensor) -> Tensor:
    """Return the median of some rows of a head's weight (d, m), (m,); of half precision in float32.

    A row that is common to all classes changes no probability, but if it is large, logits lose their last digits. A
    mean would follow an outlier row.
    """
    weight = weight.contiguous()  # torch's median of an expanded tensor is uninitialised memory (2.13)
    return promoted(weight[:: -(-len(weight) // _CENTRE_ROWS)]).median(dim=0).values


def shifted(bias: Tensor | None, weight: Tensor) -> Tensor:
    """Return a head's bias (d,) minus its median; zeros for None."""
    if bias is None:
        return promoted(weight[:0]).new_zeros(len(weight))
    bias = promoted(bias)
    return bias - bias.median().nan_to_num(0.0, 0.0, 0.0)  # the median is -inf if most classes are masked


def takes_pairs(d: int, m: int) -> bool:
    """Return whether a head of d classes and m features is computed by pairs of classes, for up to 3 m / 2 classes."""
    return d <= max(FUSED_OUTPUTS, 3 * m // 2)


class RowSum(NamedTuple):
    """Hold a sum over the rows of a head that count."""

    total: float
    counted: int
    prepared: Tensor  # constants of weight and bias, in the backend's own layout, for further calls


class RowGradients(NamedTuple):
    """Hold the terms of the gradient of a sum over the rows of a head, with v_i = var_{p_i}(w)."""

    total: float | Tensor  # Σ shares_i |φ_i|² v_i, a number, or a float64 tensor that the host has not waited for
    of_logits: Tensor  # shares_i |φ_i|² ∂v_i/∂z_is, (d, n)
    probabilities: Tensor  # p_is, (d, n)
    factors: Tensor  # 2 shares_i v_i and shares_i |φ_i|², (2, n)


class ClassSums(NamedTuple):
    """Hold sums over each row's classes but the most probable one t, of e_s = exp(z_s - z_t)."""

    maximum: Tensor  # z_t, (n,) in the logits' dtype; -inf before the first class
    top: Tensor  # t, (n,) int64; -1 before the first class
    rest: Tensor  # Σ e_s, (n,) float64
    moment: Tensor  # Σ e_s |w_s|², (n,) float64


class MeanRow(NamedTuple):
    """Hold squared norms, (n,) float64, where w_t is the row of a sample's most probable class."""

    others: Tensor  # of the mean of the other classes' rows
    away: Tensor  # of that mean minus w_t
    reach: Tensor | None  # of Σ e_s w_s + w_t


class Backend:
    """Provide the operations in plain torch.

    Other backends override the operations for which they have kernels, and the choices of what is faster.
    """

    name = "reference"  # as results show it
    device = "cpu"  # the type of device that engines run on
    memory = DEFAULT_MEMORY  # bytes that working buffers may take by default
    routes: type[LibraryRoutes] = LibraryRoutes  # chooses among the routes to the forms of a layer's M
    sums: tuple[torch.dtype, ...] = ()  # dtypes with a kernel for softmax_variance_sum
    in_place = False  # whether a wide head needs no buffers between its kernels
    first_tile = 0  # classes in the first tile of a wide head, if the backend fuses

    # Devices, and choices of what is faster.

    def engines(self) -> list[str]:
        """Return the names of the backend's engines that this machine can run."""
        return [self.name]

    def forced(self, engine: str) -> contextlib.AbstractContextManager[None]:
        """Use one of the engines inside a ``with`` block."""
        return contextlib.nullcontext()

    def on_gpu(self, tensor: Tensor) -> bool:
        """Return whether operations on a tensor are done as on a GPU."""
        return tensor.is_cuda

    def fuses(self, features: Tensor, weight: Tensor) -> bool:
        """Return whether :meth:`multiply_exponentiate` takes features (n, m) and a weight (d, m)."""
        return False

    def stacking_pays(self, inputs: Tensor, geometry: Geometry, rows: int, *, by_gram: bool) -> bool:
        """Return whether several cotangents, with ``rows`` in a group, are faster contracted together than alone."""
        return True

    # Heads.

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """Return the product of two matrices, written to ``out``; of bfloat16 in float32."""
        if a.dtype != torch.bfloat16:
            return product(a, b, out=out)
        for part in _aligned(b.shape[1]):
            if a.is_cuda:
                torch.mm(a, b[:, part], torch.float32, out=out[:, part])
            else:
                torch.mm(a.float(), b[:, part].float(), out=out[:, part])
        return out

    def multiply_add(self, a: Tensor, b: Tensor, total: Tensor) -> None:
        """Add the product of two matrices to ``total``; of bfloat16 in float32."""
        if a.dtype != torch.bfloat16:
            total.addmm_(a, b)
            return
        for part in _aligned(len(b)):
            if a.is_cuda:
                torch.addmm(total, a[:, part], b[part], torch.float32, out=total)
            else:
                total.addmm_(a[:, part].float(), b[part].float())

    def row_dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``Σ_j a_ij b_ij`` as (n,)."""
        return _row_dots(a, b)

    def squared_norms(self, matrix: Tensor, memory: int) -> Tensor:
        """Return ``|row|²`` of an (n, m) matrix, (n,); of half precision ``memory`` bytes at a time."""
        if promoted_dtype(matrix.dtype) == matrix.dtype:
            return self.row_dots(matrix, matrix)
        chunks = map(promoted, matrix.split(max(1, memory // (4 * max(1, matrix.shape[1])))))
        return torch.cat([self.row_dots(chunk, chunk) for chunk in chunks])

    def pair_distances(self, weight: Tensor) -> Tensor:
        """Return ``|w_s - w_t|²`` for all pairs of rows of ``weight`` (d, m), as (d, d), from the differences."""
        return torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist").square()

    def softmax_variance(self, features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
        """Return ``|φ_i|² Σ_{s<t} p_s p_t distances[s, t]``, p = softmax(W φ_i + b), (n,).

        Kernels take at most :data:`FUSED_OUTPUTS` outputs.
        """
        logits = product(features, weight.t(), bias)
        maximum = logits.new_full((len(logits),), -torch.inf)
        rest, _, _ = self.exponentiate(logits, None, 1.0, maximum)
        pairs = _row_dots(logits, product(logits, distances)) / 2
        return _row_dots(features, features) * pairs / (1 + rest).square()

    def softmax_variance_sum(
        self,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        prepared: Tensor | None,
        labels: Tensor | None,
        ignored: int,
        values: Tensor | None,
    ) -> RowSum | None:
        """Return the sum over rows of :meth:`softmax_variance`, after centring weight and bias.

        Labels (n,) are class indices; rows with the ``ignored`` one count 0, and without labels all rows count. The
        values are written to ``values``, (n,) float64, if it is given. The result is None if a row that counts has a
        label that is no class. ``prepared`` comes from an earlier call with this weight and bias, or is None.
        """
        d, m = weight.shape
        if prepared is None:
            parts = weight - centre(weight), shifted(bias, weight), self.pair_distances(weight)
            prepared = torch.cat([part.flatten() for part in parts])
        centred, offsets, distances = prepared.split([d * m, d, d * d])
        found = self.softmax_variance(features, centred.view(d, m), offsets, distances.view(d, d))
        kept = torch.ones_like(found, dtype=torch.bool) if labels is None else labels != ignored
        if labels is not None and bool((kept & ((labels < 0) | (labels >= d))).any()):
            return None
        found = torch.where(kept, found, 0.0)
        if values is not None:
            values.copy_(found)
        return RowSum(float(found.sum()), int(kept.sum()), prepared)

    def softmax_variance_gradient(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor
    ) -> RowGradients:
        """Return the sum over rows of ``shares_i |φ_i|² var_{p_i}(w)``, and its gradient in the logits."""
        dtype, centred = features.dtype, weight - centre(weight)
        p = torch.softmax(product(features, centred.t(), shifted(bias, weight)), dim=1)
        q = product(p, self.pair_distances(weight))
        twice = (p * q).sum(dim=1)
        scale = self.row_dots(features, features) * shares
        of_logits = p * (q - twice.unsqueeze(1)) * scale.to(dtype).unsqueeze(1)
        factors = torch.stack([(twice * shares).to(dtype), scale.to(dtype)])
        return RowGradients(scale @ twice.double() / 2, of_logits.t(), p.t(), factors)

    def exponentiate(
        self, logits: Tensor, row_norms: Tensor | None, top_value: float, maximum: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Replace a block of each row's logits (n, d) by ``exp(z - maximum)``, in place.

        ``maximum`` (n,), the largest logit of earlier blocks (-inf for the first), is first raised to this block's
        largest logit, in place. Return the sums of each row, (n,), the sums weighted by ``row_norms`` (d,), or None,
        and the place of the logit that raised the maximum, (n,), -1 if none did. The entry at that place becomes
        ``top_value``, and is not in the sums. Kernels need contiguous logits and norms.
        """
        largest, top = logits.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf).max(dim=1)
        raised = largest > maximum
        maximum.copy_(torch.where(raised, largest, maximum))
        logits.sub_(torch.where(maximum > -torch.inf, maximum, 0.0).unsqueeze(1)).exp_()
        top, hidden = top.unsqueeze(1), (raised & largest.isfinite()).unsqueeze(1)
        logits.scatter_(1, top, torch.where(hidden, 0.0, logits.gather(1, top)))
        rest = logits.sum(dim=1, dtype=torch.float64)
        moment = None if row_norms is None else _row_dots(logits, row_norms.expand_as(logits))
        logits.scatter_(1, top, torch.where(raised.unsqueeze(1), top_value, logits.gather(1, top)))
        return rest, moment, torch.where(raised, top.squeeze(1), -1)

    def exponentiate_tile(
        self,
        logits: Tensor,
        bias: Tensor | None,
        norms: Tensor,
        first: int,
        sums: ClassSums,
        rounded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Replace a tile of each row's logits by e = exp(z - maximum), in place, and add it to the row's sums.

        If the tile has a larger logit than earlier tiles, its class becomes the row's most probable one: e is 0 at its
        place, and the previously most probable class joins the others.

        Logits are (n, width), of the classes from ``first`` on; compiled kernels for the CPU need them contiguous. Bias
        and norms ``|w_s|²`` (d,) are of all classes. With ``rounded`` (n, width) bfloat16, e is written there, the sums
        are those of the rounded e, and the logits are lost. Return the arguments for :meth:`rejoin`: the classes (n,)
        that joined the others, -1 for none, and the factors (n,) float64 from the old maximum to the new one.
        """
        before, tile = sums.maximum.clone(), slice(first, first + logits.shape[1])
        if bias is not None:
            logits.add_(bias[tile])
        rest, moment, place = self.exponentiate(logits, None if rounded is not None else norms[tile], 0.0, sums.maximum)
        if rounded is not None:
            values = rounded.copy_(logits).to(logits.dtype)
            both = values.sum(dim=1, dtype=torch.float64), (values * norms[tile]).sum(dim=1, dtype=torch.float64)
            rest, moment = (rows.masked_fill_((place >= 0) & (sums.maximum == torch.inf), torch.nan) for rows in both)
        assert moment is not None
        raised = place >= 0
        joining, top = torch.where(raised, sums.top, -1), place.add_(first)
        joined = joining >= 0
        factor = torch.where(joined, (before - sums.maximum).double().exp(), 1.0)
        joined_norms = torch.where(joined, norms[joining.clamp_min(0)], 0.0)
        sums.rest.add_(joined).mul_(factor).add_(rest)
        sums.moment.add_(joined_norms).mul_(factor).add_(moment)
        sums.top.copy_(torch.where(raised, top, sums.top))
        return joining, factor

    def multiply_exponentiate(
        self, features: Tensor, weight: Tensor, bias: Tensor, norms: Tensor, first: int, sums: ClassSums
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the exponentials of ``features @ weight.T + bias``, without storing the logits, and add them to sums.

        It is for features (n, m) and a weight (width, m), of the classes from ``first`` on, that the backend
        :meth:`fuses`. Return the exponentials (n, width), 0 at the class that became a row's most probable one, and the
        arguments for :meth:`rejoin`, -1 for no class: classes (n,) of rows with exponentials relative to the new
        maximum, which join Σ e_s w_s before the tile is added; classes (n,) of rows with exponentials relative to the
        old one, which join after it; and the factors (n,) float64 for both.
        """
        raise NotImplementedError

    def norms_about(self, weight: Tensor, centre: Tensor) -> Tensor:
        """Return ``|w_s - centre|²``, (d,) in the dtype of ``centre`` (m,); weights may be in half precision."""
        parts = weight.split(max(1, _PROMOTED // max(1, weight.shape[1])))
        return torch.cat([_squares(promoted(part) - centre) for part in parts]).to(centre.dtype)

    def rejoin(self, summed: Tensor, weight: Tensor, centre: Tensor | None, top: Tensor, factor: Tensor) -> None:
        """Set ``summed_i = factor_i (summed_i + w_t - centre)`` in place, t = ``top_i``; a row with -1 stays unchanged.

        ``summed`` (n, m), ``top`` and ``factor`` (n,) are contiguous; a ``centre`` of None is 0.
        """
        index = (top >= 0).nonzero().squeeze(1)
        if len(index):
            rows = promoted(weight[top[index]])
            rows = rows if centre is None else rows - centre
            summed[index] = (summed[index] + rows) * factor[index].unsqueeze(1).to(summed.dtype)

    def mean_row(
        self, summed: Tensor, weight: Tensor, centre: Tensor, sums: ClassSums, uncentred: Tensor | None, reach: bool
    ) -> MeanRow:
        """Replace ``Σ e_s w_s`` (n, m), contiguous, over all classes but t by the mean of the weight's rows, in place.

        The norms are those of rows minus ``centre``. ``uncentred``, (n,) float64, is ``Σ e_s`` of the classes in
        ``summed`` if that sum is not centred, and the mean will not be either; with None both are centred.
        """
        dtype = summed.dtype
        if uncentred is not None:
            summed.addr_(uncentred.to(dtype), centre, alpha=-1)
        top = promoted(weight[sums.top.clamp_min(0)]).sub_(centre)
        whole = self.row_dots(*[summed + top] * 2) if reach else None
        mean = summed.div_(sums.rest.to(dtype).clamp_min(torch.finfo(dtype).tiny).unsqueeze(1))
        others, away = self.row_dots(mean, mean), top.neg_().add_(mean)
        lengths = MeanRow(others, self.row_dots(away, away), whole)
        mean.addcmul_(away, (-1 / (1 + sums.rest)).unsqueeze(1).to(dtype))
        if uncentred is not None:
            mean.add_(centre)
        return lengths

    def spread(
        self,
        features: Tensor,
        maximum: Tensor,
        mean: Tensor,
        weight: Tensor,
        centre: Tensor | None,
        bias: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """Return ``Σ_s exp(⟨φ_i, w_s - centre⟩ + b_s - maximum_i) |w_s - centre - mean_i|²``, 0 in rows not chosen.

        It depends quadratically on an error in ``mean`` (n, m). A ``centre`` of None is 0. ``maximum`` and ``chosen``
        (n,) are contiguous.
        """
        total = torch.zeros(len(features), dtype=torch.float64, device=features.device)
        index = chosen.nonzero().squeeze(1)
        if len(index):
            rows = promoted(weight) if centre is None else promoted(weight) - centre
            scores = product(features[index], rows.t(), bias).sub_(maximum[index].unsqueeze(1)).exp_()
            distances = torch.cdist(mean[index], rows, compute_mode="donot_use_mm_for_euclid_dist").square()
            total[index] = _row_dots(scores, distances)
        return total

    def sigmoid_curvature(self, logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
        """Return ``Σ_s coefficients[i, s] row_norms[s] σ'(logits[i, s])``, (n,), exact for large logits too."""
        small = logits.abs().neg().exp()
        return _row_dots(coefficients * small / (1 + small).square(), row_norms.expand_as(logits))

    # Layers. Kernels too take inputs, cotangents and rows with any strides.

    def direct(
        self, inputs: Tensor, cotangent: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None
    ) -> Forms:
        """Compute each sample's M, and return its forms: |M|², with R (G, r, d) |R M|², with w those of w ∘ M."""
        gradients = product(geometry.rows(cotangent).mT, geometry.patches(inputs))  # n, G, d, m
        return self.products(gradients, geometry, factor, weight)

    def direct_gathered(
        self,
        inputs: Tensor,
        cotangents: Sequence[Tensor],
        geometry: Geometry,
        factor: Tensor | None,
        positions: Tensor | None = None,
    ) -> Forms:
        """Return ``|M|²`` and ``|R M|²`` of k cotangents as :meth:`direct` does, concatenated to (k n,).

        With ``positions`` (n, G d, elements) int32, cotangents (n, G d, …) have some elements of each row: the position
        of each, or -1 for one that counts nowhere.
        """
        if positions is not None:
            cotangents = [_placed(cotangent, positions, geometry.places(inputs.shape[2:])) for cotangent in cotangents]
        return Forms.joined([self.direct(inputs, cotangent, geometry, factor, None) for cotangent in cotangents])

    def products(self, gradients: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None) -> Forms:
        """Return the forms of :meth:`direct` for given M, (n, G, d, m)."""
        gram_weighted = None if factor is None else _squares(product(factor, gradients))
        if weight is None:
            return Forms(_squares(gradients), gram_weighted)
        weighted = (weight * gradients).double()
        elements = geometry.kernel_elements
        by_column = weighted.unflatten(3, (-1, elements)).sum(dim=(2, 4)).flatten(1)
        by_row = weighted.sum(dim=3).flatten(1)
        return Forms(_squares(gradients), gram_weighted, _squares(weighted), by_column, by_row)

    def patches(self, inputs: Tensor, geometry: Geometry) -> Tensor:
        """Return patches φ_p, (n, G, P, m), with any strides."""
        return geometry.patches(inputs)

    def patch_gram(self, inputs: Tensor, geometry: Geometry) -> Tensor:
        """Return ``⟨φ_p, φ_p'⟩`` for all pairs of positions, (n, G, P, P) in the inputs' dtype."""
        rows = geometry.patches(inputs)
        return product(rows, rows.mT)

    def gram(self, rows: Tensor, patch_gram: Tensor) -> Tensor:
        """Return ``Σ_pp' ⟨a_p, a_p'⟩ patch_gram[p, p']``, (k n,), for rows a (k n, G, P, r).

        It is ``|M|²`` for a = δ, and ``|R M|²`` for a = R δ. The rows of k cotangents share n Gram matrices.
        """
        pairs = product(rows, rows.mT).view(-1, *patch_gram.shape)
        return (pairs * patch_gram).sum(dim=(2, 3, 4), dtype=torch.float64).flatten()

    def gram_weighted(self, rows: Tensor, factor: Tensor, patch_gram: Tensor, *, triangular: bool) -> Tensor:
        """Return :meth:`gram` of R δ, for δ (n, G, P, d) and R (G, r, d), ``triangular`` or not."""
        # R (r, d) times (d, P), since a convolution's cotangent has this order in memory.
        return self.gram(product(factor, rows.mT).mT, patch_gram)

    def small_eigenvalues(self, matrices: Tensor) -> Tensor:
        """Return the eigenvalues of symmetric matrices (n, N, N), N ≤ 32, ascending, (n, N) float64.

        Those of a matrix that is not finite are NaN.
        """
        finite = matrices.isfinite().all(dim=2).all(dim=1)
        values: Tensor = torch.linalg.eigvalsh(torch.where(finite[:, None, None], matrices, 0.0))
        return torch.where(finite[:, None], values, torch.nan)


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1, dtype=torch.float64)


def _squares(matrices: Tensor) -> Tensor:
    return matrices.square().flatten(1).sum(dim=1, dtype=torch.float64)


def _placed(cotangent: Tensor, positions: Tensor, places: Triple) -> Tensor:
    """Return a whole cotangent, (n, G d, p0, p1, p2), from some elements of each row and their positions."""
    whole = cotangent.new_zeros(*positions.shape[:2], math.prod(places))
    elements = torch.where(positions < 0, 0.0, cotangent.flatten(2))
    placed: Tensor = whole.scatter_add_(2, positions.clamp_min(0).long(), elements).unflatten(2, places)
    return placed


def _aligned(classes: int) -> list[slice]:
    """Return the slice of classes that cuBLAS multiplies fast, by accesses of 16 bytes, and the slice of the rest."""
    whole = classes // _ALIGNED * _ALIGNED
    return [part for part in (slice(0, whole), slice(whole, classes)) if part.start < part.stop]

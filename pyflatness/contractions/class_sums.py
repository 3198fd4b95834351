"""Hold a row's sums over the classes of a head, while these come tile by tile and when all of them were there."""

from typing import NamedTuple

from torch import Tensor


class ClassSums(NamedTuple):
    """Hold sums over each row's classes but the most probable one t, relative to its exp(z).

    Attributes:
        maximum: z_t, (n,) in the logits' dtype; -inf before the first class.
        top: t, (n,) int64; -1: there is none.
        rest: ``Σ e_s`` with e_s = exp(z_s - z_t), (n,) float64.
        moment: ``Σ e_s |w_s|²``, (n,) float64.
    """

    maximum: Tensor
    top: Tensor
    rest: Tensor
    moment: Tensor


class MeanRow(NamedTuple):
    """Hold squared lengths, (n,) float64, in which w_t is the row of a sample's most probable class.

    Attributes:
        others: of the mean of the other classes' rows.
        away: of that mean less w_t.
        reach: of ``Σ e_s w_s + w_t``; None where it was not asked for.
    """

    others: Tensor
    away: Tensor
    reach: Tensor | None

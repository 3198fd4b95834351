"""Shift the weight and bias of a head by what is common to its classes: it moves no probability.

A row common to all classes would drown the logits' last digits by its size. The centre is the median of some rows: a
mean would follow an outlier row.
"""

from torch import Tensor

from .precision import promoted

_CENTRE_ROWS = 31  # as in csrc/cpu/kernels.h


def centre(weight: Tensor) -> Tensor:
    """Return the median of some rows of a weight (d, m), (m,); of half precision in float32."""
    weight = weight.contiguous()  # torch's median of an expanded tensor is uninitialised memory (2.13)
    return promoted(weight[:: -(-len(weight) // _CENTRE_ROWS)]).median(dim=0).values


def shifted(bias: Tensor | None, weight: Tensor) -> Tensor:
    """Return a bias (d,) less its median; zeros for None."""
    if bias is None:
        return promoted(weight[:0]).new_zeros(len(weight))
    bias = promoted(bias)
    return bias - bias.median().nan_to_num(0.0, 0.0, 0.0)  # -inf where most classes are masked

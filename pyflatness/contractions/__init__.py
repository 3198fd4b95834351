"""The operations that measures are made of, on the backend that was chosen for them.

``kernels in C++ (compiled) or torch (reference)  ->  contractions (here)  ->  losses  ->  measures``
"""

from .backends import check, choose, describe
from .precision import full_precision, promoted, promoted_dtype, squared_norms
from .softmax import SoftmaxVariance

__all__ = [
    "SoftmaxVariance",
    "check",
    "choose",
    "describe",
    "full_precision",
    "promoted",
    "promoted_dtype",
    "squared_norms",
]

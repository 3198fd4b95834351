"""The operations that measures are made of, on the backend that was chosen for them.

``kernels in C++ (compiled) or torch (reference)  ->  contractions (here)  ->  losses  ->  measures``
"""

from .backends import check, choose, describe
from .geometry import Geometry
from .layer import DenseGradients, WeightGradients
from .precision import full_precision, promoted, promoted_dtype, squared_norms
from .softmax import DEFAULT_MEMORY, SoftmaxVariance, default_memory
from .wide import Bounded

__all__ = [
    "DEFAULT_MEMORY",
    "Bounded",
    "DenseGradients",
    "Geometry",
    "SoftmaxVariance",
    "WeightGradients",
    "check",
    "choose",
    "default_memory",
    "describe",
    "full_precision",
    "promoted",
    "promoted_dtype",
    "squared_norms",
]

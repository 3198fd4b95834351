"""Provide the operations that measures are made of, on the backend that was chosen for them.

``kernels in C++ (compiled) or torch (reference)  ->  contractions (here)  ->  losses  ->  measures``
"""

from .backends import NAMES as BACKENDS
from .backends import choose, choose_for_few, choose_for_head, describe
from .dense import DenseContraction
from .geometry import Geometry
from .layer import LayerContraction
from .precision import divided, full_precision, multiplied, product, promoted, promoted_dtype, squared_norms
from .quantities import needs_weight
from .reference import RowSum
from .softmax import DEFAULT_MEMORY, FUSED_OUTPUTS, Labels, SoftmaxVariance, default_memory
from .tokens import Columns, TokenContraction
from .wide import Bounded
from .written import WrittenContraction

__all__ = [
    "BACKENDS",
    "DEFAULT_MEMORY",
    "FUSED_OUTPUTS",
    "Bounded",
    "Columns",
    "Contractor",
    "DenseContraction",
    "Geometry",
    "Labels",
    "LayerContraction",
    "RowSum",
    "SoftmaxVariance",
    "TokenContraction",
    "WrittenContraction",
    "choose",
    "choose_for_few",
    "choose_for_head",
    "default_memory",
    "describe",
    "divided",
    "full_precision",
    "multiplied",
    "needs_weight",
    "product",
    "promoted",
    "promoted_dtype",
    "squared_norms",
]

Contractor = LayerContraction | TokenContraction | WrittenContraction
"""What contracts a layer's inputs and cotangents, in the form that they have in :mod:`.kinds`."""

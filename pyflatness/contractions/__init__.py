"""Provide the operations that measures are made of, on the chosen backend.

``torch (reference), or kernels in C++, CUDA or Triton  ->  contractions (here)  ->  losses, sweep  ->  measures``
"""

from .backends import NAMES as BACKENDS
from .backends import choose, choose_for_head, default_memory
from .columns import WithColumns
from .dense import DenseContraction
from .geometry import Geometry
from .layer import Contractor, Ingredients, LayerContraction
from .precision import divided, full_precision, multiplied, product, promoted, promoted_dtype
from .quantities import needs_weight, of_outputs
from .reference import DEFAULT_MEMORY, FUSED_OUTPUTS, Backend, RowSum
from .softmax import Labels, SoftmaxVariance
from .tokens import Columns, TokenContraction
from .wide import Bounded
from .written import WrittenContraction

__all__ = [
    "BACKENDS",
    "DEFAULT_MEMORY",
    "FUSED_OUTPUTS",
    "Backend",
    "Bounded",
    "Columns",
    "Contractor",
    "DenseContraction",
    "Geometry",
    "Ingredients",
    "Labels",
    "LayerContraction",
    "RowSum",
    "SoftmaxVariance",
    "TokenContraction",
    "WithColumns",
    "WrittenContraction",
    "choose",
    "choose_for_head",
    "default_memory",
    "divided",
    "full_precision",
    "multiplied",
    "needs_weight",
    "of_outputs",
    "product",
    "promoted",
    "promoted_dtype",
]

"""Compute the trace of a layer's block of the loss Hessian.

    Tr(∂²E/∂w²) = Σ_s T[s, s] = Σ_i Σ_c σ_ic |M_i^(c)|² / Σ_i ω_i    by the GGN

A network's value is the sum over its measured layers. It is not invariant to rescalings.
"""

from .base import Measure

TRACE = Measure(
    name="trace",
    formula="Tr(∂²E/∂w²)",
    source="the sum of the block Hessian's eigenvalues",
    quantity="squares",
)

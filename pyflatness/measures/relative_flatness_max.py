"""Compute maximal relative flatness (Petzka et al. 2021, Definition 13).

    κ^φ(w) = Σ_s |w_s|² λ_max(∂²E/∂w_s²)        over the rows w_s of a layer's weight (the filters of a convolution)

It bounds the robustness to every feature matrix |A| ≤ 1, E_F ≤ δ²d/2 κ^φ + O(δ³) at a minimum (Theorem 14), where
relative flatness gives the mean over rotations. It is invariant to layer-wise rescalings of ReLU networks; normalised
also to neuron-wise ones.
"""

from ..hessian.row_sweep import Rows, RowSweep
from ..report import Estimate
from .base import Measure, Task, Values


def relative_flatness_max(task: Task) -> Values:
    """Return the value of every layer that ran."""
    sweep = RowSweep(task)
    return {name: _estimate(sweep, rows, name) for name, rows in sweep.rows().items()}


def _estimate(sweep: RowSweep, rows: Rows, name: str) -> Estimate:
    ritz, notes = rows.ritz, sweep.notes(name)
    if ritz.products:
        bound = float(rows.norms @ ritz.residuals)
        converged = "" if ritz.converged else ": not converged"
        notes = (
            *notes,
            f"eigenvalues of the rows within {bound:.1e} in the sum ({ritz.products} Lanczos products){converged}",
        )
    return Estimate(
        value=float(rows.norms @ ritz.values),
        stderr=None,
        samples=sweep.samples,
        method=rows.method,
        exact=rows.exact,
        backend="reference",
        layer=name,
        notes=notes,
    )


RELATIVE_FLATNESS_MAX = Measure(
    name="relative_flatness_max",
    formula="κ^φ = Σ_s |w_s|² λ_max(∂²E/∂w_s²)",
    source="Petzka et al. 2021, Definition 13",
    compute=relative_flatness_max,
    granularity="layer",
    invariant="layer-wise",
    cost="a sweep, and Lanczos in memory or the rows' Hessians",
    reads=2,
)

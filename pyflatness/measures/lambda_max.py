"""Compute the largest eigenvalue of the loss Hessian, of a layer's block and of all measured layers together.

    λ_max(∂²E/∂w²), algebraically largest: negative where the loss is concave in w; GGN: λ_max(Σ_i Σ_c σ_ic m_ic m_icᵀ)
    with m_ic = vec(M_i^(c)), over Σ_i ω_i

w is the layer's effective weight, all its groups together, without the bias; the network's value is that of the joint
Hessian of the measured layers' weights, with the blocks between layers (where the GGN is another matrix even for ReLU
networks). It is computed by Lanczos (:mod:`pyflatness.numerics.lanczos`), where every product is one read of the data.
Certified is that an eigenvalue lies within the reported residual of the value, up to the rounding of the products; that
it is the largest one is as certain as that a random start has a component along its eigenvector. It is not invariant to
rescalings.
"""

from ..hessian.eigenvalues import largest
from ..hessian.products import Products
from ..numerics.lanczos import Ritz
from ..passes.memory import Budget
from ..report import Estimate
from .base import Measure, Task, Values


def lambda_max(task: Task) -> Values:
    """Return the value of every layer that ran, and under ``""`` that of the joint Hessian."""
    products = Products(task)
    every = tuple(products.modules)
    blocks = dict.fromkeys([*((name,) for name in every), every])  # a single layer is the network too
    found = largest(products, list(blocks), Budget.of(task.model, task.options.memory), task.options.seed)
    estimates = {name: _estimate(task, products, found[name,], name) for name in every}
    return {**estimates, "": _estimate(task, products, found[every], "")}


def _estimate(task: Task, products: Products, ritz: Ritz, name: str) -> Estimate:
    custom = products.custom & {name} if name else products.custom
    method = "ggn" if task.options.by_ggn else "hessian"
    certificate = f"λ_max: an eigenvalue within {float(ritz.residuals):.1e} ({ritz.products} Lanczos products)"
    return Estimate(
        value=float(ritz.values),
        stderr=None,
        samples=products.samples,
        method=method,
        exact=method == "hessian" and ritz.converged and not custom,
        backend="reference",
        layer=name,
        notes=(*products.notes(name), certificate if ritz.converged else f"{certificate}: not converged"),
    )


LAMBDA_MAX = Measure(
    name="lambda_max",
    formula="λ_max(∂²E/∂w²)",
    source="the largest eigenvalue of the block Hessian; Petzka et al. 2019",
    compute=lambda_max,
    cost="Lanczos: a pass over the data for each product",
    reads=2,
)

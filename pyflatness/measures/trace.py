"""Compute traces of the loss Hessian in a layer's weight, outputs and inputs, and its largest eigenvalue.

    Tr(∂²E/∂w²) = Σ_s T[s, s] = Σ_i Σ_c σ_ic |M_i^(c)|² / Σ_i ω_i    by the GGN

is ``trace``, of a layer's block. A network's value is the sum over its measured layers, as for the next two. None of
these is invariant to rescalings.

    (1/n) Σ_i Tr(∂²ℓ_i/∂z_i²) = Σ_i Σ_c σ_ic |δ_i^(c)|² / Σ_i ω_i    by the GGN

is ``output_trace``, over all outputs z_i of the layer in sample i: of each position (pixel, token) and call. The mean
over samples is weighted as the loss weights them. ``per_neuron`` is the diagonal by output channel (d,), each entry
summed over positions and calls, and averaged over samples in the same way. The GGN is the Hessian where the model is
piecewise linear behind the layer. Elsewhere the value takes a Hessian product for each entry of a sample's outputs, or
is sampled: E⟨r, (∂²ℓ_i/∂z_i²) r⟩ for random signs r of each sample's own (Hutchinson 1990). Outputs that are λ times as
large have 1/λ² of it. HAWQ-V2 (Dong et al. 2020, arXiv:1911.03852) chooses the bits of activations by it.

    (1/n) Σ_i Tr(∂²ℓ_i/∂x_i²) = Σ_i Σ_c σ_ic |Wᵀ δ_i^(c)|² / Σ_i ω_i    by the GGN,    z = W x + b

is ``input_trace``, over all inputs x_i of the layer in sample i, as they enter this layer, of each position and call. A
convolution's input is the unpadded one, and W its dense matrix. Where the model uses x elsewhere too (a residual path),
only what this layer takes of it is moved. ``per_neuron`` is the diagonal by input channel (c,), summed and averaged in
the same way. Of a linear layer with one position, a sample's relative flatness is |x_i|² times its value. It is the
trace of Wᵀ (∂²ℓ_i/∂z_i²) W, so that it is exact, and sampled, where ``output_trace`` is. Embeddings, bilinear layers,
the weights of normalisations and weights in several kinds of uses have no such input, and are refused.

    λ_max(∂²E/∂w²), algebraically largest: negative where the loss is concave in w; GGN: λ_max(Σ_i Σ_c σ_ic m_ic m_icᵀ)
    with m_ic = vec(M_i^(c)), over Σ_i ω_i

is ``lambda_max``, of a layer's block and of all measured layers together. w is the layer's effective weight, all its
groups together, without the bias. The network's value is that of the joint Hessian of the measured layers' weights,
with the blocks between layers (where the GGN is another matrix even for ReLU networks). It is computed by Lanczos
(:mod:`pyflatness.numerics.lanczos`), where every product is one read of the data. Certified is that an eigenvalue lies
within the reported residual of the value, up to the rounding of the products. That it is the largest one is as certain
as that a random start has a component along its eigenvector.
"""

from ..hessian.products import Products
from ..numerics.lanczos import LargestEigenvalues
from ..report import Estimate
from ..sweep.activations import INPUTS, OUTPUTS
from .base import Estimates, Measure, Task

TRACE = Measure(
    name="trace", formula="Tr(∂²E/∂w²)", source="the sum of the block Hessian's eigenvalues", quantity="squares"
)


OUTPUT_TRACE = Measure(
    name="output_trace",
    formula="(1/n) Σ_i Tr(∂²ℓ_i/∂z_i²), z the layer's outputs",
    source="Dong et al. 2020 (HAWQ-V2), for activations",
    quantity=OUTPUTS,
    cost="one sweep, shared; behind layers that are not piecewise linear a Hessian product for each output",
)


INPUT_TRACE = Measure(
    name="input_trace",
    formula="(1/n) Σ_i Tr(∂²ℓ_i/∂x_i²), x the layer's inputs",
    source="Dong et al. 2020 (HAWQ-V2), for activations",
    quantity=INPUTS,
    cost="one sweep, shared; behind layers that are not piecewise linear a Hessian product for each output",
)


def lambda_max(task: Task) -> Estimates:
    """Return the value of every layer that ran, and under ``""`` that of the joint Hessian."""
    products = Products(task)
    every = tuple(products.modules)
    blocks = dict.fromkeys([*((name,) for name in every), every])  # a single layer is the network too
    found = products.largest_eigenvalues(list(blocks))
    estimates = {name: _estimate(task, products, found[name,], name) for name in every}
    return {**estimates, "": _estimate(task, products, found[every], "")}


def _estimate(task: Task, products: Products, ritz: LargestEigenvalues, name: str) -> Estimate:
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
    network_of="of the layers' joint Hessian",
)

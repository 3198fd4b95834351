"""Relate flatness to generalisation: robustness of features, representativeness, bounds, gaps.

After Petzka et al. 2021, "Relative Flatness and Generalization". For a layer with weight w (d, m) and inputs φ, a model
f = ψ(φ), a sample S and local distributions λ_i around the φ_i,

    E_gen = E(f) - E_emp = E_Rep + E_F                                                           (Eq. 5)
    E_Rep = E(f) - (1/|S|) Σ_i E_ξ ℓ(ψ(φ_i + ξ), y_i)          how well S stands for the data    (Eq. 3)
    E_F   = (1/|S|) Σ_i E_ξ ℓ(ψ(φ_i + ξ), y_i) - ℓ(ψ(φ_i), y_i)    how robust features are       (Eq. 4)

with labels taken as constant around each sample.
"""

from .gap_bounds import density_constants, generalization_bound, spectral_robustness_bound, uniform_robustness_bound
from .inequalities import bounds, interpolation_error
from .perturbed import truncated_normal_noise
from .robustness import feature_robustness, label_constancy, largest_robustness, matrix_robustness
from .sampling import authors_representativeness, representativeness

__all__ = [
    "authors_representativeness",
    "bounds",
    "density_constants",
    "feature_robustness",
    "generalization_bound",
    "interpolation_error",
    "label_constancy",
    "largest_robustness",
    "matrix_robustness",
    "representativeness",
    "spectral_robustness_bound",
    "truncated_normal_noise",
    "uniform_robustness_bound",
]

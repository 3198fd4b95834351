"""Relate flatness to generalisation: robustness of features, representativeness, bounds, gaps, correlations.

After Petzka et al. 2021, "Relative Flatness and Generalization". For a layer with weight w (d, m) and inputs φ, a model
f = ψ(φ), a sample S and local distributions λ_i around the φ_i,

    E_gen = E(f) - E_emp = E_Rep + E_F                                                           (Eq. 5)
    E_Rep = E(f) - (1/|S|) Σ_i E_ξ ℓ(ψ(φ_i + ξ), y_i)          how well S stands for the data    (Eq. 3)
    E_F   = (1/|S|) Σ_i E_ξ ℓ(ψ(φ_i + ξ), y_i) - ℓ(ψ(φ_i), y_i)    how robust features are       (Eq. 4)

with labels taken as constant around each sample.
"""

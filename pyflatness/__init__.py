"""Measure how flat the loss is around a trained network."""

from . import statistics as statistics
from . import theory as theory
from .api import block_traces, head_flatness, measure, relative_flatness
from .curvature import changes
from .curvature.ascent import WorstCase
from .curvature.cost_of_change import cost_of_change
from .curvature.critical import critical_sharpness
from .curvature.landscape import landscape
from .curvature.linear_interpolation import LinearInterpolation, linear_interpolation
from .curvature.slices import Landscape
from .curvature.spectra import Spectrum
from .curvature.spectrum import spectrum
from .curvature.worst_case import keskar_sharpness, worst_case_sharpness
from .errors import (
    BackendError,
    FlatnessError,
    InputError,
    MissingExtraError,
    NonFiniteError,
    NotYetError,
    RankError,
    StoreError,
)
from .invariances import invariances
from .measures.adaptive_sharpness_mc import adaptive_sharpness_mc
from .measures.mls_adversarial import mls_adversarial
from .measures.pac_bayes import pac_bayes
from .measures.representation import representation
from .model.calling import causal_lm
from .reparameterization.reparameterize import reparameterize
from .report import Estimate, Report
from .scoring.attached import add_to_store
from .scoring.score import score
from .scoring.scores import Scores
from .statistics import (
    conditional_mutual_information,
    correlations,
    granulated_kendall,
    plot_correlation,
    plot_correlation_matrix,
    sign_error,
)
from .theory import (
    authors_representativeness,
    bounds,
    density_constants,
    feature_robustness,
    generalization_bound,
    generalization_gap,
    interpolation_error,
    label_constancy,
    largest_robustness,
    matrix_robustness,
    representativeness,
    spectral_robustness_bound,
    truncated_normal_noise,
    uniform_robustness_bound,
)
from .training.head_penalty import flatness_penalty
from .training.history import History
from .training.layer_penalty import FlatnessPenalty
from .training.track import track
from .verification import Verification, verify

__version__ = "0.2.0.dev0"

__all__ = [
    "BackendError",
    "Estimate",
    "FlatnessError",
    "FlatnessPenalty",
    "History",
    "InputError",
    "Landscape",
    "LinearInterpolation",
    "MissingExtraError",
    "NonFiniteError",
    "NotYetError",
    "RankError",
    "Report",
    "Scores",
    "Spectrum",
    "StoreError",
    "Verification",
    "WorstCase",
    "adaptive_sharpness_mc",
    "add_to_store",
    "authors_representativeness",
    "block_traces",
    "bounds",
    "causal_lm",
    "changes",
    "conditional_mutual_information",
    "correlations",
    "cost_of_change",
    "critical_sharpness",
    "density_constants",
    "feature_robustness",
    "flatness_penalty",
    "generalization_bound",
    "generalization_gap",
    "granulated_kendall",
    "head_flatness",
    "interpolation_error",
    "invariances",
    "keskar_sharpness",
    "label_constancy",
    "landscape",
    "largest_robustness",
    "linear_interpolation",
    "matrix_robustness",
    "measure",
    "mls_adversarial",
    "pac_bayes",
    "plot_correlation",
    "plot_correlation_matrix",
    "relative_flatness",
    "reparameterize",
    "representation",
    "representativeness",
    "score",
    "sign_error",
    "spectral_robustness_bound",
    "spectrum",
    "track",
    "truncated_normal_noise",
    "uniform_robustness_bound",
    "verify",
    "worst_case_sharpness",
]

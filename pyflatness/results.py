"""Name the classes of all that public calls return, for annotations and for reading files that they have written."""

from .curvature.allocate import Allocation, Frontier
from .curvature.importance import Importance
from .curvature.landscape import Landscape, LinearInterpolation
from .curvature.quadratic import Quadratic
from .curvature.spectra import Density, Spectrum
from .measures.pac_bayes import Bisection, PacBayes
from .measures.worst_case import WorstCase
from .report import Estimate, Report
from .scoring.scores import Scores
from .scoring.units import Row
from .statistics.correlation import Correlation, Correlations
from .statistics.grid import ConditionalMutualInformation, Environment, GranulatedKendall, SignError
from .theory.gap import GeneralizationGap, Performance
from .theory.gap_bounds import DensityConstants, GeneralizationBound
from .theory.inequalities import Bound, Bounds, InterpolationError
from .theory.invariance import Invariance, Invariances
from .theory.robustness import FeatureRobustness, LabelConstancy, LargestRobustness, MatrixRobustness
from .theory.sampling import Decomposition, Representativeness
from .training.history import History, Record
from .verification import Check, Difference, Verification

__all__ = [
    "Allocation",
    "Bisection",
    "Bound",
    "Bounds",
    "Check",
    "ConditionalMutualInformation",
    "Correlation",
    "Correlations",
    "Decomposition",
    "Density",
    "DensityConstants",
    "Difference",
    "Environment",
    "Estimate",
    "FeatureRobustness",
    "Frontier",
    "GeneralizationBound",
    "GeneralizationGap",
    "GranulatedKendall",
    "History",
    "Importance",
    "InterpolationError",
    "Invariance",
    "Invariances",
    "LabelConstancy",
    "Landscape",
    "LargestRobustness",
    "LinearInterpolation",
    "MatrixRobustness",
    "PacBayes",
    "Performance",
    "Quadratic",
    "Record",
    "Report",
    "Representativeness",
    "Row",
    "Scores",
    "SignError",
    "Spectrum",
    "Verification",
    "WorstCase",
]

"""How flat is the loss around a trained network."""

from .capture import causal_lm
from .errors import BackendError, FlatnessError, InputError, MissingExtraError, NonFiniteError, NotYetError
from .measures.adaptive_sharpness_mc import adaptive_sharpness_mc
from .measures.bounds import Bound, Bounds, bounds
from .measures.mls_adversarial import mls_adversarial
from .measures.pac_bayes import PacBayes, pac_bayes
from .measures.representation import representation
from .pipeline import block_traces, head_flatness, measure, relative_flatness
from .reparameterize import reparameterize
from .report import Estimate, Report
from .verification import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Bound",
    "Bounds",
    "Estimate",
    "FlatnessError",
    "InputError",
    "MissingExtraError",
    "NonFiniteError",
    "NotYetError",
    "PacBayes",
    "Report",
    "Verification",
    "adaptive_sharpness_mc",
    "block_traces",
    "bounds",
    "causal_lm",
    "head_flatness",
    "measure",
    "mls_adversarial",
    "pac_bayes",
    "relative_flatness",
    "reparameterize",
    "representation",
    "verify",
]

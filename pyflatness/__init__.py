"""How flat is the loss around a trained network."""

from .capture import causal_lm
from .errors import BackendError, FlatnessError, InputError, MissingExtraError, NonFiniteError, NotYetError
from .pipeline import block_traces, head_flatness, measure, relative_flatness
from .reparameterize import reparameterize
from .report import Estimate, Report
from .verification import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Estimate",
    "FlatnessError",
    "InputError",
    "MissingExtraError",
    "NonFiniteError",
    "NotYetError",
    "Report",
    "Verification",
    "block_traces",
    "causal_lm",
    "head_flatness",
    "measure",
    "relative_flatness",
    "reparameterize",
    "verify",
]

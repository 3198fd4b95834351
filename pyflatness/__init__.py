"""How flat is the loss around a trained network."""

from .errors import BackendError, FlatnessError, InputError, MissingExtraError, NonFiniteError, NotYetError
from .pipeline import head_flatness, relative_flatness
from .report import Estimate
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
    "Verification",
    "head_flatness",
    "relative_flatness",
    "verify",
]

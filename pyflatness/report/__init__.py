"""Hold what a measurement returns: estimates, reports, and their tables, figures and intervals."""

from .report import Estimate, Report
from .result import Readable, Result

__all__ = ["Estimate", "Readable", "Report", "Result"]

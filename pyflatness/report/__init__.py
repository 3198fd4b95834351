"""Hold what a measurement returns: estimates, reports, and their tables, figures and intervals."""

from .report import Estimate, Report

__all__ = ["Estimate", "Report"]

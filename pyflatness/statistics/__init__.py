"""Relate measures to generalisation over many networks: a room that takes tables of numbers and knows no model.

A table has a row for each network: :mod:`.tables` reads it from a data frame, a dict of lists or a CSV file.
"""

from .correlation import Correlation, Correlations, correlations
from .figures import plot_correlation, plot_correlation_matrix
from .grid import (
    ConditionalMutualInformation,
    Environment,
    GranulatedKendall,
    SignError,
    conditional_mutual_information,
    granulated_kendall,
    sign_error,
)

__all__ = [
    "ConditionalMutualInformation",
    "Correlation",
    "Correlations",
    "Environment",
    "GranulatedKendall",
    "SignError",
    "conditional_mutual_information",
    "correlations",
    "granulated_kendall",
    "plot_correlation",
    "plot_correlation_matrix",
    "sign_error",
]

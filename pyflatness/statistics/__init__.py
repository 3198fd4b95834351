"""Relate measures to generalisation over many networks: a room that takes tables of numbers and knows no model.

A table has a row for each network: :mod:`.tables` reads it from a data frame, a dict of lists or a CSV file.
"""

from .correlation import correlations
from .figures import plot_correlation, plot_correlation_matrix
from .grid import conditional_mutual_information, granulated_kendall, sign_error

__all__ = [
    "conditional_mutual_information",
    "correlations",
    "granulated_kendall",
    "plot_correlation",
    "plot_correlation_matrix",
    "sign_error",
]

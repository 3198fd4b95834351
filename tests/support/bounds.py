"""Rows of ``pf.theory.bounds``."""

import math


def holds(row):
    slack = 1e-9 * max(1.0, abs(row.right)) if math.isfinite(row.right) else 0.0
    return row.left <= row.right + slack

"""Time the package, each script by itself, and redo the papers' figures, ``python -m benchmarks.papers``."""

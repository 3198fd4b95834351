"""Measure while other libraries train: callbacks and metrics for them, each imported only where it is asked for."""

"""Measures, one file per family: formula, source and code together."""

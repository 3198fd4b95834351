"""Provide the mathematics of tensors that needs no model."""

"""Give a model other weights that compute the same function."""

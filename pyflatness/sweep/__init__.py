"""Sum over micro-batches: contractions of layers, the diagonal over parameters, Jacobians."""

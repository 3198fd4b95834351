"""What is summed over micro-batches: contractions of layers, the diagonal over parameters, Jacobians."""

"""Second order: block traces, products and eigenvalues of the loss Hessian."""

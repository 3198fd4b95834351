"""Compute second-order quantities: block traces, products and eigenvalues of the loss Hessian."""

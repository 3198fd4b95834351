"""The minimum that normalised sharpness has in closed form or by its own method, by a general minimiser."""

import torch
from scipy import optimize


def brute_force(curvature, weight):
    """Minimise by a quasi-Newton method in log a and log b, which are kept from running off to infinity."""
    d, m = weight.shape
    h, squares = curvature.numpy(), weight.square().numpy()

    def value(x):
        scale = torch.from_numpy(x[:d, None] + x[d:]).exp().numpy()
        rising, falling = h * scale, squares / scale
        gradient = rising - falling
        return rising.sum() + falling.sum(), [*gradient.sum(axis=1), *gradient.sum(axis=0)]

    bounds = [(-40.0, 40.0)] * (d + m)
    return optimize.minimize(
        value, [0.0] * (d + m), jac=True, bounds=bounds, options={"maxiter": 20_000, "ftol": 1e-16, "gtol": 1e-13}
    ).fun

"""Truth for the use of a parameter that is no module's: derivatives by nested autograd in that very parameter."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from support import truth


class ParameterTruth:
    """Hold the Hessian and GGN of E in a parameter of a float64 model, as a matrix (d, m) of its own.

    ``rows`` takes some of its rows, with the others as they are; ``transposed`` is for one that is kept as (m, d, …).
    """

    def __init__(self, model, loss, x, y, name, *, rows=slice(None), transposed=False):
        whole = dict(model.named_parameters())[name].detach()

        def outputs(matrix: Tensor) -> Tensor:
            start, stop, _ = rows.indices(len(whole))
            if transposed:
                part = matrix.unflatten(1, (len(whole), *whole.shape[2:])).transpose(0, 1)
            else:
                part = matrix.view(-1, *whole.shape[1:])
            changed = torch.cat([whole[:start], part, whole[stop:]])
            with sdpa_kernel(SDPBackend.MATH):
                return torch.func.functional_call(model, {name: changed}, (x,))

        part = whole.transpose(0, 1) if transposed else whole[rows]
        self.weight = part.flatten(1).clone()
        self.hessian = truth.hessian(lambda matrix: loss(outputs(matrix), y), self.weight)
        f = outputs(self.weight)
        jacobian = truth.jacobian(outputs, self.weight)
        curvature = truth.hessian(lambda z: loss(z, y), f).view(f.numel(), f.numel())
        self.ggn = torch.einsum("asj,ab,btk->sjtk", jacobian, curvature, jacobian)

    def values(self, matrix: Tensor, groups: int = 1) -> dict[str, float]:
        """Return what measures of a layer are of its Hessian, or GGN."""
        flat = matrix.reshape(self.weight.numel(), -1)
        return {
            "relative_flatness": (kappa := truth.relative_flatness_of(matrix, self.weight, groups)),
            "relative_flatness_per_feature": kappa / (2 * self.weight.shape[1]),
            "trace": truth.trace_of(matrix),
            "adaptive_sharpness": truth.adaptive_sharpness_of(matrix, self.weight),
            "lambda_max": float(torch.linalg.eigvalsh(flat)[-1]),
            "scaled_trace": float(self.weight.square().sum()) * truth.trace_of(matrix),
        }

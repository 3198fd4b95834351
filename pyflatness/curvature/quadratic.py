"""Compute the quadratic model of the loss in a few directions: E(θ) + gᵀΔ + ½ ΔᵀHΔ for Δ = Σ_k c_k d_k.

It takes one gradient and a Hessian product for each direction, and is exact over all of the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..hessian.parameter_products import ParameterProducts
from ..model import parameters
from ..model.directions import Direction
from ..passes.task import Task


@dataclass(frozen=True)
class Quadratic:
    """Hold the quadratic model of the loss in K directions.

    Attributes:
        value: E(θ).
        gradient: (K,) float64, ⟨∇E, d_k⟩.
        hessian: (K, K), ⟨d_j, H d_k⟩.
    """

    value: float
    gradient: Tensor
    hessian: Tensor

    def at(self, *coefficients: Tensor) -> Tensor:
        """Return the model's values E + Σ_k c_k g_k + ½ Σ_jk c_j c_k H_jk over a grid.

        Args:
            coefficients: for each direction, (steps_k,).

        Returns:
            (steps_1,), or (steps_1, steps_2), float64.

        Raises:
            InputError: another number of coefficients than of directions.
        """
        if len(coefficients) != len(self.gradient):
            raise InputError(
                f"coefficients: as many as there are directions are wanted, {len(self.gradient)}, got "
                f"{len(coefficients)}"
            )
        points = torch.stack(torch.meshgrid(*(c.double() for c in coefficients), indexing="ij"), dim=-1)
        second = ((points @ self.hessian) * points).sum(dim=-1)
        return self.value + points @ self.gradient + 0.5 * second


def quadratic(task: Task, directions: Sequence[Direction], value: float) -> Quadratic:
    """Return the quadratic model along directions of parameters, where E(θ) is ``value``."""
    try:
        products = ParameterProducts(task, {name for direction in directions for name in direction.values})
        none = {name: torch.zeros_like(values) for name, values in parameters.every(task.model).items()}
        every = ([(none | direction.values)[name] for name in products.names] for direction in directions)
        rows = torch.stack([torch.cat([change.double().flatten() for change in each]) for each in every])
        gradient, turned = products.gradient(), products({products.names: rows})[products.names]
    except InputError as error:
        raise type(error)(f"{error}; quadratic=False leaves the quadratic model out").about(error.layers) from error
    hessian = rows @ turned.T
    return Quadratic(value, (rows @ gradient).cpu(), (0.5 * (hessian + hessian.T)).cpu())

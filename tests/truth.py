"""Truth for tests: dense Hessians by nested autograd in float64, and exact softmax variances by mpmath-free float64."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def hessian(risk: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """The dense Hessian of ``risk`` in ``weight`` (d, m), as (d, m, d, m)."""
    result = torch.autograd.functional.hessian(risk, weight)
    assert isinstance(result, Tensor)
    return result


def relative_flatness(risk: Callable[[Tensor], Tensor], weight: Tensor) -> float:
    """Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(H_ss'), the definition, from the dense Hessian."""
    weight = weight.detach().double()
    traces = torch.einsum("sjtj->st", hessian(risk, weight))
    return float((weight @ weight.t() * traces).sum())


def of_model(model: nn.Module, loss: Callable[..., Tensor], inputs: Tensor, targets: Tensor, name: str) -> float:
    """κ of one layer of a float64 model."""
    layer = model.get_submodule(name)

    def risk(weight: Tensor) -> Tensor:
        changed = {f"{name}.weight": weight.reshape(layer.weight.shape)}
        return loss(torch.func.functional_call(model, changed, (inputs,)), targets)

    return relative_flatness(risk, layer.weight.detach().flatten(1))


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """|φ_i|² Σ_s p_s |w_s - μ_i|² in float64, from differences, with the tail of p summed apart."""
    features, weight = features.double(), weight.double()
    logits = features @ (weight - weight[0]).t() + (0 if bias is None else bias.double())
    p = torch.softmax(logits, dim=1)
    pairs = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist").square()
    return features.square().sum(dim=1) * ((p @ pairs) * p).sum(dim=1) / 2

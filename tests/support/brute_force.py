"""Small networks in float64, and their derivatives in all parameters by plain autograd."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyflatness as pf
from support import truth
from support.cases import M, N, classifier
from support.grid import Case, normal

X = normal(10, N, M)


def network(*widths, bias=True, activation=nn.ReLU, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = list(classifier(*widths, bias=bias))
        return nn.Sequential(*(activation() if isinstance(p, nn.ReLU) else p for p in parts)).double()


def one(name, model, loss, data, **options):
    report = pf.measure(model, loss, data, measures=name, **options)
    assert report.measures == (name,)
    return report[name]


def products(model, loss, x, y):
    """⟨θ, ∂ℓ_i/∂θ⟩ of the loss of each sample alone, by autograd."""
    found = []
    for i in range(len(x)):
        gradients = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), [*model.parameters()])
        found.append(sum((g * p).sum() for g, p in zip(gradients, model.parameters(), strict=True)))
    return torch.stack(found).detach()


def all_parameters_hessian(model, loss, x, y, names=None):
    """θ of the parameters of these names, or of all that are trained, and the Hessian of the loss in it."""
    theta, named = flat(model, names)

    def risk(theta):
        return loss(torch.func.functional_call(model, placed(named, theta), (x,)), y)

    return theta, truth.hessian(risk, theta)


def written_out(direction, size, dim):
    """weight_norm: torch's own kernel has a wrong second derivative."""
    return direction * (size / torch.norm_except_dim(direction, 2, dim))


def flat(model, names=None):
    named = {k: p.detach() for k, p in model.named_parameters() if (p.requires_grad if names is None else k in names)}
    return torch.cat([p.flatten() for p in named.values()]), named


def placed(named, theta):
    parts = theta.split([p.numel() for p in named.values()])
    return {name: part.view_as(p) for (name, p), part in zip(named.items(), parts, strict=True)}


@functools.cache
def diagonals(case: Case, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """θ, and the diagonal of the Hessian, the GGN, or of (1/n) Σ_i J_iᵀJ_i."""
    model = case.build()
    theta, named = flat(model)

    def outputs(theta):
        return torch.func.functional_call(model, placed(named, theta), (case.inputs,))

    with sdpa_kernel(SDPBackend.MATH), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_weight_norm", written_out)
        if kind == "hessian":
            return theta, truth.hessian(lambda t: case.loss(outputs(t), case.targets), theta).diagonal()
        f = outputs(theta).detach()
        jacobian = truth.jacobian(outputs, theta)
    if kind == "outputs":
        return theta, jacobian.square().sum(dim=0) / case.samples
    curvature = truth.hessian(lambda z: case.loss(z, case.targets), f).view(f.numel(), f.numel())
    return theta, torch.einsum("aj,ab,bj->j", jacobian, curvature, jacobian)

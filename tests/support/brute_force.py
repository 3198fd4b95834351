"""Small networks in float64, and their derivatives in all parameters by plain autograd."""

import torch
from torch import nn

import pyflatness as pf
from support import truth
from support.cases import M, N, classifier
from support.grid import normal

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


def all_parameters_hessian(model, loss, x, y):
    names, values = zip(*((k, v.detach()) for k, v in model.named_parameters() if v.requires_grad), strict=True)
    sizes, shapes = [v.numel() for v in values], [v.shape for v in values]

    def risk(flat):
        parts = [p.view(s) for p, s in zip(flat.split(sizes), shapes, strict=True)]
        return loss(torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,)), y)

    theta = torch.cat([v.flatten() for v in values])
    return theta, truth.hessian(risk, theta)

"""Where a model is not differentiable, Monte Carlo values have no limit that a Hessian knows."""

import pytest
import torch
from torch import nn

import pyflatness as pf


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_adaptive_sharpness_mc_comes_to_its_limit_only_below_the_nearest_kink(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 3)).double().eval()
    data, loss = (torch.randn(40, 8).double(), torch.randint(3, (40,))), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(300):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        optimizer.step()
    nearest = float(model[0](data[0]).detach().abs().min())
    limit = pf.measure(model, loss, data, measures="adaptive_sharpness")["adaptive_sharpness"]
    near, far = (
        pf.measures.adaptive_sharpness_mc(model, loss, data, rho=rho, probes=200) for rho in (3 * nearest, nearest / 30)
    )
    low, high = far.interval(0.999)
    assert low < limit < high
    low, high = near.interval(0.999)
    assert (low > limit) is (activation is nn.ReLU)
    assert high > limit

"""Whether a call left the user's model, gradients, modes, buffers and random state as they were; and small data."""

import copy

import torch
from torch import nn

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(3)), torch.arange(20) % 3
LOSS = nn.CrossEntropyLoss()


def snapshot(model):
    return {
        "state": {name: copy.deepcopy(_alone(held)) for name, held in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "random": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


def _alone(held):
    """Return a tensor without its graph, as some libraries have one in their states, which cannot be copied."""
    return held.detach() if isinstance(held, torch.Tensor) else held


def assert_unchanged(model, before):
    after = snapshot(model)
    for key in ("modes", "flags", "hooks", "grad mode", "threads"):
        assert after[key] == before[key], key
    assert torch.equal(after["random"], before["random"])
    for name, value in before["state"].items():
        assert torch.equal(after["state"][name], value), name
    for one, other in zip(after["gradients"], before["gradients"], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)

"""Networks with more samples, for values that are sampled."""

import torch
from torch import nn
from torch.nn import functional as F

from support.networks import CASES

LAYER = {"mlp ReLU": "0", "mlp Tanh": "0", "attention": "q", "indefinite loss, Tanh": "2"}  # of a network of the grid


def many(name, times=40):
    """A case with more samples: its own, perturbed."""
    case = CASES[name]
    noise = torch.Generator().manual_seed(5)
    inputs = case.inputs.repeat(times, *(1,) * (case.inputs.ndim - 1))
    if inputs.is_floating_point():
        inputs = inputs + 0.5 * torch.randn(inputs.shape, generator=noise, dtype=inputs.dtype)
    else:
        inputs = torch.randint(int(inputs.max()) + 1, inputs.shape, generator=noise)
    targets = case.targets.repeat(times, *(1,) * (case.targets.ndim - 1))
    return case.build(), case.loss, (inputs, targets)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def network(scale, classes=10, samples=240, seed=0):
    """A ReLU network and its data; the softmax is more peaked the larger the scale."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, classes))
    with torch.no_grad():
        model[4].weight.mul_(scale)
    x = torch.randn(samples, 8, generator=seeded(seed), dtype=torch.float64)
    return model.double().eval(), (x, torch.arange(samples) % classes)


NETWORKS = {
    "flat": (0.5, nn.CrossEntropyLoss(), 0.05),
    "peaked": (20.0, nn.CrossEntropyLoss(), 0.05),
    "a callable": (20.0, lambda f, y: F.cross_entropy(f, y), 0.05),
    "class weights": (3.0, nn.CrossEntropyLoss(torch.linspace(0.2, 3, 10).double(), label_smoothing=0.1), 0.03),
}


class Limited(nn.Module):
    """Refuses more than ``most`` rows, or (``whole``) any other number than 24."""

    def __init__(self, inner, most=10**9, whole=False):
        super().__init__()
        self.inner, self.most, self.whole = inner, most, whole

    def forward(self, x):
        if len(x) > self.most:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        if self.whole and len(x) != 24:
            raise ValueError("a batch of another size")
        return self.inner(x)


class Sorting(nn.Module):
    """Give the layers inside the samples of larger batches in another order."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        order = x[:, 0].argsort() if len(x) > 100 else torch.arange(len(x))
        return self.inner(x[order])[order.argsort()]

"""What a plan promises of unseen data: the 90 % interval of ``predicted`` holds what these show."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.combinations import every

CE = nn.CrossEntropyLoss()
DRAWS = 20


class Tokens(nn.Module):
    """Predicts the next of several tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(16, 24), nn.Linear(24, 24), nn.Linear(24, 16)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head((self.inner(h) + h.cumsum(dim=1) / 4).tanh()).movedim(-1, 1)


def _classes(count, generator):
    """Points of eight classes that overlap."""
    labels = torch.randint(8, (count,), generator=generator)
    centres = 1.2 * torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    return centres[labels] + torch.randn(count, 12, generator=generator), labels


def _chains(count, generator):
    """Sequences of a Markov chain, and each one's next tokens."""
    chances = (2 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0))).softmax(dim=1)
    tokens = [torch.randint(16, (count,), generator=generator)]
    for _ in range(8):
        tokens.append(torch.multinomial(chances[tokens[-1]], 1, generator=generator).squeeze(1))
    chain = torch.stack(tokens, dim=1)
    return chain[:, :-1], chain[:, 1:]


def _trained(model, drawn):
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(600):
        x, y = drawn(256, generator)
        optimiser.zero_grad()
        CE(model(x), y).backward()
        optimiser.step()
    return model.eval()


def _network(kind):
    torch.manual_seed(0)
    if kind == "classes":
        parts = [nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8)]
        return _trained(nn.Sequential(*parts), _classes), _classes, 256
    return _trained(Tokens(), _chains), _chains, 64


@pytest.mark.soak
@every(together=1, bits=[4, 5], kind=["classes", "chains"], measured=[True, False])
def test_nine_of_ten_intervals_hold_the_change_on_unseen_data(kind, bits, measured):
    model, drawn, count = _network(kind)
    x, y = drawn(40_000, torch.Generator().manual_seed(2))
    held = 0
    for seed in range(DRAWS):
        own = drawn(count, torch.Generator().manual_seed(100 + seed))
        formats = ["int3", "int4", "int5", "int6", "int8"]
        plan = pf.allocate(model, CE, own, formats, bits=bits, probes=4, seed=seed, measured=measured)
        with torch.no_grad():
            change = float(CE(plan.apply(model)(x), y) - CE(model(x), y))
        low, high = plan.predicted.interval(0.9)
        held += low <= change <= high
    print(f"{kind}, {bits} bits, measured={measured}: {held} of {DRAWS}")
    assert held >= 0.85 * DRAWS

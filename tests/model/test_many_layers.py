"""The work beside torch's operations grows with the number of layers, and not with its square.

Counted are the lines of Python that are run: no line of the package's, or of what it asks of a module, may run much
more than twice as often for twice the layers.
"""

import sys
from collections import Counter

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.grid import normal

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 4, 2), torch.tensor([0, 1, 1, 0])
FEW, SOME = 12, 40  # run by each layer a constant number of times, and before and after them


class Parallel(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(sum(torch.relu(part(x)) for part in self.parts))


class OneBehindTheOther(Parallel):
    def forward(self, x):
        for part in self.parts:
            x = x + torch.relu(part(x))
        return self.head(x)


class Functions(Parallel):
    """With weights that no module has."""

    def __init__(self, layers):
        super().__init__(0)
        self.weights = nn.ParameterList(torch.randn(2, 2) for _ in range(layers))

    def forward(self, x):
        return self.head(sum(torch.relu(x @ weight) for weight in self.weights))


def measured(make=Parallel, layers=None, **options):
    def run(count):
        model = make(count).double().eval()
        str(pf.measure(model, LOSS, (X, Y), layers=layers and layers(model), **options))

    return run


CALLS = {
    "side by side": measured(),
    "one behind the other": measured(OneBehindTheOther),
    "weights in functions": measured(Functions),
    "probes": measured(probes=2),
    "adaptive": measured(probes="adaptive"),
    "by name": measured(layers=lambda model: [name for name, _ in model.named_modules() if name[-1:].isdigit()]),
    "by module": measured(layers=lambda model: [*model.parts]),
    "by weight": measured(layers=lambda model: [f"parts.{place}.weight" for place in range(len(model.parts))]),
    "eigenvalues": measured(measures=["lambda_max", "relative_flatness_max"]),
}


def lines(run, *args):
    """How often each line was run."""
    found = Counter()

    def line(frame, event, _):
        found[frame.f_code.co_filename, frame.f_lineno] += event == "line"
        return line

    def call(frame, *_):
        name = frame.f_code.co_filename
        return line if "pyflatness" in name or name == nn.Module.named_modules.__code__.co_filename else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        run(*args)
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize("what", CALLS)
def test_work_is_linear_in_the_number_of_layers(what):
    run = CALLS[what]
    run(2)  # what is done once a process
    once, twice = lines(run, FEW), lines(run, 2 * FEW)
    assert sum(once.values()) > 1000
    assert {place: (once[place], count) for place, count in twice.items() if count > 2.3 * once[place] + SOME} == {}

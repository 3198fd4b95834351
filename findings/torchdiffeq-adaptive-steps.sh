#!/bin/sh
# torchdiffeq 0.2.5 on torch 2.13.0: with an adaptive method, which is the default, the rows of a batch are not separate
# in odeint. A network that is applied row by row gives each row an equation of its own, so that one expects the
# derivative of one row's solution in the start of another to be 0. It is not: the first step's size is computed from the
# norm of the whole batch, and autograd follows it (the sizes of later steps are computed under no_grad). With
# options={"first_step": …} the derivative is 0, but a row's values still depend on its batch by the choice of the steps.
# A fixed-step method, such as rk4, has neither.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 torchdiffeq==0.2.5 numpy
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torchdiffeq import odeint

torch.manual_seed(0)
start = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
weight = torch.randn(3, 3, dtype=torch.float64)
times = torch.tensor([0.0, 1.0], dtype=torch.float64)


def derivative(time, state):
    return torch.tanh(state @ weight)


def look(**options):
    end = odeint(derivative, start, times, **options)[-1]
    (gradient,) = torch.autograd.grad(end[0].sum(), start)
    alone = odeint(derivative, start[:1], times, **options)[-1]
    return float(gradient[1].abs().max()), float((end[0] - alone[0]).abs().max())


seen = {"dopri5": look(), "first_step": look(options={"first_step": 0.1})}
seen["rk4"] = look(method="rk4", options={"step_size": 0.1})
for name, (other, apart) in seen.items():
    print(f"{name}: derivative of row 0 in the start of row 1 {other:.2e}, row 0 in the batch less by itself {apart:.2e}")
assert seen["dopri5"][0] > 0, "autograd does not follow the size of the first step now"
assert seen["first_step"][0] == 0 and seen["first_step"][1] > 0, "steps of a given first size are another thing now"
assert seen["rk4"][0] == 0 and seen["rk4"][1] < 1e-14, "rk4 mixes rows now"
PYTHON

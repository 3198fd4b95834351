#!/bin/sh
# torch 2.13.0, CPU: the second derivative of weight_norm in its direction v (parametrizations.weight.original1, or
# weight_v of the older function) is wrong, without a warning. Values and first derivatives are right, and so is the
# second derivative in the length g (original0). The same weight written out, g v / |v|, has the second derivatives of
# differences; torch's own kernel, _weight_norm_interface, has others, of another sign here.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/env/bin/python" -W ignore - <<'PYTHON'
import torch

torch.manual_seed(0)
x = torch.randn(6, 4, dtype=torch.float64)
g, v = torch.rand(4, 1, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
ways = {"torch._weight_norm": torch._weight_norm, "written out": lambda v, g: g * v / v.norm(dim=1, keepdim=True)}


def loss(way, v):
    return (x @ ways[way](v, g).t()).tanh().square().mean()


def trace(way):
    given = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(way, given), given, create_graph=True)
    rows = [torch.autograd.grad(entry, given, retain_graph=True)[0].flatten() for entry in gradient.flatten()]
    return gradient.detach(), float(torch.stack(rows).trace())


def of_differences(step=1e-3):
    moves = step * torch.eye(16, dtype=torch.float64).view(16, 4, 4)
    middle = loss("written out", v)
    return float(sum(loss("written out", v + d) - 2 * middle + loss("written out", v - d) for d in moves) / step**2)


(first, torchs), (same, right), differences = trace("torch._weight_norm"), trace("written out"), of_differences()
print("torch", torch.__version__)
print("largest difference of the first derivatives:", float((first - same).abs().max()))
print(f"trace of the second derivative: {torchs:.6f} by torch, {right:.6f} written out, {differences:.6f} by differences")
assert torch.allclose(first, same), "the first derivatives differ too"
assert abs(right - differences) < 1e-4 * abs(right), "what is written out is not that of differences"
assert abs(torchs - right) > 0.1 * abs(right), "torch has it right now"
PYTHON

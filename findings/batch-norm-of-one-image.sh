#!/usr/bin/env bash
# torch 2.13.0, CPU: the gradients of a BatchNorm are wrong for one image that is channels_last and gets its dimension of
# samples by unsqueeze(0).
#
# Such an image has the strides (4, 1, 20, 4), and torch calls it channels_last. Where the gradient of the output is
# contiguous, native_batch_norm_backward mixes up entries, in eval mode and in training mode; no warning. A contiguous
# copy of the same image has the right gradients, and so has x[0:1], whose strides are (100, 1, 20, 4). torch.vmap makes
# such strides where every sample has a channels_last weight of its own.
#
# Seen:
#   gradient in the weight, summed: 5.0918 for 1.6146
#   the process exits with 0 as long as this is so, and with 1 where torch is right
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(8, 4, 5, 5).to(memory_format=torch.channels_last)[0].unsqueeze(0)
norm = nn.BatchNorm2d(4).eval()


def gradient(x):
    (found,) = torch.autograd.grad(norm(x).flatten(1).tanh().sum(), norm.weight)
    return found


wrong, right = gradient(x), gradient(x.contiguous())
print("torch", torch.__version__, "strides", x.stride())
print(f"gradient in the weight, summed: {float(wrong.sum()):.4f} for {float(right.sum()):.4f}")
raise SystemExit(torch.allclose(wrong, right, rtol=1e-3))
PYTHON

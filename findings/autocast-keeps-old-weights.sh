#!/bin/sh
# torch 2.13.0: inside of one torch.autocast block a layer keeps the copy of its weight in half precision that its first
# forward pass made. An optimizer step in the block changes the weight in place, and the copy stays: a later forward pass
# in the block, as of a measurement after the step, has the outputs of the old weights, without a warning. The first
# forward pass in a new block has those of the new ones. Prints what was seen, and exits with an error if the behaviour
# is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.nn import functional as F

torch.manual_seed(0)
layer = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
x, y = torch.randn(8, 4), torch.randint(2, (8,))
with torch.autocast("cpu", dtype=torch.bfloat16):
    before = F.cross_entropy(layer(x), y)
    before.backward()
    optimizer.step()
    within = F.cross_entropy(layer(x), y)
with torch.autocast("cpu", dtype=torch.bfloat16):
    after = F.cross_entropy(layer(x), y)
print(f"torch {torch.__version__}: the loss before a step {before:.4f}, after it {within:.4f} in the same block of")
print(f"autocast, {after:.4f} in a new one, and {F.cross_entropy(layer(x), y):.4f} without autocast")
assert within.item() == before.item()
assert abs(after.item() - before.item()) > 0.05
PYTHON

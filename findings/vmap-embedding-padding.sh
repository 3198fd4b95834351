#!/bin/sh
# torch 2.13.0: under torch.vmap, with a weight for each sample, an embedding leaves out the row of padding_idx in the
# gradient of the first sample alone. The rule lays the samples' weights one behind the other and adds an offset to the
# indices, and not to padding_idx. So gradients of each sample in such weights (as for an empirical Fisher matrix) have
# entries at the padding, which each sample alone, in a loop, has not. Outputs are right, and there is no warning.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/env/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.nn import functional as F

torch.manual_seed(0)
tokens = torch.tensor([[1, 2], [1, 2], [1, 2]])
weights = torch.randn(4, 3).expand(3, 4, 3).clone().requires_grad_()


def lookup(weight, tokens):
    return F.embedding(tokens, weight, padding_idx=1)


together = torch.vmap(lookup)(weights, tokens)
alone = torch.stack([lookup(weight, x) for weight, x in zip(weights, tokens)])
(by_vmap,) = torch.autograd.grad(together.sum(), weights)
(by_loop,) = torch.autograd.grad(alone.sum(), weights)
print("torch", torch.__version__)
print("largest difference of the outputs:", float((together - alone).detach().abs().max()))
print("gradient at the padding, by sample: by vmap", by_vmap[:, 1].sum(1).tolist(), "in a loop", by_loop[:, 1].sum(1).tolist())
assert torch.equal(together, alone) and bool((by_loop[:, 1] == 0).all()), "outputs differ, or the loop is another one"
assert bool((by_vmap[0, 1] == 0).all()) and bool((by_vmap[1:, 1] != 0).all()), "vmap leaves out all paddings now"
PYTHON

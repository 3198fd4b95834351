#!/bin/sh
# keras 3.15.0 on torch 2.13.0: torch.func.functional_call on a Keras model runs without an error and ignores the
# parameters that it is given. A Keras model is an nn.Module and lists its weights in named_parameters(), so that one
# expects torch's functional interface to replace them. Its layers read keras.Variable objects instead: the outputs with
# all parameters replaced by zeros are those of the model's own weights, and derivatives in the given ones are None.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 keras==3.15.0 numpy
KERAS_BACKEND=torch "$folder/env/bin/python" - <<'PYTHON'
import keras
import torch

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3)])
x = torch.ones(2, 5, device=next(model.parameters()).device)
given = {name: torch.zeros_like(p, requires_grad=True) for name, p in model.named_parameters()}
own = model(x)
found = torch.func.functional_call(model, given, (x,))
gradients = torch.autograd.grad(found.sum(), [*given.values()], allow_unused=True)
print("keras", keras.__version__, "torch", torch.__version__)
print("parameters:", {name: tuple(p.shape) for name, p in model.named_parameters()})
print("largest output with all parameters 0:", float(found.abs().max()), "of the model:", float(own.abs().max()))
print("gradients in the given parameters:", gradients)
assert torch.equal(found, own) and float(own.abs().max()) > 0, "functional_call uses the given parameters now"
assert all(gradient is None for gradient in gradients), "there are derivatives in the given parameters now"
PYTHON

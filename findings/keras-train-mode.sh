#!/bin/sh
# keras 3.15.0 on torch 2.13.0: model.train() sets training=True on a Keras model and changes nothing in its outputs.
# An nn.Module with a Dropout that is in training mode drops entries; a Keras model, which is an nn.Module too, decides
# by the argument training= of the call alone, whose default is off. So a loop of torch's that calls model.train() and
# model(x) trains without dropout, and with the moving statistics of BatchNormalization, which are never updated.
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
layers = keras.layers
model = keras.Sequential([layers.Input((50,)), layers.BatchNormalization(), layers.Dropout(0.5)])
x = torch.randn(64, 50, device=next(model.parameters()).device)
statistics = [variable.numpy().copy() for variable in model.non_trainable_variables]
model.train()
found = model(x)
dropped = float((found == 0).float().mean())
moved = any((a != b.numpy()).any() for a, b in zip(statistics, model.non_trainable_variables) if a.shape == (50,))
print("keras", keras.__version__, "torch", torch.__version__)
print("model.training:", model.training, "share of outputs dropped:", dropped, "statistics moved:", moved)
asked = float((model(x, training=True) == 0).float().mean())
print("with model(x, training=True) the share is", asked)
assert model.training and dropped == 0 and not moved, "train() has an effect now"
assert 0.4 < asked < 0.6, "training=True drops another share now"
PYTHON

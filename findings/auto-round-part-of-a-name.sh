#!/bin/sh
# auto-round 0.16.1: an entry of layer_config whose name is no layer's is looked for inside of all names, and overwrites
# what these layers have by their full names, wherever it stands in the table. So of {"layers.10": 2 bits, "yers.1": 8
# bits} layers.10 has 8 bits. A full name is taken as that layer alone ("layers.1" is not layers.10), so that a typing
# error in one name (or the name of a layer that a version of the model has no more) changes others, without a message.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 auto-round==0.16.1 numpy
"$folder/env/bin/python" -W ignore - 2> "$folder/warnings" <<'PYTHON'
from importlib.metadata import version

import torch
from auto_round.compressors import utils
from torch import nn

print("auto-round", version("auto-round"))
model = nn.Module()
model.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))
for name, module in model.named_modules():
    module.global_name = name  # as auto-round marks the modules of a model before it asks
found = []
for given in ({"layers.10": 2, "layers.1": 8}, {"layers.10": 2, "yers.1": 8}, {"yers.1": 8, "layers.10": 2}):
    table = {name: {"bits": bits} for name, bits in given.items()}
    resolved, _, _ = utils.set_layer_config(model, table, "W4A16", torch.float16, (nn.Linear,), ())
    found.append([resolved[f"layers.{number}"]["bits"] for number in (1, 10, 11)])
    print(f"{given}: bits of layers 1, 10 and 11: {found[-1]}")
assert found == [[8, 2, 4], [8, 8, 8], [8, 8, 8]], "names are read otherwise now"
PYTHON

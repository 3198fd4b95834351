#!/bin/sh
# torchao 0.18.0 on torch 2.13.0: a weight that IntxWeightOnlyConfig rounds to int2 or int4 takes a byte an entry, in
# memory and on disk, as one that it rounds to int8 does. The entries have 4 and 16 values, as asked for, and none is
# packed. So bits that were spared in a layer spare no bytes there, and a model of mixed bits is as large as one of
# int8. The names IntxWeightOnlyConfig and weight_dtype=torch.int4 do not show it; the class of the weight does, which
# is IntxUnpackedToInt8Tensor.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0 numpy
"$folder/env/bin/python" -W ignore - 2> "$folder/warnings" <<'PYTHON'
import io

import torch
import torchao
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis

print("torch", torch.__version__, "torchao", torchao.__version__)
sizes = {}
for bits in (2, 4, 8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=PerAxis(0)))
    entries = model[0].weight.qdata
    with io.BytesIO() as file:
        torch.save(model.state_dict(), file)
        sizes[bits] = entries.untyped_storage().nbytes(), file.tell()
    kind = type(model[0].weight).__name__
    print(f"int{bits}: a {kind} of {entries.unique().numel()} values, {sizes[bits][0]} bytes, on disk {sizes[bits][1]}")
    assert entries.unique().numel() == 2**bits, "another number of values"
assert {memory for memory, _ in sizes.values()} == {512 * 512}, "entries are packed now"
assert max(disk for _, disk in sizes.values()) < 1.01 * min(disk for _, disk in sizes.values()), "files differ now"
PYTHON

#!/bin/sh
# GPTQModel 7.7.0: among the rules of QuantizeConfig.dynamic those that leave layers out ("-:") come before all others,
# wherever they stand in the table. The first rule that matches a name decides. So a table that gives some layers their
# bits and ends with "-:.*", for all the rest, quantises no layer at all, without a message. A rule for the rest has to
# leave out the layers above it by its own pattern.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 datasets numpy \
    defuser==0.0.28 device-smi==0.5.7 logbar==0.4.15 pypcre==0.6.4 threadpoolctl==3.8.0 tokenicer==0.0.14 torchao==0.18.0 \
    pillow requests jinja2 protobuf packaging ninja dill triton
# The rules are Python, of which nothing has to be built.
"$folder/env/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$folder" gptqmodel==7.7.0
tar -xzf "$folder/gptqmodel-7.7.0.tar.gz" -C "$folder"
cd "$folder"
PYTHONPATH="$folder/gptqmodel-7.7.0" "$folder/env/bin/python" -W ignore - 2> "$folder/messages" <<'PYTHON' || { cat "$folder/messages"; exit 1; }
from gptqmodel.quantization.config import QuantizeConfig
from gptqmodel.version import __version__

LAYERS = [f"model.layers.{number}.mlp.down_proj" for number in (0, 1)]
FIRST, REST = r"+:^model\.layers\.0\.mlp\.down_proj$", "-:.*"
BUT = r"-:^(?!model\.layers\.0\.mlp\.down_proj$).*"
print("GPTQModel", __version__)
found = {}
for rest in (REST, BUT):
    config = QuantizeConfig(bits=4, group_size=32, dynamic={FIRST: {"bits": 8}, rest: {}})
    found[rest] = [config.dynamic_get(name, "bits", config.bits) for name in LAYERS]
    print(f"given {FIRST} and then {rest}: order kept {[*config.dynamic]}")
    print(f"    bits of layers 0 and 1, False where the layer is left out: {found[rest]}")
assert found == {REST: [False, False], BUT: [8, False]}, "rules are applied in another order now"
PYTHON

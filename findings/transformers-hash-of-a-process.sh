#!/bin/sh
# transformers 5.24.0: a model that can generate keeps Python's own hash of its generation settings in
# generation_config._original_object_hash. Python seeds the hashes of texts in each process, so that the same model, with
# the same settings and weights, is pickled to other bytes in each process. A cache that knows a model by the hash of
# its pickle never finds it again. Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat > "$folder/pickled.py" <<'PYTHON'
import hashlib
import pickle

import torch
import transformers

torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(config).eval()


def digest(held):
    return hashlib.sha256(pickle.dumps(held)).hexdigest()[:12]


settings = model.generation_config
weights = {name: weight.numpy().tobytes() for name, weight in model.state_dict().items()}
print(digest(weights), digest(settings), end=" ")
settings._original_object_hash = 0
print(digest(settings))
PYTHON
for seed in 1 2; do
    PYTHONHASHSEED=$seed "$folder/env/bin/python" -W ignore "$folder/pickled.py" 2> "$folder/warnings" > "$folder/$seed"
    echo "process $seed: pickles of weights, settings, and settings without the hash: $(cat "$folder/$seed")"
done
read -r weights settings without < "$folder/1"
read -r others other_settings other_without < "$folder/2"
test "$weights" = "$others"
test "$settings" != "$other_settings"
test "$without" = "$other_without"

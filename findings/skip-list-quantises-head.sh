#!/bin/sh
# transformers 5.24.0 with bitsandbytes 0.50.2: a list of modules that are not to be quantised, whatever is in it,
# replaces the list that is made where none is given. That one has the head. So who leaves one more layer out, as a plan
# of mixed precision does, has lm_head quantised from then on, without a message: the list has to name the head too.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 bitsandbytes==0.50.2 accelerate numpy
MODEL="$folder/model" "$folder/env/bin/python" -W ignore - 2> "$folder/warnings" <<'PYTHON'
import os

import bitsandbytes
import torch
import transformers

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(os.environ["MODEL"])
print("transformers", transformers.__version__, "bitsandbytes", bitsandbytes.__version__)
found = {}
for skipped in (None, ["model.layers.0"], ["model.layers.0", "lm_head"]):
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
    model = transformers.AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], quantization_config=config)
    layers = [type(layer.self_attn.q_proj).__name__ for layer in model.model.layers]
    found[str(skipped)] = type(model.lm_head).__name__
    print(f"llm_int8_skip_modules={skipped}: q_proj of the layers {layers}, head {type(model.lm_head).__name__}")
assert [*found.values()] == ["Linear", "Linear4bit", "Linear"], "the head is treated otherwise now"
PYTHON

"""Print the tables of docs/scale.md as the command makes them: ``python tests/support/scale_page.py``.

``--write`` puts them there.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from pyflatness.cli import main
from support import ROOT

PAGE = ROOT / "docs" / "scale.md"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}


def command(name: str) -> list[str]:
    """Return the arguments of the command for a model."""
    options = "--dtype bfloat16 --length 4096 --samples 1024 --probes 8 --ranks 8 --ranks 64 --flops-per-second 4e14"
    return ["plan", "--model", f"hf:{name}", *options.split()]


def made(name: str) -> str:
    """Return the part of the page for a model: the command and what it prints."""
    before, out = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).mkdir()
        Path(folder, name, "config.json").write_text(json.dumps({**LLAMA, **MODELS[name]}))
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
                main(command(name))
        finally:
            os.chdir(before)
    lines = "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())
    return f"    $ pyflatness {' '.join(command(name))}\n" + "".join(f"    {line}\n" for line in lines.splitlines())


def on_page(name: str) -> str:
    """Return that part as the page has it."""
    found = re.search(rf"^    \$ pyflatness plan --model hf:{name} (.*\n)(    .*\n)+", PAGE.read_text("utf-8"), re.M)
    assert found is not None
    return found[0]


if __name__ == "__main__":
    for model in MODELS:
        print(made(model))
        if "--write" in sys.argv:
            PAGE.write_text(PAGE.read_text("utf-8").replace(on_page(model), made(model)), encoding="utf-8")

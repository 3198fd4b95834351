"""The Python of the pages in docs/, run block after block; blocks with prompts are run by doctest."""

import os
import re
import runpy
import textwrap
from pathlib import Path

import pytest

from support import ROOT

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^(<!-- not run: .+ -->\n\n?)?( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
DIGITS = """
import torch, pyflatness as pf
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(60, 1, 8, 8), torch.randint(3, (60,))
"""
LANGUAGE_MODEL = """
import torch, transformers, pyflatness as pf
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
llama = transformers.LlamaConfig(vocab_size=17, tie_word_embeddings=True, eos_token_id=1, **sizes)
model = transformers.LlamaForCausalLM(llama).eval()
model.save_pretrained("stories260K")
tokens = torch.randint(17, (4, 6))
batches = [{"input_ids": tokens, "labels": tokens}]
"""
SETUPS = {  # what a page's reader has at hand
    "curvature.md": DIGITS
    + """
from collections import OrderedDict
parts = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
model = nn.Sequential(OrderedDict(zip(("conv1", "relu", "flat", "fc"), parts))).double().eval()
loss, batches = nn.CrossEntropyLoss(), [(x[:30].double(), y[:30]), (x[30:].double(), y[30:])]
train = test = batches
others = nn.Conv2d(1, 4, 3), *parts[1:3], nn.Linear(144, 3)
other = nn.Sequential(OrderedDict(zip(("conv1", "relu", "flat", "fc"), others))).double().eval()
""",
    "index.md": DIGITS
    + """
model, loss, data = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), nn.CrossEntropyLoss(), (x, y)
""",
    "models.md": LANGUAGE_MODEL,
    "layers.md": LANGUAGE_MODEL,
    "statistics.md": DIGITS
    + """
x_test, y_test, loss = torch.randn(60, 1, 8, 8), torch.randint(3, (60,)), nn.CrossEntropyLoss()
def trained(rate):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    model[1].weight.data *= 1 + 10 * rate
    return model.eval()
""",
    "training.md": DIGITS
    + """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
loss, data, (x_test, y_test) = nn.CrossEntropyLoss(), (x.flatten(1), y), (x.flatten(1), y)
def train(model):
    return 1.0
""",
}


def blocks(page: Path) -> list[str]:
    """Return the code that a page has readers run; a comment in front of a block takes it out, with its reason."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(code) for without, _, code in found if not without and ">>>" not in code]


PAGES = [page.name for page in sorted(DOCS.glob("*.md")) if blocks(page)]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in SETUPS, f"docs/{name} has code that nothing runs: give it a set-up here, or a reason there"
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(os.devnull)
    exec(SETUPS[name], names)
    for code in blocks(DOCS / name):
        exec(compile(code, f"docs/{name}", "exec"), names)

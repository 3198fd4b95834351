"""Runs of ``pyflatness score`` on the tiny network, and the rows they write."""

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pyflatness import cli
from pyflatness.messages import from_cell
from pyflatness.scoring import specs

READS_PICKLES = torch.__version__ >= "2.10"  # releases before it can be made to run code, and are refused
needs_pickles = pytest.mark.skipif(not READS_PICKLES, reason="pickled checkpoints are read from torch 2.10 on")


LOSS = torch.nn.CrossEntropyLoss()
DATA = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20) % 3


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double().eval()


def tiny_net(tiny: str, seed: int, name: str = "Tiny") -> torch.nn.Module:
    network = specs.resolve(f"{tiny}:{name}")
    torch.manual_seed(seed)
    return network().eval()


def built_mark(tiny: str) -> Path:
    return Path(tiny).with_name("built")


def arguments_of(tiny: str, *rest: object, data: str = "data", loss: str = "cross_entropy") -> list[str]:
    """The head alone, so that a measure has one row, unless ``rest`` names layers or another network."""
    out = str(Path(tiny).with_name("out") / "scores.csv")
    spec = ["--model", f"{tiny}:Tiny", "--data", f"{tiny}:{data}"]
    chosen = any(str(each).startswith(("--layers", "--model")) for each in rest)
    return ["score", *spec, "--loss", loss, "--out", out, *([] if chosen else ["--layers", "head"]), *map(str, rest)]


def rows_of(tiny: str) -> list[dict[str, str]]:
    with (Path(tiny).with_name("out") / "scores.csv").open(newline="", encoding="utf-8") as file:
        return [{name: from_cell(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def status(*arguments: str) -> object:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    return str(exit_.value) if str(exit_.value).startswith("Error: ") else exit_.value.code or 0


def saved(tiny: str, seed: int, name: str) -> Path:
    path = Path(tiny).with_name(name)
    save_file(tiny_net(tiny, seed).state_dict(), path)
    return path

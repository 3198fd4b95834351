"""``pyflatness allocate``: the choice as a table, as JSON, and as a file for another tool."""

import json

import pytest
from click.testing import CliRunner

from pyflatness.cli.network import allocate
from pyflatness.errors import InputError

NETWORK = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def data():
    torch.manual_seed(1)
    return torch.randn(60, 4), torch.randint(3, (60,))
"""


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NETWORK)
    specs = ["--model", f"{path}:model", "--data", f"{path}:data", "--loss", "cross_entropy"]
    return lambda *more: CliRunner().invoke(allocate, [*specs, *more], catch_exceptions=False)


def test_prints_the_choice_and_writes_it_for_another_tool(command, tmp_path):
    options = ["--formats", "int3, int8", "--bits", "5"]
    shown = command(*options, "--frontier", "--export", "torchao", str(tmp_path / "plan.json"))
    assert shown.exit_code == 0
    assert "bits a weight of 56" in shown.output
    assert shown.output.count("\n") > 12
    held = json.loads(command(*options, "--json").output)
    assert held["bits"] <= 5
    written = json.loads((tmp_path / "plan.json").read_text())["_data"]["fqn_to_config"]
    dtypes = {name: f"int{config['_data']['weight_dtype']['_data'][3:]}" for name, config in written.items()}
    assert dtypes == held["choice"]


def test_a_budget_below_the_cheapest_choice_is_an_error(command):
    with pytest.raises(InputError, match="the cheapest choice takes 3 bits a weight"):
        command("--formats", "int3,int8", "--bits", "2")

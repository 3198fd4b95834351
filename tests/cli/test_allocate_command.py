"""``pyflatness allocate``: the choice as a table, as JSON, and as a file for another tool."""

import json
from unittest import mock

import pytest
from click.testing import CliRunner

import pyflatness as pf
from pyflatness.cli.network import allocate
from pyflatness.errors import InputError
from pyflatness.scoring import specs

NETWORK = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def data(count=60):
    torch.manual_seed(1)
    return torch.randn(count, 4), torch.randint(3, (count,))

def others(count=60):
    torch.manual_seed(2)
    return torch.randn(2 * count, 4), torch.randint(3, (2 * count,))
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
    assert "change to second order, unmeasured" in shown.output
    assert "without what choosing hides and so without intervals; the plan of" in shown.output
    assert shown.output.count("\n") > 12
    held = json.loads(command(*options, "--json").output)
    assert held["bits"] <= 5
    written = json.loads((tmp_path / "plan.json").read_text())["_data"]["fqn_to_config"]
    dtypes = {name: f"int{config['_data']['weight_dtype']['_data'][3:]}" for name, config in written.items()}
    assert dtypes == held["choice"]


def test_a_budget_below_the_cheapest_choice_is_an_error(command):
    with pytest.raises(InputError, match="the cheapest choice takes 3 bits a weight"):
        command("--formats", "int3,int8", "--bits", "2")


def test_fixed_formats_and_held_out_data_are_those_of_python(command, tmp_path):
    options = ["--formats", "int3,int8", "--bits", "8", "--fixed", "2=int4", "--fixed", "[01]=int3", "--rounds", "0"]
    given = ["--held-out", f"{tmp_path / 'net.py'}:others", "--data-args", "count=70"]
    held = json.loads(command(*options, *given, "--json").output)
    assert held["choice"] == {"0": "int3", "2": "int4"}
    assert held["predicted"]["samples"] == 140
    net = specs.resolve(f"{tmp_path / 'net.py'}:model").__globals__
    how = {"bits": 8, "fixed": {"2": "int4", "[01]": "int3"}, "rounds": 0, "held_out": net["others"](70)}
    plan = pf.allocate(net["model"]().eval(), "cross_entropy", net["data"](70), ["int3", "int8"], **how)
    assert held == json.loads(json.dumps(plan.to_dict()))


def test_rounds_are_those_of_python(command):
    with mock.patch("pyflatness.cli.network.allocation.allocate", wraps=pf.allocate) as call:
        for options in ([], ["--rounds", "2"]):
            assert command("--formats", "int2,int3", "--bits", "2.5", *options).exit_code == 0
    assert [given.kwargs["rounds"] for given in call.call_args_list] == [None, 2]


def test_plans_by_the_divergence_from_the_model(command):
    plan = command("--formats", "int3,int8", "--bits", "5", "--loss", "kl")
    assert "on unseen data the KL divergence from the model is" in plan.output


BAD = {
    "format": (
        ["--formats", "int4,foo", "--bits", "4"],
        "'foo' is no format that is known; there are int2 … int8, int4-g128",
    ),
    "format of a tool": (
        ["--formats", "nf4", "--bits", "4", "--export", "torchao", "plan.json"],
        r"'nf4' is no format of torchao; bitsandbytes has it, .*there are int\[2-8\], with -gN for groups, fp8, keep",
    ),
    "fixed": (
        ["--formats", "int4", "--bits", "4", "--fixed", "2=foo"],
        "'foo' is no format that is known; there are int2",
    ),
    "tool": (["--formats", "int4", "--bits", "4", "--export", "foo", "plan.json"], "tool='foo': choose one of"),
    "no budget": (["--formats", "int4"], "one budget is wanted"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses_before_the_model_is_made(command, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.py"
    path.write_text(path.read_text().replace("return nn.Sequential", "raise RuntimeError\n    return nn.Sequential"))
    given, message = BAD[case]
    with pytest.raises(InputError, match=message):
        command(*given)


def test_refuses_what_is_no_format_of_a_name(command, tmp_path):
    options = ["--formats", "int4", "--bits", "4"]
    assert "'lm_head': NAME=FORMAT is wanted" in command(*options, "--fixed", "lm_head").output
    assert "'2' is 'int4' and 'int8'" in command(*options, "--fixed", "2 = int4, 2=int8").output
    with pytest.raises(InputError, match="'9' is none of these layers"):
        command(*options, "--fixed", "9=int4")
    assert "there is no 'missing'" in command(*options, "--held-out", f"{tmp_path / 'net.py'}:missing").output
    path = tmp_path / "other.py"
    path.write_text("def data():\n    raise RuntimeError")
    with pytest.raises(InputError, match="--held-out: the callable failed"):
        command(*options, "--held-out", f"{path}:data")

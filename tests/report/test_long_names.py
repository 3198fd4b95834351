"""Names of layers stand whole, and on one line, in every table, however long they are."""

import re

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.cli import output
from pyflatness.scoring.scores import table

NAMES = [
    f"transformer_encoder.layers.{block}.feed_forward_network.{which}_projection_of_the_block"
    for block in range(2)
    for which in ("intermediate", "output")
]


class Deep(nn.Module):
    """A network whose layers have the long names of transformers."""

    def __init__(self):
        super().__init__()
        for name in NAMES:
            module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.add_module(last, nn.Linear(6, 6))

    def forward(self, x):
        for name in NAMES:
            x = torch.relu(self.get_submodule(name)(x))
        return x


@pytest.fixture(scope="module")
def deep():
    torch.manual_seed(0)
    return Deep().eval(), nn.CrossEntropyLoss(), (torch.randn(24, 6), torch.randint(6, (24,)))


def four_bits(given):
    return pf.changes.of_format(given[0], "int4")


TABLES = {
    "report": lambda given: pf.measure(*given),
    "report of many": lambda given: pf.measure(*given, measures="sweep", probes=2),
    "cost": lambda given: pf.cost_of_change(*given, four_bits(given), by_trace=True),
    "allocation": lambda given: pf.allocate(*given, ["int4", "int8"], bits=6),
    "importance": lambda given: pf.importance(*given),
    "bounds": lambda given: pf.theory.bounds(*given),
    "scores": lambda given: pf.score({"runs/of/one/seed/" + 3 * "width=64,": given[0]}, *given[1:], probes=2),
}


@pytest.mark.parametrize("name", TABLES)
def test_as_text(deep, name):
    lines = str(TABLES[name](deep)).splitlines()
    assert not any("…" in line for line in lines)
    for layer in NAMES:
        assert any(re.search(rf"(^|\s){re.escape(layer)}(\.weight)?(\s|$)", line) for line in lines), layer
    for line in lines:  # no line has a name's end or beginning alone
        for found in re.findall(r"\S*(?:transformer_encoder|of_the_block)\S*", line):
            assert re.search(r"transformer_encoder\S*of_the_block", found), line


@pytest.mark.parametrize("width", [80, 100])
def test_on_a_terminal(deep, width, monkeypatch, capsys):
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    found = TABLES["scores"](deep)
    output.show(table(found.rows))
    out = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert "…" not in out
    for layer in NAMES:
        assert layer in out


def test_measures_stand_in_one_table_where_their_headers_in_two_lines_fit(deep):
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)).eval()
    given = (model, *deep[1:])
    lines = str(pf.cost_of_change(*given, four_bits(given), by_trace=True)).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["gradient_", "cost_of_", "loss_", "cost_"]
    assert lines[1].split() == [
        "layer",
        "of_change",
        "change",
        "predicted",
        "change",
        "by_trace",
        "value",
        "of",
        "exact",
    ]
    assert sum(line.startswith(" 0 ") for line in lines) == 1
    lines = str(pf.measure(*given)).splitlines()
    assert lines[0].split() == ["layer", "relative_flatness", "trace", "value", "of", "exact"]


def test_what_all_rows_are_of_is_said_once(deep):
    lines = str(pf.cost_of_change(*deep, four_bits(deep), probes=2, curvature="ggn")).splitlines()
    headers = [line for line in lines if line.split()[:1] == ["layer"]]
    assert headers
    assert not any("value of" in line for line in headers)
    assert sum(line.startswith("value of, in every row: ") for line in lines) == len(headers)
    assert sum(line.startswith(f" {NAMES[0]} ") for line in lines) == len(headers)
    assert not any(line.strip() in ("definition", "ggn-sampled") for line in lines)  # no row of its own

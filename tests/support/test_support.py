"""The scripts that guard a change of the code's shape: the grid covers what it should, and no difference is missed."""

import copy
import json
import math
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from support import combinations, value_grid, values
from support.cases import LOSSES
from support.grid import CASES
from support.public import CALLS

SCRIPT = Path(values.__file__)


@pytest.fixture(scope="module")
def entries():
    return value_grid.entries()


@pytest.fixture(scope="module")
def recording(entries):
    names = (
        "head_flatness | class weights | float64 | reference",
        "relative_flatness | mlp ReLU | layer 0 | defaults | compiled",
        "measure | mlp ReLU | defaults | reference",
        "block_traces | bad data: none",
    )
    return values.record([entry for entry in entries if entry[0] in names])


def test_names_of_the_grid_are_unique(entries):
    assert [name for name, count in Counter(name for name, _ in entries).items() if count > 1] == []


def test_the_grid_covers_measures_losses_backends_networks_and_calls(entries):
    names = [name.split(" | ") for name, _ in entries]
    calls = {parts[0].split(",")[0] for parts in names}
    figures = {"plot_correlation", "plot_correlation_matrix"}
    # The forward= of other entries, a formula of numbers alone, a comparison of measures that are here, and a file.
    assert {*CALLS} - calls == {*figures, "causal_lm", "density_constants", "invariances", "add_to_store"}
    table = value_grid.measure_names()
    assert len(table) > 30
    assert {f"measure {name}" for name in table} <= calls
    for backend in value_grid.BACKENDS:
        held = {tuple(parts[:2]) for parts in names if backend in parts}
        assert {("head_flatness", loss) for loss in LOSSES} <= held
        assert {("measure", case) for case in CASES} <= held
        assert {("relative_flatness", case) for case in CASES} <= held


def test_every_pair_of_options_occurs():
    choices = {name: list(table) for name, table in value_grid.CHOICES.items()}
    rows = combinations.covering(choices)
    for i, (first, a_values) in enumerate(choices.items()):
        for second, b_values in list(choices.items())[i + 1 :]:
            place = list(choices).index(second)
            met = {(row[i], row[place]) for row in rows}
            assert met == {(a, b) for a in a_values for b in b_values}, (first, second)
    layers = sum(len(case.layers) for case in CASES.values())
    assert 3 * layers > len(rows)  # so that each is met at some layer


def test_two_recordings_are_equal(entries, recording):
    again = values.record([entry for entry in entries if entry[0] in recording["values"]])
    assert len(recording["values"]) == 4
    assert values.compare(recording, again) == 0


def changed(recording, entry, path, text):
    other = copy.deepcopy(recording)
    name = next(name for name in other["values"] if name.startswith(entry))
    if text is None:
        del other["values"][name][path]
    else:
        other["values"][name][path] = text(other["values"][name][path])
    return other, f"{name} :: {path}"


def next_bit(text):
    return math.nextafter(float.fromhex(text), math.inf).hex()


@pytest.mark.parametrize(
    ("entry", "path", "text"),
    [
        ("relative_flatness", "value", next_bit),
        ("measure", "trace.0.value", next_bit),
        ("head_flatness", "per_sample", lambda text: text.replace("0x1.", "-0x1.", 1)),
        ("block_traces", "error", lambda text: text.replace("data", "Data")),
        ("measure", "trace.0.method", lambda text: "head"),
        ("measure", "trace.0.stderr", None),
    ],
)
def test_a_change_is_seen_unless_it_is_allowed(recording, capsys, entry, path, text):
    other, name = changed(recording, entry, path, text)
    for pair in ((recording, other), (other, recording)):
        assert values.compare(*pair) == 1
        assert name in capsys.readouterr().out
        assert values.compare(*pair, ["something else", "*" + path]) == 0
        assert "; 1 others are allowed to" in capsys.readouterr().out


def test_a_missing_entry_is_seen(recording, capsys):
    other = copy.deepcopy(recording)
    facts = other["values"].pop("block_traces | bad data: none")
    assert values.compare(recording, other) == len(facts)
    capsys.readouterr()
    assert values.compare(other, recording) == 0  # the grid has grown
    assert capsys.readouterr().out.startswith("1 entries are in the new recording alone")


def test_numbers_keep_every_bit():
    def recorded(value):
        return values.recorded(lambda: {"x": value, "of": torch.tensor([value], dtype=torch.float64)})

    assert recorded(0.0) != recorded(-0.0)
    assert recorded(1.0) != recorded(math.nextafter(1.0, 2))
    assert recorded(math.nan) == recorded(-math.nan)
    single = torch.tensor([1.0])
    assert values.recorded(lambda: single) != values.recorded(single.double)


def test_the_script_exits_with_the_verdict(recording, tmp_path, monkeypatch):
    other, _ = changed(recording, "relative_flatness", "value", next_bit)
    for name, held in (("old", recording), ("new", other)):
        (tmp_path / name).write_text(json.dumps(held), encoding="utf-8")

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, "compare", *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return stopped.value.code

    assert (run("old", "old"), run("old", "new"), run("old", "new", "--allow", "*value")) == (0, 1, 0)

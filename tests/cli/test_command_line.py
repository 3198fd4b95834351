"""What all commands have in common: help by purpose, exit statuses, JSON for programs, plain output."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest

import pyflatness as pf
from pyflatness import cli
from pyflatness.cli import doctor, group
from pyflatness.cli.output import show_json
from pyflatness.measures import MEASURES
from support import ROOT
from support.score_runs import arguments_of, rows_of, saved, status

PAGE = (ROOT / "docs" / "scoring.md").read_text(encoding="utf-8")
LINEAR = ["--model", "torch.nn:Linear", "--model-args", '{"in_features": 4, "out_features": 3}']


@pytest.fixture
def read(capsys):
    """A function that runs a command with --json, and returns what is in the JSON that it prints."""

    def run(*arguments, expected=0):
        assert status(*arguments, "--json") == expected
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def store(tiny):
    """A store with one checkpoint."""
    path = Path(tiny).with_name("runs.sqlite")
    options = {"model": f"{tiny}:Tiny", "layers": "*", "measures": ["trace", "weight_norm"], "store": path}
    pf.score({"first": saved(tiny, 1, "1.safetensors")}, "cross_entropy", f"{tiny}:data", **options)
    return str(path)


def test_help_has_every_command_in_a_section_and_the_exit_statuses(capsys):
    assert status("--help") == 0
    out = capsys.readouterr().out
    titles = re.findall(r"^(\S.*):$", out, re.MULTILINE)
    assert titles[:2] == ["Options", "Measure networks"]
    assert "Commands" not in titles
    commands = set(re.findall(r"^  ([a-z][a-z-]*)  ", out, re.MULTILINE))
    assert commands >= {"score", "store", "demo", "measure"}
    for command in commands:
        assert status(command, "--help") == 0
    capsys.readouterr()
    assert "..." not in out[out.index("Measure networks:") :]
    for code, meaning in group.STATUSES.items():
        assert f"  {code:<5}{meaning}" in out


def test_the_page_has_every_command_and_status(capsys):
    assert status("--help") == 0
    names = {*re.findall(r"^  ([a-z][a-z-]*)  ", capsys.readouterr().out, re.MULTILINE)} - {"store"}
    assert status("store", "--help") == 0
    names |= {f"store {name}" for name in re.findall(r"^  ([a-z]+)  ", capsys.readouterr().out, re.MULTILINE)}
    assert {"store ls", "store show", "store merge"} < names
    for name in names:
        assert f"| `{name}` |" in PAGE
    for code, meaning in group.STATUSES.items():
        assert f"| {code} | {meaning} |" in PAGE


def test_every_option_has_help():
    """It comes from docstrings, by the names of parameters."""
    commands = group.Commands(cli._SECTIONS, "")
    context = click.Context(commands)
    every = [commands.get_command(context, name) for name in commands.list_commands(context)]
    every += [command for one in every if isinstance(one, click.Group) for command in one.commands.values()]
    options = [(command.name, option) for command in every for option in command.params if option.name != "help"]
    said = {(name, option.name): option.help for name, option in options if isinstance(option, click.Option)}
    assert [names for names, text in said.items() if not text] == []
    assert "it means --probes adaptive" in said["score", "rtol"]
    assert said["measure", "rtol"] == said["score", "rtol"]


@pytest.mark.parametrize("command", ["store ls x.sqlite", "store gc x.sqlite", "doctor", "measures"])
def test_an_interruption_ends_any_command_with_its_status(command, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Command, "invoke", interrupted)
    assert status(*command.split()) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_commands_run_beside_the_main_thread(capsys):
    thread = threading.Thread(target=lambda: status("measures", "--help-me-choose"))
    thread.start()
    thread.join()
    assert "you want" in capsys.readouterr().out


def test_json_of_networks_and_measures(read):
    assert read("layers", *LINEAR) == [{"name": "", "type": "Linear", "shape": [3, 4]}]
    lazy = read("layers", "--model", "torch.nn:LazyLinear", "--model-args", '{"out_features": 3}')
    assert lazy == [{"name": "", "type": "LazyLinear", "shape": None}]
    assert [row["name"] for row in read("measures")] == [measure.name for measure in MEASURES]
    assert {"want", "take", "invariant", "price"} == {*read("measures", "--help-me-choose")[0]}


def test_json_of_a_store(read, store):
    listed = read("store", "ls", store)
    (row,) = listed["checkpoints"]
    assert (row["name"], row["done"], row["failed"], row["todo"]) == ("first", 6, 0, 0)
    assert listed["settings"][0]["loss"] == "CrossEntropy"
    assert listed["seconds"] > 0
    shown = read("store", "show", store, "first")
    assert (shown["checkpoint"], len(shown["content"])) == ("first", 64)
    (setting,) = shown["settings"]
    values = {(row["layer"], row["measure"]): row["value"] for row in setting["rows"]}
    assert values["", "trace"] == pytest.approx(
        sum(v for (layer, name), v in values.items() if layer and name == "trace")
    )
    assert read("store", "verify", store) == {"store": store, "whole": True, "problems": [], "orphans": []}


def test_json_of_a_store_that_is_not_whole(read, store, capsys):
    import sqlite3

    connection = sqlite3.connect(store)
    with connection:
        connection.execute("DELETE FROM units WHERE id = 1")
    connection.close()
    found = read("store", "verify", store, expected=1)
    assert not found["whole"]
    assert found["problems"]
    assert status("store", "verify", store) == 1
    assert "run pyflatness score as before with another --store" in capsys.readouterr().out


def test_json_of_the_doctor(read, monkeypatch):
    checks = [
        doctor.EngineCheck("reference", doctor.torch.float32, error, "fused", 1e-5) for error in (1e-7, float("inf"))
    ]
    monkeypatch.setattr(doctor, "self_check", lambda: checks)
    found = read("doctor", expected=1)
    assert found["environment"]["pyflatness"] == pf.__version__
    assert [(row["dtype"], row["error"], row["ok"]) for row in found["checks"]] == [
        ("float32", 1e-7, True),
        ("float32", None, False),
    ]
    assert not found["ok"]


def test_json_has_no_nan(capsys):
    show_json({"a": [float("nan"), (1.5, float("-inf"))], "b": True})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [1.5, None]], "b": True}


@pytest.mark.parametrize("plain", [False, True])
def test_escape_codes_are_for_terminals_and_not_with_no_color(plain, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if plain:
        monkeypatch.setenv("NO_COLOR", "1")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert status("layers", *LINEAR) == 0
        terminal.flush()
        written = os.read(ours, 65536)
    os.close(ours)
    assert b"Linear" in written
    assert (b"\x1b[" in written) != plain


@pytest.mark.parametrize("arguments", [("--help",), ("measures",), ("layers", *LINEAR), ("doctor",)])
def test_no_escape_codes_in_a_pipe(arguments, monkeypatch, capfd):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert status(*arguments) == 0
    out, err = capfd.readouterr()
    assert len(out) > 100
    assert "\x1b" not in out + err


def test_main_is_what_the_script_runs():
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0


# --- printed tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["measures"],
        ["measures", "--help-me-choose"],
        ["layers", *LINEAR],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_lines_end_where_their_text_does(arguments, capsys):
    assert status(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert [line for line in lines if line != line.rstrip()] == []


def test_every_command_has_a_line_of_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert status("--help") == 0
    out = capsys.readouterr().out
    sections = out[out.index("Measure networks:") : out.index("Exit status:")]
    lines = [line for line in sections.splitlines() if line.startswith("  ") and line.strip()]
    assert len(lines) > 7
    for line in lines:
        assert line[2] != " ", f"{line!r} goes on from the line before"
        assert line.endswith(".")
        assert not line.endswith("..")


def test_json_of_score_is_what_the_file_has(tiny, capsys):
    paths = [saved(tiny, 1, "1.safetensors"), saved(tiny, 2, "2.safetensors")]
    assert status(*arguments_of(tiny, "--json", *paths)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["errors"], found["interrupted"], found["notes"]) == (0, False, [])
    assert [(row["checkpoint"], row["value"]) for row in found["rows"]] == [
        (row["checkpoint"], float(row["value"])) for row in rows_of(tiny)
    ]
    assert len(found["rows"]) == 2


def test_json_of_score_has_errors_and_status_1(tiny, capsys):
    broken = saved(tiny, 1, "1.safetensors")
    broken.write_bytes(b"nothing")
    assert status(*arguments_of(tiny, "--json", broken)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["errors"] == 1
    assert found["rows"][0]["value"] is None
    assert found["rows"][0]["error"]


def test_json_of_score_is_not_of_a_store(tiny, tmp_path, capsys):
    arguments = arguments_of(tiny, "--json", "--store", tmp_path / "runs.sqlite")
    place = arguments.index("--out")
    assert status(*arguments[:place], *arguments[place + 2 :]) == 2
    assert "--json goes without --store" in capsys.readouterr().err


# --- completion in the shell ------------------------------------------------------------------------------------------


SCRIPT = Path(sys.executable).parent / "pyflatness"
NAMES = [measure.name for measure in MEASURES]


@pytest.fixture
def complete(monkeypatch, capsys):
    """A function that returns what bash is offered for the last word of a line."""

    def offered(line):
        monkeypatch.setenv("_PYFLATNESS_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        assert status() == 0
        return [text.partition(",")[2] for text in capsys.readouterr().out.splitlines()]

    return offered


def test_commands_and_options(complete):
    assert complete("pyflatness re") == ["report"]
    assert complete("pyflatness store ") == ["add", "export", "gc", "ls", "merge", "show", "verify"]
    assert complete("pyflatness store ls --") == ["--json", "--help"]
    assert {"--layers", "--layers-args"} & {*complete("pyflatness score --lay")} == {"--layers"}


def test_choices(complete):
    assert complete("pyflatness score --curvature ") == ["auto", "ggn", "hessian"]
    assert complete("pyflatness score --executor s") == ["serial", "slurm"]


def test_names_of_measures_also_behind_a_comma(complete):
    assert complete("pyflatness score --measures ") == [*NAMES, "sweep", "all"]
    assert complete("pyflatness score --measures lambda") == ["lambda_max"]
    assert complete("pyflatness score --measures trace,lambda") == ["trace,lambda_max"]


def test_losses(complete):
    assert complete("pyflatness score --loss ") == [
        *("auto", "cross_entropy", "mse_loss", "binary_cross_entropy_with_logits")
    ]
    assert complete("pyflatness score --loss m") == ["mse_loss"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_show_what_a_command_does_uncut(shell, monkeypatch, capsys):
    monkeypatch.setenv("_PYFLATNESS_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "pyflatness ")
    monkeypatch.setenv("COMP_CWORD", "1" if shell == "zsh" else "")
    assert status() == 0
    out = capsys.readouterr().out
    assert "Write a page to look at: table, charts, correlations." in out.replace("\\:", ":")
    assert "..." not in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_the_script_that_the_page_names(shell, monkeypatch, capsys):
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert '_PYFLATNESS_COMPLETE=bash_source pyflatness)"' in page
    assert shell == "bash" or f"_PYFLATNESS_COMPLETE={shell}_source pyflatness" in page
    monkeypatch.setenv("_PYFLATNESS_COMPLETE", f"{shell}_source")
    monkeypatch.setattr(click.shell_completion.BashComplete, "_check_version", lambda *given: None)  # asks bash
    assert status() == 0
    assert f"_PYFLATNESS_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None or not SCRIPT.exists(), reason="bash, or the command, is not here")
def test_bash_completes_with_the_line_of_the_page():
    """What bash itself does when TAB is pressed: call the function that is registered for the command."""
    script = """
    eval "$(_PYFLATNESS_COMPLETE=bash_source pyflatness)"
    complete -p pyflatness >&2
    COMP_WORDS=(pyflatness score --measures trace,lambda) COMP_CWORD=3
    _pyflatness_completion pyflatness
    echo "${COMPREPLY[@]}"
    """
    path = os.pathsep.join([str(SCRIPT.parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert "_pyflatness_completion pyflatness" in done.stderr
    assert done.stdout.split() == ["trace,lambda_max"]

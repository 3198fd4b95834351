"""Completion in the shell: commands, options, choices, and the names of measures."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pyflatness.measures import MEASURES
from support import ROOT
from support.score_runs import status

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

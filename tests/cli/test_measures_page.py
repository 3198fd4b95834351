"""``pyflatness measures`` and the page that it writes."""

import functools
import re

import pytest

import pyflatness as pf
from pyflatness.cli import measures
from pyflatness.measures import MEASURES
from support import ROOT
from support.score_runs import status


def test_measures_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("measures") == 0
    out = capsys.readouterr().out
    for measure in MEASURES:
        assert measure.name in out
    assert "Theorem 4" in " ".join(out.split())  # lines are cut to the terminal


def test_the_page_of_measures_has_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Every measure is in its table, and under the title of its file."""
    assert status("measures", "--markdown") == 0
    page = capsys.readouterr().out
    titles = [name for line in page.splitlines() if line.startswith("## ") for name in line[3:].split(", ")]
    assert sorted(titles) == sorted(measure.name for measure in MEASURES)
    assert all(f"| `{measure.name}` |" in page for measure in MEASURES)


def test_the_table_to_choose_by_is_that_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "which-measure.md").read_text(encoding="utf-8")
    table = "".join(line for line in page.splitlines(keepends=True) if line.startswith("|"))
    assert status("measures", "--help-me-choose", "--markdown") == 0
    assert capsys.readouterr().out == table, (
        "the table of docs/which-measure.md is another; run: pyflatness measures --help-me-choose --markdown"
    )
    assert status("measures", "--help-me-choose") == 0
    shown = capsys.readouterr().out
    for choice in measures.CHOICES:
        assert {*choice[0].split()} <= {*shown.split()}  # cells are folded
    assert "`" not in shown


def _is_public(name: str) -> bool:
    """Return whether it is a public name, ``pf.theory.bounds``."""
    try:
        functools.reduce(getattr, name.removeprefix("pf.").split("."), pf)
    except AttributeError:
        return False
    return True


def test_what_can_be_chosen_exists_and_is_invariant_to_what_is_said() -> None:
    known = {measure.name: measure for measure in MEASURES}
    rescalings = {"layer-wise", "neuron-wise"}
    for choice in measures.CHOICES:
        names = re.findall(r"`([\w.]+)`", choice[1])
        assert names, choice
        for name in names:
            assert name in known or _is_public(name) or name == ".per_neuron", name
        if choice[2].split()[0] in rescalings:
            said = {word for word in choice[2].split() if word in rescalings}
            for name in known.keys() & set(names):
                assert {word for word in known[name].invariant.split(", ") if "attention" not in word} == said, name

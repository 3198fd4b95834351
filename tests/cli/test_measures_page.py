"""``pyflatness measures`` and the page that it writes."""

import pytest

from pyflatness import cli
from pyflatness.measures import MEASURES
from support import ROOT


def _status(*arguments: str) -> object:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    return exit_.value.code or 0


def test_measures_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("measures") == 0
    out = capsys.readouterr().out
    for measure in MEASURES:
        assert measure.name in out
    assert "Theorem 4" in " ".join(out.split())  # lines are cut to the terminal


def test_the_page_of_measures_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """Every measure is in its table, and under the title of its file."""
    path = ROOT / "docs" / "measures.md"
    titles = [name for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("## ")
        for name in line[3:].split(", ")]  # fmt: skip
    assert sorted(titles) == sorted(measure.name for measure in MEASURES)
    assert _status("measures", "--markdown") == 0
    assert path.read_text(encoding="utf-8") == capsys.readouterr().out, (
        "pyflatness measures --markdown > docs/measures.md"
    )

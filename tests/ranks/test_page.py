"""docs/sweep.md says of every public call that reads data, and of every measure, whether it is there over ranks."""

import inspect
import re

from pyflatness.measures import MEASURES
from support import ROOT, rank_cases
from support.public import CALLS

PAGE = (ROOT / "docs" / "sweep.md").read_text("utf-8")
BY_THEMSELVES = {"reparameterize"}  # which read data, and never together


def rows(header):
    """Return the first two columns of the table with this header."""
    table = PAGE.split(f"| {header} | over ranks |\n|---|---|\n")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))


def test_every_call_on_data_is_listed():
    together = {name for name, call in CALLS.items() if "process_group" in inspect.signature(call).parameters}
    assert rows("call").keys() == together | BY_THEMSELVES


def test_every_measure_is_listed():
    said = "docs/sweep.md, Which calls and measures: a row for each measure is wanted, in the order of MEASURES"
    assert [*rows("measure")] == [row.name for row in MEASURES], said


def test_measures_that_are_refused_are_those_of_the_page():
    assert {name for name, said in rows("measure").items() if said.startswith("refused")} == rank_cases.REFUSED

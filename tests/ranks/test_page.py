"""Two pages say of every public call that reads data, and of every measure, whether it is there over ranks.

docs/method.md has a row for each, and docs/ranks.md names those that are refused.
"""

import inspect
import re

from pyflatness.measures import MEASURES
from support import ROOT, rank_cases
from support.public import CALLS

PAGE, FOR_USERS = ((ROOT / "docs" / name).read_text("utf-8") for name in ("method.md", "ranks.md"))
BY_THEMSELVES = {"reparameterize"}  # which read data, and never together


def rows(header):
    """Return the first two columns of the table with this header."""
    table = PAGE.split(f"| {header} | over ranks |\n|---|---|\n")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))


def refused(header):
    """Return what the table with this header says is refused."""
    return {name for name, said in rows(header).items() if said.startswith("refused")}


def test_every_call_on_data_is_listed():
    together = {name for name, call in CALLS.items() if "process_group" in inspect.signature(call).parameters}
    assert rows("call").keys() == together | BY_THEMSELVES


def test_every_measure_is_listed():
    said = "docs/method.md, Which calls and measures: a row for each measure is wanted, in the order of MEASURES"
    assert [*rows("measure")] == [row.name for row in MEASURES], said


def test_measures_that_are_refused_are_those_of_the_page():
    assert refused("measure") == rank_cases.REFUSED


def test_the_page_for_users_names_what_is_refused():
    table = FOR_USERS.split("| refused over ranks | why |\n|---|---|\n")[1].split("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert named == refused("call") | refused("measure")
    assert all(f"`{name}`" in FOR_USERS for name in BY_THEMSELVES)

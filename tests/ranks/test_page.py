"""docs/ranks.md names every call and every measure that is refused over ranks."""

import inspect
import re

from pyflatness.measures import MEASURES
from support import ROOT, rank_cases
from support.public import CALLS

PAGE = (ROOT / "docs" / "ranks.md").read_text("utf-8")
TABLE = PAGE.split("| refused over ranks | why |\n|---|---|\n")[1].split("\n\n")[0]
NAMED = {name for row in TABLE.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
BY_THEMSELVES = "reparameterize"  # it reads data, and never together


def test_what_is_refused_is_a_call_or_a_measure() -> None:
    together = {name for name, call in CALLS.items() if "process_group" in inspect.signature(call).parameters}
    measures = {row.name for row in MEASURES}
    assert together | measures >= NAMED
    assert BY_THEMSELVES not in together
    assert f"`{BY_THEMSELVES}`" in PAGE


def test_measures_that_are_refused_are_those_of_the_page() -> None:
    assert NAMED & {row.name for row in MEASURES} == rank_cases.REFUSED

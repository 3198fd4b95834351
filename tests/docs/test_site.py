"""The site has every public name and every measure."""

import re

import pyflatness as pf
from pyflatness.measures import MEASURES
from support import ROOT

DOCS = ROOT / "docs"


def test_the_reference_has_every_public_name_once() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md")))
    listed = re.findall(r"^\.\. auto\w+:: pyflatness\.([\w.]+)$", text, re.MULTILINE)
    rooms = ("errors", "measures", "results", "statistics", "theory")
    public = {*pf.__all__, *(f"{room}.{name}" for room in rooms for name in getattr(pf, room).__all__)}
    listed = [name for name in listed if name.split(".")[0] not in ("integrations", "options")]
    assert sorted(listed) == sorted(public - {*rooms})


def test_formulas_has_every_measure() -> None:
    text = (DOCS / "formulas.md").read_text(encoding="utf-8")
    rows = {name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
    assert {measure.name for measure in MEASURES} <= rows

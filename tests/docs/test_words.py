"""The pages stay short: words of those for users and of those on the inside, and how many there are of each."""

import re

import pytest

from support import ROOT

DOCS = ROOT / "docs"
LIMITS = {"index": (26_000, 20), "inside": (34_000, 12)}
"""Words and pages in the sidebar of each of these pages; what is not written here does not count."""
ELSEWHERE = {"changelog", "inside", "contributing", "security"}


def pages(name: str) -> list[str]:
    """Return the names of the pages that a page has in the sidebar."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    return [found for found in re.findall(r"^([a-z0-9-]+)$", text, re.MULTILINE) if found not in ELSEWHERE]


@pytest.mark.parametrize("name", LIMITS)
def test_pages_are_few_and_short(name: str) -> None:
    words = {page: len((DOCS / f"{page}.md").read_text(encoding="utf-8").split()) for page in pages(name)}
    most, count = LIMITS[name]
    longest = sorted(words.items(), key=lambda page: page[1])[-5:]
    assert len(words) <= count
    assert sum(words.values()) <= most, f"the longest are {longest}"


def test_every_page_is_in_one_sidebar() -> None:
    found = {path.stem for path in DOCS.glob("*.md")} - ELSEWHERE - {"index", "measures"}
    assert sorted(found) == sorted(pages("index") + pages("inside"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900

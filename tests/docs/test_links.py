"""Links of the pages as GitHub follows them, and the files that pages, docstrings and messages name.

`make docs` fails at a link between pages that leads nowhere. Checked here is what it does not see: links to other files
of the repository, and those of README.md and its like before they are made pages of the site.
"""

import re
from pathlib import Path

import pytest

from support import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "reference").glob("*.md")])
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def slugs(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site give to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    """Return the relative links of a page's text that lead to no file or no heading."""
    targets = re.findall(r"\]\(\s*([^()\s]+)\s*\)", FENCED.sub("", text))
    relative = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    return [
        f"{name}{mark}{anchor}"
        for name, mark, anchor in relative
        if not (page.parent / name).exists() or (anchor and anchor not in slugs(page.parent / name if name else page))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


def test_links_that_lead_nowhere_are_found() -> None:
    text = "[a](no.md), [b](docs/start.md#no-such-heading), [c](#pyflatness), [d](docs/start.md#one-value)"
    assert broken(ROOT / "README.md", text) == ["no.md", "docs/start.md#no-such-heading"]


def test_files_that_are_named_are_there() -> None:
    sources = [*PAGES, *(ROOT / "pyflatness").rglob("*.py"), *(ROOT / "docs" / "examples").glob("*.py")]
    named = {
        name
        for source in sources
        if source.name != "CHANGELOG.md"  # it may name what is gone
        for name in re.findall(
            r"(?<![\w/.-])(?:docs|tests|benchmarks)/[\w/-]+\.(?:md|py|png|cpp)\b", source.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 50
    assert sorted(name for name in named if not (ROOT / name).exists()) == []

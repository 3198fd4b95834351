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
    missing = {measure.name for measure in MEASURES} - rows
    assert not missing, f"docs/formulas.md has no row for {missing}: write one, | `name` | formula | …"


def _user_pages() -> list[str]:
    """Return the names of the pages for users, those of the sidebar that are not inside, and of the README."""
    names = re.findall(r"^([a-z0-9-]+)$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [*(f"docs/{name}.md" for name in names if name not in ("changelog", "inside")), "README.md"]


def _sentences(text: str) -> list[str]:
    """Return what a reader reads as sentences: no code, tables, headings, pictures and addresses of links."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^(    |\||#).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*[-*] ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"(!?)\[([^\]]*)\]\([^)]*\)", lambda link: "" if link[1] else link[2], text)
    return [" ".join(one.split()) for part in re.split(r"\n\s*\n", text) for one in re.split(r"(?<=[.?!])\s+", part)]


def test_sentences_for_users_are_short_and_say_no_cotangent() -> None:
    """A user's page has one idea a sentence, and explains terms in the glossary."""
    found = {page: _sentences((ROOT / page).read_text(encoding="utf-8")) for page in _user_pages()}
    inside = re.findall(r"^([a-z0-9-]+)$", (DOCS / "inside.md").read_text(encoding="utf-8"), re.MULTILINE)
    others = {
        f"docs/{name}.md" for name in ("index", "inside", "changelog", "measures", *inside)
    }  # measures: generated
    assert found.keys() == {f"docs/{path.name}" for path in DOCS.glob("*.md")} - others | {"README.md"}
    assert [(page, one) for page, sentences in found.items() for one in sentences if len(one.split()) > 38] == []
    said = {page for page, sentences in found.items() if any("cotangent" in one for one in sentences)}
    assert said == {"docs/glossary.md"}

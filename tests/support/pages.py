"""Read pages of results back: their tables, elements, and the data of their charts."""

import json
import re
from html.parser import HTMLParser
from typing import Any


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._rows: list[list[str]] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "wbr":
            self._inside = tag
        if tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")

    def handle_data(self, data):
        if self._inside in ("th", "td"):
            self._rows[-1][-1] += data
        elif self._inside == "caption":
            self._rows = self.tables.setdefault(data, [])

    def handle_endtag(self, tag):
        self._inside = ""

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def drawn(text: str) -> dict[str, Any]:
    """Return the data and specifications of the charts of each section, by its title."""
    titles = re.findall(r'<h2 id="section-\d+">(.*?)</h2>', text)
    sections = json.loads(re.search('id="data">(.*?)</script>', text, re.DOTALL)[1])["sections"]
    return dict(zip(titles, sections, strict=True))

"""Put tables and charts together to one file."""

import base64
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import charts
from .charts import Charts
from .tables import Table, templates

_NO_CHARTS = Charts([], ())


@dataclass(frozen=True)
class Section:
    """Hold a part of a page: its title, paragraphs, charts, and tables; ``closed`` ones open at a click."""

    title: str
    texts: tuple[str, ...] = ()
    charts: Charts = _NO_CHARTS
    tables: tuple[Table, ...] = ()
    closed: bool = False


@dataclass(frozen=True)
class Page:
    """Hold what a page shows."""

    title: str
    texts: tuple[str, ...]
    sections: tuple[Section, ...]

    def html(self) -> str:
        """Return the page as one file: style sheet, scripts and data are in it, and nothing else may be loaded.

        Raises:
            MissingExtraError: without Altair.
        """
        scripts = [_bundle(), _beside("tables.js"), _beside("charts.js")]
        drawn = [{"data": section.charts.data, "specs": section.charts.specs} for section in self.sections]
        return (
            templates()
            .get_template("page.html")
            .render(
                page=self,
                style=_beside("page.css"),
                scripts=scripts,
                hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
                data=_json({"name": charts.DATA, "sections": drawn}),
            )
        )


def written(page: Page, path: str | Path | None) -> str:
    """Return a page as HTML, also written to a file at ``path``."""
    text = page.html()
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _json(held: Any) -> str:
    """Return JSON for a script element, which no text in it can end."""
    return json.dumps(held, allow_nan=False).replace("<", "\\u003c")


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@functools.cache
def _bundle() -> str:
    """Return the JavaScript of Vega-Lite, for all charts of a page."""
    alt = charts.altair()
    import vl_convert

    release = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    bundle: str = vl_convert.javascript_bundle(vl_version=release)  # type: ignore[call-arg]  # its stub is too strict
    return bundle.replace("</script", "<\\/script")

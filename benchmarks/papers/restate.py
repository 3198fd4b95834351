"""State the findings of docs/papers anew, from the points in its JSON files, after statistics or texts changed.

    python -m benchmarks.papers.restate                          # all of docs/papers/*.json that have points
    python -m benchmarks.papers.restate p21-fig6-paper …         # some
    python -m benchmarks.papers.restate --from FOLDER NAME …     # results of a run with --out FOLDER, taken over

Each file's findings, verdict and figure are made anew, and the verdict becomes the text behind the file's link in
docs/papers-figures.md, or that of the grid stands in docs/studies.md, where comments mark its place. Tables without a
place are printed. Files of the tables in docs/zoo take the place of a run; their points are in the tables.
"""

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pandas

from pyflatness.measures import MEASURES

from . import named, p19_minima, p21_fig6, reproducing, zoo
from .experiment import Experiment, Found, Points

DOCS = Path(__file__).parents[2] / "docs"
PAGE, GRID, FOLDER = DOCS / "papers-figures.md", DOCS / "studies.md", DOCS / "papers"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--from", "source", type=click.Path(path_type=Path, exists=True, file_okay=False), default=FOLDER)
def main(names: tuple[str, ...], source: Path) -> None:
    """Write files and the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name in names or sorted(path.stem for path in source.glob("*.json")):
        facts = json.loads((source / f"{name}.json").read_text(encoding="utf-8"))
        experiment = named(facts["experiment"])
        found, files = of_zoo(experiment, facts) if "table_of" in facts else reproducing.restated(experiment, facts)
        for kind in (".json", ".png") if (source / f"{name}.png").exists() else (".json",):
            (FOLDER / f"{name}{kind}").write_bytes(next(c for file, c in files.items() if file.endswith(kind)))
        text, count = stated(text, name, found.verdict)
        if count:
            text = filled(text, name, found.tables)
        elif found.tables:
            GRID.write_text(filled(GRID.read_text(encoding="utf-8"), name, placed(found)), encoding="utf-8")
        where = "" if count or found.tables else " (docs/papers-figures.md does not have it)"
        click.echo(f"{name}: {found.verdict}{where}")
    PAGE.write_text(text, encoding="utf-8")


def stated(page: str, name: str, verdict: str) -> tuple[str, int]:
    """Return the page with a verdict in the item that links to a file of points, and how many items do."""
    item = re.compile(
        rf"^- (\*\*[^\n]*(?:\n  [^\n]*)*?\(papers/{name}\.json\)[^:]*?\)?):\s.*?(?=\n(?:- |\n))", re.M | re.S
    )

    def anew(match: re.Match[str]) -> str:
        head = " ".join(match[1].split())
        return textwrap.fill(
            f"- {head}: {verdict}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )

    return item.subn(anew, page)


def placed(found: Found) -> dict[str, str]:
    """Return the verdict and the tables by the names of their places on a page."""
    verdict = textwrap.fill(found.verdict, 120, break_long_words=False, break_on_hyphens=False)
    return {"verdict": verdict, **found.tables}


def filled(page: str, name: str, texts: Mapping[str, str]) -> str:
    """Return the page with texts of a file of points in the places that comments mark; print those that have none."""
    for place, text in texts.items():
        mark = re.compile(rf"(<!-- {name}: {place} -->\n\n).*?(\n\n<!-- end -->)", re.S)
        page, count = mark.subn(lambda match, text=text: match[1] + text + match[2], page)  # type: ignore[misc]
        assert count <= 1, (name, place)
        if not count:
            click.echo(f"\n{name}: {place}\n\n{text}")
    return page


def of_zoo(experiment: Experiment, facts: Mapping[str, Any]) -> tuple[Found, dict[str, bytes]]:
    """Return findings and files of the tables in docs/zoo, whose networks are LeNet5 as at paper scale."""
    table, after = (networks(DOCS / "zoo" / file) for file in ("before.csv", "after.csv"))
    if experiment.name in ("p21-fig7", "p19-fig2"):
        shown = [*p21_fig6.columns("fc3"), *(f"{name} fc3" for name in p19_minima.MEASURES)]
        table = zoo.joined(table, after, shown)
    found = experiment.judge(Points(table.columns, table.failures, facts["scale"], {}))
    told = replace(found, table={})  # the points are in the tables
    return found, reproducing.files(experiment, facts["scale"], told, {"table_of": facts["table_of"]})


def networks(path: Path) -> zoo.Networks:
    """Return a table of networks that all converged, with columns named as those of a run."""
    frame = pandas.read_csv(path).rename(columns={"checkpoint": "name"})
    plain = [row.name for row in MEASURES if row.name in frame]
    frame = frame.rename(columns={name: f"{name} network" for name in plain})
    recipes, seeds = ([name.rsplit("_seed", 1)[part] for name in frame["name"]] for part in (0, 1))
    columns = {str(name): [*frame[name]] for name in frame}
    return zoo.tabled(columns | {"recipe": recipes, "seed": seeds, "converged": [True] * len(recipes)}, {})


if __name__ == "__main__":
    main()

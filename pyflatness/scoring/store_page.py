"""Make a page of a store: the values of each of its settings, and how they were made as far as the store has it."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..errors import InputError
from ..messages import printable
from ..report.page import Cell, Page, Section, tables
from ..training.history import History
from . import attached, attached_page
from .export import records, setting_hash, setting_texts
from .page import Choices, Part, page
from .store import Store

_UNITS = """
SELECT min(finished) AS first, max(finished) AS last, sum(seconds) AS seconds, count(*) AS units FROM units
WHERE setting = ?
"""
_VERSIONS = "SELECT versions, count(*) AS units FROM units WHERE setting = ? GROUP BY versions ORDER BY min(finished)"


def of_store(store: Store, title: str, choices: Choices, more: Mapping[str, Mapping[str, Any]] | None = None) -> Page:
    """Return a page of all that a store has.

    Args:
        store: to be read.
        title: the page's heading.
        choices: what measures are held against, and how.
        more: columns of checkpoints, by their names, beside those that the store has.

    Raises:
        InputError: a store without values, and as :func:`.page.page`.
        MissingExtraError: without Altair.
    """
    found = [*records(store, more)]
    settings = [*dict.fromkeys(record["setting"] for record in found)]
    own = {key: [record for record in found if record["setting"] == key] for key in settings}
    made = {key: facts for key, facts in _made(store).items() if key in own}
    every = store.settings()
    names = {setting_hash(every[number]): text for number, text in setting_texts(every).items()}
    parts = [Part(names[key], own[key], made[key]) for key in settings]
    held = attached.found(store)
    stored = {one.name: one.result for one in held if isinstance(one.result, History)}
    choices = replace(choices, histories={**stored, **choices.histories})
    return page(title, parts, choices, [*attached_page.sections(held), *_runs(store), _checkpoints(store)])


def table(store: Store) -> dict[str, list[Any]]:
    """Return the values of a store as columns by name.

    Raises:
        InputError: it has no values, or a checkpoint has values of several settings.
    """
    found = [*records(store)]
    settings: dict[str, set[str]] = {}
    for record in found:
        settings.setdefault(record["checkpoint"], set()).add(record["setting"])
    several = [name for name, own in settings.items() if len(own) > 1]
    if several:
        raise InputError(f"test: {several[0]!r} has values of several settings (data, loss, …) in {store.path}")
    if not found:
        raise InputError(f"test: there are no values in {store.path}")
    return {name: [record[name] for record in found] for name in found[0]}


def _made(store: Store) -> dict[str, list[tuple[str, object]]]:
    """Return how the values of each setting were made, by its hash as records have it."""
    return {setting_hash(facts): _facts(store, number, facts) for number, facts in store.settings().items()}


def _facts(store: Store, setting: int, facts: Mapping[str, Any]) -> list[tuple[str, object]]:
    key, shown = facts["key"], facts.get("shown", {})
    data, units = key["data"], store.select(_UNITS, (setting,))[0]
    found: list[tuple[str, object]] = [
        ("model", shown.get("model") or "that of each checkpoint"),
        ("data", shown.get("data") or ""),
        ("samples", data["samples"]),
        (
            "fingerprint of the data (SHA-256)",
            data["content"] + (", first and last batch alone" if "ends" in data else ""),
        ),
        ("loss", key["loss"].get("name", "")),
        *((f"option {name}", value) for name, value in key["options"].items() if value not in (None, False)),
        ("measuring took", f"{units['seconds'] or 0:.3g} s in {units['units']} units"),
    ]
    if units["first"] is not None:
        found.append(("measured", f"{_date(units['first'])} to {_date(units['last'])} UTC"))
    for row in store.select(_VERSIONS, (setting,)):
        found.append(("versions", f"{_versions(row['versions'])} ({row['units']} units)"))
    return found


def _runs(store: Store) -> Iterator[Section]:
    """Yield what added to the store: of releases that did not keep it nothing is known."""
    rows = store.select("SELECT command, began, versions FROM runs ORDER BY began")
    if rows:
        cells = tuple(
            (Cell(f"{_date(row['began'])} UTC"), Cell(printable(row["command"])), Cell(_versions(row["versions"])))
            for row in rows
        )
        held = tables.Table("What added to the store", ("began", "command", "versions"), cells)
        yield Section("Commands", tables=(held,), closed=True)


def _versions(text: str) -> str:
    return ", ".join(f"{name} {number}" for name, number in json.loads(text).items())


def _checkpoints(store: Store) -> Section:
    rows = store.select("SELECT name, path, content FROM checkpoints ORDER BY id")
    cells = tuple(tuple(map(tables.text, (row["name"], row["path"] or "in memory", row["content"]))) for row in rows)
    held = tables.Table("Checkpoints by content", ("model", "file", "SHA-256 of its content"), cells)
    return Section("Checkpoints", tables=(held,), closed=True)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))

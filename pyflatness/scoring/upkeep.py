"""Unite stores, check one, and take out of it what no checkpoint has any more."""

import json
import sqlite3

from .store import Store

_BETTER = {"to do": 0, "failed": 1, "none": 2, "done": 2}

_ORPHANS = {
    "units without a value": (
        "SELECT count(*) FROM units WHERE id NOT IN (SELECT unit FROM results WHERE unit NOT NULL)"
    ),
    "values of weights that no checkpoint has": (
        "SELECT count(*) FROM results WHERE content NOT IN (SELECT content FROM checkpoints)"
    ),
    "spectra and landscapes of weights that no checkpoint has": (
        "SELECT count(*) FROM attached WHERE content != '' AND content NOT IN (SELECT content FROM checkpoints)"
    ),
    "settings without a value": "SELECT count(*) FROM settings WHERE id NOT IN (SELECT setting FROM results)",
}


def merge(store: Store, other: Store) -> int:
    """Take into a store what another has and it has not; return how many values, spectra, landscapes and histories.

    Of a value that both have the store's own stays, unless it failed or is to do and the other's is not; of a spectrum,
    landscape or history that both have the later one, but for one that failed in the place of one that is there. A
    checkpoint that both know by one name keeps the content that the store has for it.

    Raises:
        StoreError: the other one is damaged.
    """
    other.check()
    taken = 0
    with store.changes() as connection:
        settings = {}
        for row in other.select("SELECT * FROM settings ORDER BY id"):
            connection.execute("INSERT OR IGNORE INTO settings (key, facts) VALUES (?, ?)", (row["key"], row["facts"]))
            found = connection.execute("SELECT id FROM settings WHERE key = ?", (row["key"],)).fetchone()
            settings[row["id"]] = found["id"]
        for row in other.select("SELECT * FROM checkpoints ORDER BY id"):
            own = connection.execute("SELECT columns FROM checkpoints WHERE name = ?", (row["name"],)).fetchone()
            columns = json.dumps({**json.loads(row["columns"]), **(json.loads(own["columns"]) if own else {})})
            connection.execute(
                "INSERT INTO checkpoints (name, path, content, columns) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET columns = excluded.columns",
                (row["name"], row["path"], row["content"], columns),
            )
        units: dict[int, int] = {}
        for row in other.select("SELECT * FROM results ORDER BY id"):
            taken += _take(connection, other, row, settings, units)
        taken += _take_attached(connection, other)
        _take_runs(connection, other)
        if taken:
            store.note_run(connection)
    return taken


def _take_attached(connection: sqlite3.Connection, other: Store) -> int:
    taken = 0
    for row in other.select("SELECT * FROM attached ORDER BY id"):
        key = "content = :content AND training = :training AND kind = :kind AND label = :label"
        cells = {**dict(row), "id": None}
        own = connection.execute(f"SELECT error = '' AS good, added FROM attached WHERE {key}", cells).fetchone()
        if own is None or (own["good"], own["added"]) < (row["error"] == "", row["added"]):
            connection.execute(f"DELETE FROM attached WHERE {key}", cells)
            _insert(connection, "attached", cells)
            taken += 1
    return taken


def _take_runs(connection: sqlite3.Connection, other: Store) -> None:
    for row in other.select("SELECT command, began, versions FROM runs ORDER BY began"):
        connection.execute("INSERT OR IGNORE INTO runs (command, began, versions) VALUES (?, ?, ?)", (*row,))


def _take(
    connection: sqlite3.Connection, other: Store, row: sqlite3.Row, settings: dict[int, int], units: dict[int, int]
) -> bool:
    """Take a value, and its unit with the first of them; return whether it was taken."""
    cells = dict(row, setting=settings[row["setting"]])
    del cells["id"]
    key = (cells["setting"], cells["content"], cells["place"], cells["measure"])
    own = connection.execute(
        "SELECT id, state FROM results WHERE setting = ? AND content = ? AND place = ? AND measure = ?", key
    ).fetchone()
    if own is not None and _BETTER[own["state"]] >= _BETTER[row["state"]]:
        return False
    if row["unit"] is not None:
        if row["unit"] not in units:
            (unit,) = other.select("SELECT * FROM units WHERE id = ?", (row["unit"],))
            units[row["unit"]] = _insert(connection, "units", {**dict(unit, setting=cells["setting"]), "id": None})
        cells["unit"] = units[row["unit"]]
    if own is None:
        _insert(connection, "results", cells)
    else:
        places = ", ".join(f"{name} = ?" for name in cells)
        connection.execute(f"UPDATE results SET {places} WHERE id = ?", (*cells.values(), own["id"]))
    return True


def _insert(connection: sqlite3.Connection, table: str, cells: dict[str, object]) -> int:
    cells = {name: cell for name, cell in cells.items() if name != "digest"}
    marks = ", ".join("?" * len(cells))
    cursor = connection.execute(f"INSERT INTO {table} ({', '.join(cells)}) VALUES ({marks})", (*cells.values(),))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def problems(store: Store) -> list[str]:
    """Return what is wrong with a store's file, in words; empty if nothing is."""
    unfinished = "SELECT count(*) FROM results WHERE state = 'failed' AND coalesce(error, '') = ''"
    return store.problems() or _counted(store, {"values that failed without an error": unfinished})


def orphans(store: Store) -> list[str]:
    """Return what :func:`collect` would take out, in words."""
    return _counted(store, _ORPHANS)


def _counted(store: Store, queries: dict[str, str]) -> list[str]:
    counts = {what: int(store.select(query)[0][0]) for what, query in queries.items()}
    return [f"{count} {what}" for what, count in counts.items() if count]


def collect(store: Store) -> list[str]:
    """Take out of a store what no checkpoint has any more, and return what that was, in words."""
    found = orphans(store)
    with store.changes() as connection:
        connection.execute("DELETE FROM results WHERE content NOT IN (SELECT content FROM checkpoints)")
        connection.execute(
            "DELETE FROM attached WHERE content != '' AND content NOT IN (SELECT content FROM checkpoints)"
        )
        connection.execute("DELETE FROM units WHERE id NOT IN (SELECT unit FROM results WHERE unit NOT NULL)")
        connection.execute("DELETE FROM settings WHERE id NOT IN (SELECT setting FROM results)")
    store.select("VACUUM")
    return found

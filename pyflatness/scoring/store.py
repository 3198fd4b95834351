"""Keep scores in one SQLite file, so that nothing that was computed is lost or computed twice.

There is one writer, the process that hands out the units; others may read meanwhile. A unit's values are committed
together and reach the disk before the next commit (``synchronous=FULL``), so that a process that is killed, or a
machine that loses power, loses the units in work and no others. While it is written the store has a log beside it
(``…-wal``), into which a commit is one write; a store that is closed is one file again.

Every value has a row from the moment it is asked for: its state is first ``to do``, then ``done``, ``failed``, or
``none`` for a layer of a pattern that does not run. A row is found by what the value depends on (:mod:`.keys`): the
setting (data, model, loss, options), the content of the checkpoint, the place and the measure.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import StoreError
from ..messages import shown
from . import keys
from .units import Fit, Held, Pair, Row, kinds
from .worker import Outcome

SCHEMA = 3
_APPLICATION = 0x666C6174  # "flat", in the header of the file

_SQL = {float: "REAL", int: "INTEGER", bool: "INTEGER", str: "TEXT"}
_KEY = "setting = :setting AND content = :content AND place = :place AND measure = :measure"  # of a result
_OF_UNITS = tuple(field.name for field in fields(Fit))
_NUMBERS = {name: kind for name, kind in kinds().items() if name not in ("checkpoint", "measure", *_OF_UNITS)}
"""The columns of a row that are a value's own: others are its key, or its unit's."""

_TABLES = f"""
CREATE TABLE settings (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, facts TEXT NOT NULL
);
CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, path TEXT, content TEXT NOT NULL,
    columns TEXT NOT NULL DEFAULT '{{}}'
);
CREATE INDEX checkpoints_by_content ON checkpoints (content);
CREATE TABLE units (
    id INTEGER PRIMARY KEY, setting INTEGER NOT NULL REFERENCES settings, content TEXT NOT NULL,
    {", ".join(f"{name} REAL" for name in _OF_UNITS)},
    seconds REAL NOT NULL, batch_size INTEGER, versions TEXT NOT NULL, finished REAL NOT NULL,
    digest TEXT NOT NULL DEFAULT ''
);
CREATE INDEX units_by_content ON units (content);
CREATE TABLE results (
    id INTEGER PRIMARY KEY, setting INTEGER NOT NULL REFERENCES settings, content TEXT NOT NULL,
    place TEXT NOT NULL, measure TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'to do' CHECK (state IN ('to do', 'done', 'failed', 'none')),
    unit INTEGER REFERENCES units,
    {", ".join(f"{name} {_SQL[kind]}" for name, kind in _NUMBERS.items())},
    UNIQUE (setting, content, place, measure), CHECK ((state = 'to do') = (unit IS NULL)),
    {", ".join(f"CHECK (typeof({name}) IN ('{_SQL[kind].lower()}', 'null'))" for name, kind in _NUMBERS.items())}
);
CREATE INDEX results_by_unit ON results (unit);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, command TEXT NOT NULL, began REAL NOT NULL, versions TEXT NOT NULL, UNIQUE (command, began)
);
CREATE TABLE result_files (
    id INTEGER PRIMARY KEY, content TEXT NOT NULL, training TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL,
    setting TEXT NOT NULL, file BLOB NOT NULL, error TEXT NOT NULL, versions TEXT NOT NULL, added REAL NOT NULL,
    UNIQUE (content, training, kind, label)
);
"""


class Store:
    """Hold a store open; a context manager. The file need not be there to be written.

    If anything is added the store keeps what did it: ``command``, a command line, or the name of a Python call. A
    ``copy`` is in memory: what is written into it is gone afterwards, and the file stays as it is.
    """

    def __init__(
        self, path: Path, *, write: bool = False, new: bool = True, command: str = "Python call", copy: bool = False
    ) -> None:
        self.path = path
        self._write = write
        self._run = command, time.time()
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack, self._explained():
            try:
                self.path = path = path.resolve()  # whatever links lead to it
            except (OSError, ValueError, RuntimeError) as error:  # with NUL, or a surrogate; links in a circle
                raise StoreError(f"store: no file can be called {shown(str(path))} ({error})") from None
            if not (write and new) and not path.is_file():
                raise StoreError(f"store: there is no file {path}")
            if write and not copy:
                path.parent.mkdir(parents=True, exist_ok=True)
                check_local(path)
                stack.enter_context(only_writer(path))
            self._connection = self._connected(copy=copy)
            stack.callback(self._connection.close)
            self._check()
            if write:
                self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
                stack.callback(self._into_one_file)
            self._stack = stack.pop_all()

    def _connected(self, *, copy: bool) -> sqlite3.Connection:
        mode = "memory" if copy else "rwc" if self._write else "rw"  # a reader takes back what a writer that died left
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
        if copy and self.path.exists():
            with Store(self.path) as store:
                store._connection.backup(connection)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _check(self) -> None:
        """Raise if the file is no store of this version, or damaged; make the tables of a new one."""
        application, version = self._number("application_id"), self._number("user_version")
        if application == version == 0 and self._write and not self.select("SELECT name FROM sqlite_master"):
            with self.changes():
                for statement in _statements():
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                self._connection.execute(f"PRAGMA user_version = {SCHEMA}")
        elif application != _APPLICATION:
            raise StoreError(f"store: {self.path} is a database of another program")
        elif version != SCHEMA:
            what = "a later" if version > SCHEMA else "an earlier"
            raise StoreError(f"store: {self.path} is of {what} release of pyflatness (schema {version}, here {SCHEMA})")
        elif {*_statements()} != {row["sql"] for row in self.select("SELECT sql FROM sqlite_master") if row["sql"]}:
            raise self._damaged("tables of another form than they were made")
        self._connection.execute(f"PRAGMA query_only = {'OFF' if self._write else 'ON'}")

    def _number(self, pragma: str) -> int:
        return int(self._connection.execute(f"PRAGMA {pragma}").fetchone()[0])

    def problems(self) -> list[str]:
        """Return what is wrong with the file, in words."""
        with self._explained(), self._reading():
            found = [row[0] for row in self._connection.execute("PRAGMA integrity_check") if row[0] != "ok"]
            broken = self._connection.execute("PRAGMA foreign_key_check").fetchall()
            found += [f"{len(broken)} rows that refer to others which are not there"] if broken else []
            for unit in [] if found else self._connection.execute("SELECT * FROM units ORDER BY id").fetchall():
                if unit["digest"] != self._results(unit)[1]:
                    found.append(f"units {unit['id']}: not what was written")
        return found

    def check(self) -> None:
        """Raise if anything is wrong with the file, as :meth:`problems` says."""
        for problem in self.problems():
            raise self._damaged(problem)

    def _damaged(self, problem: str) -> StoreError:
        return StoreError(
            f"store: {self.path} is damaged ({problem}); pyflatness store verify lists what is wrong. Put a copy "
            "of it back, or score again into another store"
        )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Let all that is read inside be of one moment."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            with contextlib.suppress(sqlite3.Error):  # there is none after some errors
                self._connection.execute("ROLLBACK")

    def _results(self, unit: sqlite3.Row) -> tuple[list[sqlite3.Row], str]:
        """Return the rows of a unit's values, and the checksum of the unit with them."""
        rows = self._connection.execute("SELECT * FROM results WHERE unit = ? ORDER BY id", (unit["id"],)).fetchall()
        cells = [unit[name] for name in unit.keys() if name != "digest"]  # noqa: SIM118 (a Row iterates over cells)
        return rows, hashlib.sha256(repr([cells, *map(list, rows)]).encode()).hexdigest()

    def _into_one_file(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # someone reads: the log stays until the next writer
            self._connection.execute("PRAGMA journal_mode = DELETE")

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was committed is in it."""
        with self._explained():
            self._stack.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise what SQLite says of the file as an error that names it."""
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError, OverflowError) as error:
            what = "written" if self._write else "read"
            text = getattr(error, "strerror", None) or error
            if "not a database" in str(text):
                raise StoreError(
                    f"store: {self.path} is no store, or a damaged one ({text}); pyflatness score … --store FILE and "
                    "pf.score(…, store=FILE) write stores"
                ) from error
            raise StoreError(f"store: {self.path} cannot be {what} ({text}); what was committed is kept") from error

    @contextlib.contextmanager
    def changes(self) -> Iterator[sqlite3.Connection]:
        """Commit what is changed inside as a whole, or nothing of it."""
        with self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                for unit in self._connection.execute("SELECT * FROM units WHERE digest = ''").fetchall():
                    digest = self._results(unit)[1], unit["id"]
                    self._connection.execute("UPDATE units SET digest = ? WHERE id = ?", digest)
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # it rolls back by itself after some errors
                    self._connection.execute("ROLLBACK")
                raise

    def select(self, query: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        with self._explained():
            return self._connection.execute(query, values).fetchall()

    def setting(self, facts: keys.Facts) -> int:
        """Return the number of a setting, which is noted if it is new."""
        with self.changes() as connection:
            return _number_of(connection, keys.of_json(facts["key"]), json.dumps(facts, sort_keys=True))

    def forget(self, setting: int) -> None:
        """Give a setting a key that no other run has, by which its values stay and are not found again."""
        facts = self.settings()[setting]
        facts["key"] = keys.once() | facts["key"]  # that it has already, if anything else is unknown
        text = json.dumps(facts, sort_keys=True)
        with self.changes() as connection:
            where = (keys.of_json(facts["key"]), text, setting)
            connection.execute("UPDATE settings SET key = ?, facts = ? WHERE id = ?", where)

    def name(self, contents: Mapping[str, tuple[str | None, str]]) -> None:
        """Note what checkpoints hold now: path, None if they have none, and content.

        One that moved gives its row on.
        """
        with self.changes() as connection:
            for name, (path, content) in contents.items():
                _take_along(connection, name, content, contents)
                connection.execute(
                    "INSERT INTO checkpoints (name, path, content) VALUES (?, ?, ?) "
                    "ON CONFLICT (name) DO UPDATE SET path = excluded.path, content = excluded.content",
                    (name, path, content),
                )

    def describe(self, columns: Mapping[str, Mapping[str, Any]]) -> None:
        """Add columns of metadata to checkpoints, by their names; those of other names stay."""
        with self.changes() as connection:
            for name, cells in columns.items():
                row = connection.execute("SELECT columns FROM checkpoints WHERE name = ?", (name,)).fetchone()
                if row is not None:
                    text = json.dumps({**json.loads(row["columns"]), **cells})
                    connection.execute("UPDATE checkpoints SET columns = ? WHERE name = ?", (text, name))

    def ask(self, setting: int, pairs: Mapping[str, Iterable[Pair]], *, retry: bool = False) -> dict[str, list[Pair]]:
        """Ask for values of checkpoints; return those that are to be computed."""
        states = ("to do", "failed") if retry else ("to do",)
        missing: dict[str, list[Pair]] = {}
        with self.changes() as connection:
            for content, own in pairs.items():
                for pair in own:
                    key = _key_of(setting, content, pair)
                    there = connection.execute(f"SELECT state FROM results WHERE {_KEY}", key).fetchone()
                    if there is None:
                        _insert(connection, "results", key)
                    if there is None or there["state"] in states:
                        missing.setdefault(content, []).append(pair)
        return missing

    def note_run(self, connection: sqlite3.Connection) -> None:
        """Note, once, what adds to the store while it is open."""
        connection.execute(
            "INSERT OR IGNORE INTO runs (command, began, versions) VALUES (?, ?, ?)", (*self._run, versions())
        )

    def commit(self, setting: int, content: str, outcome: Outcome) -> None:
        """Write what came of a unit: all of it or nothing; values that are done stay as they are."""
        unit = {"setting": setting, "content": content, **asdict(outcome.fit), "seconds": outcome.seconds}
        unit |= {"batch_size": outcome.batch_size, "versions": versions(), "finished": time.time()}
        with self.changes() as connection:
            number = _insert(connection, "units", unit)
            self.note_run(connection)
            for pair, row in outcome.values.items():
                key = _key_of(setting, content, pair)
                there = connection.execute(f"SELECT * FROM results WHERE {_KEY} AND state != 'done'", key).fetchone()
                if there is not None:
                    state = "failed" if row.error else "none" if row.value is None else "done"
                    numbers = {name: getattr(row, name) for name in _NUMBERS}
                    _replace(connection, there, {"state": state, "unit": number, **numbers})

    def values(self, setting: int, content: str) -> dict[Pair, Held]:
        """Return what came of a checkpoint so far, in the order in which it was asked for."""
        with self._explained(), self._reading():
            query = "SELECT * FROM units WHERE setting = ? AND content = ?"
            units = self._connection.execute(query, (setting, content)).fetchall()
            found: list[tuple[sqlite3.Row, sqlite3.Row]] = []
            for unit in units:
                rows, checksum = self._results(unit)
                if unit["digest"] != checksum:
                    raise self._damaged(f"units {unit['id']}: not what was written")
                found += [(row, unit) for row in rows]
        found.sort(key=lambda one: int(one[0]["id"]))
        return {Pair.of(json.loads(row["place"]), row["measure"]): _held(row, unit) for row, unit in found}

    def settings(self) -> dict[int, keys.Facts]:
        """Return what is the same for the values of a setting, by its number."""
        return {
            row["id"]: json.loads(row["facts"]) for row in self.select("SELECT id, facts FROM settings ORDER BY id")
        }

    def counts(self, setting: int, contents: Iterable[str]) -> dict[str, int]:
        """Return how many values of checkpoints there are, by their state."""
        chosen = {*contents}
        rows = self.select("SELECT state, content FROM results WHERE setting = ?", (setting,))
        found = Counter(row["state"] for row in rows if row["content"] in chosen)
        return {state: found[state] for state in ("to do", "done", "failed", "none")}

    def errors(self, setting: int, contents: Iterable[str]) -> list[tuple[str, str]]:
        """Return checkpoints of which a value failed, each with its first error."""
        rows = self.select(
            "SELECT name, error, results.content FROM results JOIN checkpoints USING (content) "
            "WHERE setting = ? AND state = 'failed' GROUP BY name ORDER BY checkpoints.id, results.id",
            (setting,),
        )
        chosen = {*contents}
        return [(row["name"], row["error"]) for row in rows if row["content"] in chosen]


def _number_of(connection: sqlite3.Connection, key: str, facts: str) -> int:
    """Return the number of a setting, which is noted if it is new."""
    connection.execute("INSERT OR IGNORE INTO settings (key, facts) VALUES (?, ?)", (key, facts))
    return int(connection.execute("SELECT id FROM settings WHERE key = ?", (key,)).fetchone()["id"])


def _take_along(connection: sqlite3.Connection, name: str, content: str, names: Container[str]) -> None:
    """Give a new name the row of a checkpoint with the same content whose file is gone, and that is not named."""
    if content.startswith(keys.UNREADABLE):  # nothing is known of what is in it
        return
    if connection.execute("SELECT 1 FROM checkpoints WHERE name = ?", (name,)).fetchone():
        return
    for row in connection.execute("SELECT id, name, path FROM checkpoints WHERE content = ?", (content,)).fetchall():
        if row["name"] not in names and row["path"] is not None and not Path(row["path"]).exists():
            connection.execute("UPDATE checkpoints SET name = ? WHERE id = ?", (name, row["id"]))
            return


def _key_of(setting: int, content: str, pair: Pair) -> dict[str, object]:
    return {"setting": setting, "content": content, "place": json.dumps(pair.place), "measure": pair.measure}


def _held(row: sqlite3.Row, unit: sqlite3.Row) -> Held:
    cells: dict[str, Any] = {name: None if row[name] is None else kind(row[name]) for name, kind in _NUMBERS.items()}
    if row["state"] == "done" and row["value"] is None:  # SQLite has no NaN
        cells["value"] = math.nan
    if cells["stderr"] is None and str(cells["method"]).endswith("-sampled"):
        cells["stderr"] = math.nan
    return Held(Row(measure=row["measure"], **cells), Fit(*(unit[name] for name in _OF_UNITS)), unit["versions"])


def _statements() -> list[str]:
    """Return what makes the tables."""
    return [text for part in _TABLES.split(";") if (text := part.strip())]


@functools.cache
def versions() -> str:
    """Return what computes here, as JSON."""
    return json.dumps({"pyflatness": __version__, "torch": torch.__version__, "python": platform.python_version()})


_BETTER = {"to do": 0, "failed": 1, "none": 2, "done": 2}

_ORPHANS = {
    "units without a value": "units WHERE id NOT IN (SELECT unit FROM results WHERE unit NOT NULL)",
    "values of weights that no checkpoint has": "results WHERE content NOT IN (SELECT content FROM checkpoints)",
    "spectra and landscapes of weights that no checkpoint has": (
        "result_files WHERE content != '' AND content NOT IN (SELECT content FROM checkpoints)"
    ),
    "settings without a value": "settings WHERE id NOT IN (SELECT setting FROM results)",
}


def merge(store: Store, other: Store) -> int:
    """Take into a store what another has and it has not; return how many values, spectra, landscapes and histories.

    Of a value that both have the store's own stays, unless it failed or is to do and the other's is not; of a spectrum,
    landscape or history that both have the later one, but for one that failed in the place of one that is there. A
    checkpoint that both know by one name keeps the content that the store has for it.
    """
    other.check()
    taken = 0
    with store.changes() as connection:
        settings = {}
        for row in other.select("SELECT * FROM settings ORDER BY id"):
            settings[row["id"]] = _number_of(connection, row["key"], row["facts"])
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
        taken += _take_result_files(connection, other)
        for row in other.select("SELECT command, began, versions FROM runs ORDER BY began"):
            connection.execute("INSERT OR IGNORE INTO runs (command, began, versions) VALUES (?, ?, ?)", (*row,))
        if taken:
            store.note_run(connection)
    return taken


def _take_result_files(connection: sqlite3.Connection, other: Store) -> int:
    taken = 0
    for row in other.select("SELECT * FROM result_files ORDER BY id"):
        key = "content = :content AND training = :training AND kind = :kind AND label = :label"
        cells = {**dict(row), "id": None}
        own = connection.execute(f"SELECT error = '' AS good, added FROM result_files WHERE {key}", cells).fetchone()
        if own is None or (own["good"], own["added"]) < (row["error"] == "", row["added"]):
            connection.execute(f"DELETE FROM result_files WHERE {key}", cells)
            _insert(connection, "result_files", cells)
            taken += 1
    return taken


def _take(
    connection: sqlite3.Connection, other: Store, row: sqlite3.Row, settings: dict[int, int], units: dict[int, int]
) -> bool:
    """Take a value, and its unit with the first of them; return whether it was taken."""
    cells = dict(row, setting=settings[row["setting"]])
    del cells["id"]
    own = connection.execute(f"SELECT * FROM results WHERE {_KEY}", cells).fetchone()
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
        _replace(connection, own, cells)
    return True


def _replace(connection: sqlite3.Connection, result: sqlite3.Row, cells: Mapping[str, object]) -> None:
    """Write cells of a result; the unit that it was of gets another checksum, as the one that it is of now."""
    places = ", ".join(f"{name} = ?" for name in cells)
    connection.execute(f"UPDATE results SET {places} WHERE id = ?", (*cells.values(), result["id"]))
    connection.execute("UPDATE units SET digest = '' WHERE id IN (?, ?)", (result["unit"], cells["unit"]))


def _insert(connection: sqlite3.Connection, table: str, cells: dict[str, object]) -> int:
    cells = {name: cell for name, cell in cells.items() if name != "digest"}
    marks = ", ".join("?" * len(cells))
    cursor = connection.execute(f"INSERT INTO {table} ({', '.join(cells)}) VALUES ({marks})", (*cells.values(),))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def problems(store: Store) -> list[str]:
    """Return what is wrong with a store's file, in words; empty if nothing is."""
    unfinished = "results WHERE state = 'failed' AND coalesce(error, '') = ''"
    return store.problems() or _counted(store, {"values that failed without an error": unfinished})


def orphans(store: Store) -> list[str]:
    """Return what :func:`collect` would take out, in words."""
    return _counted(store, _ORPHANS)


def _counted(store: Store, rows: dict[str, str]) -> list[str]:
    counts = {what: int(store.select(f"SELECT count(*) FROM {which}")[0][0]) for what, which in rows.items()}
    return [f"{count} {what}" for what, count in counts.items() if count]


def collect(store: Store) -> list[str]:
    """Take out of a store what no checkpoint has any more, and return what that was, in words."""
    found = orphans(store)
    with store.changes() as connection:
        for which in sorted(_ORPHANS.values(), key=lambda which: not which.startswith("results")):
            connection.execute(f"DELETE FROM {which}")  # values first: their units and settings may go with them
    store.select("VACUUM")
    return found


_MOUNTS = Path("/proc/self/mountinfo")
_REMOTE = ("nfs", "cifs", "smb", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "ncpfs", "fuse.sshfs")


def check_local(path: Path, mounts: Path = _MOUNTS) -> None:
    """Raise if a file is, or would be, on a network file system: its locks and its order of writes cannot be relied on.

    On systems that do not list their mounts as Linux does nothing is known, and nothing raised.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    mount, kind = Path("/"), ""
    for line in lines:
        before, _, after = line.partition(" - ")
        place = Path(before.split()[4].encode().decode("unicode_escape"))
        if path.resolve().is_relative_to(place) and len(place.parts) >= len(mount.parts):
            mount, kind = place, after.split()[0]
    if kind.startswith(_REMOTE):
        raise StoreError(
            f"store: {path} is on a network file system ({kind}), whose locks a store cannot rely on; put it on a "
            "local disk. For several machines give each a store of its own with --shard i/N, and unite these with "
            "`pyflatness store merge`"
        )


def _lock(handle: int) -> None:
    """Lock a file until its handle is closed."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold the right to write a store, which ends with the process however it ends.

    It is a lock on a file beside the store's: SQLite's own locks on the store are the process's, and would be lost
    when any other handle on it is closed.
    """
    try:
        handle = os.open(path.with_name(f"{path.name}-lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(f"store: {path} cannot be written ({error.strerror})") from None
    try:
        try:
            _lock(handle)
        except OSError:
            raise StoreError(
                f"store: another process is writing {path}; wait for it, or give this one a store of its own with "
                "--shard i/N"
            ) from None
        if path.is_file() and path.stat().st_nlink > 1:
            raise StoreError(
                f"store: {path} has {path.stat().st_nlink} names (hard links), by which others may write it; copy it "
                "(cp), and write the copy"
            )
        yield
    finally:
        os.close(handle)

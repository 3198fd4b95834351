"""Write a store's values as a table: one row for each value, with everything that is needed to read it.

The columns of :data:`COLUMNS` come first, then those of the checkpoints' metadata. ``SCHEMA`` is raised when a column
changes its meaning or goes; new ones may come behind the others without that.
"""

import importlib.util
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import InputError, MissingExtraError
from ..options import Options
from .keys import of_json
from .store import Store
from .units import csv_line, kinds, rows

SCHEMA = 1
_KINDS = {"schema": int, **kinds(), **dict.fromkeys(("arguments", "model", "data", "versions", "setting"), str)}
COLUMNS = (*_KINDS,)

Record = dict[str, Any]

_DEFAULTS = asdict(Options())
_DIGITS = 12  # of the hash of a setting


def records(store: Store, more: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[Record]:
    """Yield a store's values, and what failed, in the order in which they were asked for; not what is to do."""
    checkpoints = store.select("SELECT name, content, columns FROM checkpoints ORDER BY id")
    metadata = {
        row["name"]: _renamed({**json.loads(row["columns"]), **(more or {}).get(row["name"], {})})
        for row in checkpoints
    }
    names = [*dict.fromkeys(name for columns in metadata.values() for name in columns)]
    for setting, facts in store.settings().items():
        key, shown = facts["key"], facts.get("shown", {})
        same = {
            "schema": SCHEMA,
            "arguments": json.dumps({"loss": key["loss"], **_given_options(key)}, sort_keys=True),
            "model": shown.get("model") or "",
            "data": shown.get("data") or "",
            "setting": setting_hash(facts),
        }
        for checkpoint in checkpoints:
            held = store.values(setting, checkpoint["content"])
            columns = dict.fromkeys(names) | metadata[checkpoint["name"]]
            versions = (one.versions for one in held.values() if one.row.is_there)
            for row, version in zip(rows(checkpoint["name"], held, held), versions, strict=True):
                found = {**same, **asdict(row), "versions": version}
                yield {name: found[name] for name in COLUMNS} | columns


def setting_hash(facts: Mapping[str, Any]) -> str:
    """Return what rows of a setting have in common, by content."""
    return of_json(facts["key"])[:_DIGITS]


def setting_texts(settings: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return what tells the settings of a store from each other for a reader, by their numbers.

    That is the model, the data and how many samples they have, the loss, and options that are not those by default;
    and the beginning of the hash where several settings have all of these in common.
    """
    texts = {number: _setting_text(facts) for number, facts in settings.items()}
    known = [*texts.values()]
    return {
        number: text if known.count(text) == 1 else f"{text}; setting {setting_hash(settings[number])}"
        for number, text in texts.items()
    }


def _setting_text(facts: Mapping[str, Any]) -> str:
    key, shown = facts["key"], facts.get("shown", {})
    samples = "" if "ends" in key["data"] else f", {key['data']['samples']} samples"  # of two batches alone
    model, data = shown.get("model") or "of each", f"{shown.get('data') or ''}{samples}"
    options = [f"{name} {value}" for name, value in _given_options(key).items()]
    return "; ".join([f"model {model}", f"data {data}", f"loss {key['loss'].get('name', '')}", *options])


def _given_options(key: Mapping[str, Any]) -> Record:
    return {name: value for name, value in key["options"].items() if value != _DEFAULTS[name]}


def _renamed(columns: Mapping[str, Any]) -> Record:
    """Return columns of metadata, under another name where one is a column of the values."""
    return {f"metadata_{name}" if name in COLUMNS else name: cell for name, cell in columns.items()}


def check_format(path: Path) -> None:
    """Raise if the file's ending is that of no format, or what writes it is not installed."""
    if path.suffix not in _FORMATS:
        raise InputError(f"{path.suffix or 'no'!r} is no known ending; choose {', '.join(_FORMATS)}")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("Parquet files need pyarrow: pip install 'pyflatness[parquet]'")


def content(found: list[Record], path: Path) -> bytes:
    """Return what a file of this name is to hold; see :func:`check_format`."""
    return _FORMATS[path.suffix](found)


def _csv(found: list[Record]) -> bytes:
    return b"".join(map(csv_line, [[*found[0]] if found else COLUMNS, *(record.values() for record in found)]))


def _parquet(found: list[Record]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    types = {int: "int64", bool: "bool", float: "double", str: "string"}
    named = [(name, pyarrow.type_for_alias(types[kind])) for name, kind in _KINDS.items()]
    others = [*found[0]][len(COLUMNS) :] if found else []
    arrays = [pyarrow.array([record[name] for record in found], kind) for name, kind in named]
    arrays += [_array(pyarrow, [record[name] for record in found]) for name in others]
    table = pyarrow.table(dict(zip([*COLUMNS, *others], arrays, strict=True)))
    table = table.replace_schema_metadata({"pyflatness schema": str(SCHEMA)})
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def _array(pyarrow: Any, cells: list[Any]) -> Any:
    """Return a column of metadata: of one kind if its cells are, else as text."""
    try:
        return pyarrow.array(cells)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return pyarrow.array([None if cell is None else str(cell) for cell in cells])


_FORMATS: dict[str, Callable[[list[Record]], bytes]] = {
    ".csv": _csv,
    ".json": lambda rows: json.dumps({"schema": SCHEMA, "rows": rows}, indent=1, ensure_ascii=False).encode(),
    ".jsonl": lambda rows: b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows),
    ".parquet": _parquet,
}

"""Read what is known of checkpoints besides their weights: hyperparameters, test losses, as columns by name."""

import contextlib
import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..messages import reason
from ..statistics.tables import aliases
from . import checkpoints
from .store import Store

Cells = dict[str, Any]

_NAMES = ("checkpoint", "name")


def read(path: Path, names: Iterable[str]) -> dict[str, Cells]:
    """Return the columns of checkpoints from a CSV file with a column ``checkpoint`` or ``name``, or a JSON file.

    The latter has such rows, or columns by the checkpoint's name. Names are those of checkpoints, of their files, or
    these without their ending.
    """
    try:
        content = path.read_text(encoding="utf-8")
        held = json.loads(content) if path.suffix == ".json" else [*csv.DictReader(content.splitlines())]
        rows = _of_rows(held) if isinstance(held, list) else {name: dict(cells) for name, cells in held.items()}
    except FileNotFoundError:
        raise InputError(f"metadata: there is no file {path}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"metadata: {path} is no CSV or JSON file of columns by checkpoint, with a column 'checkpoint' or 'name' "
            f"({reason(error)})"
        ) from None
    found = {}
    for name in names:
        cells = next((rows[alias] for alias in aliases(name) if alias in rows), None)
        if cells is not None:
            found[name] = cells
    if not found:
        raise InputError(f"metadata: {path} has {len(rows)} rows, and none of them is of one of these checkpoints")
    return found


def of_store(store: Store, path: Path | None) -> dict[str, Cells]:
    """Return the columns of a store's checkpoints from a file, see :func:`read`; without a file there are none."""
    return read(path, [row["name"] for row in store.select("SELECT name FROM checkpoints")]) if path else {}


def of_files(paths: Mapping[str, Path]) -> dict[str, Cells]:
    """Return the settings that the files of checkpoints hold, by the checkpoints' names; of unreadable ones nothing."""
    found = {}
    for name, path in paths.items():
        with contextlib.suppress(InputError):  # it is a row with an error
            settings = checkpoints.read(path).metadata
            if settings:
                found[name] = {key: _number(text) for key, text in sorted(settings.items())}
    return found


def _of_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Cells]:
    found = {}
    for row in rows:
        label = next((name for name in _NAMES if name in row), None)
        if label is None:
            raise InputError(f"its columns are {', '.join(map(str, row))}")
        cells = {str(name): _number(cell) for name, cell in row.items() if name != label}
        found[str(row[label])] = cells
    return found


def _number(cell: Any) -> Any:
    """Return a text that is a number as one."""
    if not isinstance(cell, str):
        return cell
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell or None

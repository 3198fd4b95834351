"""Give results their common forms: as text, as a dict, as JSON, as a data frame.

In JSON, NaN and infinity are as Python writes them.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import Self

from ..errors import InputError
from ..messages import check_path
from . import views

if TYPE_CHECKING:
    import pandas


class Result:
    """Give a result its forms. A class of results has ``__str__`` and, where it is a table, says what its rows are."""

    def __repr__(self) -> str:
        return str(self)

    def __bool__(self) -> bool:
        """Return True, also of a result without rows: ``if history`` asks whether there is one."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return all that the result holds as plain numbers, strings, lists and dicts."""
        facts: dict[str, Any] = _plain(self, whole=True)
        return facts

    def to_json(self, path: str | Path | None = None) -> str:
        """Return :meth:`to_dict` as JSON, also written to ``path``; NaN and infinity are as Python writes them."""
        return write_json(self.to_dict(), path)

    def to_frame(self) -> "pandas.DataFrame":
        """Return a data frame, with a row for each of what the result is a table of, else with one row.

        Columns of values by sample or neuron that no row has are left out.

        Raises:
            MissingExtraError: without pandas.
        """
        return views.frame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        """Return the rows of the data frame."""
        return [self.to_dict()]


class Readable(Result):
    """Read a result back from what it was written as."""

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Return what :meth:`to_dict` was made from.

        Raises:
            InputError: not such a dict.
        """
        raise NotImplementedError

    @classmethod
    def from_json(cls, source: str | Path) -> Self:
        """Return what :meth:`to_json` was made from: its text, or the path of its file.

        Raises:
            InputError: no such file, or not such a text.
        """
        return cls.from_dict(read_json(cls.__name__.lower(), source))


def _plain(held: Any, *, whole: bool = False) -> Any:
    """Return what a result holds as what JSON knows, the names of several things joined by commas."""
    if isinstance(held, Result) and not whole:
        return held.to_dict()
    if is_dataclass(held):
        return {entry.name: _plain(getattr(held, entry.name)) for entry in fields(held)}
    if isinstance(held, Mapping):
        return {key if isinstance(key, str) else ", ".join(key): _plain(value) for key, value in held.items()}
    if isinstance(held, (list, tuple)):
        return [*map(_plain, held)]
    return held.tolist() if isinstance(held, Tensor) else held


def write_json(facts: Any, path: str | Path | None = None) -> str:
    """Return plain numbers, strings, lists and dicts as JSON, also written to a file at ``path``."""
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    if path is not None:
        check_path("path", path).write_text(text + "\n", encoding="utf-8")
    return text


def read_json(what: str, source: str | Path) -> Any:
    """Return what :func:`write_json` was given, from its text or file; ``what`` begins an error's message."""
    try:
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        return json.loads(str(source) if is_text else Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{what}: JSON text, or the path of a file of it, is wanted ({error})") from None

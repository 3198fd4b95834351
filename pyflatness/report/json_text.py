"""Write results as JSON, and read them back; NaN and infinity are as Python writes them."""

import json
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..messages import check_path


def write(facts: Any, path: str | Path | None = None) -> str:
    """Return plain numbers, strings, lists and dicts as JSON, also written to a file at ``path``."""
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    if path is not None:
        check_path("path", path).write_text(text + "\n", encoding="utf-8")
    return text


def read(what: str, source: str | Path) -> Any:
    """Return what :func:`write` was given, from its text or the path of its file.

    Args:
        what: is read, the beginning of an error's message.
        source: the text, or the path.

    Raises:
        InputError: no such file, or not such a text.
    """
    try:
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        return json.loads(str(source) if is_text else Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{what}: JSON text, or the path of a file of it, is wanted ({error})") from None

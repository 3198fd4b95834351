"""Measure how flat the loss is around a trained network."""

import ast
import functools
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.2.0.dev0"


@functools.cache
def _homes() -> dict[str, str | None]:
    """Return the module of each public name, None for modules: ``__init__.pyi`` says it, for type checkers too."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `import pyflatness` takes no time and no torch."""
    if name == "__all__":
        return sorted(_homes())
    if name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _homes()[name]
    found = importlib.import_module(f".{home or name}", __name__)
    globals()[name] = found if home is None else getattr(found, name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *_homes()]

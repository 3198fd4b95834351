"""The imports of a package as a graph, read from its source: between modules, and between rooms.

A room is a folder right below the package's root, with all that it holds, or a module at the root. Imports inside
functions count like others; those under ``if TYPE_CHECKING:`` are kept apart, as nothing is imported there. To take the
package's ``__version__`` is to import none of what the package exports beside it.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Import:
    """An import of one module of the package by another; ``kind`` is "module", "function" or "type checking"."""

    importer: str
    imported: str
    kind: str


def modules(package: Path) -> dict[str, Path]:
    """Return the package's modules by their dotted names; a folder's ``__init__`` bears the name of the folder."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """Return the room of a module: the name of its folder at the root, or of the module itself if it stands there."""
    _, *inner = module.split(".")
    return "__init__" if not inner else inner[0]


@functools.cache
def imports(package: Path) -> list[Import]:
    """Return every import of a module of the package by another one."""
    known = modules(package)
    found = []
    for name, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node, kind in _imports(tree, "module"):
            names = _imported(node, name, path.name == "__init__.py")
            held = {next((part for part in _ancestors(full) if part in known), "") for full in names}
            found += [Import(name, other, kind) for other in sorted(held - {"", name})]
    return found


def _imports(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        inner = kind
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inner = "type checking"
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and kind == "module":
            inner = "function"
        yield from _imports(child, inner)


def _imported(node: ast.Import | ast.ImportFrom, importer: str, is_package: bool) -> list[str]:
    """Return the dotted names that a statement imports; what is no module is a name in one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    parts = importer.split(".")
    above = parts[: len(parts) - node.level + is_package] if node.level else []
    names = [alias.name for alias in node.names if alias.name != "__version__"]
    return [".".join([*above, *filter(None, [node.module]), name]) for name in names]


def _ancestors(name: str) -> Iterator[str]:
    """Yield a dotted name, and what is left of it without its last parts, longest first."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        yield ".".join(parts[:length])


def graph(package: Path, kinds: tuple[str, ...] = ("module", "function"), *, rooms: bool = True) -> Graph:
    """Return who imports whom, between rooms or between modules; ``__main__`` is none."""
    named = room if rooms else str
    found: Graph = {named(module): set() for module in modules(package) if not module.endswith("__main__")}
    for one in imports(package):
        importer, imported = named(one.importer), named(one.imported)
        if one.kind in kinds and importer != imported and importer in found:
            found[importer].add(imported)
    return found


def components(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components (Tarjan 1972), each before those that import it."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            start = stack.index(node)
            found.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the components of more than one node."""
    return [component for component in components(edges) if len(component) > 1]


def longest_chain(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the longest chain of imports, a circle as one link, from the top to the ground."""
    below: dict[str, list[str]] = {}
    best: list[str] = []
    for component in components(edges):
        under = {other for node in component for other in edges[node]} - {*component}
        chain = [" = ".join(component), *max((below[node] for node in under), key=len, default=[])]
        below.update(dict.fromkeys(component, chain))
        best = max(best, chain, key=len)
    return best

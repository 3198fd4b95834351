"""Count how the package is laid out, beside what is aimed at.

    python tests/support/counts.py [--check]

Printed: modules at the package's root; floors and circles of imports between rooms (:mod:`support.imports` says what
these are); the Python frames of the package on the stack when a compiled kernel is called; files over 400 lines, of the
package, the kernels, tests and benchmarks; and files in which it is decided what becomes of samples with NaN. With
``--check`` the exit status is 1 if any is above its aim.
"""

import argparse
import ast
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import pyflatness as pf

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script
from support import ROOT, imports

PACKAGE = Path(pf.__file__).parent
POLICIES = {"raise", "propagate", "omit"}
LONG = 400  # lines of a file
FOLDERS, SUFFIXES = ("pyflatness", "csrc", "tests", "benchmarks"), (".py", ".cpp", ".h", ".cu", ".cuh")


@dataclass(frozen=True)
class Count:
    """A number, the most that it should be, and what it is made of."""

    what: str
    number: int
    aim: int | None = None
    held: str = ""

    @property
    def reached(self) -> bool:
        return self.aim is None or self.number <= self.aim


def root_modules(package: Path) -> list[str]:
    """Return the names of the modules at the root, but ``__init__`` and ``__main__``."""
    return sorted(path.stem for path in package.glob("*.py") if not path.stem.startswith("__"))


def compares_policy(node: ast.AST) -> bool:
    """Return whether a comparison or a case of a match is with the name of a NaN policy."""
    if isinstance(node, ast.Compare | ast.match_case):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.pattern]
        constants = (inner for side in sides for inner in ast.walk(side) if isinstance(inner, ast.Constant))
        return any(isinstance(constant.value, str) and constant.value in POLICIES for constant in constants)
    return False


def files_of_policy(package: Path) -> tuple[list[str], list[str]]:
    """Return the files that decide by a NaN policy, and those that ask a property which does so.

    A file decides where it compares anything with "raise", "propagate" or "omit". A property of a class whose body does
    so hands the decision on, so files that read an attribute of its name are listed too.
    """
    trees = {
        str(path.relative_to(package)): ast.parse(path.read_text("utf-8")) for path in imports.modules(package).values()
    }
    deciding = [name for name, tree in trees.items() if any(map(compares_policy, ast.walk(tree)))]
    properties = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(
            ast.unparse(decorator) in ("property", "functools.cached_property") for decorator in node.decorator_list
        )
        and any(map(compares_policy, ast.walk(node)))
    }
    asking = [
        name
        for name, tree in trees.items()
        if any(isinstance(node, ast.Attribute) and node.attr in properties for node in ast.walk(tree))
    ]
    return deciding, [name for name in asking if name not in deciding]


def frames(call: Callable[[], Any]) -> list[list[str]]:
    """Return the package's frames on the stack at every call of a kernel, outermost first.

    Kernels are the functions of the compiled module that work on tensors: their names end in the tensors' dtype.
    """
    stacks: list[list[str]] = []

    def profile(frame: FrameType | None, event: str, called: Any) -> None:
        if event != "c_call" or getattr(called, "__module__", None) != "pyflatness._C":
            return
        if not called.__name__.endswith(("_f32", "_f64")) or "workspace" in called.__name__:
            return
        stack = [called.__name__]
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if PACKAGE in path.parents:
                name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.10 has no qualified one
                stack.append(f"{path.relative_to(PACKAGE).with_suffix('')}:{name}")
            frame = frame.f_back
        stacks.append(stack[::-1])

    call()  # what is done once for a process
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stacks


def calls() -> dict[str, tuple[int | None, list[Callable[[], Any]]]]:
    """Return the public calls whose frames are counted, each with the most that there should be.

    The network's convolutions take different routes to a kernel: of few pixels and channels, and of more.
    """
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 48, 3), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(192, 3)).eval()
    data, loss = (torch.randn(6, 2, 6, 6), torch.arange(6) % 3), nn.CrossEntropyLoss()
    features, weight = torch.randn(6, 5), torch.randn(3, 5)
    compiled = {"backend": "compiled"}
    return {
        "head_flatness": (6, [lambda: pf.head_flatness(features, weight, **compiled)]),
        "relative_flatness, Conv2d": (
            12,
            [
                lambda: pf.relative_flatness(model, loss, data, "0", **compiled),
                lambda: pf.relative_flatness(model, loss, data, "2", **compiled),
            ],
        ),
        "measure": (13, [lambda: pf.measure(model, loss, data, **compiled)]),
        "measure, all measures": (None, [lambda: pf.measure(model, loss, data, measures="all", **compiled)]),
    }


def long_files() -> dict[str, int]:
    """Return the lines of each source file that is too long."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in paths}
    return {name: length for name, length in lengths.items() if length > LONG}


def deepest(stacks: Iterable[list[str]]) -> list[str]:
    """Return the stack of most frames, without the kernel."""
    return max(stacks, key=len)[:-1]


def counts(package: Path = PACKAGE) -> list[Count]:
    """Return all counts of the package."""
    rooms, files = imports.graph(package), imports.graph(package, rooms=False)
    every_kind = "module", "function", "type checking"
    chain, found = imports.longest_chain(rooms), imports.imports(package)
    later = {(one.importer, one.imported) for one in found if one.kind == "function"}
    typed = imports.circles(imports.graph(package, every_kind))
    deciding, asking = files_of_policy(package)
    long = long_files()
    root = root_modules(package)
    return [
        Count("modules at the root", len(root), 12, ", ".join(root)),
        Count("floors of imports between rooms", len(chain), 14, " → ".join(chain)),
        Count("circles of rooms", *_circles(imports.circles(rooms), 0)),
        Count("circles of modules", *_circles(imports.circles(files), 0)),
        Count("circles of rooms, with imports for type checking", *_circles(typed, None)),
        Count("imports inside functions", len(later), None, "; ".join(f"{a} → {b}" for a, b in sorted(later))),
        *(
            Count(f"frames to a kernel: {name}", len(stack), aim, " → ".join(stack))
            for name, (aim, made) in calls().items()
            for stack in [deepest(found for call in made for found in frames(call))]
        ),
        Count(f"files over {LONG} lines", len(long), None, ", ".join(f"{name} {n}" for name, n in long.items())),
        Count("files that decide by the NaN policy", len(deciding), 1, ", ".join(deciding)),
        Count("files that ask a property which does", len(asking), None, ", ".join(asking)),
    ]


def _circles(found: list[list[str]], aim: int | None) -> tuple[int, int | None, str]:
    return len(found), aim, "; ".join(" – ".join(names) for names in found)


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit status 1 if a number is above its aim")
    options = parser.parse_args()
    table = Table("count", "now", "aim", "of these", box=box.SIMPLE, show_lines=True)
    found = counts()
    for count in found:
        aim = "" if count.aim is None else f"≤ {count.aim}" if count.aim else "0"
        table.add_row(count.what, str(count.number), aim, count.held)
    Console(width=150, markup=False, highlight=False).print(table)
    return int(options.check and not all(count.reached for count in found))


if __name__ == "__main__":
    sys.exit(main())

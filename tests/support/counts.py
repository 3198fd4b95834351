"""Count how the package is laid out, beside what is aimed at.

    python tests/support/counts.py [--check]

Printed: lines, files and branches; class names that stand in two modules; questions for the class of a layer, a loss or
a backend outside of the rooms that answer for them; public names, and what ``import pyflatness`` loads; modules at the
package's root; floors and circles of imports between rooms (:mod:`support.imports` says what these are); the Python
frames of the package on the stack when a compiled kernel is called, and all frames that a warm ``pf.measure`` enters;
places with private names of torch's; files in which it is decided what becomes of samples with NaN; and what the
first ``pf.measure`` of a process takes. Some aims are not reached yet: such a count may have a limit beside its aim,
above which it is not to grow. With ``--check`` the exit status is 1 if any is above its limit, or else its aim.
"""

import argparse
import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import pyflatness as pf
from pyflatness.model import kinds

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script
from support import ROOT, imports

PACKAGE = Path(pf.__file__).parent
POLICIES = {"raise", "propagate", "omit"}
ANSWERING = ("model/kinds", "model/uses", "losses")  # rooms that know the classes of layers and losses
BACKENDS = ("backends", "compiled", "cuda", "triton", "reference")  # files of contractions/ that are backends


@dataclass(frozen=True)
class Count:
    """A number, the most that it should be, what it is made of, and the most that it may be until that is reached."""

    what: str
    number: int
    aim: int | None = None
    held: str = ""
    limit: int | None = None

    @property
    def reached(self) -> bool:
        return self.aim is None or self.number <= self.aim

    @property
    def holds(self) -> bool:
        """Return whether the number is within its limit, or the aim where there is none."""
        return self.reached or (self.limit is not None and self.number <= self.limit)


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


def entered(call: Callable[[], Any]) -> int:
    """Return how many Python frames a warm call enters, torch's and the standard library's among them."""
    count = 0

    def profile(frame: FrameType | None, event: str, called: Any) -> None:
        nonlocal count
        count += event == "call"

    call()  # what is done once for a process
    call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def measurements() -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return calls of ``measure`` whose frames are counted, each with the most that there should be.

    The networks are those of ``benchmarks/plain_torch.py``.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        plain = importlib.import_module("plain_torch")
    finally:
        sys.path.pop(0)
    found = {}
    for (name, (network, data, _)), aim in zip(plain.WORKS.items(), (1_800, None, 15_000), strict=True):
        torch.manual_seed(0)
        model, x = network(), data()
        of = (model, nn.CrossEntropyLoss(), (x, torch.arange(len(x)) % 10))
        if aim:
            found[name] = aim, partial(pf.measure, *of, measures=plain.MEASURES, progress=False)
    return found


def private_of_torch(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return where a name of torch's that begins with an underscore stands: in an import, or behind a module of it.

    Modules of torch are ``torch`` itself and what is imported from or as one, such as ``nn``, ``F`` and ``dist``.
    """
    found = set()
    for name, tree in trees.items():
        modules = {"torch"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                modules |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                modules |= {alias.asname for alias in node.names if alias.asname and alias.name.startswith("torch.")}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", ast.unparse(node)):
                names = ast.unparse(node).split(".")
            else:
                continue
            private = any(each.startswith("_") and not each.startswith("__") for each in names[1:])
            if private and names[0] in modules - {"_C"}:
                found.add(f"{name}:{node.lineno}")
    return sorted(found)


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


def code_lines(text: str) -> int:
    """Return how many lines of a module are code: not blank, and no comment or docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                documented.update(range(first.lineno, (first.end_lineno or 0) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in layout)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documented)


def repeated_classes(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return names of classes that stand in two modules."""
    classes = [{node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} for tree in trees.values()]
    counted = Counter(name for names in classes for name in names)
    return sorted(name for name, number in counted.items() if number > 1)


def class_questions(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return where ``isinstance`` asks for a layer's or a loss's class outside of the rooms that answer for them."""
    known = {cls.__name__ for cls in kinds.CLASSES} | {"CrossEntropy", "CustomLoss", "SquaredError"}
    known |= {"BinaryCrossEntropy", "Scale", "Together", "TransposedLinear", "PermutedLinear", "Convolution"}
    return [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        if not name.startswith(ANSWERING)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if known & {part.split(".")[-1] for part in re.split(r"[^\w.]+", ast.unparse(node.args[1]))}
    ]


def backend_questions(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return where code outside of the backends asks which one it has, or whether a tensor is on a GPU."""
    found = []
    for name, tree in trees.items():
        if name.startswith(tuple(f"contractions/{file}" for file in BACKENDS)):
            continue
        for node in ast.walk(tree):
            device = isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "_on_cuda", "_compiled")
            names = {ast.unparse(side) for side in node.comparators} if isinstance(node, ast.Compare) else set()
            if device or names & {"cuda", "compiled", "reference", "'cuda'", "'compiled'"}:
                found.append(f"{name}:{node.lineno}")
    return found


FIRST_CALL = """
import sys, time, torch
start = time.process_time()
import pyflatness as pf
imported, modules = time.process_time(), [name for name in sys.modules if name.split(".")[0] == "pyflatness"]
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
pf.measure(model, torch.nn.CrossEntropyLoss(), (torch.randn(64, 32), torch.arange(64) % 10), progress=False)
print(imported - start, time.process_time() - start, *modules)
"""


def loaded(times: int = 3) -> tuple[list[str], float, float]:
    """Return the package's modules that ``import pyflatness`` loads, and CPU seconds beyond torch's own import.

    The seconds are those of the import, and those of the import with a first ``pf.measure`` on a small perceptron.
    """
    command = [sys.executable, "-c", FIRST_CALL]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(times)]
    imported, measured = (min(float(run[place]) for run in runs) for place in range(2))
    return runs[0][2:], imported, measured


def deepest(stacks: Iterable[list[str]]) -> list[str]:
    """Return the stack of most frames, without the kernel."""
    return max(stacks, key=len)[:-1]


def counts(package: Path = PACKAGE, times: int = 3) -> list[Count]:
    """Return all counts of the package; the import is timed so many times."""
    rooms, files = imports.graph(package), imports.graph(package, rooms=False)
    every_kind = "module", "function", "type checking"
    chain, found = imports.longest_chain(rooms), imports.imports(package)
    later = {(one.importer, one.imported) for one in found if one.kind == "function"}
    typed = imports.circles(imports.graph(package, every_kind))
    deciding, asking = files_of_policy(package)
    root = root_modules(package)
    texts = {str(path.relative_to(package)): path.read_text("utf-8") for path in imports.modules(package).values()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    code = sum(map(code_lines, texts.values()))
    branches = sum(isinstance(node, ast.If | ast.IfExp) for tree in trees.values() for node in ast.walk(tree))
    private = private_of_torch(trees)
    repeated, asked, backends = repeated_classes(trees), class_questions(trees), backend_questions(trees)
    at_import, imported, measured = loaded(times)
    tests = sum(len(path.read_text("utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    return [
        Count("lines", sum(len(text.splitlines()) for text in texts.values()), 35_000, limit=52_000),
        Count("lines of code", code, 24_000, limit=35_200),
        Count("files", len(texts), 200, limit=266),
        Count("lines of tests", tests, 38_000, limit=64_900),
        Count("if and if-else in 1,000 lines of code", round(1000 * branches / code), 95, limit=128),
        Count("class names in two modules", len(repeated), 0, ", ".join(repeated)),
        Count("isinstance on layers and losses elsewhere", len(asked), 0, ", ".join(asked)),
        Count("questions for a backend elsewhere", len(backends), 10, ", ".join(backends)),
        Count("public names", len(pf.__all__), 30),
        Count("modules at import", len(at_import), 60),
        Count("CPU milliseconds of the import", round(1000 * imported), 50),
        Count("CPU milliseconds of the import and a first measure", round(1000 * measured), 350),
        Count("modules at the root", len(root), 12, ", ".join(root)),
        Count("floors of imports between rooms", len(chain), 14, " → ".join(chain)),
        Count("circles of rooms", *_circles(imports.circles(rooms), 0)),
        Count("circles of modules", *_circles(imports.circles(files), 0)),
        Count("circles of rooms, with imports for type checking", *_circles(typed, 0)),
        Count("imports inside functions", len(later), 0, "; ".join(f"{a} → {b}" for a, b in sorted(later))),
        *(
            Count(f"frames to a kernel: {name}", len(stack), aim, " → ".join(stack))
            for name, (aim, made) in calls().items()
            for stack in [deepest(found for call in made for found in frames(call))]
        ),
        *(Count(f"frames of measure: {name}", entered(call), aim) for name, (aim, call) in measurements().items()),
        Count("places with a private name of torch's", len(private), 8, ", ".join(private), limit=14),
        Count("files that decide by the NaN policy", len(deciding), 1, ", ".join(deciding)),
        Count("files that ask a property which does", len(asking), None, ", ".join(asking)),
    ]


def _circles(found: list[list[str]], aim: int | None) -> tuple[int, int | None, str]:
    return len(found), aim, "; ".join(" – ".join(names) for names in found)


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit status 1 if a number is above its limit or aim")
    options = parser.parse_args()
    table = Table("count", "now", "aim", "limit", "of these", box=box.SIMPLE, show_lines=True)
    found = counts()
    for count in found:
        aim = "" if count.aim is None else f"≤ {count.aim}" if count.aim else "0"
        limit = "" if count.reached or count.limit is None else f"≤ {count.limit}"
        table.add_row(count.what, str(count.number), aim, limit, count.held)
    Console(width=150, markup=False, highlight=False).print(table)
    return int(options.check and not all(count.holds for count in found))


if __name__ == "__main__":
    sys.exit(main())

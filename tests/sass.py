"""What nvcc makes of the CUDA kernels, against the table in ``csrc/cuda/sass.md``.

    python tests/sass.py [--write]

Compiles each file of ``csrc/cuda`` to machine code for sm_90 and disassembles it, which needs no GPU. The exit status
is 1 if the table is another one; ``--write`` makes it the one that was found. Where nvcc or nvdisasm are not there (the
latter is `pip install nvidia-cuda-nvdisasm`), or nvcc is of another version than the table's, this says so and does
nothing else.
"""

import argparse
import concurrent.futures
import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "csrc" / "cuda" / "sass.md"
COMMAND = "python tests/sass.py --write"
OPTIONS = ["-std=c++17", "-cubin", "--generate-code=arch=compute_80,code=sm_90", "-Xptxas", "-v"]  # as the build's
HEAD = """# The kernels' machine code

What nvcc {version} makes of the CUDA kernels for sm_90, a row for each instance: registers of a thread; bytes of static
shared memory; bytes that a thread spills to memory (stored, loaded); instructions on local memory, where spilled
registers and arrays with computed indices lie; and the most global loads on their way at once in one stretch of code
without a label, by the bytes of each. `python tests/sass.py` compares this table with what the compiler makes, in `make
kernels-check` where nvcc of this version and nvdisasm are there; `{command}` writes it.

| kernel | registers | shared | spilled | local | loads on their way |
|---|---|---|---|---|---|
"""


class Kernel(NamedTuple):
    """A row of the table."""

    name: str
    registers: int
    shared: int
    spilled: tuple[int, int]
    local: int
    loads: str

    def row(self) -> str:
        """In Markdown."""
        spilled = "{}, {}".format(*self.spilled) if any(self.spilled) else ""
        cells = f"`{self.name}`", self.registers, self.shared or "", spilled, self.local or "", self.loads
        return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Compare or write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    nvcc, nvdisasm = tool("nvcc"), tool("nvdisasm")
    if nvcc is None or nvdisasm is None:
        return left_out(f"there is no {'nvcc' if nvcc is None else 'nvdisasm'}")
    version = release(nvcc)
    stored = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if not write and (known := re.search(r"nvcc (\S+)", stored)) and known[1] != version:
        return left_out(f"the table is that of nvcc {known[1]}, and this is {version}")
    if [*map(int, release(nvdisasm).split("."))] < [*map(int, version.split("."))]:
        return left_out(f"nvdisasm {release(nvdisasm)} is older than nvcc {version}")
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
        made = pool.map(lambda source: [*kernels(nvcc, nvdisasm, source, Path(folder))], sources)
        rows = [kernel.row() for file in made for kernel in sorted(file)]
    found = HEAD.format(version=version, command=COMMAND) + "\n".join(rows) + "\n"
    if write:
        PAGE.write_text(found, encoding="utf-8")
    changes = difflib.unified_diff(stored.splitlines(), found.splitlines(), "stored", "compiled", lineterm="", n=0)
    print(*changes, f"{len(rows)} kernels", sep="\n")
    if found != stored and not write:
        print(f"csrc/cuda/sass.md is not what the compiler makes: look at the lines above, then {COMMAND}")
        return 1
    return 0


def tool(name: str) -> str | None:
    """A program of the CUDA toolkit, or of a package of it."""
    places = [shutil.which(name), *(f"{home}/bin/{name}" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"))]
    if package := importlib.util.find_spec("nvidia"):
        places += [
            str(path) for folder in package.submodule_search_locations for path in Path(folder).glob(f"*/bin/{name}")
        ]
    return next((place for place in places if place and Path(place).exists()), None)


def release(program: str) -> str:
    """Its version, such as 13.0.88."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r", V(\S+)", said)[1]


def left_out(reason: str) -> int:
    """Say so; return the exit status."""
    print(f"tests/sass.py: left out: {reason}")
    return 0


def kernels(nvcc: str, nvdisasm: str, source: Path, folder: Path) -> Iterator[Kernel]:
    """Those of a file."""
    cubin = folder / f"{source.stem}.cubin"
    compiled = subprocess.run([nvcc, *OPTIONS, "-o", cubin, source], capture_output=True, text=True, check=True)
    listing = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
    code = dict(re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", listing, re.MULTILINE | re.DOTALL))
    for name, (registers, shared, stored, loaded) in resources(compiled.stderr).items():
        instructions = code[name].splitlines()
        local = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in instructions)
        yield Kernel(readable(name), registers, shared, (stored, loaded), local, on_their_way(instructions))


def resources(said: str) -> dict[str, tuple[int, int, int, int]]:
    """By kernel, registers, static shared memory, and bytes spilled, from what ptxas says."""
    found = {}
    for part in said.split("Compiling entry function '")[1:]:
        numbers = [
            re.search(rf"(\d+) {what}", part)
            for what in ("registers", "bytes smem", "bytes spill stores", "bytes spill loads")
        ]
        found[part.partition("'")[0]] = tuple(int(number[1]) if number else 0 for number in numbers)
    return found


def readable(name: str) -> str:
    """A kernel's name in C++, without namespaces, arguments and casts."""
    plain = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    plain = re.sub(r"pyflatness::cuda::|\(anonymous namespace\)::|_GLOBAL__N__\w+::|^void |\((int|bool)\)", "", plain)
    return plain[: plain.index(">(") + 1] if ">(" in plain else plain.partition("(")[0]


def on_their_way(instructions: Iterable[str]) -> str:
    """The most global loads at once, as "8 × 16": of them none has been used, and no label has come by."""
    pending: dict[int, tuple[int, frozenset[str]]] = {}  # of each load, its bytes and registers
    most: Counter[int] = Counter()
    for number, line in enumerate(instructions):
        found = re.search(r"\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)([.\w]*) ?(.*?) ?;", line)
        if not found:
            pending = {} if line.startswith(".L") else pending
            continue
        name, suffixes, operands = found.groups()
        used = registers_of(operands)
        pending = {place: load for place, load in pending.items() if not load[1] & used}
        if name in ("LDGDEPBAR", "DEPBAR"):
            pending = {place: load for place, load in pending.items() if load[1]}
        if name in ("LDG", "LDGSTS"):
            width = re.search(r"\.(?:[US](8|16)|(64|128))\b", suffixes)
            size = int(width[1] or width[2]) // 8 if width else 4
            first = re.match(r"R(\d+)", operands)
            count = max(size // 4, 1)
            into = {f"R{int(first[1]) + i}" for i in range(count)} if first and name == "LDG" else ()
            pending[number] = size, frozenset(into)
        if sum(size for size, _ in pending.values()) > sum(size * count for size, count in most.items()):
            most = Counter(size for size, _ in pending.values())
    return ", ".join(f"{count} × {size}" for size, count in sorted(most.items(), reverse=True))


def registers_of(operands: str) -> set[str]:
    """Those that an instruction names, with the second one of a pair."""
    found = re.findall(r"\bR(\d+)(\.64)?", operands)
    return {f"R{int(number) + i}" for number, pair in found for i in range(2 if pair else 1)}


if __name__ == "__main__":
    sys.exit(main())

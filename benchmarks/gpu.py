"""Everything that is to be fast on a GPU, beside its floors, in one table.

Run from the project's root on a machine with one, once ``make test-gpu`` has built the kernels there: ``make bench-gpu
PYTHON=python``, or ``PYTHONPATH=. python benchmarks/gpu.py [PART-OF-A-NAME …]`` for the rows whose names have one of
these in them. Floors are measured in the same run; times are medians of rounds in which alternatives come in turn.

Each row is printed when it is there. One that fails says so, the others are taken all the same, and the exit status is
1. The last lines are Markdown to paste into ``docs/cuda.md``.
"""

import argparse
import datetime
import sys
import time
import traceback

import gpu_head
import gpu_kernels
import gpu_layers
import torch
from gpu_rows import COLUMNS, Row, Works
from rich.console import Console
from rich.table import Table

from pyflatness.contractions.backends import cuda


def main() -> int:
    """Print the rows and the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PART-OF-A-NAME", help="all rows unless given")
    names = parser.parse_args().names or [""]
    if not torch.cuda.is_available():
        sys.exit(f"benchmarks/gpu.py: needs a CUDA GPU, and a torch built for it; torch {torch.__version__} finds none")
    device = torch.device("cuda")
    reason = cuda.unavailable(device, torch.float32)
    if reason:
        sys.exit(f"benchmarks/gpu.py: {reason}; `make test-gpu` builds them for this GPU")
    works = {**gpu_layers.works(device), **gpu_kernels.works(device), **gpu_head.works(device)}
    chosen = {work: take for work, take in works.items() if any(name in work for name in names)}
    if not chosen:
        parser.error(f"no row's name has {' or '.join(names)} in it; there are {'; '.join(works)}")
    rows = taken(chosen)
    Console(width=200).print(table(rows))
    print(markdown(rows, " ".join(["python benchmarks/gpu.py", *map(repr, filter(None, names))])))
    return int(len(rows) < len(chosen))


def taken(works: Works) -> dict[str, Row]:
    """Return the rows of all works that do not fail; print each, and what those raised that do."""
    rows = {}
    for name, take in works.items():
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            rows[name] = take()
        except Exception:
            traceback.print_exc()
            said = "FAILED"
        else:
            cells = zip(COLUMNS, rows[name].cells(), strict=True)
            said = "; ".join(f"{column}: {cell}" for column, cell in cells if cell)
        print(f"{name} ({time.perf_counter() - start:.0f} s): {said}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def table(rows: dict[str, Row]) -> Table:
    """Return the rows as a table for the terminal."""
    whole = Table("work", *COLUMNS, title="GPU")
    for name, row in rows.items():
        whole.add_row(name, *row.cells())
    return whole


def markdown(rows: dict[str, Row], command: str) -> str:
    """Return the rows as a table of a document, and where its numbers come from."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    today = datetime.date.today().isoformat()
    lines = [["work", *COLUMNS], ["---"] * (len(COLUMNS) + 1), *([name, *row.cells()] for name, row in rows.items())]
    whole = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"\n{whole}\n\n{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}, {today}, by `{command}`."


if __name__ == "__main__":
    sys.exit(main())

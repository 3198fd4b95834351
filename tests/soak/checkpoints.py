"""Read damaged and hostile checkpoints, and print what became of them.

    python tests/soak/checkpoints.py [--count 1000]

First come so many damaged checkpoints, of each kind in ``tests/support/corrupted.py``, through ``pyflatness score``:
every one should be a row with its error. Then the hostile files of ``tests/support/hostile.py``, in this process, which
reports what it does beside reading: nothing should be run, and the next good file should be read. The exit status is 1
if anything was otherwise.
"""

import argparse
import csv
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import pyflatness as pf

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script
from pyflatness import cli
from pyflatness.scoring import checkpoints
from support import corrupted, hostile

_MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))

def data():
    torch.manual_seed(0)
    return torch.randn(50, 20), torch.arange(50) % 10
"""


def damaged(folder: Path, count: int) -> bool:
    """Score damaged checkpoints, print a table by kind, and return whether each was a row with its error."""
    (folder / "small.py").write_text(_MODEL)
    torch.manual_seed(0)
    state = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 10)).state_dict()
    files, out = corrupted.write(folder, state, count), folder / "scores.csv"
    spec = ["--model", f"{folder}/small.py:model", "--data", f"{folder}/small.py:data", "--loss", "cross_entropy"]
    start = time.perf_counter()
    try:
        cli.main(["score", *spec, "--layers", "2", "--out", str(out), *map(str, files)])
    except SystemExit as end:
        status = end.code
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kinds, errors = Counter(files.values()), Counter(files[Path(row["checkpoint"])] for row in rows if row["error"])
    table = Table("damaged checkpoints", "files", "rows with an error", box=box.SIMPLE_HEAD)
    for kind in kinds:
        table.add_row(kind, str(kinds[kind]), str(errors[kind]))
    table.add_row("all", str(kinds.total()), str(errors.total()))
    Console().print(table)
    print(f"exit status {status} after {time.perf_counter() - start:.0f} s")
    return errors == kinds and len(rows) == count and status == 1


def attacked(folder: Path) -> bool:
    """Read hostile files, print what became of each, and return whether nothing was run."""
    marker, lost = folder / "marker", 0
    torch.save({"a": torch.ones(2)}, folder / "good.pt")
    table = Table("hostile files", "seconds", "MiB at most", "what became of it", box=box.SIMPLE_HEAD)
    files = {**hostile.calls(marker), **hostile.bombs()}
    with hostile.watched() as reports:
        for name, content in files.items():
            (folder / "x.pt").write_bytes(content)
            start = time.perf_counter()
            try:
                result = f"read: {', '.join(checkpoints.unpickled(folder / 'x.pt').state)}"
            except pf.errors.InputError as error:
                result = str(error)
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            table.add_row(name, f"{time.perf_counter() - start:.1f}", str(most), result)
            lost += not torch.equal(checkpoints.unpickled(folder / "good.pt").state["a"], torch.ones(2))
    Console(width=160).print(table)
    ran = len(reports) + marker.exists()
    print(f"{len(files)} hostile files: {ran} executions, {lost} good files lost", *reports, sep="\n")
    return not ran and not lost


def main() -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="of damaged checkpoints")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return int(not all([damaged(Path(folder), options.count), attacked(Path(folder))]))


if __name__ == "__main__":
    sys.exit(main())

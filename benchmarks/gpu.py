"""Everything that is to be fast on a GPU, beside its floors, in one table.

Run from the project's root on a machine with one, once ``make test-gpu`` has built the kernels there: ``make bench-gpu
PYTHON=python``, or ``PYTHONPATH=. python benchmarks/gpu.py [head|layers]``. Floors are measured in the same run; times
are medians of rounds in which alternatives come in turn.
"""

import argparse
import importlib
import importlib.util
import sys

import torch
from rich.console import Console
from rich.table import Table

from pyflatness.contractions import cuda

PARTS = {"head": "gpu_head", "layers": "gpu_layers"}


def main() -> None:
    """Print the table; exit with a message where it cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="head|layers", help="all unless named")
    chosen = parser.parse_args().parts or [name for name in PARTS if importlib.util.find_spec(PARTS[name])]
    if not {*chosen} <= {*PARTS}:
        parser.error(f"there are {', '.join(PARTS)}, not {', '.join(chosen)}")
    if not torch.cuda.is_available():
        sys.exit(f"benchmarks/gpu.py: needs a CUDA GPU, and a torch built for it; torch {torch.__version__} finds none")
    reason = cuda.unavailable(torch.device("cuda"), torch.float32)
    if reason:
        sys.exit(f"benchmarks/gpu.py: {reason}; `make test-gpu` builds them for this GPU")
    torch.manual_seed(0)
    table = Table(
        "work", "floor ms", "pyflatness ms", "it / floor", "composed ms", "extra MiB", "to reach", title="GPU"
    )
    for part in chosen:
        table.add_section()
        for row in importlib.import_module(PARTS[part]).rows(torch.device("cuda")):
            other = "" if row.composed_ms is None else f"{row.composed_ms:.4g}"
            numbers = (f"{row.floor_ms:.4g}", f"{row.ours_ms:.4g}", f"{row.ours_ms / row.floor_ms:.2f}", other)
            table.add_row(row.work, *numbers, f"{row.extra_mib:.0f}", row.target)
        torch.cuda.empty_cache()
    Console(width=190).print(table)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()

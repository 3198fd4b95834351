"""Run the same functions in several processes of one ``torch.distributed`` group, and hand back what each gave."""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from support import ROOT


def outcomes(module: str, names: list[str], size: int) -> dict[str, list[Any]]:
    """Return by name what each rank's ``getattr(module, name)(rank, size)`` returned, or the error that it raised.

    Args:
        module: to import, where the functions are.
        names: of functions, called one after another in processes that are started once.
        size: how many processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, (module, names, size, folder), nprocs=size, join=True)
        found = [pickle.loads(Path(folder, f"{rank}").read_bytes()) for rank in range(size)]
    return {name: [each[name] for each in found] for name in names}


def torchrun(script: Path, *arguments: object, size: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script in so many processes of torchrun's, and return its exit status and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=500
    )


def leave() -> NoReturn:
    """End a process of such a script when all have come here.

    The interpreter's own end is left out: a thread of gloo's that still holds a tensor aborts the process there, seldom
    (https://github.com/pytorch/pytorch/pull/179291), and a model that DistributedDataParallel wraps keeps such threads.
    """
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _run(rank: int, module: str, names: list[str], size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    cases, found = importlib.import_module(module), {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = getattr(cases, name)(rank, size)
        except Exception as error:
            found[name] = error
    Path(folder, f"{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()

"""Run the same functions in several processes of one ``torch.distributed`` group, and hand back what each gave."""

import contextlib
import datetime
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from pyflatness.errors import RankError
from support import ROOT

_CONTEXT = multiprocessing.get_context("spawn")
_PATIENCE = datetime.timedelta(minutes=3)  # of a rank that waits for another; gloo's own is half an hour
_POOL: list[tuple[Any, connection.Connection]] = []  # processes by rank, each with the pipe to it; they end with ours


def outcomes(module: str, names: list[str], size: int) -> dict[str, list[Any]]:
    """Return by name what each rank's ``getattr(module, name)(rank, size)`` returned, or the error that it raised.

    The processes are started once for all tests of a session; each call has a process group of its own.

    Args:
        module: to import, where the functions are.
        names: of functions, called one after another.
        size: how many ranks.

    Raises:
        RuntimeError: a process ended, or failed outside of the functions.
    """
    while len(_POOL) < size:
        here, there = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        _POOL.append((process, here))
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, pipe) in enumerate(_POOL[:size]):
            pipe.send((rank, module, names, size, folder))
        found: dict[int, Any] = {}
        try:
            while len(found) < size:
                waiting = {pipe: rank for rank, (_, pipe) in enumerate(_POOL[:size]) if rank not in found}
                for pipe in connection.wait([*waiting]):
                    rank = waiting[pipe]
                    found[rank] = pickle.loads(pipe.recv_bytes())
                    if isinstance(found[rank], str):
                        raise RuntimeError(f"rank {rank}: {found[rank]}")
        except (EOFError, RuntimeError) as error:  # the others wait for this rank
            for process, _ in _POOL:
                process.kill()
            _POOL.clear()
            raise RuntimeError(f"{module}: {error or 'a process ended'}") from error
    return {name: [found[rank][name] for rank in range(size)] for name in names}


def torchrun(script: Path, *arguments: object, size: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script in so many processes of torchrun's, and return its exit status and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=500
    )


@contextlib.contextmanager
def launched(folder: str, kind: str) -> Iterator[tuple[int, int, Callable[[str], object]]]:
    """Give a script its rank, how many there are, and what writes its text, or an error of the ranks; then leave."""
    if kind == "die":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others, too
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    write = Path(folder, f"{dist.get_rank()}").write_text
    try:
        yield dist.get_rank(), dist.get_world_size(), write
    except RankError as error:
        write(str(error))
        raise
    leave()


def leave() -> NoReturn:
    """End a process of such a script when all have come here.

    The interpreter's own end is left out: a thread of gloo's that still holds a tensor aborts the process there, seldom
    (https://github.com/pytorch/pytorch/pull/179291), and a model that DistributedDataParallel wraps keeps such threads.
    """
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _serve(pipe: connection.Connection) -> None:
    """Answer each call with what its functions returned, pickled; or with the text of an error outside of them."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            pipe.send_bytes(pickle.dumps(_run(*pipe.recv())))
        except EOFError:
            return
        except Exception:
            pipe.send_bytes(pickle.dumps(traceback.format_exc()))


def _run(rank: int, module: str, names: list[str], size: int, folder: str) -> dict[str, Any]:
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size, timeout=_PATIENCE)
    cases, found = importlib.import_module(module), {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = getattr(cases, name)(rank, size)
        except Exception as error:
            found[name] = error
    dist.destroy_process_group()
    return found

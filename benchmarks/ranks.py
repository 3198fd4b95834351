"""Data over ranks: two processes of one thread against one process of one thread, and what a call takes besides.

Run from the project's root: ``python benchmarks/ranks.py``. It starts two ranks with gloo. On the same work and data,
in turn: ``one`` is rank 0 with all of it while rank 1 waits, ``two`` both with a half each, ``ratio`` the first over
the second, and ``ratio of work`` the same of the processor's time that rank 0 takes, which other processes of the
machine change less. ``group of one`` is what rank 0 takes in a process group of its own, over ``one``. ``small`` is a
call whose work is next to nothing: what meeting, agreeing and adding up take. ``messages`` is how many exchanges rank 0
takes part in, and ``bytes`` what it sends in them. Under FSDP2 each of the two has half of the weights too, and in one
process the model is not wrapped.
"""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from networks import resnet20
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pyflatness as pf
from pyflatness.numerics.ranks import Ranks

Data = tuple[torch.Tensor, ...]
Work = tuple[Callable[..., object], nn.Module, nn.Module, Data]
"""A call, the model in one process and on two ranks, and all data."""

LOSS = nn.CrossEntropyLoss()
ROUNDS = 5


def multilayer() -> nn.Module:
    """Return a network of three linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).eval()


def data(samples: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, *shape, generator=generator), torch.randint(10, (samples,), generator=generator)


def layers(model: nn.Module, mine: Data, **options: Any) -> object:
    """Measure all layers by one sweep."""
    return pf.measure(model, LOSS, mine, measures=["relative_flatness", "trace"], **options)


def largest(model: nn.Module, mine: Data, **options: Any) -> object:
    """Find the largest eigenvalues, by many reads of the data."""
    return pf.measure(model, LOSS, mine, measures=["lambda_max"], **options)


def sampled(model: nn.Module, mine: Data, **options: Any) -> object:
    """Measure all layers by two probes."""
    return pf.measure(model, LOSS, mine, measures=["relative_flatness"], curvature="ggn", probes=2, **options)


def wide() -> nn.Module:
    """Return a network of four blocks of 2.1 million weights each."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(4)
    ]
    return nn.Sequential(*blocks, nn.Linear(1024, 10)).eval()


def sharded(model: nn.Sequential) -> nn.Module:
    """Spread a network over the ranks, each of its blocks by itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def head(model: nn.Module, mine: Data, **options: Any) -> object:
    """Measure the head."""
    return pf.relative_flatness(model, LOSS, mine, **options)


def works() -> dict[str, Work]:
    """Return by name a call, its model and all data."""
    torch.manual_seed(0)
    whole = {
        "all layers of a network of three, n = 8,192": (layers, multilayer(), data(8192, 64)),
        "all layers of a ResNet-20, n = 64": (layers, resnet20().eval(), data(64, 3, 32, 32)),
        "λ_max of a network of three, n = 2,048": (largest, multilayer(), data(2048, 64)),
        "small: a head, n = 2": (head, multilayer(), data(2, 64)),
    }
    of_fsdp = {
        "FSDP2: two probes of 8.4 million weights, n = 1,024": (sampled, wide(), sharded(wide()), data(1024, 1024)),
        "FSDP2: its head, n = 1,024": (head, wide(), sharded(wide()), data(1024, 1024)),
    }
    return {name: (call, model, model, held) for name, (call, model, held) in whole.items()} | of_fsdp


class Counted:
    """Count what is sent, inside."""

    def __enter__(self) -> "Counted":
        self.messages = self.bytes = 0
        self._before = Ranks._gather, Ranks._sent

        def sent(ranks: Ranks, tensor: torch.Tensor, *arguments: Any, **options: Any) -> list[torch.Tensor]:
            self.messages, self.bytes = self.messages + 1, self.bytes + tensor.numel() * tensor.itemsize
            return self._before[0](ranks, tensor, *arguments, **options)

        def part(ranks: Ranks, name: str, into: torch.Tensor | None = None) -> torch.Tensor:
            found = self._before[1](ranks, name, into)
            self.messages, self.bytes = self.messages + 1, self.bytes + found[0].numel() * found.itemsize
            return found

        Ranks._gather, Ranks._sent = sent, part  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        Ranks._gather, Ranks._sent = self._before  # type: ignore[method-assign]


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return seconds of a call, and of this process's work in it."""
    start, worked = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - worked


def medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median seconds, and those of work."""
    seconds, work = zip(*times, strict=True)
    return statistics.median(seconds), statistics.median(work)


def run(rank: int, size: int, port: int) -> None:
    """Time everything on one of the ranks; the first prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    table = Table("work", "one", "two", "ratio", "ratio of work", "group of one", "messages", "bytes")
    alone = [dist.new_group([each]) for each in range(size)][rank]
    for name, (call, model, spread, whole) in works().items():
        mine = tuple(held[rank::size] for held in whole)
        together = partial(call, spread, mine)
        together()
        one, own, two = [], [], []
        for _ in range(ROUNDS):
            if rank == 0:
                one.append(timed(partial(call, model, whole, process_group=False)))
                own.append(timed(partial(call, model, whole, process_group=alone)))
            dist.barrier()
            two.append(timed(together))
            dist.barrier()
        with Counted() as counted:
            together()
        if rank == 0:
            (first, work), (second, half), (grouped, _) = medians(one), medians(two), medians(own)
            ratios = f"{first / second:.2f}", f"{work / half:.2f}", f"{grouped / first:.3f}"
            times = f"{1e3 * first:.3g} ms", f"{1e3 * second:.3g} ms", *ratios
            table.add_row(name, *times, f"{counted.messages}", f"{counted.bytes:,}")
    if rank == 0:
        Console(width=140).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, (2, port), nprocs=2)

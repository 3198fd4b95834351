"""What every executor has to do for a run: the same values, a death costs its unit alone, errors are rows, resuming."""

import dataclasses
from concurrent.futures import Executor
from pathlib import Path

from safetensors.torch import save_file

import pyflatness as pf
from support.score_runs import saved, tiny_net

NETWORK = """
import os, pathlib, signal
from tiny import Tiny, data

class Fateful(Tiny):
    def forward(self, x):
        once = pathlib.Path(__file__).with_name("once")
        if self.head.bias[0] == 98 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.head.bias[0] == 97:
            raise OSError("no such disk")
        return super().forward(x)
"""


def network(tiny: str) -> str:
    """Return the path of a file with ``Fateful``, whose process dies once, or which raises, at certain weights."""
    path = Path(tiny).with_name("fateful.py")
    path.write_text(NETWORK)
    return str(path)


def fated(tiny: str, number: float) -> Path:
    """Return a checkpoint with such weights."""
    state = tiny_net(tiny, 9).state_dict()
    state["head.bias"][0] = number
    save_file(state, path := Path(tiny).with_name(f"fated_{number}.safetensors"))
    return path


def check(executor: Executor, tiny: str) -> None:
    """Run three units, of which one loses its worker and one raises, and once more."""
    files = [saved(tiny, 0, "a.safetensors"), fated(tiny, 98), fated(tiny, 97)]
    spec, store = network(tiny), Path(tiny).with_name("runs.sqlite")
    options = {"model": f"{spec}:Fateful", "measures": ["trace"]}
    found = pf.score(files, "cross_entropy", f"{spec}:data", **options, store=store, executor=executor)
    assert Path(tiny).with_name("once").exists()
    here = pf.score(files, "cross_entropy", f"{spec}:data", **options)
    assert [dataclasses.replace(row, seconds=None) for row in found] == [
        dataclasses.replace(row, seconds=None) for row in here
    ]
    assert {row.checkpoint: "OSError: no such disk" in row.error for row in found} == {
        str(path): path is files[2] for path in files
    }
    again = pf.score(files, "cross_entropy", f"{spec}:data", **options, store=store, executor=executor)
    assert (found.computed, again.computed, [*again]) == (3, 0, [*found])

"""Units in other processes: the same values, data that differ are noticed, and a death costs its unit alone."""

import dataclasses
import os
import signal
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import pyflatness as pf
from pyflatness.scoring import executors
from support.score_runs import saved, tiny_net

EDITED = """
import os, signal, torch
from tiny import Tiny, data

class Deadly(Tiny):
    def forward(self, x):
        if self.head.bias[0] == 99:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def unseeded():
    return torch.randn(8, 4), torch.arange(8) % 3
"""


@pytest.fixture
def edited(tiny: str) -> str:
    path = Path(tiny).with_name("edited.py")
    path.write_text(EDITED)
    return str(path)


def plain(scores: pf.results.Scores) -> list[pf.scoring.units.Row]:
    return [dataclasses.replace(row, seconds=None) for row in scores]


def test_values_are_those_of_this_process_and_a_death_costs_one_unit(tiny: str, edited: str) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(5)]
    state = tiny_net(tiny, 9).state_dict()
    state["head.bias"][0] = 99
    save_file(state, deadly := Path(tiny).with_name("deadly.safetensors"))
    torch.set_num_threads(1)
    options = {"model": f"{edited}:Deadly", "measures": ["trace", "relative_flatness"], "layers": "*"}
    here = pf.score(files, "cross_entropy", f"{edited}:data", **options)
    store = Path(tiny).with_name("runs.sqlite")
    found = pf.score(
        [*files[:3], deadly, *files[3:]],
        *("cross_entropy", f"{edited}:data"),
        **{**options, "store": store, "executor": "processes", "workers": 2},
    )
    assert [row for row in plain(found) if row.checkpoint != str(deadly)] == plain(here)
    assert {row.error[:18] for row in found if row.checkpoint == str(deadly)} == {"the worker died 3 "}
    again = pf.score(files, "cross_entropy", f"{edited}:data", **options, store=store)
    assert again.computed == 0


def test_data_that_differ_between_processes_are_refused(tiny: str, edited: str) -> None:
    options = {"model": f"{tiny}:Tiny", "store": Path(tiny).with_name("runs.sqlite"), "executor": "processes"}
    with pytest.raises(pf.errors.InputError, match="a worker that loaded them got other samples"):
        pf.score([saved(tiny, 1, "a.safetensors")], "cross_entropy", f"{edited}:unseeded", **options)


def test_an_executor_of_the_users(tiny: str) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(4)]
    options = {"model": f"{tiny}:Tiny", "layers": "*"}
    here = pf.score(files, "cross_entropy", f"{tiny}:data", **options)
    with ThreadPoolExecutor(2) as executor:
        assert plain(pf.score(files, "cross_entropy", f"{tiny}:data", executor=executor, **options)) == plain(here)


class _Dying(Executor):
    """Loses its worker at chosen units, once or for good."""

    workers = 2

    def __init__(self, lost: set[int], *, closed: bool = False) -> None:
        self.calls, self.lost, self.closed = 0, lost, closed

    def submit(self, function, /, *arguments):
        self.calls += 1
        if self.closed and self.calls > 2:
            raise BrokenExecutor("no worker is left")
        future: Future = Future()
        if self.calls in self.lost:
            future.set_exception(BrokenExecutor("gone"))
        else:
            future.set_result(function(*arguments))
        return future


def test_a_unit_is_submitted_again_when_its_worker_dies(tiny: str) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(4)]
    options = {"model": f"{tiny}:Tiny", "layers": "head", "store": Path(tiny).with_name("runs.sqlite")}
    executor = _Dying({1, 3})
    scores = pf.score(files, "cross_entropy", f"{tiny}:data", executor=executor, **options)
    assert (executor.calls, scores.errors) == (6, {})
    options.pop("layers")
    lost = pf.score(files[:1], "cross_entropy", f"{tiny}:data", executor=_Dying({1, 2, 3}), model=f"{tiny}:Tiny")
    assert {row.layer: row.error for row in lost} == dict.fromkeys(
        ("body", "head", ""), "the worker died 3 times in this unit: gone"
    )
    broken = _Dying(set(), closed=True)
    with pytest.raises(pf.errors.InputError, match="executor: it is broken"):
        pf.score(files, "cross_entropy", f"{tiny}:data", executor=broken, **options)
    assert pf.score(files, "cross_entropy", f"{tiny}:data", **options).computed == 2


def test_what_is_in_memory_stays_there(tiny: str) -> None:
    data, files = (torch.randn(8, 4), torch.arange(8) % 3), [saved(tiny, 0, "a.safetensors")]
    with pytest.raises(pf.errors.InputError, match="data: the workers of an executor load them by themselves"):
        pf.score(files, "cross_entropy", data, model=f"{tiny}:Tiny", executor=_Dying(set()))
    with pytest.raises(pf.errors.InputError, match="models: the workers of an executor read weights"):
        pf.score({"a": tiny_net(tiny, 0)}, "cross_entropy", lambda: data, executor=_Dying(set()))


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        (
            "thread",
            pf.errors.InputError,
            "'thread' does not exist; choose one of 'serial', 'processes', 'ray', 'slurm'",
        ),
        ("ray", pf.errors.MissingExtraError, r"needs ray: pip install 'pyflatness\[ray\]'"),
        ("slurm", pf.errors.MissingExtraError, r"needs submitit: pip install 'pyflatness\[slurm\]'"),
    ],
)
def test_executors_by_name(name: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(error, match=words):
        executors.named(name, 1)


def test_processes_end_with_their_executor() -> None:
    executor = executors.Processes(1)
    pid = executor.submit(os.getpid).result()
    executor.submit(signal.pause)
    executor.shutdown()
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        signal.sigtimedwait([], 0.01)
    pytest.fail("the process is still there")

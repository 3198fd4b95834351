"""Batches cut to a number of samples, or in halves when the memory does not suffice."""

from pathlib import Path

import numpy as np
import pytest
import torch

import pyflatness as pf
from pyflatness.scoring import data_specs, specs, text_data
from pyflatness.scoring.cutting import Cut
from pyflatness.scoring.run import ScoringRun
from pyflatness.scoring.worker import Maker, Setup
from support.score_runs import saved, tiny_net

SCARCE = """
from tiny import Tiny, data

class Scarce(Tiny):
    def forward(self, x):
        if len(x) > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().forward(x)

class Empty(Tiny):
    def forward(self, x):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
"""


@pytest.mark.parametrize(
    ("most", "limit", "sizes"),
    [
        (None, None, [10, 10, 10, 7]),
        (4, None, [4, 4, 2, 4, 4, 2, 4, 4, 2, 4, 3]),
        (None, 20, [10, 10]),
        (None, 13, [10, 3]),
        (8, 0.5, [8, 2, 8]),
        (100, 100, [10, 10, 10, 7]),
    ],
)
def test_sizes_of_batches(most: int | None, limit: float | None, sizes: list[int]) -> None:
    x = torch.arange(37.0)[:, None].expand(37, 3)
    data = [(part, part[:, 0]) for part in x.split(10)]
    batches = [*Cut(data, torch.device("cpu"), most=most, limit=limit)]
    assert [len(inputs) for inputs, _ in batches] == sizes
    assert torch.cat([targets for _, targets in batches]).tolist() == [*range(sum(sizes))]


def test_a_part_of_data_of_unknown_length() -> None:
    class Unknown:
        def __iter__(self):
            return iter([(torch.ones(3, 2), torch.ones(3))])

    with pytest.raises(pf.errors.InputError, match="do not say how many samples"):
        Cut(Unknown(), torch.device("cpu"), limit=0.5)


@pytest.mark.parametrize("kind", ["Scarce", "Empty"])
def test_batches_are_halved_until_the_memory_suffices(kind: str, tiny: str) -> None:
    (path := Path(tiny).with_name("scarce.py")).write_text(SCARCE)
    models = {"a": saved(tiny, 0, "a.safetensors"), "b": saved(tiny, 1, "b.safetensors")}
    asked = "cross_entropy", ("pac_bayes",)
    sources = Maker(f"{path}:{kind}"), Maker(f"{path}:data")
    run = ScoringRun(models, Setup(*sources, *asked, batch_size="auto"))
    found = [run.bench.outcome(unit) for name in models for unit in run.units(name, run.pairs(name))]
    if kind == "Empty":
        assert all("out of memory" in outcome.errors[0] for outcome in found)
        return
    assert [outcome.batch_size for outcome in found] == [2, 2]  # of 10, 5 and 2; the second unit begins with 2
    for name, outcome in zip(models, found, strict=True):
        model, data = tiny_net(tiny, "ab".index(name)), specs.resolve(f"{tiny}:data")()
        truth = pf.measure(model, "cross_entropy", data, measures="pac_bayes", progress=False)["pac_bayes"]
        (row,) = outcome.values.values()
        assert row.value == pytest.approx(truth.value, rel=1e-6)
    whole = ScoringRun(models, Setup(*sources, *asked))
    (unit,) = whole.units("a", whole.pairs("a"))
    assert "out of memory" in whole.bench.outcome(unit).errors[0]


# --- sizes of data ----------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2), dtype=np.float32), y=np.arange(4))
    return tmp_path / "a.npz"


@pytest.mark.parametrize("option", ["count", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True])
def test_of_arrays(path, option, value):
    with pytest.raises(pf.errors.InputError, match=f"{option}={value!r}: a number of samples is wanted, at least 1"):
        data_specs.read_npz(path, **{option: value})


def test_the_first_of_arrays(path):
    inputs, targets = data_specs.read_npz(path, count=3)
    assert (len(inputs), targets.tolist()) == (3, [0, 1, 2])


@pytest.mark.parametrize("option", ["count", "batch_size"])
def test_of_texts(tmp_path, option):
    with pytest.raises(pf.errors.InputError, match=f"{option}=0: a number of samples is wanted"):
        text_data.read_file(tmp_path / "a.txt", **{option: 0})


def test_of_tables_and_images(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(pf.errors.InputError, match="count=-1: a number of samples is wanted"):
        data_specs.read_parquet(tmp_path / "a.parquet", count=-1)
    with pytest.raises(pf.errors.InputError, match="batch_size=0: a number of samples is wanted"):
        data_specs.read_images(tmp_path, batch_size=0)

"""How many samples are taken of a file, and how many make a batch: numbers above zero."""

import numpy as np
import pytest

import pyflatness as pf
from pyflatness.scoring import data_specs, texts


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
        texts.read_file(tmp_path / "a.txt", **{option: 0})


def test_of_tables_and_images(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(pf.errors.InputError, match="count=-1: a number of samples is wanted"):
        data_specs.read_parquet(tmp_path / "a.parquet", count=-1)
    with pytest.raises(pf.errors.InputError, match="batch_size=0: a number of samples is wanted"):
        data_specs.read_images(tmp_path, batch_size=0)

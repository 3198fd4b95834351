"""The states of torch's, Python's and NumPy's global generators: put back where a call drew from them, else left."""
# ruff: noqa: NPY002, the user's generators are what is tested

import contextlib
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyflatness as pf
from pyflatness.model.generators import Randomness, outside

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(3)), torch.arange(24) % 3
LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def no_other_thread(monkeypatch):
    """As where no thread runs but this one; other tests, or libraries, may have left some."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.fixture(autouse=True)
def _kept():
    before, of_torch = outside(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(pickle.loads(before[1]))
    torch.set_rng_state(of_torch)


@contextlib.contextmanager
def drawing(draw):
    """A thread that draws all the time; the numbers that it drew."""
    drawn, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            drawn.append(draw())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield drawn
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("data", ["tensors", "loader"])
def test_torch_s_random_numbers_of_other_threads_do_not_come_again(data):
    """Python's and NumPy's may."""
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)).eval()
    read = (X, Y) if data == "tensors" else DataLoader(TensorDataset(X, Y), 8)
    with drawing(lambda: tuple(nn.functional.dropout(torch.ones(64)).tolist())) as drawn:
        for _ in range(4):
            pf.measure(net, LOSS, read, measures="sweep")
    again = len(drawn) - len({*drawn})
    assert len(drawn) > 100
    # A loader draws a seed from torch's generator in every read, so that it is put back.
    assert again == 0 or data == "loader"


class Drawing(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0 * (torch.rand(1) + random.random() + np.random.rand())


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("where", ["model", "loader", "generator"])
def test_what_a_call_drew_is_put_back(where, beside):
    """Also while another thread is there that draws nothing."""

    def batches():
        for _ in range(2):
            yield X + 0 * (torch.rand(1) + random.random() + np.random.rand()), Y

    net = nn.Sequential((Drawing if where == "model" else nn.Linear)(4, 5), nn.Linear(5, 3)).eval()
    data = {"model": (X, Y), "loader": DataLoader(TensorDataset(X, Y), 8, shuffle=True), "generator": batches()}[where]
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    if beside:
        thread.start()
    before, of_torch = outside(), torch.get_rng_state()
    try:
        pf.relative_flatness(net, LOSS, data)
    finally:
        stop.set()
    assert before == outside()
    assert torch.get_rng_state().equal(of_torch)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_normal_numbers_of_numpy_are_seen_and_put_back_though_every_second_one_is_kept(no_other_thread, kept, count):
    np.random.seed(0)
    np.random.randn(kept)  # with an odd number of them before, the next one takes no bits
    before, wanted = Randomness([]), np.random.randn(3).tolist()
    before.put_back()
    np.random.randn(count)
    assert before._outside != outside()
    before.put_back()
    assert np.random.randn(3).tolist() == wanted


def test_another_bit_generator_of_the_users(no_other_thread):
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        before = Randomness([])
        assert before._outside == outside()
        first = np.random.rand()
        assert before._outside != outside()
        before.put_back()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(usual)

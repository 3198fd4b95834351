"""The states of Python's and NumPy's global generators: whether they moved, and putting them back."""
# ruff: noqa: NPY002, the user's generators are what is tested

import random

import numpy as np
import pytest

from pyflatness.model.generators import OutsideTorch


@pytest.fixture(autouse=True)
def _kept():
    python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    yield
    random.setstate(python)
    np.random.set_state(of_numpy)


def stream():
    """Numbers that tell every part of the states apart, a normal number that is kept too; the states stay."""
    python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    drawn = [random.random(), random.gauss(0, 1), *np.random.randn(3), *np.random.rand(2)]
    random.setstate(python)
    np.random.set_state(of_numpy)
    return drawn


def test_nothing_drawn_is_no_move():
    for kept in (0, 1):
        np.random.seed(kept)
        np.random.randn(kept)
        assert not OutsideTorch().moved()


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_normal_numbers_of_numpy_are_seen_and_put_back_though_every_second_one_is_kept(kept, count):
    np.random.seed(0)
    np.random.randn(kept)  # with an odd number of them before, the next one takes no bits
    before, wanted = OutsideTorch(), stream()
    np.random.randn(count)
    assert before.moved()
    before.put_back()
    assert not before.moved()
    assert stream() == wanted


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: np.random.randint(2), lambda: random.choice("ab")]
)
def test_each_draw_is_seen_at_every_place_of_the_state(draw):
    for _ in range(700):  # the Mersenne Twister makes 624 words at a time
        before = OutsideTorch()
        draw()
        assert before.moved()


def test_another_bit_generator_of_the_users():
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        before = OutsideTorch()
        assert not before.moved()
        first = np.random.rand()
        assert before.moved()
        before.put_back()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(usual)

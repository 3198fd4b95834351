"""An estimate is a number wherever one is wanted."""

import copy
import dataclasses
import json
import math
import numbers
import pickle
import warnings

import numpy as np
import pytest
import torch

import pyflatness as pf

FACTS = {"stderr": 0.1, "samples": 5, "method": "ggn-sampled", "exact": False, "backend": "reference", "dof": 4.0}
HALF, TWO = pf.results.Estimate(0.5, **FACTS), pf.results.Estimate(2.0, **FACTS)


def test_formatting():
    assert (f"{HALF:.3f}", f"{TWO:8.2e}", "%.1f" % HALF) == ("0.500", "2.00e+00", "0.5")  # noqa: UP031
    assert f"{HALF}" == str(HALF) == repr(HALF)
    assert repr(HALF).startswith("Estimate(")


def test_order():
    assert HALF < TWO
    assert HALF <= 0.5 < TWO
    assert max([HALF, TWO]) is TWO
    assert sorted([3, TWO, HALF, 1.0]) == [HALF, 1.0, TWO, 3]


def test_arithmetic_gives_numbers():
    for found in (HALF + TWO, HALF - 1, 2 * TWO, 1 / HALF, TWO**2, -HALF, abs(HALF), round(TWO, 1), sum([HALF, TWO])):
        assert not isinstance(found, pf.results.Estimate)
        assert repr(found) == repr(float(found))
    assert HALF + TWO == 2.5
    assert math.sqrt(TWO) == 2**0.5
    assert math.isclose(TWO, 2.0)
    assert math.log(HALF) == math.log(0.5)
    assert type(float(TWO)) is float
    assert isinstance(TWO, numbers.Real)


def test_arrays_and_tensors():
    assert np.asarray(TWO).dtype == np.float64
    assert np.array([HALF, TWO]).tolist() == [0.5, 2.0]
    assert np.float64(2) * HALF == 1
    assert torch.tensor([HALF, TWO]).tolist() == [0.5, 2.0]
    assert torch.equal(torch.ones(2) * TWO, torch.full((2,), 2.0))
    assert json.loads(json.dumps([HALF])) == [0.5]


def test_a_sum_with_a_loss_warns_that_it_has_no_gradient():
    loss = torch.tensor(3.0, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            total = loss + 0.1 * TWO
    assert total.item() == pytest.approx(3.2)
    assert [(one.category, one.filename) for one in said] == [(UserWarning, __file__)]
    assert "pf.FlatnessPenalty" in str(said[0].message)
    sums = {
        "plain": lambda: loss + TWO,
        "of two": lambda: loss + (HALF + TWO),
        "of several": lambda: loss + sum([HALF, TWO]) / 2,
        "of a difference": lambda: loss + abs(HALF - TWO),
        "with numbers": lambda: loss - (1 - 1 / TWO),
        "negative": lambda: -HALF + loss,
        "right": lambda: TWO / 10 + loss,
        "less": lambda: loss - TWO,
        "from": lambda: TWO - loss,
        "function": lambda: torch.add(loss, TWO),
        "in place": lambda: loss.clone().add_(TWO),
    }
    for add in sums.values():
        with pytest.warns(UserWarning, match="it has no gradient"):
            add()


def test_other_calculations_with_tensors_do_not_warn():
    loss = torch.tensor(3.0, requires_grad=True)
    assert (loss * TWO).item() == 6
    assert (loss / TWO).item() == 1.5
    assert (loss > TWO).item()
    assert (loss + float(TWO)).item() == (loss + TWO.value).item() == 5
    assert (loss.detach() + 0.5 * TWO).item() == 4
    assert (torch.clamp(loss, max=TWO)).item() == 2


def test_compiled_code_takes_estimates():
    compiled = torch.compile(lambda x, factor: x * TWO + factor, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2), HALF).tolist() == [2.5, 2.5]


def test_equality():
    other = dataclasses.replace(TWO, samples=6)
    assert TWO == 2.0 == TWO
    assert TWO.__ne__(2) is False
    assert TWO != 3
    assert TWO != "2"
    assert other != TWO
    assert TWO.__eq__(other) is False
    assert TWO.value == other.value
    assert pytest.approx(2.0 + 1e-9) == TWO
    assert pytest.approx(TWO) == 2.0
    nothing = dataclasses.replace(TWO, value=math.nan)
    assert nothing == dataclasses.replace(TWO, value=math.nan)
    assert nothing != math.nan
    with pytest.raises(TypeError, match="unhashable"):
        hash(TWO)


def test_copies():
    whole = dataclasses.replace(TWO, per_sample=torch.ones(3), notes=("a note",))
    for other in (copy.copy(whole), copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert other == whole
        assert (float(other), other.value, other.dof) == (2.0, 2.0, 4.0)
    changed = dataclasses.replace(TWO, value=3.0)
    assert (float(changed), changed.value) == (3.0, 3.0)
    assert pf.results.Estimate.from_dict(whole.to_dict()) == whole


def test_what_is_calculated_is_read_without_the_package(tmp_path):
    """A checkpoint with ``0.1 * estimate`` in it is data: it loads where only tensors and plain numbers do."""
    for found in (0.1 * TWO, HALF + TWO, -HALF):
        torch.save({"weight": torch.ones(2), "flatness": found}, tmp_path / "held.pt")
        held = torch.load(tmp_path / "held.pt", weights_only=True)["flatness"]
        assert (held.dtype, held.shape, held.item()) == (torch.float64, (), float(found))
        assert b"pyflatness" not in (tmp_path / "held.pt").read_bytes()
        assert type(pickle.loads(pickle.dumps(found))) is float
        assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == copy.copy(found) == float(found)
    torch.save({"flatness": TWO.value}, tmp_path / "held.pt")
    assert type(torch.load(tmp_path / "held.pt", weights_only=True)["flatness"]) is float


def test_facts_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TWO.value = 3.0

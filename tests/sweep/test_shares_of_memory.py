"""How the memory for cotangents that are held back is shared out among layers on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from pyflatness.sweep.contracted import _even_shares


def run(**outputs):
    """A run of layers whose calls have these outputs."""
    calls = {name: [SimpleNamespace(output=output) for output in each] for name, each in outputs.items()}
    return SimpleNamespace(calls=calls.__getitem__)


@pytest.mark.parametrize("together", [2, 3, 9])
def test_as_many_cotangents_of_every_layer(together):
    """Half precision is held back as float32, and the calls of a layer together."""
    made = run(
        wide=[torch.zeros(4, 100)],
        narrow=[torch.zeros(4, 3, dtype=torch.bfloat16)],
        shared=[torch.zeros(4, 5, dtype=torch.float64)] * 2,
    )
    each = {"wide": 1600, "narrow": 48, "shared": 320}
    for left in (0, sum(each.values()) - 1):
        shares = _even_shares(made, each, together * sum(each.values()) + left)
        assert shares == {name: together * needed for name, needed in each.items()}


def test_one_cotangent_is_not_worth_it():
    assert _even_shares(run(layer=[torch.zeros(4, 100)]), ["layer"], 3199) == {}
    assert _even_shares(run(), [], 100) == {}

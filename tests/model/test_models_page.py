"""The table of architectures in docs/models.md, against what is measured; full configurations, on the meta device."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from support import models_page
from support.full_architectures import FULL, of_full


def test_the_table_is_what_is_measured() -> None:
    assert models_page.on_page() == models_page.table(), "python tests/support/models_page.py --write"


@pytest.mark.parametrize("name", FULL)
def test_every_weight_of_a_full_configuration_is_measured_or_named(name: str) -> None:
    found = of_full(name)
    measured = sum(layer.entries for layer in found.layers.values())
    assert measured / found.entries + sum(found.uncovered.values()) == pytest.approx(1)

"""Processes, models and loaders of accelerate's."""

from pathlib import Path

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import ROOT, rank_script, ranks

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate -c constraints.txt")


@pytest.mark.soak
def test_ranks_measure_what_accelerate_prepares(tmp_path: Path) -> None:
    done = ranks.torchrun(ROOT / "tests" / "support" / "accelerate_script.py", tmp_path)  # accelerate launch wants MPI
    assert done.returncode == 0, done.stderr
    inputs, targets = rank_script.dataset().tensors
    for name, places in (("even", [*range(25), *range(7)]), ("each_once", [*range(25)])):  # 8 batches of 4
        first, second = (pf.results.Report.from_json(tmp_path / f"{name}{rank}") for rank in range(2))
        assert first == second
        data = inputs[places], targets[places]
        expected = pf.measure(rank_script.model(), nn.CrossEntropyLoss(), data, measures=first.measures)
        for measure, values in expected.by_measure().items():
            for layer, value in values.items():
                found = first[layer, measure]
                assert float(found) == pytest.approx(float(value), rel=1e-10)
                told = [note for note in found.notes if "accelerate repeats 7 samples" in note]
                assert len(told) == (name == "even")


def test_a_model_with_accelerates_forward_is_the_model(tmp_path: Path) -> None:
    from accelerate import Accelerator

    model = rank_script.model()
    prepared = Accelerator(cpu=True).prepare(model)
    inputs, targets = rank_script.dataset().tensors
    values = [pf.relative_flatness(each, nn.CrossEntropyLoss(), (inputs, targets)) for each in (prepared, model)]
    assert torch.equal(*(torch.tensor(float(value)) for value in values))

"""Scripts that torchrun has started."""

from pathlib import Path

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import ROOT, rank_script, ranks

SCRIPT = ROOT / "tests" / "support" / "rank_script.py"


def test_ranks_of_torchrun_measure_a_wrapped_model_together(tmp_path: Path):
    done = ranks.torchrun(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (pf.results.Report.from_json(tmp_path / f"{rank}") for rank in range(2))
    assert first == second
    inputs, targets = rank_script.dataset().tensors
    repeated = torch.cat([inputs, inputs[:1]]), torch.cat([targets, targets[:1]])  # as the sampler does
    expected = pf.measure(rank_script.model(), nn.CrossEntropyLoss(), repeated, measures=first.measures)
    for measure, values in expected.by_measure().items():
        for layer, value in values.items():
            assert float(first[layer, measure]) == pytest.approx(float(value), rel=1e-10)
            assert any("repeats 1 of the 25 samples" in note for note in first[layer, measure].notes)


@pytest.mark.soak
def test_four_ranks_measure_together(tmp_path: Path):
    done = ranks.torchrun(SCRIPT, tmp_path, size=4)
    assert done.returncode == 0, done.stderr
    assert len({(tmp_path / f"{rank}").read_text() for rank in range(4)}) == 1


@pytest.mark.soak
def test_a_rank_that_ends_is_an_error_of_the_others(tmp_path: Path):
    assert ranks.torchrun(SCRIPT, tmp_path, "die").returncode != 0
    assert "ended, or does not answer" in (tmp_path / "0").read_text()
    assert not (tmp_path / "1").exists()

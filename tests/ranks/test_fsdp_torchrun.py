"""Scripts that torchrun has started, in which a language model is spread over ranks by FSDP2."""

from pathlib import Path

import pytest

import pyflatness as pf
from support import ROOT, ranks

pytest.importorskip("transformers", reason="transformers is not installed")

SCRIPT = ROOT / "tests" / "support" / "rank_fsdp_script.py"
STORIES = ROOT.parent / "shared" / "models" / "stories260K"
if not STORIES.is_dir():
    pytest.skip(f"there is no {STORIES}", allow_module_level=True)


@pytest.fixture(scope="module")
def expected():
    from support import rank_fsdp_script

    return pf.measure(
        rank_fsdp_script.model(STORIES), data=rank_fsdp_script.batches(STORIES), **rank_fsdp_script.CHOICE
    )


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_values_of_one_process(expected, tmp_path: Path, size: int):
    """Of two ranks the first has more batches, and of four the last has none."""
    done = ranks.torchrun(SCRIPT, tmp_path, STORIES, size=size)
    assert done.returncode == 0, done.stderr
    first, *others = ((tmp_path / f"{rank}").read_text() for rank in range(size))
    assert all(other == first for other in others)
    found = pf.results.Report.from_json(tmp_path / "0")
    for measure, values in expected.by_measure().items():
        for layer, value in values.items():
            assert float(found[layer, measure]) == pytest.approx(float(value), rel=1e-10)
            assert found[layer, measure].notes == value.notes  # tied weights are named


@pytest.mark.soak
def test_a_rank_that_ends_is_an_error_of_the_others(tmp_path: Path):
    assert ranks.torchrun(SCRIPT, tmp_path, STORIES, "die").returncode != 0
    assert "ended, or does not answer" in (tmp_path / "0").read_text()
    assert not (tmp_path / "1").exists()

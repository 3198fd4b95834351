"""What all results have in common: as a dict, as JSON, as a data frame, they say the same."""

import json
from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness import progress
from pyflatness.curvature.quadratic import Quadratic

TABLE = {"depth": [2, 2, 4, 4], "rate": [0.1, 0.3, 0.1, 0.3], "kappa": [1, 2, 4, 3], "gap": [5, 6, 7, 8]}


def test_results_of_grids() -> None:
    pytest.importorskip("pandas", reason="data frames need pandas")
    psi = pf.statistics.granulated_kendall(TABLE, "kappa", "gap", ["depth", "rate"])
    assert psi.to_dict() == {
        **{"measure": "kappa", "target": "gap", "value": 0.5},
        **{"by_setting": {"depth": 1.0, "rate": 0.0}, "pairs": {"depth": 2, "rate": 2}},
    }
    assert json.loads(psi.to_json()) == psi.to_dict()
    assert psi.to_frame()["psi"].tolist() == [1.0, 0.0]
    errors = pf.statistics.sign_error(TABLE, "kappa", "gap", ["depth", "rate"])
    assert [row["error"] for row in errors.to_dict()["environments"]] == [row.error for row in errors.environments]
    assert errors.to_frame()["error"].tolist() == [row.error for row in errors.environments]
    information = pf.statistics.conditional_mutual_information(TABLE, "kappa", "gap", ["depth", "rate"])
    assert [*information.to_dict()["by_condition"]] == ["", "depth", "rate", "depth, rate"]
    assert information.to_frame()["given"].tolist() == ["", "depth", "rate", "depth, rate"]


def test_tensors_and_what_results_hold_become_lists_and_dicts(tmp_path: Path) -> None:
    along = torch.tensor([0.0, 1.0], dtype=torch.float64)
    model = Quadratic(1.0, torch.tensor([2.0]), torch.tensor([[3.0]]))
    landscape = pf.results.Landscape((along,), along + 1, None, 1.0, model, ("a",), 7, 2, {"model": "m"})
    found = landscape.to_dict()
    assert found["losses"] == [1.0, 2.0]
    assert found["coefficients"] == [[0.0, 1.0]]
    assert found["accuracy"] is None
    assert found["quadratic"] == {"value": 1.0, "gradient": [2.0], "hessian": [[3.0]]}
    assert json.loads(landscape.to_json(tmp_path / "landscape.json")) == found
    assert json.loads((tmp_path / "landscape.json").read_text()) == found
    assert repr(landscape) == str(landscape)


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by 12 seconds whenever it is read."""
    seconds = iter(range(0, 10_000, 12))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))


def test_a_log_gets_a_line_every_half_minute(clock, capsys):
    assert [*progress.track(range(7), 7, "sweep", None)] == [*range(7)]
    assert capsys.readouterr().err.splitlines() == ["sweep: 3 of 7 after 36 s", "sweep: 6 of 7 after 72 s"]
    with progress.bar("plan", 9, None) as advance:
        for _ in range(4):
            advance(2, "layer 'a'")
    assert capsys.readouterr().err.splitlines() == ["plan: layer 'a': 6 of 9 after 36 s"]


def test_no_lines_where_they_are_not_wanted_or_not_needed(clock, monkeypatch, capsys):
    assert [*progress.track(range(7), 7, "sweep", False)] == [*range(7)]
    monkeypatch.setattr(progress, "_EVERY", 1e9)
    assert [*progress.track(range(7), 7, "sweep", None)] == [*range(7)]
    assert capsys.readouterr().err == ""

"""The callback for Lightning's ddp strategy: two processes train, and measure together."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import ROOT, ranks, trainings

pytest.importorskip("lightning.pytorch")


@pytest.mark.soak
def test_two_processes_train_and_measure_together(tmp_path: Path):
    done = ranks.torchrun(ROOT / "tests" / "support" / "rank_lightning_script.py", tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["same"]  # as without the callback: losses, buffers, random states
    assert second["same"]
    assert first["histories"] == second["histories"]
    assert first["buffers"] != second["buffers"]  # BatchNorm's, of each one's own samples
    network = trainings.Network()
    network.load_state_dict(
        {name: torch.tensor(values) for name, values in first["weights"].items()}
        | {name.removeprefix("net."): torch.tensor(values) for name, values in first["buffers"].items()}
    )
    for loader, history in zip(trainings.loaders(noise=0)[::-1], first["histories"], strict=True):
        data = torch.stack([x for x, _ in loader.dataset]), loader.dataset.targets
        report = pf.measure(network.eval(), nn.CrossEntropyLoss(), data, measures="relative_flatness")
        last = [row for row in history if row["epoch"] == 2]
        assert {row["samples"] for row in last} == {len(data[0])}
        for row, layer in zip(last, ("body", "head", ""), strict=True):
            assert row["layer"].removeprefix("net.") == layer
            assert row["value"] == pytest.approx(report.by_measure()["relative_flatness"][layer].value, rel=1e-5)
    logged = next(tmp_path.glob("lightning_logs/version_1/metrics.csv"))
    assert "flatness/relative_flatness/head" in logged.read_text()

"""The study of docs/study.md: its list is balanced, and two tiny trainings become rows, each at its loss exactly."""

import csv
import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.papers import study
from support.grid import normal

NAMES = [*study.SETTINGS]


def test_every_prefix_of_blocks_is_balanced():
    trainings = study.plan()
    assert len({planned.name for planned in trainings}) == len(trainings) == 1728
    for start in range(0, len(trainings), study.BLOCK):
        block = trainings[start : start + study.BLOCK]
        assert {(one.data, one.architecture) for one in block} == {*study.SHAPES}
        for name, levels in study.SETTINGS.items():
            assert sum(one.settings[name] == levels[0] for one in block) == study.BLOCK // 2
    steps = trainings[: 9 * study.BLOCK : 2]  # of the first trajectory, a seed of each recipe
    for shape in study.SHAPES:
        own = [[*one.settings.values()] for one in steps if (one.data, one.architecture) == shape]
        changed = [[name for name, a, b in zip(NAMES, *two, strict=True) if a != b] for two in itertools.pairwise(own)]
        assert sorted(itertools.chain(*changed)) == sorted(NAMES)


def synthetic(name):
    images = (normal(1, 120, 1, 28, 28).float() * 40 + 100).clamp(0, 255)
    labels = torch.arange(120) % 10
    images += 100 * F.interpolate((labels[:, None] == torch.arange(16)).float().view(-1, 1, 4, 4), size=28)
    return study.prepared((images[:60], labels[:60]), (images[60:], labels[60:]))


@pytest.mark.parametrize("architecture", ["normalised", "transformer"])
def test_from_images_to_rows(tmp_path, monkeypatch, architecture):
    monkeypatch.setattr(study, "LOSSES", (1.0, 0.5))
    settings = dict.fromkeys(NAMES, 0.0) | {"rate": 1.0, "batch_size": 20, "weight_decay": 1.0, "optimizer": "adam"}
    first = study.Planned("mnist", architecture, settings | {"sam": 0.02, "augmentation": "shift"}, 3)
    trainings = [first, replace(first, settings=settings | {"label_noise": 0.1}, seed=4)]
    path = study.run(trainings[:1], synthetic, tmp_path, 2)
    text = path.read_text()
    assert study.run(trainings, synthetic, tmp_path, 4).read_text().startswith(text)  # goes on, and trains none again
    rows = [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())]
    assert [(row["training"], row["loss"]) for row in rows] == [
        (one.name, loss) for one in trainings for loss in ("1", "0.5")
    ]
    for row in rows:
        assert float(row["train_loss"]) == pytest.approx(float(row["loss"]), rel=1e-4)
        assert all(row[name] for name in study.COLUMNS), row
    images, labels = synthetic("mnist")[0]
    weights = study.read(tmp_path, rows[2])
    noisy = study.with_noise(labels, 0.1)
    with torch.no_grad():
        assert float(F.cross_entropy(weights(images), noisy)) == pytest.approx(1.0, rel=1e-4)
    assert (noisy != labels).sum() > 0

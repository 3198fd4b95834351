"""The study of docs/study.md: its list is balanced, and two tiny trainings become rows, each at its loss exactly."""

import csv
import itertools
import math
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch
from torch.nn import functional as F

from benchmarks.papers import study, study_report
from pyflatness.statistics import conditional_mutual_information, correlations, granulated_kendall, sign_error
from support.grid import normal

NAMES = [*study.SETTINGS]


def test_every_prefix_of_blocks_is_balanced():
    trainings = study.plan()
    assert len({planned.name for planned in trainings}) == len({planned.seed for planned in trainings}) == 1152
    for start in range(0, len(trainings), study.BLOCK):
        block = trainings[start : start + study.BLOCK]
        assert {(one.data, one.architecture) for one in block} == {*study.SHAPES}
        for name, levels in study.SETTINGS.items():
            assert sum(one.settings[name] == levels[0] for one in block) == study.BLOCK // 2
    first, second = trainings[: study.BLOCK], trainings[study.BLOCK : 2 * study.BLOCK]
    assert [replace(one, seed=one.seed + 1) for one in first] == second
    steps = [one for block in range(0, 16, 2) for one in trainings[study.BLOCK * block : study.BLOCK * (block + 1) : 2]]
    for shape in study.SHAPES:  # of the first trajectory, a seed of each recipe
        own = [[*one.settings.values()] for one in steps if (one.data, one.architecture) == shape]
        changed = [[name for name, a, b in zip(NAMES, *two, strict=True) if a != b] for two in itertools.pairwise(own)]
        assert sorted(itertools.chain(*changed)) == sorted(NAMES)


def synthetic(name):
    images = (normal(1, 120, 1, 28, 28).float() * 40 + 100).clamp(0, 255)
    labels = torch.arange(120) % 10
    images += 100 * F.interpolate((labels[:, None] == torch.arange(16)).float().view(-1, 1, 4, 4), size=28)
    return study.prepared((images[:60], labels[:60]), (images[60:], labels[60:]))


def test_from_images_to_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "LOSSES", (1.0, 0.5))
    settings = dict.fromkeys(NAMES, 0.0) | {"rate": 1.0, "batch_size": 20, "weight_decay": 1.0, "optimizer": "adam"}
    first = study.Planned("mnist", "normalised", settings | {"sam": 0.02, "augmentation": 0.1}, 3)
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


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Four blocks and a training, in which trace is the order of the test error, and λ_max is not finite once."""
    generator, rows = np.random.default_rng(0), []
    for planned in study.plan()[: 4 * study.BLOCK + 1]:
        error = 0.2 + 0.3 * (planned.settings["label_noise"] > 0) + 0.05 * generator.random()
        for loss in study.LOSSES:
            facts = {"data": planned.data, "architecture": planned.architecture, **planned.settings, "loss": loss}
            facts |= {"name": f"{planned.name}_loss{loss}", "training": planned.name, "seed": planned.seed}
            told = dict.fromkeys((*study.TARGETS, "trace"), error + 0.01 * generator.random())
            values = dict(zip(study.MEASURED, generator.random(len(study.MEASURED)), strict=True))
            rows.append(values | facts | told | {"train_loss": loss, "steps": generator.integers(9, 99)})
    rows[7]["test error"], rows[5]["lambda_max"] = math.nan, math.inf
    path = tmp_path_factory.mktemp("study") / "networks.csv"
    pandas.DataFrame(rows).reindex(columns=study.COLUMNS).to_csv(path, index=False)
    return path


def test_what_is_compared(table):
    frame = study_report.references(study_report.table(table), "test error")
    assert len(frame) == len(study.LOSSES) * 4 * study.BLOCK - 1
    measures = study_report.compared(frame)
    assert {"lambda_max", "trace"} & {*measures} == {"trace"}
    tau = study_report.taus(frame, ["trace", "relative_flatness", "random numbers"], "test error")
    assert tau["trace"].value == pytest.approx(1)
    assert tau["relative_flatness"].low < 0 < tau["relative_flatness"].high
    twins = [pair for _, pair in frame.groupby(["recipe", "loss"]) if len(pair) > 1]
    assert len(twins) == len(frame) // 2
    assert all([*pair["the twin's target"]] == [*pair["test error"][::-1]] for pair in twins)


def test_partial_correlations_are_the_librarys(table):
    frame = study_report.table(table)
    frame["stratum"] = frame["loss"].astype(str)  # no setting is constant then
    settings = ["stratum", *study.SETTINGS]
    texts = frame.assign(**{name: "=" + frame[name].astype(str) for name in settings})
    expected = correlations(
        texts, ["nmls", "margin"], "test error", given=settings, interval="fisher", settings="recipe"
    )
    for name, found in study_report.partials(frame, ["nmls", "margin"]).items():
        of = expected[name, "Spearman"]
        assert (found.value, found.low, found.high) == pytest.approx((of.value, of.low, of.high), abs=1e-8)


def test_pairs_of_networks(table):
    frame = study_report.table(table)
    settings = study_report.settings_with_pairs(frame)
    assert sorted(settings.values()) == [2] * 5 + [4] * 2  # of nine shapes, two recipes each
    found = study_report.pairwise(frame, ["trace", "nmls"])
    assert [found["trace"][name].value for name in ("Ψ", "sign error", "CMI")] == pytest.approx([1, 0, 1])
    assert all(found["trace"][name].value == 1 and found["trace"][name].low is None for name in settings)
    assert found["nmls"]["sign error"].value == pytest.approx(0.5, abs=0.2)


def test_statistics_of_pairs_are_the_librarys(table, monkeypatch):
    monkeypatch.setattr(study_report, "FEWEST", 6)
    frame = study_report.table(table)
    frame["nmls"] = frame["nmls"].round(1)  # ties
    settings = [*study_report.settings_with_pairs(frame)]
    kept = np.arange(len(frame)) % 17 > 0
    found = study_report.Pairs.of(frame, settings).statistics(frame["nmls"], frame["test loss"], kept)
    every, some = ["stratum", *settings], frame[kept]
    psi = granulated_kendall(some, "nmls", "test loss", every).by_setting
    errors, merged = (
        [one for one in sign_error(some, "nmls", "test loss", every, fewest=fewest).environments
         if one.setting != "stratum"]
        for fewest in (1, 6)
    )  # fmt: skip
    expected = [psi[name] for name in settings]
    information = conditional_mutual_information(some, "nmls", "test loss", "stratum").by_condition["stratum",]
    expected += [np.mean(expected), information, np.mean([one.error for one in errors])]
    assert found == pytest.approx([*expected, max(one.error for one in merged if one.pairs >= 6)])

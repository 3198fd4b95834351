"""``pyflatness demo``: its numbers, the files that it saves, and that the commands which it prints work."""

import csv
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.cli import demo, example_networks
from pyflatness.scoring import checkpoints, specs
from support import ROOT
from support.score_runs import status

CHOICES = [("mlp_1", "adam", 0.001, 64), ("mlp_1", "adam", 0.002, 64), ("mlp_1", "adam", 0.005, 64)]
CHOICES += [("cnn", "sgd", 0.02, 16), ("mlp_2", "sgd", 0.005, 128)]
KEYS = "network", "optimizer", "learning_rate", "batch_size"
RECIPES = [dict(zip(KEYS, choice, strict=True)) | {"seed": seed} for seed, choice in enumerate(CHOICES)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, of a name that a shell would take apart, and what the command printed after two epochs."""
    folder = tmp_path_factory.mktemp("a demo's")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "recipes", lambda seed: RECIPES)
        patch.setattr(demo, "MAX_EPOCHS", 2)
        printed: list[str] = []
        patch.setattr("click.echo", lambda text, err=False: printed.append(text))
        state, threads = torch.get_rng_state(), torch.get_num_threads()
        assert status("demo", "--out", str(folder), "--seed", "5") == 0
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads
    return folder, "\n".join(printed)


def test_every_network_is_in_the_files(made):
    folder, printed = made
    assert (folder / "scatter.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((folder / "results.json").read_text())
    with (folder / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert (results["seed"], results["versions"]["torch"]) == (5, torch.__version__)
    assert len(results["correlations"]) == 3 * len(demo.MEASURES)
    (train, test), loss = demo.digits(5), torch.nn.CrossEntropyLoss()
    for recipe, row, cells in zip(RECIPES, results["networks"], table, strict=True):
        assert row.items() >= {**recipe, "epochs": 2, "converged": False}.items()
        assert float(cells["relative_flatness"]) == row["relative_flatness"]
        network = _read(folder, row)
        assert row["test_loss"] == pytest.approx(loss(network(test[0]), test[1]).item(), rel=1e-5)
        assert row["gap"] == row["test_loss"] - row["train_loss"]
        for measure, normalize in zip(demo.MEASURES, (None, "std"), strict=True):
            expected = float(pf.measure(network, loss, train, normalize=normalize)["relative_flatness"])
            assert row[measure] == pytest.approx(expected, rel=1e-6)
    assert "after the most epochs allowed" in printed
    assert "with the training loss held fixed, Kendall's correlation" in printed
    assert "compared within the same architecture" in " ".join(printed.split())


def test_the_last_sentence_reads_the_interval():
    generator = np.random.default_rng(0)
    for sign, said in ((1, "have the smaller gap"), (-1, "have the larger gap"), (0, "do not decide")):
        kappa, noise, loss = generator.normal(size=(3, 24)).tolist()
        gap = [sign * k + 0.1 * e for k, e in zip(kappa, noise, strict=True)]
        columns = zip(kappa, gap, loss, strict=True)
        rows = [
            {"name": str(i), "network": "abc"[i % 3], "relative_flatness": k, "relative_flatness_std": k, "gap": g,
             "train_loss": e} for i, (k, g, e) in enumerate(columns)
        ]  # fmt: skip
        assert said in demo.conclusion(demo.correlated(rows, ["loss"]))


def _read(folder, row):
    network = specs.resolve(f"{folder}/networks.py:{row['network']}")()
    checkpoints.load(network, checkpoints.read(folder / f"{row['name']}.safetensors").state)
    return network.eval()


def test_checkpoints_have_their_settings(made):
    folder, _ = made
    names = ["cnn/sgd_lr0.02_batch16", "mlp_1/adam_lr0.001_batch64", "mlp_1/adam_lr0.002_batch64"]
    names += ["mlp_1/adam_lr0.005_batch64", "mlp_2/sgd_lr0.005_batch128"]
    assert checkpoints.find([folder]) == [folder / f"{name}.safetensors" for name in names]
    found = checkpoints.read(folder / f"{names[3]}.safetensors")
    expected = {"network": "mlp_1", "optimizer": "adam", "learning_rate": "0.005", "batch_size": "64", "seed": "2"}
    assert found.metadata.items() >= expected.items()
    with np.load(folder / "test.npz") as file:
        assert torch.equal(torch.from_numpy(file["labels"]), demo.digits(5)[1][1])
    source = (folder / "networks.py").read_text()
    assert source == Path(example_networks.__file__).read_text()
    assert re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE) == ["torch"]  # they need no pyflatness


def test_printed_commands_work(made, monkeypatch, tmp_path):
    folder, printed = made
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^    (.+)$", printed, re.MULTILINE)
    assert lines == [*demo.commands(folder)]
    for program, *arguments in map(shlex.split, lines):
        if program == "pyflatness":
            assert status(*arguments) == 0
        else:
            assert (program, arguments[0]) == ("python", "-c")
            exec(arguments[1], {})
    assert pf.statistics.correlations(folder / "train.csv", test=folder / "test.csv").points == 3


def test_the_page_has_these_commands():
    page = (ROOT / "docs" / "scoring.md").read_text(encoding="utf-8").splitlines()
    for line in ["pyflatness demo --out digits", *demo.commands(Path("digits"))]:
        assert f"    {line}" in page


def test_recipes_vary_everything():
    recipes = demo.recipes(7)
    assert len({recipe["seed"] for recipe in recipes}) == len(recipes) == 24
    for field in KEYS:
        assert len({recipe[field] for recipe in recipes}) > 1


def test_digits_are_split_by_seed():
    (train, _), (test, _) = demo.digits(0)
    assert train.shape[1:] == (1, 8, 8)
    assert len(train) + len(test) == 1797
    assert torch.equal(demo.digits(0)[0][0], train)
    assert not torch.equal(demo.digits(1)[0][0], train)


def test_training_reaches_the_target():
    data, _ = demo.digits(0)
    network, _, converged = demo.trained(RECIPES[2], data)
    assert converged
    assert not network.training
    with torch.no_grad():
        assert float(F.cross_entropy(network(data[0]), data[1])) < 2 * demo.TARGET_LOSS


def test_a_network_that_diverged_stays_in_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "MAX_EPOCHS", 1)
    chosen = [RECIPES[0], RECIPES[1], RECIPES[4] | {"learning_rate": 1e30}]
    rows = demo.measured(chosen, *demo.digits(0), tmp_path)
    assert math.isnan(rows[2]["relative_flatness"])
    found = demo.correlated(rows)
    assert (found.points, found.excluded) == (2, (rows[2]["name"],))
    demo.write(tmp_path, rows, found, seed=0)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["relative_flatness"] is None for row in results["networks"]] == [False, False, True]


def test_json_is_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "MAX_EPOCHS", 1)
    monkeypatch.setattr(demo, "recipes", lambda seed: RECIPES[:2])
    assert status("demo", "--out", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "results.json").read_text())

"""``pyflatness example-zoo``: what it saves, and that the commands which it prints work."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pyflatness as pf
from pyflatness.cli import demo_networks, example_networks, example_zoo
from pyflatness.scoring import checkpoints, listing, loading, specs
from support import ROOT
from support.score_runs import status

RECIPES = [demo_networks.Recipe("MLP-1", "Adam", rate, 64, seed) for seed, rate in enumerate((0.001, 0.002, 0.005))]
RECIPES += [demo_networks.Recipe("CNN", "SGD", 0.02, 16, 3), demo_networks.Recipe("MLP-2", "SGD", 0.005, 128, 4)]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder, of a name that a shell would take apart, and what the command printed."""
    folder = tmp_path_factory.mktemp("a zoo's")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_networks, "recipes", lambda seed: RECIPES)
        patch.setattr(demo_networks, "MAX_EPOCHS", 2)
        patch.setattr("click.echo", lambda text: printed.append(text))
        printed: list[str] = []
        assert status("example-zoo", str(folder)) == 0
    return folder, "\n".join(printed)


def test_checkpoints_have_their_settings(zoo: tuple[Path, str]) -> None:
    folder, _ = zoo
    names = ["cnn/sgd_lr0.02_batch16", "mlp_1/adam_lr0.001_batch64", "mlp_1/adam_lr0.002_batch64"]
    names += ["mlp_1/adam_lr0.005_batch64", "mlp_2/sgd_lr0.005_batch128"]
    assert listing.find([folder]) == [folder / f"{name}.safetensors" for name in names]
    found = checkpoints.read(folder / f"{names[3]}.safetensors")
    with np.load(folder / "test.npz") as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    network = specs.resolve(f"{folder}/networks.py:mlp_1")()
    assert loading.load(network, found.state) == ()
    loss, accuracy = demo_networks.evaluate(network, images, labels)
    expected = {"network": "MLP-1", "optimiser": "Adam", "learning_rate": "0.005", "batch_size": "64", "seed": "2"}
    assert found.metadata.items() >= expected.items()
    assert float(found.metadata["test_loss"]) == pytest.approx(loss)
    assert float(found.metadata["test_accuracy"]) == accuracy
    gap = loss - float(found.metadata["train_loss"])
    assert float(found.metadata["generalization_gap"]) == pytest.approx(gap)


def test_printed_commands_work(zoo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, printed = zoo
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^    (.+)$", printed, re.MULTILINE)
    assert lines == [*example_zoo.commands(folder)]
    for program, *arguments in map(shlex.split, lines):
        if program == "pyflatness":
            assert status(*arguments) == 0
        else:
            assert (program, arguments[0]) == ("python", "-c")
            exec(arguments[1], {})
    found = pf.statistics.correlations(folder / "train.csv", test=folder / "test.csv")
    assert found.points == 3


def test_the_page_has_these_commands() -> None:
    page = (ROOT / "docs" / "scoring.md").read_text(encoding="utf-8").splitlines()
    for line in ["pyflatness example-zoo digits", *example_zoo.commands(Path("digits"))]:
        assert f"    {line}" in page


def test_the_networks_need_no_pyflatness(zoo: tuple[Path, str]) -> None:
    folder, _ = zoo
    source = (folder / "networks.py").read_text()
    assert source == Path(example_networks.__file__).read_text()
    assert re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE) == ["torch"]


def test_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert status("example-zoo", str(tmp_path)) == "Error: the digits need scikit-learn: pip install 'pyflatness[demo]'"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert str(status("example-zoo", str(tmp_path / "file"))).startswith(f"Error: DIR {tmp_path / 'file'}: ")

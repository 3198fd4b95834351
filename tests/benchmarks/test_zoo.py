"""``benchmarks/zoo.py``: reparameterised checkpoints and the tables of correlations, on small networks."""

import csv
import importlib.util
import sys
from pathlib import Path

import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file

import pyflatness as pf
from pyflatness import cli
from support import ROOT

RUNNER = ROOT / "benchmarks" / "zoo.py"
NETWORK = """
import torch
from torch import nn

class LeNet5(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

def train_data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(20, 4, generator=generator), torch.randint(3, (20,), generator=generator)) for _ in range(2)]

def test_data():
    return train_data(1)
"""


def _run(*arguments: object) -> None:
    with pytest.raises(SystemExit) as exit_:
        sys.modules["zoo"].main([str(argument) for argument in arguments])
    assert exit_.value.code == 0


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _score(folder: Path, data: str, out: str, *rest: object) -> Path:
    spec = [f"--model={folder}/lenet5.py:LeNet5", f"--data={folder}/lenet5.py:{data}", "--loss=cross_entropy"]
    with pytest.raises(SystemExit) as exit_:
        cli.main(["score", *spec, f"--out={folder / out}", *map(str, rest)])
    assert not exit_.value.code
    return folder / out


@pytest.fixture
def zoo(tiny: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Path], pf.results.Report]:
    """A folder with the network's file, its checkpoints, and what is measured of the first."""
    if not RUNNER.is_file():
        pytest.skip("the benchmarks are not part of this source tree")
    monkeypatch.syspath_prepend(RUNNER.parent)
    spec = importlib.util.spec_from_file_location("zoo", RUNNER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "zoo", module)
    spec.loader.exec_module(module)
    folder = Path(tiny).parent
    (folder / "lenet5.py").write_text(NETWORK)
    own: dict[str, object] = {}
    exec(NETWORK, own)
    paths, reports = [folder / f"net{seed}.safetensors" for seed in range(6)], []
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        network = own["LeNet5"]().eval()
        save_file(network.state_dict(), path)
        reports.append(pf.measure(network, "cross_entropy", own["train_data"](), measures="sweep"))
    return folder, paths, reports[0]


def test_the_zoo_reparameterised_and_its_tables(zoo, capsys):
    folder, paths, report = zoo
    scaled = folder / "scaled"
    _run("reparameterize", folder / "lenet5.py", scaled, *paths)
    first = [load_file(scaled / path.name) for path in paths]
    _run("reparameterize", folder / "lenet5.py", scaled, *paths)
    factors = []
    for path, state in zip(paths, first, strict=True):
        assert all(torch.equal(state[name], again) for name, again in load_file(scaled / path.name).items())
        own = load_file(path)
        one, two = (float((state[name] / own[name]).median()) for name in ("0.bias", "2.bias"))
        torch.testing.assert_close(state["0.weight"], own["0.weight"] * one)
        torch.testing.assert_close(state["2.weight"], own["2.weight"] * two / one)
        torch.testing.assert_close(state["4.weight"], own["4.weight"] / two)
        assert torch.equal(state["4.bias"], own["4.bias"])
        factors += [one, two]
    assert len({*factors}) == len(factors)
    assert all(5 <= factor <= 25 for factor in factors)

    files = [_score(folder, name, f"{name}.csv", "--layers=4", *paths) for name in ("train_data", "test_data")]
    groups = ("relative_flatness", "trace", "sharpness", "mls"), ("weight_norm", "pac_bayes")
    options = []
    for weights, where in (("before", folder), ("after", scaled)):
        for number, names in enumerate(groups):
            chosen = ["--layers=*", *(f"--measures={name}" for name in names)]
            scored = _score(folder, "train_data", f"{weights}{number}.csv", *chosen, *(where / p.name for p in paths))
            options.append(f"--{weights}={scored}")
    capsys.readouterr()
    _run("table", *files, *options, "--head=4", "--out", folder / "docs")
    printed = capsys.readouterr().out
    before, after = (folder / "docs" / f"{name}.csv" for name in ("before", "after"))
    rows = _rows(before)
    assert [row["checkpoint"] for row in rows] == [path.stem for path in paths]
    for layer, column in (("0", "trace 0"), ("4", "relative_flatness 4"), ("", "trace network")):
        assert float(rows[0][column]) == pytest.approx(report[layer, column.split()[0]].value, rel=1e-4)
    losses = [float(row["loss"]) for file in files[:2] for row in _rows(file)]
    for row, train, test in zip(rows, losses[:6], losses[6:], strict=True):
        assert float(row["gap"]) == pytest.approx(test - train, rel=1e-4, abs=1e-5)
    for name, moved in (("relative_flatness 4", False), ("weight_norm network", True)):
        same = [pf.statistics.correlations(file, name)[name, "Pearson"].value for file in (before, after)]
        assert (abs(same[0] - same[1]) > 1e-3) == moved
        assert (f"| {name} | before and after | 6 |" in printed) != moved
        assert (f"| {name} | after | 6 |" in printed) == moved
    written = _rows(folder / "docs" / "correlations.csv")
    table = {(row["measure"], row["weights"], row["statistic"]): row for row in written}
    assert len(table) == 6 * (4 + 4 + 4 + 4 + 1 + 1 + 3)  # with the loss, the recipe's mean gap and random numbers
    numbers = {**pandas.read_csv(after), "recipe": range(6)}
    found = pf.statistics.correlations(numbers, "sharpness", interval="fisher", settings="recipe", seeds="recipe")
    row, expected = table["sharpness", "after", "Kendall"], found["sharpness", "Kendall"]
    assert [float(row[name]) for name in ("value", "low", "high")] == pytest.approx(
        [expected.value, expected.low, expected.high], abs=6e-4
    )
    assert (folder / "docs" / "gap.png").stat().st_size > 0
    _run("restate", folder / "docs", "--head=4")
    assert capsys.readouterr().out == printed

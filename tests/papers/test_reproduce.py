"""The command: results, failures, going on, and errors; and each experiment at small scale in the soak."""

import json

import pytest
from safetensors.torch import load_file, save_file

from benchmarks import papers
from benchmarks.papers import p21_fig6, p21_fig8, reproducing
from benchmarks.papers.experiment import Bench

TINY = ["--set", "images=60", "--set", "seeds=1", "--set", "epochs=2", "--set", "measured=30", "--set", "loss=2.2"]


def test_list(capsys, status):
    assert status("--list") == 0
    shown = capsys.readouterr().out
    for experiment in papers.EXPERIMENTS:
        assert experiment.name in shown
    assert len({experiment.name for experiment in papers.EXPERIMENTS}) == len(papers.EXPERIMENTS)


def test_a_tiny_experiment(tmp_path, capsys, status):
    assert status("p21-fig6", "--out", str(tmp_path), *TINY) == 0
    shown = capsys.readouterr().out
    restated(json.loads((tmp_path / "p21-fig6-small.json").read_text()))
    found = json.loads((tmp_path / "p21-fig6-small.json").read_text())
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith("relative_flatness fc4")]
    assert len(rows) == 6  # it correlates, and more than five others do: claim, verdict, number and interval
    assert {"seen", "against", "edge", "decided"} & {word for row in rows for word in row}
    assert "p21-fig6-small.md has all numbers and sentences" in shown
    table = found["table"]
    assert len(table["name"]) == 12  # all, with those that did not converge
    ended = {name for name, converged in zip(table["name"], table["converged"], strict=True) if not converged}
    assert {*found["failures"]} == ended
    assert 0 < len(ended) < 12
    for gap, test, train in zip(table["gap"], table["test_loss"], table["loss"], strict=True):
        assert gap == pytest.approx(test - train, abs=1e-5)
    assert {"relative_flatness fc4", "pac_bayes network", "trace fc1"} <= {*table}
    assert (tmp_path / "p21-fig6-small.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "p21-fig6-small.md").read_text()
    assert found["verdict"] in page
    assert all(name in page for name in ended)
    assert found["settings"]["images"] == 60

    # A second run takes what is there: a network that changed is another one, and a new one is trained.
    work = tmp_path / "work" / "p21-digits"
    changed, gone = sorted(work.glob("*.safetensors"))[:2]
    state = load_file(changed)
    save_file({name: 2 * value for name, value in state.items()}, changed)
    gone.unlink()
    assert status("p21-fig6", "--out", str(tmp_path), *TINY) == 0
    again = json.loads((tmp_path / "p21-fig6-small.json").read_text())["table"]
    place = table["name"].index(changed.stem)
    for column in ("loss", "relative_flatness fc4"):
        pairs = [*zip(again[column], table[column], strict=True)]
        assert pairs[place][0] != pairs[place][1]
        del pairs[place]
        assert all(one == other for one, other in pairs)


def restated(facts):
    """Hold that points state the findings anew, and those of another figure of the same networks."""
    again, same = reproducing.restated(p21_fig6.EXPERIMENT, facts)
    assert again.verdict == facts["verdict"]
    told = json.loads(same["p21-fig6-small.json"])
    assert {**told, "findings": []} == {**facts, "findings": []}
    for one, other in zip(told["findings"], facts["findings"], strict=True):
        value = other["value"] and pytest.approx(other["value"], rel=1e-4, abs=1e-6)  # points have six digits
        assert one == {**other, "value": value}
    other, _ = reproducing.restated(p21_fig8.EXPERIMENT, facts)
    assert "relative flatness of fc3" in other.verdict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["p21-fig66"], "there are p21-fig6"),
        (["p21-fig6", "--set", "seed=1"], "there is no setting 'seed'; there are images, seeds"),
        (["p21-fig6", "--scale", "paper"], "say where with --data-dir"),
        (["p21-fig6", "--scale", "paper", "--data-dir", "."], "cifar10 is not in"),
    ],
)
def test_errors(tmp_path, monkeypatch, status, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in str(status(*arguments))


@pytest.mark.soak
@pytest.mark.parametrize("experiment", papers.EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_small_scale(experiment, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "experiments"  # which share networks
    folder.mkdir(exist_ok=True)
    found = experiment.run(Bench("small", experiment.small, folder, shown=False))
    rows = {len(column) for column in found.table.values()}
    assert len(rows) == 1
    assert min(rows) > 0
    assert found.verdict.endswith(".")
    assert all(finding.value is not None for finding in found.findings)

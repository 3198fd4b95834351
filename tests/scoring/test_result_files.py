"""Spectra, landscapes and histories in a store: they come back as they were, and merge, move and go as values do."""

import contextlib
import html
import sqlite3
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.scoring import result_files
from pyflatness.scoring import store as stores
from pyflatness.scoring.store import Store
from support.score_runs import DATA, LOSS, network, saved, status


@pytest.fixture(scope="module")
def spectrum() -> pf.results.Spectrum:
    return pf.spectrum(network(), LOSS, DATA, k=2, which="both", density=True, probes=2, steps=8)


@pytest.fixture(scope="module")
def landscape() -> pf.results.Landscape:
    return pf.landscape(network(), LOSS, DATA, points=(4, 3), accuracy=True)


@pytest.fixture(scope="module")
def history() -> pf.results.History:
    report = pf.measure(network(), LOSS, DATA, measures=["trace", "relative_flatness"])
    made = pf.results.History()
    for step in range(2):
        made.add(report, step=step, train_loss=1.0 - step)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two models, of which one value each was computed."""
    pf.score({"a": network(), "b": network(1)}, LOSS, DATA, store=tmp_path / "runs.sqlite")
    return tmp_path / "runs.sqlite"


def held(path: Path) -> dict[tuple[str, str], result_files.Result]:
    with Store(path) as store:
        return {(one.name, one.label): one.result for one in result_files.found(store)}


def equal(first: pf.results.Spectrum, second: pf.results.Spectrum) -> bool:
    """Whether two spectra are the same, whatever eigenvectors they have."""
    return first.to_json() == second.to_json()


def test_results_come_back_as_they_were(path: Path, spectrum, landscape, history) -> None:
    pf.add_to_store(path, "a", spectrum)
    pf.add_to_store(path, "b", landscape, label="a plane")
    pf.add_to_store(path, "run 1", history)
    found = held(path)
    assert [*found] == [("a", ""), ("b", "a plane"), ("run 1", "")]
    again = found["a", ""]
    assert torch.equal(again.eigenvalues, spectrum.eigenvalues)
    assert torch.equal(again.residuals, spectrum.residuals)
    assert torch.equal(again.density.nodes, spectrum.density.nodes)
    assert torch.equal(again.density.weights, spectrum.density.weights)
    assert again.eigenvectors == {}
    assert str(again) == str(spectrum)
    assert torch.equal(found["b", "a plane"].losses, landscape.losses)
    assert torch.equal(found["b", "a plane"].quadratic.hessian, landscape.quadratic.hessian)
    assert found["run 1", ""] == history


def test_json_of_a_spectrum(spectrum, tmp_path: Path) -> None:
    spectrum.to_json(tmp_path / "spectrum.json")
    assert equal(pf.results.Spectrum.from_json(tmp_path / "spectrum.json"), spectrum)
    plain = pf.spectrum(network(), LOSS, DATA, k=1)
    assert pf.results.Spectrum.from_json(plain.to_json()).density is None
    for text in ("{}", '{"format": "another"}', spectrum.to_json().replace('"nodes"', '"knots"')):
        with pytest.raises(pf.errors.InputError, match=r"spectrum: JSON of Spectrum\.to_json"):
            pf.results.Spectrum.from_json(text)


def test_the_same_label_is_replaced(path: Path, spectrum, history) -> None:
    pf.add_to_store(path, "a", pf.spectrum(network(), LOSS, DATA, k=1))
    pf.add_to_store(path, "a", spectrum)
    pf.add_to_store(path, "a", spectrum, label="again")
    pf.add_to_store(path, "a", history)  # a training of the name of a model is none of its results
    with Store(path) as store:
        results = [(one.name, one.label, type(one.result)) for one in result_files.found(store)]
    assert results == [
        ("a", "", pf.results.Spectrum),
        ("a", "again", pf.results.Spectrum),
        ("a", "", pf.results.History),
    ]
    assert equal(held(path)["a", "again"], spectrum)


def test_what_is_wrong_is_said(path: Path, spectrum, history, tmp_path: Path) -> None:
    with pytest.raises(pf.errors.InputError, match="'c' is not in the store; there are a, b"):
        pf.add_to_store(path, "c", spectrum)
    with pytest.raises(pf.errors.InputError, match="returned is wanted, got float"):
        pf.add_to_store(path, "a", 1.0)
    with pytest.raises(pf.errors.InputError, match="label='x': a history is told from others by the name"):
        pf.add_to_store(path, "run", history, label="x")
    with pytest.raises(pf.errors.StoreError, match="there is no file"):
        pf.add_to_store(tmp_path / "none.sqlite", "a", spectrum)
    assert held(path) == {}


def test_a_store_of_histories_alone(tmp_path: Path, history) -> None:
    pf.add_to_store(tmp_path / "runs.sqlite", "run", history)
    assert held(tmp_path / "runs.sqlite") == {("run", ""): history}
    assert status("report", str(tmp_path / "runs.sqlite"), "--out", str(tmp_path / "page.html")) == 0


def test_merging_takes_the_later_one(path: Path, tmp_path: Path, spectrum, history, monkeypatch) -> None:
    other = tmp_path / "other.sqlite"
    pf.score({"b": network(1), "c": network(2)}, LOSS, DATA, layers="2", store=other)
    pf.add_to_store(path, "b", spectrum)
    pf.add_to_store(path, "run", pf.results.History())
    later = time.time() + 10
    monkeypatch.setattr(time, "time", lambda: later)
    pf.add_to_store(other, "run", history)
    pf.add_to_store(other, "c", spectrum)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    pf.add_to_store(other, "b", pf.spectrum(network(1), LOSS, DATA, k=1))
    with Store(path, write=True, command="pyflatness merge") as store, Store(other) as source:
        assert stores.merge(store, source) == 3  # the head's value of c, its spectrum, the history
        assert stores.merge(store, source) == 0
        commands = [row["command"] for row in store.select("SELECT command FROM runs ORDER BY id")]
    # Of the calls of one moment one is kept, and this test has stopped the clock.
    assert sorted(commands) == [*["pf.add_to_store in Python"] * 4, *["pf.score in Python"] * 2, "pyflatness merge"]
    found = held(path)
    assert equal(found["b", ""], spectrum)
    assert equal(found["c", ""], spectrum)
    assert found["run", ""] == history


def test_results_go_with_their_model(path: Path, spectrum, history) -> None:
    pf.add_to_store(path, "a", spectrum)
    pf.add_to_store(path, "run", history)
    with Store(path, write=True) as store:
        with store.changes() as connection:
            connection.execute("DELETE FROM checkpoints WHERE name = 'a'")
        assert "1 spectra and landscapes of weights that no checkpoint has" in stores.orphans(store)
        stores.collect(store)
    assert held(path) == {("run", ""): history}


def test_results_that_are_gone_with_their_table_are_missed(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE result_files")
    with pytest.raises(pf.errors.StoreError, match="tables of another form than they were made"):
        held(path)


def commands(path: Path) -> list[str]:
    with Store(path) as store:
        return [row["command"] for row in store.select("SELECT command FROM runs ORDER BY began")]


def test_the_commands_that_added_are_kept(tiny: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", "not for everybody")
    store = str(Path(tiny).with_name("runs.sqlite"))
    checkpoint = str(saved(tiny, 1, "1.safetensors"))
    table = Path(tiny).with_name("not for everybody.csv")
    table.write_text("checkpoint,lr\n1,0.1\n", encoding="utf-8")
    score = ["score", "--model", f"{tiny}:Tiny", "--data", f"{tiny}:data", "--loss", "cross_entropy"]
    score += ["--executor", "serial", "--store", store, checkpoint]
    assert status(*score, "--metadata", str(table)) == 0
    assert status(*score) == 0  # adds nothing
    (kept,) = commands(Path(store))
    assert kept.startswith(f"pyflatness score --model {tiny}:Tiny ")
    assert kept.endswith("$SERVICE_API_KEY.csv'")
    assert "not for everybody" not in kept
    spectrum = Path(tiny).with_name("spectrum.json")
    pf.spectrum(network(), LOSS, DATA, k=1).to_json(spectrum)
    assert status("store", "add", store, "1", str(spectrum), "--label", "one") == 0
    assert "spectrum of 1" in capsys.readouterr().out
    assert commands(Path(store))[1] == f"pyflatness store add {store} 1 {spectrum} --label one"
    assert status("store", "show", store, "1") == 0
    assert "spectrum one\n" in capsys.readouterr().out


def test_files_that_are_no_results(path: Path, tmp_path: Path) -> None:
    for name, content in {
        "a.json": b"{}",
        "b.npz": b"PK\x03\x04",
        "c.json": b"\xff\xfe",
        "d.json": b"x" * 5000,
    }.items():
        (tmp_path / name).write_bytes(content)
        assert name in str(status("store", "add", str(path), "a", str(tmp_path / name)))
    assert "cannot be read" in str(status("store", "add", str(path), "a", str(tmp_path / "none.json")))
    assert held(path) == {}


def test_spectra_are_asked_for_as_measures_are(tmp_path: Path) -> None:
    models, path = {"a": network(), "b": network(1)}, tmp_path / "runs.sqlite"
    assert pf.score({"a": models["a"]}, LOSS, DATA, store=path, spectrum=2).computed == 2  # a value and a spectrum
    mine = pf.spectrum(models["a"], LOSS, DATA, k=1)
    pf.add_to_store(path, "a", mine)
    assert pf.score(models, LOSS, DATA, store=path, spectrum=2).computed == 2  # those of b
    assert pf.score(models, LOSS, DATA, store=path, spectrum=2).computed == 0
    found = held(path)
    assert [*found] == [("a", "tuple"), ("a", ""), ("b", "tuple")]
    assert equal(found["a", ""], mine)
    for name, model in models.items():
        truth = pf.spectrum(model, LOSS, DATA, k=2, density=True)
        assert equal(found[name, "tuple"], truth)
    assert pf.score(models, LOSS, DATA, store=path, spectrum=3).computed == 2  # they take the place of those before
    assert len(held(path)["b", "tuple"].eigenvalues) == 3
    other = DATA[0] + 1, DATA[1]
    before = held(path)["a", "tuple"]
    assert pf.score({"a": models["a"]}, LOSS, other, store=path, spectrum=3).computed == 2
    assert equal(held(path)["a", "tuple"], before)  # that of the data before is kept
    (label,) = (label for _, label in held(path) if label.startswith("tuple "))
    assert equal(held(path)["a", label], pf.spectrum(models["a"], LOSS, other, k=3, density=True))
    for data in (other, DATA):
        assert pf.score({"a": models["a"]}, LOSS, data, store=path, spectrum=3).computed == 0
    with pytest.raises(pf.errors.InputError, match="spectra are kept in a store"):
        pf.score(models, LOSS, DATA, spectrum=2)


class Once(torch.autograd.Function):
    """The identity, without a second derivative."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradients):
        return gradients


class NotTwice(nn.Module):
    def forward(self, values):
        return Once.apply(values)


def test_a_spectrum_that_fails_is_kept_as_an_error(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    broken = nn.Sequential(nn.Linear(4, 5), NotTwice(), nn.Linear(5, 3)).double().eval()
    models = {"a": network(), "broken": broken}
    options = {"layers": "2", "store": path, "spectrum": 1}  # the head has a value
    scores = pf.score(models, LOSS, DATA, **options)
    assert scores["broken", "relative_flatness"].value > 0
    assert pf.score(models, LOSS, DATA, **options).computed == 0
    assert pf.score(models, LOSS, DATA, **options, retry=True).computed == 1
    with Store(path) as store:
        (good, bad) = result_files.found(store)
        assert stores.problems(store) == []
    assert (good.name, good.error, bad.name, bad.result) == ("a", "", "broken", None)
    assert bad.error
    with Store(tmp_path / "other.sqlite", write=True) as other, Store(path) as store:
        stores.merge(other, store)
        content = other.select("SELECT content FROM result_files WHERE error != ''")[0]["content"]
        result = result_files.ResultFile(
            content, "", "spectrum", "tuple", "", pf.spectrum(network(), LOSS, DATA).to_json().encode()
        )
        result_files.put(other, result)
        with other.changes() as connection:
            connection.execute("UPDATE result_files SET added = 0")
        assert stores.merge(other, store) == 1  # the spectrum of a, which is later; no error takes the other's place
        assert [one.error for one in result_files.found(other)] == ["", ""]
    assert status("report", str(path), "--out", str(tmp_path / "page.html")) == 0
    page = html.unescape((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert f"<p>broken, tuple has no spectrum: {bad.error}</p>" in page
    assert status("store", "show", str(path), "broken") == 0


def test_the_command_computes_spectra_and_goes_on(tiny: str, capsys) -> None:
    store = str(Path(tiny).with_name("runs.sqlite"))
    checkpoints = [str(saved(tiny, seed, f"{seed}.safetensors")) for seed in (1, 2)]
    bad = Path(tiny).with_name("bad.safetensors")
    bad.write_bytes(b"nothing")
    score = ["score", "--model", f"{tiny}:Tiny", "--data", f"{tiny}:data", "--loss", "cross_entropy"]
    score += ["--layers", "head", "--executor", "serial", "--store", store, "--spectrum", "1"]
    assert status(*score, checkpoints[0], "--dry-run") == 0
    assert (
        "2 units to do (1 values, 1 reads of the data, and 1 spectra of some 600 Hessian products each)"
        in capsys.readouterr().out
    )
    assert status(*score, checkpoints[0]) == 0
    assert status(*score, *checkpoints) == 0
    assert "2 units done, 0 to do; 0 values failed" in capsys.readouterr().out
    assert status(*score, *checkpoints, str(bad)) == 1
    out = capsys.readouterr().out
    assert "spectra that failed: 1" in out
    assert "no safetensors file, or a damaged one" in out
    with Store(Path(store)) as held_open:
        kinds = [(Path(one.name).name, one.kind, bool(one.error)) for one in result_files.found(held_open)]
    spectrum = [(f"{name}.safetensors", "spectrum", name == "bad") for name in ("1", "2", "bad")]
    assert kinds == spectrum
    assert status(*score[:-4], "--spectrum", "1", "--out", "x.csv", checkpoints[0]) == 2
    assert "--spectrum: only with --store FILE" in capsys.readouterr().err

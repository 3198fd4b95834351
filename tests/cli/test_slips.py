"""Slips of the keyboard on the command line: an error that says what was meant, and no result is lost."""

from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness import messages
from pyflatness.scoring import export
from support.score_runs import arguments_of, rows_of, saved, status


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside good ones"])
@pytest.mark.parametrize("slip", ["ckptz", "empty", "*.pth", "runs/*x*"])
def test_what_names_no_checkpoints_leaves_a_table_as_it_is(slip, beside, tiny, monkeypatch, capsys):
    monkeypatch.chdir(Path(tiny).parent)
    Path("empty").mkdir()
    good = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(2)]
    assert status(*arguments_of(tiny, *good)) == 0
    before = Path("out/scores.csv").read_bytes()
    assert before.count(b"\n") == 3
    capsys.readouterr()
    assert status(*arguments_of(tiny, *good[:beside], slip)) == 2
    said = capsys.readouterr().err
    assert slip in said
    assert "no checkpoints" in said if slip == "empty" else "there is no such file" in said
    assert Path("out/scores.csv").read_bytes() == before


def test_a_missing_file_is_an_error_alone_and_a_row_beside_others(tiny, capsys):
    missing, good = Path(tiny).with_name("missing.safetensors"), saved(tiny, 0, "good.safetensors")
    assert status(*arguments_of(tiny, missing)) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert not Path(tiny).with_name("out").exists()
    assert status(*arguments_of(tiny, missing, good)) == 1
    assert [bool(row["error"]) for row in rows_of(tiny)] == [True, False]


@pytest.mark.parametrize(("slip", "meant"), [("hessian_trace", "trace"), ("relative_flatnes", "relative_flatness")])
def test_a_misspelt_measure_has_few_near_ones(slip, meant, tiny, capsys):
    assert status(*arguments_of(tiny, saved(tiny, 0, "0.safetensors"), "--measures", slip)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"'{slip}' does not exist; did you mean {meant}" in said
    assert "weight_norm" not in said
    with pytest.raises(pf.errors.InputError, match=f"did you mean {meant}"):
        pf.measure(torch.nn.Linear(3, 2), "cross_entropy", [], measures=[slip])


@pytest.mark.parametrize(("slip", "meant"), [("crossentropy", "CrossEntropyLoss"), ("nll_loss", "NLLLoss")])
def test_a_misspelt_loss_has_near_ones(slip, meant, tiny, capsys):
    assert status(*arguments_of(tiny, saved(tiny, 0, "0.safetensors"), loss=slip)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"'{slip}' is not known; did you mean" in said
    assert meant in said.partition("did you mean")[2]


def test_an_error_that_checkpoints_share_is_printed_once(tiny, capsys):
    for number in range(3):
        Path(tiny).with_name(f"{number}.pt").write_bytes(b"")
    assert status(*arguments_of(tiny, *(Path(tiny).with_name(f"{number}.pt") for number in range(3)))) == 1
    assert capsys.readouterr().out.count("it is empty") == 1


def test_names_that_are_meant():
    known = [f"ckpts/lr0.00{place}.pt" for place in range(8)]
    assert messages.instead("x", known[:3]) == f"there are {', '.join(known[:3])}"
    assert messages.instead("ckpts/lr0.03.pt", known).startswith("did you mean ckpts/lr0.003.pt")
    assert messages.near("scaled_trace_of_it", ["trace", "scaled_trace", "0"]) == "scaled_trace, trace"


def test_a_store_is_no_table_and_a_table_no_store(tiny, tmp_path, capsys):
    store = tmp_path / "train.sqlite"
    pf.score({"first": saved(tiny, 0, "0.safetensors")}, "cross_entropy", f"{tiny}:data", model=f"{tiny}:Tiny",
             store=store)  # fmt: skip
    with pytest.raises(
        pf.errors.InputError, match=r"is a store, no table; pyflatness store export .*train.sqlite --out FILE.csv"
    ):
        pf.statistics.correlations(store, "trace", "loss")
    table = store.with_suffix(".csv")
    assert status("store", "export", str(store), "--out", str(table)) == 0
    said = str(status("report", str(table), "--out", str(tmp_path / "page.html")))
    assert "train.csv is no store" in said
    assert "--store FILE" in said
    assert "committed" not in said


def test_score_without_a_checkpoint_says_that_weights_are_not_from_one(tiny, capsys):
    assert status(*arguments_of(tiny)) == 0
    said = f"no checkpoint given: {tiny}:Tiny is measured with the weights that it is made with\n"
    out, err = capsys.readouterr()
    assert err == said
    assert "no checkpoint" not in out
    assert status(*arguments_of(tiny, saved(tiny, 0, "0.safetensors"))) == 0
    assert capsys.readouterr().err == ""


def test_settings_of_a_store_are_told_apart(tiny, tmp_path, capsys):
    store, checkpoint = tmp_path / "runs.sqlite", saved(tiny, 0, "0.safetensors")
    for limit in ("7", "5"):
        arguments = arguments_of(tiny, checkpoint, "--store", store, "--limit", limit, "--executor", "serial")
        place = arguments.index("--out")
        assert status(*arguments[:place], *arguments[place + 2 :]) == 0
    for command in (["store", "ls", str(store)], ["store", "show", str(store), "0"]):
        capsys.readouterr()
        assert status(*command) == 0
        out = capsys.readouterr().out
        for samples in (7, 5):
            assert f"data {tiny}:data, {samples} samples; loss CrossEntropy\n" in out
    page = tmp_path / "page.html"
    assert status("report", str(store), "--out", str(page)) == 0
    assert ", 7 samples; loss" in page.read_text(encoding="utf-8")
    table = tmp_path / "runs.csv"
    assert status("store", "export", str(store), "--out", str(table)) == 0
    with pytest.raises(pf.errors.InputError, match="has two rows of 'relative_flatness'; the column 'setting'"):
        pf.statistics.correlations(table, "relative_flatness", "loss")


def test_settings_that_differ_by_the_content_of_data_alone_have_hashes():
    settings = {
        place: {"key": {"data": {"samples": 3, "content": place}, "loss": {"name": "L"}, "options": {"probes": 8}}}
        for place in (1, 2)
    }
    same = "model of each; data , 3 samples; loss L; probes 8"
    assert export.setting_texts({1: settings[1]}) == {1: same}
    texts = export.setting_texts(settings)
    assert texts == {place: f"{same}; setting {export.setting_hash(settings[place])}" for place in (1, 2)}
    assert texts[1] != texts[2]


def test_sentences_in_a_pipe_are_wrapped_for_reading(capsys):
    assert status("measures", "--help-me-choose") == 0
    assert 80 < max(map(len, capsys.readouterr().out.splitlines())) <= 100

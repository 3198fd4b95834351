"""Slips of the keyboard on the command line: an error that says what was meant, and no result is lost."""

from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness import messages
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
    with pytest.raises(pf.InputError, match=f"did you mean {meant}"):
        pf.measure(torch.nn.Linear(3, 2), "cross_entropy", [], measures=[slip])


def test_names_that_are_meant():
    known = [f"ckpts/lr0.00{place}.pt" for place in range(8)]
    assert messages.instead("x", known[:3]) == f"there are {', '.join(known[:3])}"
    assert messages.instead("ckpts/lr0.03.pt", known).startswith("did you mean ckpts/lr0.003.pt")
    assert messages.near("scaled_trace_of_it", ["trace", "scaled_trace", "0"]) == "scaled_trace, trace"


def test_a_store_is_no_table_and_a_table_no_store(tiny, tmp_path, capsys):
    store = tmp_path / "train.sqlite"
    pf.score({"first": saved(tiny, 0, "0.safetensors")}, f"{tiny}:data", "cross_entropy", model=f"{tiny}:Tiny",
             store=store)  # fmt: skip
    with pytest.raises(pf.InputError, match=r"is a store, no table; pyflatness export .*train.sqlite --out FILE.csv"):
        pf.correlations(store, "trace", "loss")
    table = store.with_suffix(".csv")
    assert status("export", str(store), "--out", str(table)) == 0
    said = str(status("report", str(table), "--out", str(tmp_path / "page.html")))
    assert "train.csv is no store" in said
    assert "--store FILE" in said
    assert "committed" not in said


def test_a_layer_without_a_measure_says_what_is_wanted():
    network = torch.nn.Sequential(torch.nn.Linear(4, 3)).eval()
    report = pf.measure(network, "cross_entropy", [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))], layers="*")
    with pytest.raises(pf.InputError, match=r"'0' is a layer; report\['0', measure\] is its value of a measure: rel"):
        report["0"]

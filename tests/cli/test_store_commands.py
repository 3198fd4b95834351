"""What the commands on a store say of it, and the tables that they write."""

import csv
import json
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import pyflatness as pf
from pyflatness.messages import from_cell
from pyflatness.scoring import export
from pyflatness.statistics import tables
from support.score_runs import saved, status


@pytest.fixture
def store(tiny: str) -> Path:
    """A store with two checkpoints and one that cannot be read."""
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in (1, 2)]
    path, bad = Path(tiny).with_name("runs.sqlite"), Path(tiny).with_name("bad.safetensors")
    options = {"model": f"{tiny}:Tiny", "layers": "*", "measures": ["trace", "weight_norm"], "store": path}
    pf.score({"first": files[0], "second": files[1], "bad": bad}, "cross_entropy", f"{tiny}:data", **options)
    return path


def test_ls_counts(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("store", "ls", str(store)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in (["first", "6", "0", "0"], ["bad", "0", "6", "0"], ["3", "checkpoints", "12", "6", "0"]):
        assert line in lines
    assert ["model", f"{store.parent}/tiny.py:Tiny;", "data"] == lines[-2][:3]


def test_show_has_everything_of_one(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("store", "show", str(store), "bad") == 0
    out = capsys.readouterr().out
    assert "there is no such file" in out
    assert out.count("error") == 6
    assert status("store", "show", str(store), "first") == 0
    assert "weight_norm" in capsys.readouterr().out
    assert "'frist' is not in the store; there are first" in str(status("store", "show", str(store), "frist"))


def test_tables_are_the_same_in_every_format(store: Path) -> None:
    found = {}
    for kind in ("csv", "json", "jsonl"):
        out = store.with_suffix(f".{kind}")
        assert status("store", "export", str(store), "--out", str(out)) == 0
        found[kind] = out.read_text(encoding="utf-8")
    whole = json.loads(found["json"])
    assert whole["schema"] == export.SCHEMA
    rows = whole["rows"]
    assert [json.loads(line) for line in found["jsonl"].splitlines()] == rows
    assert len(rows) == 18
    assert tuple(rows[0]) == export.COLUMNS
    for row, cells in zip(rows, csv.DictReader(found["csv"].splitlines()), strict=True):
        for name, cell in cells.items():
            value = row[name]
            assert from_cell(cell) == ("" if value is None else value if isinstance(value, str) else str(value))
    assert {row["checkpoint"] for row in rows if row["error"]} == {"bad"}
    assert json.loads(rows[0]["versions"])["torch"] == torch.__version__
    assert json.loads(rows[0]["arguments"])["loss"]["name"] == "CrossEntropy"


def test_parquet(store: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet files need pyarrow")
    out, other = store.with_suffix(".parquet"), store.with_suffix(".json")
    for path in (out, other):
        assert status("store", "export", str(store), "--out", str(path)) == 0
    table = parquet.read_table(out)
    assert table.to_pylist() == json.loads(other.read_text())["rows"]
    assert table.schema.metadata[b"pyflatness schema"] == str(export.SCHEMA).encode()


@pytest.mark.parametrize(("name", "words"), [("a.xls", "choose .csv, .json"), ("a", "'no' is no known ending")])
def test_other_formats_are_refused(name: str, words: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("store", "export", str(store), "--out", str(store.with_name(name))) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_without_pyarrow(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else name)
    assert "pip install 'pyflatness[parquet]'" in str(
        status("store", "export", str(store), "--out", str(store) + ".parquet")
    )


def test_rows_of_data_that_changed_under_one_name_are_told_apart(store: Path) -> None:
    network, (x, y) = {"a": torch.nn.Linear(4, 3).eval()}, (torch.randn(30, 4), torch.randint(3, (30,)))
    for data in ((x, y), (x, (y + 1) % 3)):
        pf.score(network, "cross_entropy", data, store=store, measures=["trace", "weight_norm"])
    out = store.with_suffix(".json")
    assert status("store", "export", str(store), "--out", str(out)) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["checkpoint"] == "a"]
    assert len({row["data"] for row in rows}) == 1
    assert [row["setting"] for row in rows] == [rows[0]["setting"]] * 2 + [rows[2]["setting"]] * 2
    assert rows[0]["setting"] != rows[2]["setting"]


def test_correlations_take_an_export_with_its_settings(store: Path) -> None:
    (table := store.with_name("runs.json")).write_text(
        json.dumps({"first": {"lr": 0.1, "rule": "sgd"}, "second": {"lr": 0.2}})
    )
    out = store.with_suffix(".csv")
    assert status("store", "export", str(store), "--out", str(out), "--metadata", str(table)) == 0
    found = tables.read(out)
    assert found.names == ("first", "second", "bad")
    assert sorted(value for value in found.column("lr") if value == value) == [0.1, 0.2]
    assert "lr" not in found.measures
    assert found.text_columns["rule"] == ("sgd", "", "")
    assert not {"seconds", "schema", "low"} & {*found.columns}


def test_gc_takes_out_what_no_checkpoint_has(tiny: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("store", "gc", str(store)) == 0
    assert "nothing taken out" in capsys.readouterr().out
    path = Path(tiny).with_name("1.safetensors")
    state = load_file(path)
    state["head.bias"] += 1
    save_file(state, path)
    options = {"model": f"{tiny}:Tiny", "layers": "*", "measures": "trace", "store": store}
    assert pf.score({"first": path}, "cross_entropy", f"{tiny}:data", **options).computed == 1
    assert status("store", "verify", str(store)) == 0
    assert "6 values of weights that no checkpoint has: pyflatness store gc takes them out" in capsys.readouterr().out
    size = store.stat().st_size
    assert status("store", "gc", str(store)) == 0
    assert status("store", "verify", str(store)) == 0
    assert "takes them out" not in capsys.readouterr().out
    assert store.stat().st_size <= size
    assert pf.score({"first": path}, "cross_entropy", f"{tiny}:data", **options).computed == 0


def test_verify_finds_what_is_broken(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("store", "verify", str(store)) == 0
    connection = sqlite3.connect(store)
    with connection:
        connection.execute("DELETE FROM units WHERE id = 1")
    connection.close()
    assert status("store", "verify", str(store)) == 1
    assert "rows that refer to others which are not there" in capsys.readouterr().out
    content = bytearray(store.read_bytes())
    content[4096 * 3 : 4096 * 3 + 300] = b"x" * 300
    store.write_bytes(content)
    assert status("store", "verify", str(store)) != 0


@pytest.mark.parametrize("command", ["ls", "verify", "show", "gc"])
def test_no_store_is_an_error(command: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "none.sqlite"), *(["x"] if command == "show" else [])]
    assert "there is no file" in str(status("store", command, *arguments))
    assert list(tmp_path.iterdir()) == []

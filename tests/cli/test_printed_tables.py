"""Tables of the commands for files and pipes: no padding at the ends of lines; JSON of those that measure."""

import json

import pytest

from support.score_runs import arguments_of, rows_of, saved, status

LINEAR = ["--model", "torch.nn:Linear", "--model-args", '{"in_features": 4, "out_features": 3}']


@pytest.mark.parametrize(
    "arguments",
    [
        ["measures"],
        ["measures", "--help-me-choose"],
        ["layers", *LINEAR],
        ["plan", *LINEAR, "--shape", "4"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_lines_end_where_their_text_does(arguments, capsys):
    assert status(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert [line for line in lines if line != line.rstrip()] == []


def test_every_command_has_a_line_of_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert status("--help") == 0
    out = capsys.readouterr().out
    sections = out[out.index("Measure networks:") : out.index("Exit status:")]
    lines = [line for line in sections.splitlines() if line.startswith("  ") and line.strip()]
    assert len(lines) > 7
    for line in lines:
        assert line[2] != " ", f"{line!r} goes on from the line before"
        assert line.endswith(".")
        assert not line.endswith("..")


def test_json_of_score_is_what_the_file_has(tiny, capsys):
    paths = [saved(tiny, 1, "1.safetensors"), saved(tiny, 2, "2.safetensors")]
    assert status(*arguments_of(tiny, "--json", *paths)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["errors"], found["interrupted"], found["notes"]) == (0, False, [])
    assert [(row["checkpoint"], row["value"]) for row in found["rows"]] == [
        (row["checkpoint"], float(row["value"])) for row in rows_of(tiny)
    ]
    assert len(found["rows"]) == 2


def test_json_of_score_has_errors_and_status_1(tiny, capsys):
    broken = saved(tiny, 1, "1.safetensors")
    broken.write_bytes(b"nothing")
    assert status(*arguments_of(tiny, "--json", broken)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["errors"] == 1
    assert found["rows"][0]["value"] is None
    assert found["rows"][0]["error"]


def test_json_of_score_is_not_of_a_store(tiny, tmp_path, capsys):
    arguments = arguments_of(tiny, "--json", "--store", tmp_path / "runs.sqlite")
    place = arguments.index("--out")
    assert status(*arguments[:place], *arguments[place + 2 :]) == 2
    assert "--json goes without --store" in capsys.readouterr().err

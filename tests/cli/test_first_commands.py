"""The commands of a first hour: measure, spectrum, correlate; options as people type them; what imports no torch."""

import json
import subprocess
import sys

import pytest
import torch

import pyflatness as pf
from pyflatness.cli import network, options
from support.score_runs import arguments_of, rows_of, saved, status, tiny_net

REFUSED = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "rich"):
            raise ImportError(f"{name} is imported")
sys.meta_path.insert(0, Refused())
from pyflatness import cli
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(("argument", "said"), [("--help", "Measure networks:"), ("--version", "version 0.")])
def test_help_and_version_import_no_torch(argument, said):
    done = subprocess.run([sys.executable, "-c", REFUSED, argument], capture_output=True, text=True, check=True)
    assert said in done.stdout


def test_a_command_that_is_nearly_one(capsys):
    assert status("scores") == 2
    assert "No such command 'scores'. Did you mean score" in capsys.readouterr().err


@pytest.fixture
def spec(tiny):
    """The arguments that name the tiny network, its data and its loss."""
    return ["--model", f"{tiny}:Tiny", "--data", f"{tiny}:data", "--loss", "cross_entropy"]


def test_measure_prints_the_report_of_a_checkpoint(tiny, spec, capsys, tmp_path):
    file = saved(tiny, 1, "1.safetensors")
    network, data = tiny_net(tiny, 1), sys.modules["tiny"].data()
    expected = pf.measure(network, "cross_entropy", data, measures=["trace", "weight_norm"])
    out = tmp_path / "report.json"
    assert status("measure", *spec, "--measures", "trace,weight_norm", "--out", str(out), str(file)) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert pf.results.Report.from_json(out)["trace"].value == expected["trace"].value
    assert status("measure", *spec, "--layers", "body,head", "--json", str(file)) == 0
    assert {"body", "head", ""} == {*json.loads(capsys.readouterr().out)["relative_flatness"]}


def test_dtype_and_device_move_the_model(tiny, spec, capsys):
    assert status("measure", *spec, "--device", "cpu", "--dtype", "bfloat16") != 0  # the data are float32
    assert "dtype" in capsys.readouterr().err
    assert status("measure", *spec, "--device", "nowhere") != 0
    assert status("score", *arguments_of(tiny, "--device", "cpu")[1:], str(saved(tiny, 1, "1.safetensors"))) == 0
    assert len(rows_of(tiny)) == 1
    assert network.moved("cpu", "float64") == {"device": torch.device("cpu"), "dtype": torch.float64}


def test_spectrum_is_that_of_python(tiny, spec, capsys, tmp_path):
    file = saved(tiny, 1, "1.safetensors")
    assert status("spectrum", *spec, "-k", "2", "--layers", "head", "--out", str(tmp_path / "s.json"), str(file)) == 0
    found = pf.spectrum(tiny_net(tiny, 1), "cross_entropy", sys.modules["tiny"].data(), layers="head", k=2)
    assert capsys.readouterr().out == f"{found}\n"
    assert (tmp_path / "s.json").exists()
    assert status("spectrum", *spec, "-k", "1", "--json", str(file)) == 0
    assert json.loads(capsys.readouterr().out)["converged"]


def test_score_without_a_file_prints_its_table(tiny, spec, capsys):
    files = [str(saved(tiny, seed, f"{seed}.safetensors")) for seed in (1, 2)]
    assert status("score", *spec, "--layers", "head", "--measures", "trace", "--measures", "weight_norm", *files) == 0
    out = capsys.readouterr().out
    assert out.count("weight_norm") == 2
    assert out.splitlines()[-1] == "4 rows, 0 errors"


def shown(out: str) -> tuple[str, list[str]]:
    """The first line, and the cells of the only measure."""
    lines = out.splitlines()
    (row,) = (line for line in lines if line.strip().startswith("kappa"))
    return lines[0], [cell.strip() for cell in row.split("  ") if cell.strip()]


def expected(found: pf.results.Correlations) -> tuple[str, list[str]]:
    cells = [str(row).removeprefix(f"{row.statistic} ") for row in found]
    return str(found).splitlines()[0], [found.rows[0].measure, *cells]


def test_correlate_says_what_the_function_does(capsys, tmp_path):
    rows = [f"{n},{n * n % 7},{n + (n * n % 3)},{n // 5}" for n in range(9)]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["name,kappa,gap,depth", *rows]))
    found = pf.statistics.correlations(table, ["kappa"])
    assert [row.statistic for row in found] == ["Pearson", "Spearman", "Kendall"]
    assert len(found) == 3
    assert status("correlate", str(table), "--measures", "kappa", "--plot", str(tmp_path / "k.png")) == 0
    assert shown(capsys.readouterr().out) == expected(found)
    assert (tmp_path / "k.png").stat().st_size > 1000
    assert status("correlate", str(table), "--exclude", "1,2", "--exclude", "3", "--json") == 0
    assert {row["measure"] for row in json.loads(capsys.readouterr().out)} == {"kappa", "depth"}
    strata = ["--measures", "kappa", "--strata", "depth", "--plot", str(tmp_path / "s.png")]
    assert status("correlate", str(table), *strata) == 0
    found = pf.statistics.correlations(table, ["kappa"], strata="depth")
    assert shown(capsys.readouterr().out) == expected(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("width=64", {"width": 64}),
        ("width=64,bias=false,name=a b", {"width": 64, "bias": False, "name": "a b"}),
        ("rate=1e-3,sizes=[1, 2],flag=True,none=None", {"rate": 1e-3, "sizes": [1, 2], "flag": True, "none": None}),
        ('{"width": 64}', {"width": 64}),
        ("path=a=b,c", {"path": "a=b,c"}),
    ],
)
def test_arguments_as_pairs_or_json(text, expected):
    assert options.json_object(text) == expected


def test_what_are_no_arguments():
    with pytest.raises(pf.errors.InputError, match="neither k=v nor JSON"):
        options.json_object("width 64")


def test_lists_take_commas_and_repeats(capsys):
    split = options.several(("a,b", "c", "h.{0,1}.x", "re:a{1,2},b", "w[q,k]"))
    assert split == ("a", "b", "c", "h.{0,1}.x", "re:a{1,2},b", "w[q,k]")
    linear = "--model", "torch.nn:Linear", "--model-args", "in_features=4", "--model-args", "out_features=3"
    assert status("layers", *linear, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["shape"] == [3, 4]

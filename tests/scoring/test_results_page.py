"""The page of many models: what is in it, that no name becomes HTML, and that its numbers are the calls' own."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.report.page import tables
from pyflatness.scoring.units import Row
from support.pages import Parsed, drawn
from support.score_runs import saved, status

HOSTILE = '<script>alert(1)</script><img src="http://x.example/y" onerror=alert(2)>"\'&amp;\x1b[31m</th>'
LOSS = nn.CrossEntropyLoss()
DATA = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


def row(name, measure, value, layer="", **facts):
    given = {"method": "ggn", "exact": True, "samples": 20, "loss": 0.1, "accuracy": 0.5, "seconds": 1.0}
    return Row(name, layer, measure, value, **(given | facts))


@pytest.fixture(scope="module")
def scores():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 9, generator=generator, dtype=torch.float64, device="cpu").tolist()
    rows = [row(f"m{place}", "trace", a, loss=b) for place, (a, b) in enumerate(zip(x, y, strict=True))]
    failed = Row(HOSTILE, "", "trace", error="no such file " + HOSTILE)
    sampled = [row("m0", "pac_bayes", 2.0, stderr=0.1, exact=False, low=1.8, high=2.2, loss=y[0])]
    return pf.results.Scores((*rows, *sampled, row("m1", "pac_bayes", 3.0, exact=False, loss=y[1]), failed), 0)


@pytest.fixture(scope="module")
def html(scores):
    return scores.to_html(title=HOSTILE, exclude=["m8"])


@pytest.fixture(scope="module")
def parsed(html):
    return Parsed(html)


def test_values_are_a_plain_table(parsed):
    header, *rows = parsed.tables["Values by model and layer"]
    assert header == ["model", "layer", "trace", "pac_bayes", "loss", "accuracy"]
    assert len(rows) == 10
    assert rows[0][3] == "2.00 ± 0.10 [1.8, 2.2]"
    assert rows[1][3] == "≈ 3"
    assert rows[2][3] == ""
    assert rows[-1][2] == "failed"


def test_nothing_of_a_name_is_html(html, parsed):
    assert "<script>alert" not in html
    assert len(parsed.all("script")) == 4  # data, Vega-Lite, tables, charts
    assert parsed.all("img") == []
    assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)
    assert parsed.tables["Values by model and layer"][-1][0] == HOSTILE.replace("\x1b", "\\x1b")


def test_nothing_is_loaded(html, parsed):
    for tag, attributes in parsed.elements:
        loads = {"src", "href", "srcset", "data", "action", "poster"} & {*attributes}
        assert not loads, (tag, attributes)
    style = re.search("<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    (policy,) = [held["content"] for held in parsed.all("meta") if "http-equiv" in held]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]


def test_correlations_are_those_of_the_call(scores, parsed):
    cells = {line[0]: line for line in parsed.tables["Correlations with loss"]}
    complete = [one for one in scores if one.measure == "trace" and one.value is not None]
    table = {"checkpoint": [one.checkpoint for one in complete]}
    table |= {"trace": [one.value for one in complete], "loss": [one.loss for one in complete]}
    found = pf.statistics.correlations(table, "trace", "loss", exclude=["m8"])
    for place, how in enumerate(("Pearson", "Spearman", "Kendall"), 1):
        assert f"{how} {cells['trace'][place]}" == str(found["trace", how])
    assert cells["trace"][4:] == ["8", "2"]  # one failed, one excluded
    assert cells["pac_bayes"][4:] == ["2", "8"]


def test_few_networks_have_no_interval():
    layers = [row(f"m{place}", "trace", place + 1.0, layer="a", loss=place**2) for place in range(3)]
    html = pf.results.Scores(
        (*layers, *(row(f"m{place}", "trace", 2.0 - place, loss=place**2) for place in range(3))), 0
    ).to_html()
    lines = Parsed(html).tables["Correlations with loss"]
    assert [line[0] for line in lines[1:]] == ["trace network", "trace a"]  # the network first
    assert lines[2][1] == "0.96"  # of 1, 2, 3 and 0, 1, 4: 4 / sqrt(2 · 26/3)
    for spec in drawn(html)["Against loss"]["specs"]:
        assert spec["title"]["subtitle"][3] == "too few networks for an interval"
    assert "[–]" not in html
    assert "Hollow" not in html


def test_failed_and_excluded_are_listed_and_hollow(html, parsed):
    listed = parsed.tables["Values that failed, and models that do not count"]
    why = {line[0]: line[3] for line in listed[1:]}
    assert why["m8"] == "excluded by name"
    failed = HOSTILE.replace("\x1b", "\\x1b")
    assert [line[3] for line in listed[1:] if line[0] == failed and line[2] == "trace"] == [f"no such file {failed}"]
    data = json.loads(re.search('id="data">(.*?)</script>', html, re.DOTALL)[1])
    points = {point["model"]: point for point in data["sections"][1]["data"]}
    assert [name for name, point in points.items() if point["out"]] == ["m8"]
    assert "x0" not in points[HOSTILE]
    marks = [layer["mark"].get("filled") for layer in data["sections"][1]["specs"][0]["layer"]]
    assert marks == [None, True, False, False, False]
    assert "Hollow points are models that do not count" in html


def test_the_summary_says_what_is_exact(parsed):
    lines = {line[0]: line[1:] for line in parsed.tables["How the values came about"]}
    assert lines["trace"] == ["9", "9", "0", "1", "ggn", "20", ""]
    assert lines["pac_bayes"] == ["2", "0", "2", "0", "ggn", "20", "0.05"]


def test_gap_of_test_data(scores):
    test = pf.results.Scores(
        tuple(row(one.checkpoint, "trace", 1.0, loss=2.0) for one in scores if one.measure == "trace"), 0
    )
    assert "Correlations with generalisation gap" in Parsed(scores.to_html(test=test)).tables
    with pytest.raises(pf.errors.InputError, match="no column of numbers 'size'"):
        scores.to_html(against="size")
    with pytest.raises(pf.errors.InputError, match="'m99' is none of the models, such as 'm0'"):
        scores.to_html(exclude=["m99"])
    with pytest.raises(pf.errors.InputError, match="no values to show"):
        pf.results.Scores((), 0).to_html()


def test_training_losses_that_differ_are_said():
    """Where measures are held against the gap, and not against the loss itself."""

    def page(losses):
        rows = [row(f"m{place}", "trace", value, loss=loss) for place, (value, loss) in enumerate(losses)]
        test = {"name": [f"m{place}" for place in range(len(rows))], "loss": [1.0, 1.2, 1.1]}
        return pf.results.Scores(tuple(rows), 0).to_html(test=test)

    assert "from 0.1 to 0.4, a factor of 4" in page([(1.0, 0.1), (2.0, 0.2), (3.0, 0.4)])
    assert "a factor of" not in page([(1.0, 0.1), (2.0, 0.11), (3.0, 0.12)])


def test_a_report_and_a_history(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    report = pf.measure(model, LOSS, DATA, measures=["trace", "relative_flatness"])
    text = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == text
    lines = {line[0]: line for line in Parsed(text).tables["Values by layer"]}
    assert lines["network"][1] == f"{report['trace'].value:.6g}"
    history = pf.results.History()
    for step in range(3):
        history.add(report, step=step, train_loss=1.0 - step)
    scores = pf.results.Scores((row("a", "trace", 1.0), row("b", "trace", math.inf)), 0)
    tables = Parsed(scores.to_html(histories={"run": history})).tables
    header, *lines = tables["What was recorded: run"]
    assert header[2:] == ["trace", "relative_flatness", "train_loss"]
    assert lines[0][0] == "step 0, live"
    assert len(lines) == 9


def test_the_command_writes_a_page(tiny, capsys):
    folder = Path(tiny).parent
    files = {str(seed): saved(tiny, seed, f"{seed}.safetensors") for seed in (1, 2)}
    options = {"model": f"{tiny}:Tiny", "layers": "*", "measures": ["trace"], "store": folder / "runs.sqlite"}
    pf.score({**files, "bad": folder / "bad.safetensors"}, "cross_entropy", f"{tiny}:data", **options)
    assert status("report", str(folder / "runs.sqlite"), "--out", str(folder / "out" / "page.html")) == 0
    assert "wrote" in capsys.readouterr().out
    html = (folder / "out" / "page.html").read_text(encoding="utf-8")
    assert "<h1>Results in runs.sqlite</h1>" in html
    assert "<summary>Show the table “Checkpoints by content”</summary>" in html
    tables = Parsed(html).tables
    made = dict(tables["What was measured"][1:])
    assert made["model"] == f"{tiny}:Tiny"
    assert len(made["fingerprint of the data (SHA-256)"]) == 64
    assert f"pyflatness {pf.__version__}" in made["versions"]
    assert [line[0] for line in tables["Checkpoints by content"][1:]] == ["1", "2", "bad"]
    assert "there is no file" in str(status("report", str(folder / "none.sqlite"), "--out", str(folder / "x.html")))


def test_without_jinja2(scores, monkeypatch):
    tables.templates.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(pf.errors.MissingExtraError, match=r"HTML needs jinja2: pip install 'pyflatness\[html\]'"):
        scores.to_html()
    tables.templates.cache_clear()


def test_without_altair(scores, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(pf.errors.MissingExtraError, match=r"pip install 'pyflatness\[html\]'"):
        scores.to_html()

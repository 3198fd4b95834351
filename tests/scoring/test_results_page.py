"""The page of many models: what is in it, that no name becomes HTML, and that its numbers are the calls' own."""

import json
import math
import re
import sys
from dataclasses import replace
from html import unescape
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
    return scores.to_html(title=HOSTILE, exclude=["m8"], max_loss=math.inf)


@pytest.fixture(scope="module")
def parsed(html):
    return Parsed(html)


def test_values_are_a_plain_table(parsed):
    header, *rows = parsed.tables["Values by model and layer"]
    assert header == ["model", "layer", "loss", "accuracy", "trace", "pac_bayes"]
    assert len(rows) == 10
    assert rows[0][5] == "2.00 ± 0.10 [1.8, 2.2]"
    assert rows[1][5] == "≈ 3"
    assert rows[2][5] == ""
    assert rows[-1][4] == "failed"


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
    assert cells["measure"] == [
        *("measure", "layer", "Pearson", "Spearman", "Kendall", "networks", "left out", "smallest", "largest")
    ]
    complete = [one for one in scores if one.measure == "trace" and one.value is not None]
    table = {"checkpoint": [one.checkpoint for one in complete]}
    table |= {"trace": [one.value for one in complete], "loss": [one.loss for one in complete]}
    found = pf.statistics.correlations(table, "trace", "loss", exclude=["m8"])
    for place, how in enumerate(("Pearson", "Spearman", "Kendall"), 2):
        assert f"{how} {cells['trace'][place]}" == str(found["trace", how])
    values = {one.checkpoint: one.value for one in complete if one.checkpoint != "m8"}
    ends = [min(values, key=values.__getitem__), max(values, key=values.__getitem__)]
    assert cells["trace"][5:] == ["8", "2", *ends]  # one failed, one excluded
    assert cells["pac_bayes"][5:7] == ["2", "8"]


def test_few_networks_have_no_interval():
    layers = [row(f"m{place}", "trace", place + 1.0, layer="a", loss=place**2) for place in range(3)]
    html = pf.results.Scores(
        (*layers, *(row(f"m{place}", "trace", 2.0 - place, loss=place**2) for place in range(3))), 0
    ).to_html()
    lines = Parsed(html).tables["Correlations with loss"]
    assert [line[:2] for line in lines[1:]] == [["trace", "network"], ["trace", "a"]]  # the network first
    assert lines[2][2] == "0.96"  # of 1, 2, 3 and 0, 1, 4: 4 / sqrt(2 · 26/3)
    assert "over 3 networks, without an interval: so few networks say next to nothing of others." in html
    for spec in drawn(html)["Flatness and loss"]["specs"]:
        assert spec["title"]["subtitle"][3] == "too few networks for an interval"
    assert "[–]" not in html
    assert "Hollow" not in html


def texts_of(gaps, values, losses=None, **facts):
    """Return the page of networks with these gaps and traces as text."""
    rows = [
        row(f"runs/m{place}.pt", "trace", value, loss=loss, **(facts if place else {}))
        for place, (value, loss) in enumerate(zip(values, losses or [0.1] * len(values), strict=True))
    ]
    test = {
        "name": [one.checkpoint for one in rows],
        "loss": [one.loss + gap for one, gap in zip(rows, gaps, strict=True)],
    }
    return pf.results.Scores(tuple(rows), 0).to_html(test=test)


def test_the_page_begins_with_answers():
    up, mixed = [0.1, 0.2, 0.3, 0.5, 0.4, 0.6, 0.8, 0.7], [0.5, 0.1, 0.4, 0.2, 0.5, 0.1, 0.3, 0.4]
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    html = texts_of(up, values)
    assert re.search('<h2 id="section-0">(.*?)</h2>', html)[1] == "Flatness and generalisation gap"
    assert "Smallest trace: runs/m0.pt, 1. Largest: runs/m7.pt, 8. A smaller value is a flatter network." in html
    assert "networks with a smaller value have a smaller generalisation gap." in html
    assert "networks with a smaller value have a larger generalisation gap." in texts_of(up, values[::-1])
    assert "It contains 0: these networks do not show whether the two correlate." in texts_of(mixed, values)
    assert "nearly equal losses: at most a factor of 1 apart" in html
    assert "⚠ The comparison may not be fair: training losses are from 0.1 to 0.4" in texts_of(
        up, values, [0.1] * 7 + [0.4]
    )
    data = drawn(html)["Flatness and generalisation gap"]["data"]
    assert [point["name"] for point in data] == [f"m{place}" for place in range(8)]


def test_models_that_do_not_count_do_not_set_the_scale():
    spec = drawn(texts_of([0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 500.0], [0.1] * 3 + [2.3]))
    shown = [layer["encoding"] for layer in spec["Flatness and generalisation gap"]["specs"][0]["layer"][1:3]]
    for encoding in shown:
        assert encoding["x"]["scale"] == {"zero": False, "nice": False, "domain": [1.0, 3.0]}
        assert encoding["y"]["scale"]["domain"] == pytest.approx([0.1, 0.3])


def test_points_have_the_colours_of_a_setting():
    """Of the first word that all names have with up to ten numbers, or of the one that is named; seeds are none."""
    names = [f"runs/lr{rate}_b{batch}_s{seed}.pt" for rate in (0.1, 0.01) for batch in (16, 64) for seed in (0, 1)]
    scores = pf.results.Scores(tuple(row(name, "trace", 1.0 + n, loss=n % 3) for n, name in enumerate(names)), 0)

    def colours(**how):
        found = drawn(scores.to_html(max_loss=math.inf, **how))["Flatness and loss"]
        assert {layer["encoding"]["color"]["legend"]["title"] for layer in found["specs"][0]["layer"]} == {
            how.get("colour", "lr")
        }
        return [point["setting"] for point in found["data"]]

    assert colours() == ["0.1"] * 4 + ["0.01"] * 4
    assert colours(colour="b") == ["16", "16", "64", "64"] * 2
    with pytest.raises(pf.errors.InputError, match=r"colour: 'width' is no column, .* there are lr, b, s"):
        scores.to_html(colour="width")


def test_values_have_four_digits_and_all_where_the_pointer_rests():
    html = pf.results.Scores((row("a", "trace", 1234.56789),), 0).to_html()
    assert Parsed(html).tables["Values by model and layer"][1][-1] == "1235"
    assert "1234.56789" in html


def test_a_smallest_value_that_is_not_sure():
    html = texts_of([0.1, 0.2, 0.3], [1.0, 2.0, 3.0])
    assert "may have as small a value" not in html
    rows = [
        row(f"m{place}", "trace", value, stderr=0.5, exact=False, low=value - 1.2, high=value + 1.2)
        for place, value in enumerate([1.0, 2.0, 9.0])
    ]
    html = pf.results.Scores(tuple(rows), 0).to_html()
    assert "By their 95 % intervals 1 other network may have as small a value." in html


def test_a_network_that_is_left_out_neither_may_be_the_smallest_nor_has_a_profile():
    """One at chance set the scale of the profiles, and was counted among those that may be as flat."""
    names = {"a": 1.0, "b": 2.0, "dead": 1e-9}
    rows = [
        row(name, "trace", value, layer, loss=0.1, exact=name == "dead", stderr=None if name == "dead" else 0.01)
        for name, value in names.items()
        for layer in ("0", "2", "")
    ]
    rows = [replace(one, low=one.value - 0.02, high=one.value + 0.02) for one in rows]
    html = pf.results.Scores(tuple(rows), 0).to_html(exclude=["dead"])
    assert "may have as small a value" not in html
    assert "Without dead." in html
    assert {point["model"] for point in drawn(html)["Over the layers"]["data"]} == {"a", "b"}


def test_settings_are_told_apart_without_colours():
    names = [f"lr{rate}_s{seed}" for rate in (0.1, 0.01) for seed in (0, 1)]
    rows = [row(name, "trace", 1.0 + n, layer) for n, name in enumerate(names) for layer in ("0", "2", "")]
    found = drawn(pf.results.Scores(tuple(rows), 0).to_html())
    for title in ("Flatness and loss", "Over the layers"):
        points = found[title]["specs"][0]["layer"][-1]["encoding"]
        for channel in ("color", "shape"):
            assert points[channel]["field"] == "setting"
            assert points[channel]["scale"]["domain"] == ["0.1", "0.01"]


def test_numbers_stand_below_their_headings_and_formulas_behind_measures(scores):
    html = pf.results.Scores((row("a", "weight_norm", 4.0),), 0).to_html()
    assert '<th scope="col" class="number">weight_<wbr>norm</th>' in html
    assert '<th scope="col">model</th>' in html
    header, line = Parsed(html).tables["How the values came about"]
    assert dict(zip(header, line, strict=True))["formula"] == "‖w‖²"


def test_the_page_of_one_model_begins_with_its_value():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    report = pf.measure(model, LOSS, DATA, measures=["relative_flatness", "lambda_max"])
    value = report["relative_flatness"]
    most = max((report[layer, "relative_flatness"] for layer in ("0", "2")), key=float)
    html = report.to_html()
    told = f"relative_flatness of the network, the sum over layers: {value:.4g}</p>"
    assert told in html
    assert f"Largest in layer {most.layer}: {most:.4g}</p>" in html
    assert html.index(told) < html.index(">Values<") < html.index("an eigenvalue within")


def test_an_interval_of_one_number_is_not_shown():
    """All resamples of networks in perfect order have the same correlation, which is no confidence."""
    places = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    html = texts_of(places, [-place for place in places])
    assert "[-1.00, -1.00]" not in html
    found = pf.statistics.correlations({"trace": places, "gap": places})["trace", "Kendall"]
    assert (found.low, found.high, str(found)) == (1.0, 1.0, "Kendall 1.00 [–]")
    assert "networks in perfect order say next to nothing of others" in html


def test_test_losses_and_gaps_are_in_the_table_and_empty_columns_are_not():
    header, *lines = Parsed(texts_of([0.25, 0.5], [1.0, 2.0], accuracy=None)).tables["Values by model and layer"]
    assert header == ["model", "layer", "loss", "accuracy", "test loss", "gap", "trace"]
    assert [line[-3:-1] for line in lines] == [["0.35", "0.25"], ["0.6", "0.5"]]
    test = {"name": ["a", "b"], "loss": [0.5, 0.6], "accuracy": [0.75, 0.5]}
    html = pf.results.Scores((row("a", "trace", 1.0), row("b", "trace", 2.0)), 0).to_html(
        against="test_error", test=test
    )
    header, *lines = Parsed(html).tables["Values by model and layer"]
    assert header[3:7] == ["accuracy", "test loss", "test accuracy", "test error"]
    assert [line[5:7] for line in lines] == [["0.75", "0.25"], ["0.5", "0.5"]]
    header, *_ = Parsed(pf.results.Scores((row("a", "trace", 1.0, accuracy=None),), 0).to_html()).tables[
        "Values by model and layer"
    ]
    assert header == ["model", "layer", "loss", "trace"]


def test_failed_and_excluded_are_listed_and_hollow(html, parsed):
    listed = parsed.tables["Values that failed, and models that do not count"]
    why = {line[0]: line[3] for line in listed[1:]}
    assert why["m8"] == "excluded by name"
    failed = HOSTILE.replace("\x1b", "\\x1b")
    assert [line[3] for line in listed[1:] if line[0] == failed and line[2] == "trace"] == [f"no such file {failed}"]
    data = json.loads(re.search('id="data">(.*?)</script>', html, re.DOTALL)[1])
    points = {point["model"]: point for point in data["sections"][0]["data"]}
    assert [name for name, point in points.items() if point["out"]] == ["m8"]
    assert "x0" not in points[HOSTILE]
    marks = [layer["mark"].get("filled") for layer in data["sections"][0]["specs"][0]["layer"]]
    assert marks == [None, True, False, False, False]
    assert "Hollow points are models that do not count" in html


def test_the_summary_says_what_is_exact(parsed):
    lines = {line[0]: line[1:] for line in parsed.tables["How the values came about"]}
    assert lines["trace"][:-1] == ["9", "9", "0", "1", "ggn", "20", ""]
    assert lines["pac_bayes"][:-1] == ["2", "0", "2", "0", "ggn", "20", "0.05"]


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
    assert "may not be fair" not in page([(1.0, 0.1), (2.0, 0.11), (3.0, 0.12)])


def test_a_report_and_a_history(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    report = pf.measure(model, LOSS, DATA, measures=["trace", "relative_flatness"])
    text = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == text
    lines = {line[0]: line for line in Parsed(text).tables["Values by layer"]}
    assert lines["network"][1] == f"{report['trace'].value:.4g}"
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


def test_intervals_are_over_recipes_and_seeds_as_of_the_call(tiny, tmp_path):
    names = [f"{recipe}-{seed}" for recipe in "abcdef" for seed in (1, 2)]
    files = {name: saved(tiny, place, f"{name}.safetensors") for place, name in enumerate(names)}
    store, metadata = tmp_path / "runs.sqlite", tmp_path / "runs.csv"
    scores = pf.score(files, "cross_entropy", f"{tiny}:data", model=f"{tiny}:Tiny", measures=["trace"], store=store)
    lines = [f"{name},{name[0]},0.{name[0] in 'abc':d},{name[2]}" for name in names]
    metadata.write_text("\n".join(["checkpoint,optimizer,rate,seed", *lines]), encoding="utf-8")
    of_network = {one.checkpoint: one for one in scores if one.layer == ""}
    table = {"checkpoint": names, "trace": [of_network[name].value for name in names]}
    table |= {"loss": [of_network[name].loss for name in names], "optimizer": [name[0] for name in names]}
    table["seed"] = [name[2] for name in names]

    def page(*options):
        out = tmp_path / "page.html"
        given = ["--metadata", str(metadata), "--max-loss", "inf", *options]
        done = status("report", str(store), "--out", str(out), *given)
        return out.read_text(encoding="utf-8") if done == 0 else done

    for options, how, over in (
        ([], {}, "12 networks"),
        (["--settings", "optimizer,rate"], {"settings": ["optimizer"]}, "12 networks in 6 clusters"),
        (
            ["--settings", "optimizer", "--seeds", "seed", "--interval", "fisher"],
            {"settings": "optimizer", "seeds": "seed", "interval": "fisher"},
            "12 networks in 6 clusters",
        ),
    ):
        html = page(*options)
        found = pf.statistics.correlations(table, "trace", "loss", max_loss=math.inf, **how)
        cells = next(line for line in Parsed(html).tables["Correlations with loss"] if line[:2] == ["trace", "network"])
        assert cells[2:5] == [str(row).partition(" ")[2] for row in found]
        assert f"over {over}" in html
        assert found.method in unescape(html)
        assert ("They take networks as independent" in html) == (not options)
    few = page("--settings", "rate")
    assert "without an interval: so few clusters say next to nothing of others" in few
    assert "no column 'rates'; did you mean" in str(page("--settings", "rates"))


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


def test_a_dead_network_is_named_and_neither_the_flattest_nor_in_a_correlation():
    facts = [(0.05, 1.0, 3.0), (0.04, 0.98, 4.0), (0.06, 1.0, 2.0), (2.3, 0.1, 0.0), (0.05, 0.12, 0.5)]
    rows = tuple(
        row(f"m{place}", "trace", value, loss=loss, accuracy=accuracy, chance=0.1)
        for place, (loss, accuracy, value) in enumerate(facts)
    )
    html = pf.results.Scores(rows, 0).to_html()
    assert "Smallest trace: m2, 2." in html
    why = {"m3": "its loss is 2.3", "m4": "its accuracy of 0.12 is that of chance"}
    assert (
        f"Left out of what is said here and of the correlations: m3 ({why['m3']}); m4 ({why['m4']})."
        in html.replace("&#39;", "'")
    )
    listed = Parsed(html).tables["Values that failed, and models that do not count"]
    assert {line[0]: line[-1] for line in listed[1:]} == why
    assert "Smallest trace: m3, 0." in pf.results.Scores(rows, 0).to_html(max_loss=math.inf)


def test_loss_and_accuracy_of_a_network_stand_in_its_own_row():
    rows = (
        row("a", "trace", 1.0, "0"),
        row("a", "trace", 2.0, "1"),
        row("a", "trace", 3.0),
        row("b", "trace", 4.0, "0"),
    )
    _, *lines = Parsed(pf.results.Scores(rows, 0).to_html()).tables["Values by model and layer"]
    assert [line[:4] for line in lines] == [
        ["a", "0", "", ""],
        ["a", "1", "", ""],
        ["a", "network", "0.1", "0.5"],
        ["b", "0", "0.1", "0.5"],
    ]

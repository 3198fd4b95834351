"""A history: what is read back is what was written, its table has every value, its figure a line for each layer."""

import json
import math

import matplotlib.colors
import pandas
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import pyflatness as pf
from pyflatness.training.history import Record
from support.cases import classifier

X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
LOSS = nn.CrossEntropyLoss()


def history(**options):
    """Three records of a network whose weights shrink."""
    model = classifier(5, 6, 4, 3)
    averaged = AveragedModel(model)
    given = {"measures": ["relative_flatness", "trace"], "weights": ["live", "swa"], "averaged": averaged} | options
    found = pf.track(model, LOSS, (X, Y), **given)
    for step in range(3):
        found.record(step=10 * step, epoch=0.5 * step, train_loss=math.inf if step else math.nan, lr=1)
        averaged.update_parameters(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 0.9
    return found


@pytest.fixture(scope="module")
def exact():
    return history(per_sample=True)


@pytest.fixture(scope="module")
def sampled():
    return history(probes=3, layers=["0", "2"])


def test_json_and_back(exact, tmp_path):
    path = tmp_path / "history.json"
    text = exact.to_json(path)
    for other in (
        pf.results.History.from_json(text),
        pf.results.History.from_json(path),
        pf.results.History.from_json(str(path)),
    ):
        assert other == exact
        assert other.to_json() == text
        assert [record.seconds for record in other] == [record.seconds for record in exact]
        assert str(other) == str(exact)
        kept, read = (held[1].reports["swa"]["2", "trace"].per_sample for held in (exact, other))
        assert torch.equal(kept, read)
    assert exact != pf.results.History([*exact][:2])
    assert exact != history(per_sample=True, measures="trace")
    changed = json.loads(text)
    changed["records"][1]["numbers"]["train_loss"] = 2.0
    assert pf.results.History.from_json(json.dumps(changed)) != exact
    assert exact != text
    assert exact[0] != text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.json", "history: JSON text, or the path .* No such file"),
        ("{", "history: JSON text"),
        ("{}", r"JSON of History.to_json\(\) is wanted"),
        ('{"records": 3}', r"JSON of History.to_json\(\) is wanted"),
        ('{"records": [3]}', "history: a record is a dict of step, epoch, numbers, reports, seconds, got 3"),
        ('{"records": [{"step": 1}]}', "a record is a dict of .*, got {'step': 1}"),
        ('{"records": [{"step": 1, "epoch": 1, "numbers": {}, "reports": 3, "seconds": 1}]}', "a record is a dict of"),
    ],
)
def test_bad_json(source, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.results.History.from_json(source)


def test_pickling_keeps_the_records(tmp_path):
    """And not the model, which a checkpoint has."""
    model = classifier(5, 6, 3)
    found = pf.track(model, LOSS, (X, Y), budget=0.9)
    found.step()
    torch.save({"history": found}, tmp_path / "checkpoint.pt")
    read = torch.load(tmp_path / "checkpoint.pt", weights_only=False)["history"]
    assert read == found
    assert read.ran == found.ran
    more = pf.track(model, LOSS, (X, Y), history=read)
    more.record(step=9)
    assert [record.step for record in more] == [1, 9]


def test_a_history_that_was_read_is_gone_on_with(exact):
    read = pf.results.History.from_json(exact.to_json())
    with pytest.raises(
        pf.errors.InputError, match=r"made without a model; pf.track\(model, loss, data, history=history"
    ):
        read.record(step=30)
    more = pf.track(classifier(5, 6, 4, 3), LOSS, (X, Y), history=read)
    more.record(step=30)
    assert [record.step for record in more] == [0, 10, 20, 30]
    assert [*more][:3] == [*read]
    assert len(read) == 3
    assert repr(more) == "History(4 records from step 0 to 30: relative_flatness, trace)"
    assert repr(pf.results.History()) == str(pf.results.History()) == "History(0 records: nothing measured)"
    head, names, *rows = str(more).splitlines()
    assert head == repr(more)
    assert names.split()[0] == "step"
    assert {"weights", "relative_flatness", "trace"} <= {*names.split()}
    assert len(rows) == sum(len(record.reports) for record in more)
    assert float(rows[0].split()[-1]) == pytest.approx(more[0].reports["live"]["trace"].value, rel=1e-3)


def test_the_table_has_the_intervals_of_a_report(exact, sampled):
    *_, last, said = str(sampled).splitlines()
    for measure in ("relative_flatness", "trace"):
        estimate = sampled[-1].reports["swa"][measure]
        shown = repr(estimate).removeprefix("Estimate(").split(":")[0]
        assert "[" in shown
        assert shown in last
        assert shown in str(sampled[-1].reports["swa"])
    assert said == "[95 % intervals]"
    assert "[" not in str(exact)
    mixed = pf.results.History()
    mixed.add(exact[0].reports)
    mixed.add(pf.measure(classifier(5, 6, 3), LOSS, (X, Y), measures="weight_norm"))
    assert str(mixed).splitlines()[-1].split()[:2] == ["–", "–"]  # of the first two measures


def test_reports_that_were_measured_otherwise(exact):
    found = pf.results.History()
    for record in exact:
        numbers = {"step": record.step, "epoch": record.epoch, **record.numbers}
        assert found.add(record.reports, seconds=record.seconds, **numbers) == record
    assert found.to_json() == exact.to_json()
    report = exact[1].reports["swa"]
    assert found.add(report, step=3).reports == {"live": report}
    assert found[-1].seconds is None
    assert pf.results.History.from_json(found.to_json()) == found
    for wrong in ({"live": 3}, report.to_dict(), None):
        with pytest.raises(pf.errors.InputError, match=r"a report of pf.measure is wanted, or a dict of them, got"):
            found.add(wrong)
    with pytest.raises(pf.errors.InputError, match="measure= has the name of a column"):
        found.add(report, measure=3.0)


def test_an_empty_history_is_true_and_its_records_are_a_tuple(exact):
    """``if history:`` asks whether there is one: what is recorded behind it was lost in silence."""
    history = pf.results.History()
    assert history
    assert history.records == ()
    assert exact.records == tuple(exact)


def test_frame_has_a_row_for_every_estimate(exact, tmp_path):
    frame = exact.to_frame()
    expected = [
        (record.step, record.epoch, weights, layer, measure, estimate.value)
        for record in exact
        for weights, report in record.reports.items()
        for measure, held in report.by_measure().items()
        for layer, estimate in held.items()
    ]
    columns = ["step", "epoch", "weights", "layer", "measure", "value"]
    assert [tuple(row) for row in frame[columns].itertuples(index=False)] == expected
    assert [*frame.columns[:6]] == ["step", "epoch", "train_loss", "lr", "seconds", "weights"]
    assert {*frame["weights"]} == {"live", "swa"}
    assert len(frame["per_sample"][0]) == 12
    assert "per_neuron" not in frame
    exact.to_csv(tmp_path / "history.csv")
    written = pandas.read_csv(tmp_path / "history.csv", keep_default_na=False)
    assert [*written["value"]] == [*frame["value"]]
    assert [*written.columns] == [name for name in frame.columns if name != "per_sample"]
    table = frame.query("layer == '4' and weights == 'live'").pivot(index="step", columns="measure", values="value")
    assert table.loc[20, "trace"] == exact[2].reports["live"]["4", "trace"]
    assert pf.results.History().to_frame().empty


def test_an_axis_for_each_measure_and_a_line_for_each_layer(exact, tmp_path):
    figure, axes = exact.plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 5000
    assert [panel.get_ylabel() for panel in axes] == ["relative_flatness", "trace", "train_loss", "lr"]
    assert all(panel.get_xlabel() == "step" for panel in axes)
    assert figure.axes == axes
    lines = {line.get_label(): line for line in axes[1].get_lines()}
    layers = ["0", "2", "4", "network"]
    assert [*lines] == [*layers, *(f"{layer}, swa" for layer in layers)]
    for label, line in lines.items():
        layer, weights = label.removesuffix(", swa"), "swa" if "swa" in label else "live"
        held = [record for record in exact if weights in record.reports]
        assert [*line.get_xdata()] == [record.step for record in held]
        values = [record.reports[weights]["" if layer == "network" else layer, "trace"].value for record in held]
        assert [*line.get_ydata()] == values
        assert line.get_linestyle() == ("--" if weights == "swa" else "-")
        assert line.get_color() == lines[layer].get_color()
    assert len({lines[layer].get_color() for layer in layers}) == 4
    assert (axes[1].get_yscale(), axes[2].get_yscale()) == ("log", "linear")
    assert not axes[1].collections


def test_intervals_are_bands(sampled):
    _, (panel,) = sampled.plot(measures="trace", layers=["2"], x="epoch")
    assert panel.get_xlabel() == "epoch"
    (live, swa), (band, _) = panel.get_lines(), panel.collections
    assert (live.get_label(), swa.get_label()) == ("2", "2, swa")
    assert matplotlib.colors.same_color(band.get_facecolor()[0][:3], live.get_color())
    estimates = [record.reports["live"]["2", "trace"] for record in sampled]
    expected = {(x, end) for x, e in zip((0, 0.5, 1), estimates, strict=True) for end in e.interval()}
    assert panel.get_legend().get_title().get_text() == "bands: 95 % intervals"
    assert {tuple(point) for point in band.get_paths()[0].vertices} == expected


def test_the_time_of_a_training_has_no_axis_unless_it_is_named():
    found = pf.track(classifier(5, 4, 3), LOSS, (X, Y), budget=0.5)
    found.step(lr=0.1)
    assert [panel.get_ylabel() for panel in found.plot()[1]] == ["relative_flatness", "lr"]
    assert [panel.get_ylabel() for panel in found.plot(measures="train_seconds")[1]] == ["train_seconds"]


def test_a_band_has_a_gap_where_an_interval_is_not_known():
    found = pf.results.History()
    for step, stderr in enumerate((0.1, math.nan, 0.1)):
        held = pf.results.Estimate(1.0, stderr, 9, "ggn-sampled", exact=False, backend="reference", dof=8.0)
        found.add(pf.results.Report(("a",), ("trace",), {("a", "trace"): held}), step=step)
    _, (panel,) = found.plot(layers="a")
    assert len(panel.collections) == 1


def test_axes_of_the_users(exact):
    figure = matplotlib.figure.Figure()
    one, two = figure.subplots(1, 2)
    assert exact.plot(measures="lr", axes=one) == (figure, [one])
    assert exact.plot(measures=["lr", "trace"], axes=figure.axes) == (figure, [one, two])
    with pytest.raises(pf.errors.InputError, match=r"axes: one for each of trace is wanted, got 2"):
        exact.plot(measures="trace", axes=[one, two])


def test_records_without_steps_are_drawn_by_their_count():
    found = pf.track(classifier(5, 6, 4, 3), LOSS, (X, Y))
    for step in (5, None):
        found.record(step=step)
    _, (panel,) = found.plot()
    assert panel.get_xlabel() == "record"
    assert [*panel.get_lines()[0].get_xdata()] == [0, 1]
    with pytest.raises(pf.errors.InputError, match="x='step': record 1 has no step"):
        found.plot(x="step")


def test_many_layers_have_colours_of_their_own():
    model = classifier(*[3] * 13)
    found = pf.track(model, LOSS, (X[:, :3], Y), measures="weight_norm")
    found.record(step=0)
    _, (panel,) = found.plot()
    assert len({line.get_color() for line in panel.get_lines()}) == 13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measures": "trac"}, "no measure or number 'trac' was recorded; there are 'relative_flatness', 'trace', "),
        ({"measures": 3}, "measures=3"),
        ({"layers": "1"}, "no layer '1' was recorded; there are '0', '2', '4', ''"),
        ({"x": "time"}, "x='time': 'step' or 'epoch'"),
    ],
)
def test_bad_figures(exact, options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        exact.plot(**options)


def test_nothing_to_draw():
    with pytest.raises(pf.errors.InputError, match="nothing was recorded yet"):
        pf.results.History().plot()
    found = pf.track(classifier(5, 4, 3), LOSS, (X, Y), measures=["trace", "fisher_rao"])
    found.record(step=0)
    _, panels = found.plot(layers=["0"])
    assert [len(panel.get_lines()) for panel in panels] == [1, 0]  # fisher_rao is of the network alone


def test_records_are_made_of_what_they_say(exact):
    record = exact[1]
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert (record.step, record.epoch, record.numbers) == (10, 0.5, {"train_loss": math.inf, "lr": 1.0})

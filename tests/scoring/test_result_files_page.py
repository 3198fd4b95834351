"""The page of spectra, landscapes and trainings: its numbers are those of the results that were put into the store."""

from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness.messages import with_error
from pyflatness.scoring import page
from pyflatness.scoring.units import Row
from support.pages import Parsed, drawn
from support.score_runs import DATA, LOSS, network, status

HOSTILE = "<script>alert(1)</script>\"'&amp;"
NETWORKS = {f"run/epoch_{number}": network(number) for number in (10, 9)} | {HOSTILE: network(3)}
SPECTRA = {
    name: pf.spectrum(NETWORKS[name], LOSS, DATA, k=2 + place, density=place == 0, probes=2, steps=8)
    for place, name in enumerate(["run/epoch_9", HOSTILE])
}
LINE = pf.landscape(network(9), LOSS, DATA, dimensions=1, points=5)
PLANE = pf.landscape(network(9), LOSS, DATA, points=(4, 3))


def history(seed: int) -> pf.results.History:
    made = pf.results.History()
    for step in range(2):
        made.add(pf.measure(network(seed + step), LOSS, DATA, measures="trace"), step=10 * step, train_loss=1.0 - step)
    return made


HISTORIES = {"first": history(0), HOSTILE: history(5)}


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("store") / "runs.sqlite"
    pf.score(NETWORKS, LOSS, DATA, layers="*", measures=["trace", "relative_flatness"], store=path)
    for name, spectrum in SPECTRA.items():
        pf.add_to_store(path, name, spectrum)
    pf.add_to_store(path, "run/epoch_9", LINE, label="line")
    pf.add_to_store(path, "run/epoch_9", PLANE)
    for name, made in HISTORIES.items():
        pf.add_to_store(path, name, made)
    page = path.with_name("page.html")
    assert status("report", str(path), "--out", str(page)) == 0
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed(html: str) -> Parsed:
    return Parsed(html)


@pytest.fixture(scope="module")
def charts(html: str):
    return drawn(html)


def test_eigenvalues_are_in_a_table(parsed: Parsed) -> None:
    header, *rows = parsed.tables["Eigenvalues"]
    assert header[:6] == ["spectrum", "weights", "λ1", "λ2", "λ3", "trace by the density"]
    for row, (name, spectrum) in zip(rows, SPECTRA.items(), strict=True):
        values = [f"{value:.4g}" for value in spectrum.eigenvalues.tolist()]
        trace = "" if spectrum.density is None else f"{with_error(*spectrum.density.moment(1))} (2 probes)"
        assert row[:6] == [name, str(spectrum.size), *values, *[""] * (3 - len(values)), trace]
        assert row[6:10] == ["hessian", "yes", "20", str(spectrum.products)]


def test_a_spectrum_is_drawn_as_it_is(charts) -> None:
    density, ranks = charts["Spectra"]["specs"]
    assert "params" not in density  # one density is nothing to choose from
    assert ranks["mark"]["type"] == "line"
    for row, (name, spectrum) in zip(charts["Spectra"]["data"], SPECTRA.items(), strict=True):
        assert row["name"] == name
        assert row["value"] == spectrum.eigenvalues.tolist()
        assert row["residual"] == spectrum.residuals.tolist()
        assert ("p" in row) == (spectrum.density is not None)
    row, spectrum = charts["Spectra"]["data"][0], SPECTRA["run/epoch_9"]
    at = torch.tensor(row["x"], dtype=torch.float64, device="cpu")
    mean, error = spectrum.density.at(at, spectrum.width())
    # Of numbers with five digits: the density's slope is at most 1 / width² for a weight of 1, and places are rounded.
    near = pytest.approx(mean.tolist(), rel=1e-3, abs=1e-3 * float(mean.max()))
    assert row["p"] == near
    assert row["high"] == pytest.approx((mean + error).tolist(), rel=1e-3, abs=1e-3 * float(mean.max()))
    assert at[0] < spectrum.density.nodes.min()
    assert at[-1] > spectrum.eigenvalues[0]
    mass = torch.trapezoid(torch.tensor(row["p"], dtype=torch.float64, device="cpu"), at)
    assert float(mass) == pytest.approx(1, abs=5e-3)  # three standard deviations are drawn: 0.3 % lie beyond


def test_landscapes_have_their_numbers(parsed: Parsed, charts) -> None:
    header, *rows = parsed.tables["Losses along directions"]
    assert header[0] == "landscape"
    by_name = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    for name, found, points in (("run/epoch_9, line", LINE, "5"), ("run/epoch_9", PLANE, "4 × 3")):
        row = by_name[name]
        assert (row["points"], row["loss at the weights"]) == (points, f"{found.loss:.4g}")
        assert row["smallest loss"] == f"{float(found.losses.min()):.4g}"
        assert row["largest loss"] == f"{float(found.losses.max()):.4g}"
        assert row["curvature"] == "; ".join(f"{x:.4g}" for x in found.quadratic.hessian.diagonal().tolist())
    line, *lines = charts["Landscapes"]["data"]
    assert line["a"] == LINE.coefficients[0].tolist()
    assert line["loss"] == LINE.losses.tolist()
    quadratic = LINE.quadratic.at(*LINE.coefficients).tolist()
    assert all(shown in (None, true) for shown, true in zip(line["model"], quadratic, strict=True))
    assert line["model"][2] == pytest.approx(LINE.loss)
    assert [row["a"] for row in lines] == PLANE.coefficients[0].tolist()
    assert [row["loss"] for row in lines] == PLANE.losses.tolist()
    assert {tuple(row["b"]) for row in lines} == {tuple(PLANE.coefficients[1].tolist())}


def test_a_landscape_has_a_cross_at_the_weights(charts) -> None:
    _, plane = charts["Landscapes"]["specs"]
    cross = plane["layer"][1]
    assert cross["mark"]["shape"] == "cross"
    assert (cross["encoding"]["x"], cross["encoding"]["y"]) == ({"datum": 0}, {"datum": 0})


def test_histories_are_lines_over_their_steps(parsed: Parsed, charts) -> None:
    header, *rows = parsed.tables["What was recorded: 2 histories"]
    assert header == ["model", "layer", "trace", "train_loss"]
    held = {(row[0], row[1]): row[2] for row in rows}
    data = [row for row in charts["Training · 2 histories"]["data"] if "m0" in row]
    for name, made in HISTORIES.items():
        for record in made:
            value = record.reports["live"]["trace"].value
            assert held[f"{name}, step {record.step}, live", "network"] == f"{value:.4g}"
            of = {"training": name, "x": record.step, "weights": "live", "layer": "network", "m0": value}
            assert of in data
    trace, loss = charts["Training · 2 histories"]["specs"]
    assert trace["params"][0]["bind"] == {"input": "select", "name": "Layer ", "options": ["0", "2", "network"]}
    assert trace["params"][0]["value"] == "network"
    assert "params" not in loss


def test_models_of_one_training_are_a_line(charts) -> None:
    data = charts["Over the training"]["data"]
    assert {(row["training"], row["x"]) for row in data} == {("run/epoch_*", 9), ("run/epoch_*", 10)}
    assert [row["x"] for row in data if row.get("layer") == "0" and "m0" in row] == [9, 10]
    assert len(charts["Over the training"]["specs"]) == 4  # two measures, loss and accuracy


def test_nothing_of_a_name_is_html(html: str, parsed: Parsed) -> None:
    assert "<script>alert" not in html
    assert len(parsed.all("script")) == 4


def test_what_added_to_the_store_is_listed(parsed: Parsed) -> None:
    header, *rows = parsed.tables["What added to the store"]
    assert header == ["began", "command", "versions"]
    assert [row[1] for row in rows] == ["pf.score in Python", *["pf.add_to_store in Python"] * 6]
    assert all(f"pyflatness {pf.__version__}" in row[2] for row in rows)


def places(*names: str, **columns: list[object]) -> set[tuple[str, str, float]]:
    """Return training, kind of step and step of models, by the data of their charts."""
    records = [
        vars(Row(name, "", "trace", 1.0, loss=0.1)) | {key: column[place] for key, column in columns.items()}
        for place, name in enumerate(names)
    ]
    found = page.of_checkpoints(records)
    along = {spec["layer"][1]["encoding"]["x"]["title"] for spec in found.specs}
    return {(row["training"], *along, row["x"]) for row in found.data}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a/epoch_2.pt", "a/epoch_10.pt"], {("a/epoch_*.pt", "epoch", 2), ("a/epoch_*.pt", "epoch", 10)}),
        (
            ["epoch=1-step=30.ckpt", "epoch=2-step=60.ckpt"],
            {("epoch=*-step=*.ckpt", "step", 30), ("epoch=*-step=*.ckpt", "step", 60)},
        ),
        (
            ["out/checkpoint-500/model.safetensors", "out/checkpoint-1000/model.safetensors"],
            {("out/checkpoint-*/model.safetensors", "step", number) for number in (500, 1000)},
        ),
        (["a/epoch_2.pt", "b/epoch_2.pt"], set()),  # one of each training
        (["step1.pt", "footstep2.pt"], set()),  # a word of which step is the end
        (["sgd_lr0.02.pt", "sgd_lr0.03.pt"], set()),
    ],
)
def test_trainings_by_names(names: list[str], wanted: set[tuple[str, str, float]]) -> None:
    assert places(*names) == wanted


def test_trainings_by_columns() -> None:
    assert places("x", "y", "z", run=["r", "r", "q"], step=[3, 1, 2]) == {("r", "step", 3), ("r", "step", 1)}
    assert places("x", "y", run=["r", "r"], epoch=[0.5, 1.0]) == {("r", "epoch", 0.5), ("r", "epoch", 1.0)}
    assert places("x", "y", step=[3, 1]) == set()  # final networks may have trained for different times


def test_a_page_without_any_of_it() -> None:
    scores = pf.results.Scores((Row("a", "", "trace", 1.0, loss=0.1), Row("b", "", "trace", 2.0, loss=0.2)), 0)
    assert {"Spectra", "Landscapes", "Over the training", "Commands"} & {*drawn(scores.to_html())} == set()


def test_a_folder_of_checkpoints_from_python(tmp_path: Path) -> None:
    rows = [Row(f"epoch_{number}", "", "trace", float(number), loss=0.1) for number in range(3)]
    found = drawn(pf.results.Scores(tuple(rows), 0).to_html(tmp_path / "page.html"))["Over the training"]
    assert [row["m0"] for row in found["data"] if "m0" in row] == [0.0, 1.0, 2.0]

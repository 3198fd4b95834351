"""``pyflatness score`` with many measures and layers, and networks of the zoo."""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.scoring import checkpoints, specs
from support import ROOT
from support.score_runs import arguments_of, needs_pickles, rows_of, saved, status, tiny_net

ZOO = ROOT.parent / "shared" / "zoo"
CHOICES = ("relative_flatness", "relative_flatness_std", "trace")


@pytest.mark.usefixtures("tiny")
@pytest.mark.skipif(not ZOO.is_dir(), reason="the zoo of trained networks is not beside the repository")
def test_zoo(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="the zoo's images are JPEG files")
    files = [str(path) for path in sorted(ZOO.glob("*.safetensors"))[:2]]
    data = {"split": "train", "count": 200}
    arguments = ["--model", f"{ZOO}/lenet5.py:LeNet5", "--data", f"{ZOO}/lenet5.py:images", "--loss", "cross_entropy"]
    arguments += ["--data-args", json.dumps(data), "--out", str(tmp_path / "zoo.csv"), "--layers", "fc3"]
    assert status("score", *arguments, *files) == 0
    with (tmp_path / "zoo.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["checkpoint"] for row in rows] == files
    network = specs.resolve(f"{ZOO}/lenet5.py:LeNet5")().eval()
    checkpoints.load(network, checkpoints.read(Path(files[0])).state)
    truth = pf.relative_flatness(network, "cross_entropy", specs.resolve(f"{ZOO}/lenet5.py:images")(**data))
    assert float(rows[0]["value"]) == pytest.approx(truth.value, rel=1e-6)
    assert all(row["layer"] == "fc3" and float(row["accuracy"]) > 0.9 for row in rows)


def test_measures_of_the_network_alone_are_one_row(tiny: str) -> None:
    checkpoint = saved(tiny, 1, "a.safetensors")
    names = ["weight_norm", "trace", "pac_bayes", "fisher_rao", "adaptive_sharpness_mc"]
    chosen = [f"--measures={name}" for name in names]
    assert status(*arguments_of(tiny, checkpoint, *chosen, "--layers=body", "--layers=head")) == 0
    rows = rows_of(tiny)
    assert [(row["layer"], row["measure"]) for row in rows] == [
        *((layer, name) for layer in ("body", "head", "") for name in names[:2]),
        *(("", name) for name in names[2:]),
    ]
    network, batches = tiny_net(tiny, 1), specs.resolve(f"{tiny}:data")()
    logits = torch.cat([network(x) for x, _ in batches]).detach().double()
    targets = torch.cat([y for _, y in batches]).long()
    for row in rows:
        report = pf.measure(network, "cross_entropy", batches, layers=row["layer"] or None, measures=row["measure"])
        expected = report[row["layer"], row["measure"]]
        assert float(row["value"]) == pytest.approx(expected.value, rel=1e-6)
        assert (row["method"], row["exact"], row["samples"]) == (
            expected.method,
            str(expected.exact),
            str(expected.samples),
        )
        assert float(row["loss"]) == pytest.approx(float(F.cross_entropy(logits, targets)), rel=1e-6)
        assert float(row["accuracy"]) == float((logits.argmax(dim=1) == targets)[targets != -100].double().mean())


@pytest.mark.parametrize("first", ["pac_bayes", "adaptive_sharpness_mc", "fisher_rao"])
def test_loss_and_accuracy_are_those_of_the_network_itself(first: str, tiny: str) -> None:
    """Not of it under noise; nor of derivatives in forward mode."""
    checkpoint = saved(tiny, 1, "a.safetensors")
    assert status(*arguments_of(tiny, checkpoint, f"--measures={first}", "--measures=trace")) == 0
    one = rows_of(tiny)
    assert status(*arguments_of(tiny, checkpoint, "--measures=trace")) == 0
    for key in ("loss", "accuracy"):
        assert {float(row[key]) for row in one} == {float(rows_of(tiny)[0][key])}


def test_sampled_values_have_their_errors(tiny: str) -> None:
    """Also where samples go through the model more than once, which counts in no loss or accuracy."""
    path = saved(tiny, 0, "a.safetensors")
    found = {}
    for probes in ([], ["--probes", "4"], ["--rtol", "0.2"], ["--fraction", "0.5"]):
        assert status(*arguments_of(tiny, "--layers", "body", *probes, path)) == 0
        (found[" ".join(probes)],) = rows_of(tiny)
    exact, *others = found.values()
    assert (exact["stderr"], exact["method"]) == ("", "ggn")
    assert exact["low"] == exact["value"] == exact["high"]
    assert [*exact][-4:] == ["error", "low", "high", "chance"]
    for row in others:
        assert row["method"] == "ggn-sampled"
        assert abs(float(row["value"]) - float(exact["value"])) <= 5 * float(row["stderr"])
        assert float(row["low"]) < float(row["value"]) < float(row["high"])
        assert float(row["loss"]) == pytest.approx(float(exact["loss"]))
        assert row["accuracy"] == exact["accuracy"]
    assert status(*arguments_of(tiny, "--probes", "some", path)) != 0


def _in_report(report: pf.results.Report) -> set[tuple[str, str]]:
    return {(layer, measure) for layer, measure, _ in report}


def test_all_measures_of_all_layers(tiny: str) -> None:
    checkpoint = saved(tiny, 1, "a.safetensors")
    assert status(*arguments_of(tiny, checkpoint, "--layers=*", "--measures=all")) == 0
    rows = rows_of(tiny)
    report = pf.measure(tiny_net(tiny, 1), "cross_entropy", specs.resolve(f"{tiny}:data")(), measures="all")
    assert {(row["layer"], row["measure"]) for row in rows} == _in_report(report)
    assert len({(row["layer"], row["measure"]) for row in rows}) == len(rows)
    for row in rows:
        assert float(row["value"]) == pytest.approx(report[row["layer"], row["measure"]].value, rel=1e-9), row
    assert len({(row["loss"], row["accuracy"]) for row in rows}) == 1


@pytest.mark.parametrize("layers", [[], ["--layers=body"], ["--layers=*"]])
def test_measures_share_their_passes(layers: list[str], tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(tiny, 1, "a.safetensors")
    network, calls = specs.resolve(f"{tiny}:Tiny"), []
    forward = network.forward
    monkeypatch.setattr(network, "forward", lambda self, x: calls.append(len(x)) or forward(self, x))
    swept = ["trace", "scaled_trace", "neuron_flatness_rows", "neuron_flatness", "weight_norm"]
    for names in (swept, ["mls", "nmls", "volume"], [*swept, "mls", "nmls", "volume"]):
        assert status(*arguments_of(tiny, checkpoint, *layers, *(f"--measures={name}" for name in names))) == 0
    passes = sum(size > 2 for size in calls) / 4  # batches; nmls is of all layers, and so apart where one is chosen
    assert passes == (4 if layers == ["--layers=*"] else 6)


def test_a_measure_that_fails_stops_no_other(tiny: str) -> None:
    checkpoint = Path(tiny).with_name("a.safetensors")
    network = tiny_net(tiny, 1, "Curved")
    save_file(network.state_dict(), checkpoint)
    names = ["trace", "normalized_sharpness", "adaptive_sharpness", "weight_norm"]
    chosen = [f"--measures={name}" for name in names]
    arguments = arguments_of(tiny, checkpoint, "--model", f"{tiny}:Curved", "--layers=*", *chosen, data="data")
    assert status(*arguments, "--data-args", '{"kind": "values"}', "--loss", "mse_loss") == 1
    rows = rows_of(tiny)
    assert len(rows) == 3 + 3 + 4 + 4  # that "spare" does not run is not known of weights, nor where there is no value
    data = specs.resolve(f"{tiny}:data")("values")
    for row in rows:
        if row["measure"] == "normalized_sharpness":
            assert "has no lower bound" in row["error"]
            assert row["value"] == row["loss"] == ""
            continue
        assert row["error"] == ""
        report = pf.measure(network, "mse_loss", data, measures=row["measure"])  # as it is taken by itself
        assert float(row["value"]) == pytest.approx(report[row["layer"], row["measure"]].value, rel=1e-6)
        assert row["loss"] != ""
    assert status(*arguments, "--layers=spare") == 1  # by its own name, so that it has to run
    assert all("'spare' did not run" in row["error"] for row in rows_of(tiny) if row["measure"] == "trace")


def test_all_layers_are_measured_by_default(tiny):
    checkpoint = saved(tiny, 0, "0.safetensors")
    given = arguments_of(tiny, checkpoint)
    place = given.index("--layers")
    assert status(*given[:place], *given[place + 2 :]) == 0
    found = rows_of(tiny)
    assert [row["layer"] for row in found] == ["body", "head", ""]
    report = pf.measure(tiny_net(tiny, 0), "cross_entropy", specs.resolve(f"{tiny}:data")())
    for row in found:
        assert float(row["value"]) == pytest.approx(report[row["layer"], "relative_flatness"].value, rel=1e-6)


# --- checkpoints as training scripts leave them -----------------------------------------------------------------------


def _variants(tiny: str) -> list[Path]:
    state, folder = tiny_net(tiny, 1).state_dict(), Path(tiny).with_name("runs")
    folder.mkdir()
    plain = saved(tiny, 1, "a.safetensors").rename(folder / "a.safetensors")
    torch.save({"epoch": 2, "state_dict": {f"model.{k}": v for k, v in state.items()}}, folder / "b.ckpt")
    torch.save({"state_dict": {f"model.{k}": v for k, v in state.items()}, "model": state}, folder / "c.ckpt")
    save_file({f"module._orig_mod.{k}": v for k, v in state.items()}, folder / "d.safetensors")
    return [plain, *(folder / name for name in ("b.ckpt", "c.ckpt", "d.safetensors"))]


@needs_pickles
@pytest.mark.parametrize("store", [False, True])
def test_notes_are_printed_once(tiny: str, store: bool, capsys: pytest.CaptureFixture[str]) -> None:
    paths = _variants(tiny)
    arguments = arguments_of(tiny, paths[0].parent)
    if store:
        place = arguments.index("--out")
        arguments[place : place + 2] = ["--store", str(Path(tiny).with_name("s.sqlite"))]
    assert status(*arguments) == 0
    out = capsys.readouterr().out
    _, lightning, both, wrapped = map(str, paths)
    for note in (
        f"{lightning} and 1 more: 'model.' was taken off the names",
        f"{both}: the weights under 'state_dict' were taken, not those under 'model'",
        f"{wrapped}: 'module._orig_mod.' was taken off the names",
    ):
        assert out.splitlines().count(note) == 1
    if not store:
        assert [row["checkpoint"] for row in rows_of(tiny)] == [str(path) for path in paths]
        assert len({row["value"] for row in rows_of(tiny)}) == 1
    status(*arguments)
    assert ("was taken off" in capsys.readouterr().out) != store  # nothing was read

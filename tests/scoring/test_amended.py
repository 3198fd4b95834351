"""A store finds values again by content: change what they depend on and they are computed, change a path and not."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.scoring import keys, specs
from support.score_runs import saved

MEASURES = ["trace", "relative_flatness"]


def scored(tiny: str, paths, data="data", loss="cross_entropy", **options) -> pf.results.Scores:
    options = {"model": f"{tiny}:Tiny", "layers": "head", "store": Path(tiny).with_name("runs.sqlite"), **options}
    data = f"{tiny}:{data}" if isinstance(data, str) else data
    return pf.score(paths, loss, data, **options)


@pytest.fixture
def paths(tiny: str) -> list[Path]:
    """Two checkpoints, scored."""
    found = [saved(tiny, seed, f"{seed}.safetensors") for seed in (1, 2)]
    assert scored(tiny, found).computed == 2
    return found


def values(scores: pf.results.Scores) -> list[tuple[str, str, float]]:
    return [(row.layer, row.measure, row.value) for row in scores]


def test_values_are_those_of_the_measure_itself(tiny: str, paths: list[Path]) -> None:
    scores = scored(tiny, paths)
    assert scores.computed == 0
    network = specs.resolve(f"{tiny}:Tiny")()
    for path in paths:
        network.load_state_dict(load_file(path))
        truth = pf.relative_flatness(network.eval(), "cross_entropy", specs.resolve(f"{tiny}:data")(), "head")
        row = scores[str(path), "head", "relative_flatness"]
        assert (row.value, row.exact, row.method, row.samples) == (truth.value, True, "head", 37)
        assert row.loss > 0
        assert 0 <= row.accuracy <= 1


def test_what_moved_or_was_touched_is_the_same(tiny: str, paths: list[Path]) -> None:
    before = values(scored(tiny, paths))
    folder = Path(tiny).with_name("elsewhere")
    folder.mkdir()
    moved = [Path(shutil.move(path, folder / f"moved-{path.name}")) for path in paths]
    copy = shutil.copy(tiny, folder / "other_name.py")
    moved[0].touch()
    again = scored(str(copy), moved, store=Path(tiny).with_name("runs.sqlite"))
    assert (again.computed, values(again)) == (0, before)
    assert [row.checkpoint for row in again] == [str(path) for path in moved]


def test_data_are_the_same_however_they_are_cut_or_ordered(tiny: str, paths: list[Path]) -> None:
    batches = specs.resolve(f"{tiny}:data")()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for data in ((x, y), [*zip(x.split(7), y.split(7), strict=True)], batches[::-1]):
        assert scored(tiny, paths, data=data).computed == 0
    sampled = {"probes": 2, "measures": "trace"}
    computed = [scored(tiny, paths, data=data, **sampled).computed for data in (batches, (x, y), batches[::-1])]
    assert computed == [2, 0, 2]


def test_losses_of_one_meaning_are_one(tiny: str, paths: list[Path]) -> None:
    for loss in (F.cross_entropy, nn.CrossEntropyLoss()):
        assert scored(tiny, paths, loss=loss).computed == 0


def _changed_weight(tiny: str, paths: list[Path]) -> dict[str, object]:
    state = load_file(paths[0])
    state["head.weight"][0, 0] = math.nextafter(float(state["head.weight"][0, 0]), 9) + 1e-6
    save_file(state, paths[0])
    return {"expected": 1}


def _changed_source(tiny: str, paths: list[Path]) -> dict[str, object]:
    other = Path(tiny).with_name("edited.py")
    other.write_text(Path(tiny).read_text().replace("self.body(x).relu()", "self.body(x).abs()"))
    return {"model": f"{other}:Tiny"}


def _changed_dtype(tiny: str, paths: list[Path]) -> dict[str, object]:
    other = Path(tiny).with_name("doubled.py")
    other.write_text("from tiny import Tiny\n\ndef doubled():\n    return Tiny().double()\n")
    return {"model": f"{other}:doubled"}


def _changed_sample(tiny: str, paths: list[Path]) -> dict[str, object]:
    batches = specs.resolve(f"{tiny}:data")()
    batches[2][0][3, 1] += 1e-3
    return {"data": batches}


CHANGES = {
    "weights": _changed_weight,
    "source of the model": _changed_source,
    "another model": lambda tiny, paths: {"model": f"{tiny}:Curved", "expected": 2},
    "dtype": _changed_dtype,
    "one sample": _changed_sample,
    "targets": lambda tiny, paths: {"data": [(x, (y + 1) % 3) for x, y in specs.resolve(f"{tiny}:data")()]},
    "fewer data": lambda tiny, paths: {"data": specs.resolve(f"{tiny}:data")(count=36)},
    "loss": lambda tiny, paths: {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
    "layer": lambda tiny, paths: {"layers": "body"},
    "measure": lambda tiny, paths: {"measures": "trace"},
    "curvature": lambda tiny, paths: {"curvature": "ggn"},
    "normalize": lambda tiny, paths: {"normalize": "std"},
    "probes": lambda tiny, paths: {"probes": 3},
    "seed": lambda tiny, paths: {"seed": 1},
    "backend": lambda tiny, paths: {"backend": "reference"},
    "nan_policy": lambda tiny, paths: {"nan_policy": "omit"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_values_depend_on_is_computed_again(what: str, tiny: str, paths: list[Path]) -> None:
    change = {"expected": 2, **CHANGES[what](tiny, paths)}
    expected = change.pop("expected")
    assert scored(tiny, paths, **change).computed == expected
    assert scored(tiny, paths, **change).computed == 0


def test_a_release_that_changes_values_computes_them_again(tiny, paths, monkeypatch):
    monkeypatch.setattr(keys, "VALUES_VERSION", keys.VALUES_VERSION + 1)
    assert scored(tiny, paths).computed == 2


def test_memory_is_no_part_of_a_value(tiny: str, paths: list[Path]) -> None:
    assert scored(tiny, paths, memory=2**20).computed == 0


def test_more_of_anything_computes_what_is_new(tiny: str, paths: list[Path]) -> None:
    third = saved(tiny, 3, "3.safetensors")
    assert scored(tiny, [*paths, third]).computed == 1
    both = {"layers": ["body", "head"], "measures": MEASURES}
    amended = scored(tiny, [*paths, third], **both)
    whole = scored(tiny, [*paths, third], store=Path(tiny).with_name("other.sqlite"), **both)
    assert [(row.checkpoint, row.layer, row.measure) for row in amended] == [
        (row.checkpoint, row.layer, row.measure) for row in whole
    ]
    for ours, other in zip(amended, whole, strict=True):
        assert ours.value == pytest.approx(other.value, rel=1e-6)
    assert scored(tiny, [third], layers="body", measures="trace").computed == 0  # a part of what is there


def test_the_same_weights_are_computed_once(tiny: str, paths: list[Path]) -> None:
    copy = shutil.copy(paths[0], Path(tiny).with_name("copy.safetensors"))
    scores = scored(tiny, [*paths, copy])
    assert scores.computed == 0
    assert scores[str(copy), "relative_flatness"].value == scores[str(paths[0]), "relative_flatness"].value


def test_failures_are_kept_until_they_are_retried(tiny: str, paths: list[Path]) -> None:
    bad = Path(tiny).with_name("bad.safetensors")
    assert scored(tiny, [*paths, bad]).computed == 1
    scores = scored(tiny, [*paths, bad])
    assert (scores.computed, [*scores.errors]) == (0, [str(bad)])
    assert "no such file" in scores.errors[str(bad)]
    assert scored(tiny, [*paths, bad], retry=True).computed == 1
    shutil.copy(paths[0], bad)
    again = scored(tiny, [*paths, bad])
    assert (again.computed, again.errors) == (0, {})  # it has the weights of another, which are there


def test_networks_in_memory(tiny: str) -> None:
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    networks = {f"{d}": nn.Sequential(nn.Linear(4, d), nn.ReLU(), nn.Linear(d, 3)).eval() for d in (5, 6)}
    store = Path(tiny).with_name("runs.sqlite")
    first = pf.score(networks, "cross_entropy", (x, y), store=store)
    assert first.computed == 2
    report = pf.measure(networks["5"], "cross_entropy", (x, y), measures="relative_flatness")
    assert [first["5", name, "relative_flatness"].value for name in ("0", "2", "")] == [
        report[name, "relative_flatness"].value for name in ("0", "2", "")
    ]
    alone = pf.relative_flatness(networks["5"], "cross_entropy", (x, y)).value  # whose sums are in another order
    assert first["5", "2", "relative_flatness"].value == pytest.approx(alone, rel=1e-14)
    assert pf.score(networks, "cross_entropy", (x, y), store=store).rows == first.rows
    networks["6"][1] = nn.LeakyReLU()
    assert pf.score(networks, "cross_entropy", (x, y), store=store).computed == 1
    networks["5"][2].weight.data[0, 0] += 1
    assert pf.score(networks, "cross_entropy", (x, y), store=store).computed == 1
    without = pf.score(networks, "cross_entropy", (x, y))
    assert [dataclasses.replace(row, seconds=None) for row in without] == [
        dataclasses.replace(row, seconds=None) for row in pf.score(networks, "cross_entropy", (x, y), store=store)
    ]


def test_a_value_that_is_nan_is_a_value(tiny: str) -> None:
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    x[3] = math.nan
    store = Path(tiny).with_name("runs.sqlite")
    network = nn.Linear(4, 3).eval()
    for _ in range(2):
        scores = pf.score({"a": network}, "cross_entropy", (x, y), store=store, nan_policy="propagate")
        assert math.isnan(scores["a", "relative_flatness"].value)
        assert scores.errors == {}
    assert scores.computed == 0


class Grid(nn.Module):
    """Have weights that are no layer's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 5))

    def forward(self, x):
        return x * self.weight.prod(dim=0)


def test_all_layers_are_measured_by_default(tmp_path):
    """Values, and what is exact, are those of ``pf.measure``; of a network with other weights its value is not."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), Grid(), nn.Linear(5, 3)).eval()
    data, store = (torch.randn(20, 4), torch.arange(20) % 3), tmp_path / "runs.sqlite"
    report = pf.measure(network, "cross_entropy", data, measures=MEASURES)
    scores = pf.score({"a": network}, "cross_entropy", data, measures=MEASURES, store=store)
    assert [(row.layer, row.measure) for row in scores] == [
        *((layer, name) for layer in ("0", "2") for name in MEASURES),
        *(("", name) for name in MEASURES),
    ]
    for row in scores:
        expected = report[row.layer, row.measure]
        assert (row.value, row.exact, row.method) == (expected.value, expected.exact, expected.method)
    assert report["0", "trace"].exact
    assert not report["trace"].exact
    assert scores["a", "trace"] == scores["a", "", "trace"]
    assert pf.score({"a": network}, "cross_entropy", data, measures=MEASURES, store=store).computed == 0
    assert pf.score({"a": network}, "cross_entropy", data, measures=MEASURES, layers="0", store=store).computed == 0
    named = pf.score({"a": network}, "cross_entropy", data, measures=MEASURES, layers=["0", "2"], store=store)
    assert (named.computed, named["a", "trace"].exact) == (1, True)  # of these layers it is


def test_loss_and_accuracy_are_there_whatever_is_measured(tiny: str) -> None:
    x, y = torch.randn(30, 4), torch.tensor([0, 1, 1, 2, 1, 2] * 5)
    networks = {"a": nn.Linear(4, 3).eval()}
    read = pf.score(networks, "cross_entropy", (x, y), measures="relative_flatness")
    for measures in ("weight_norm", ["weight_norm", "relative_flatness"]):
        for store in (None, Path(tiny).with_name("runs.sqlite")):
            scores = pf.score(networks, "cross_entropy", (x, y), measures=measures, store=store)
            row, expected = scores["a", "", "weight_norm"], read["a", "relative_flatness"]
            assert row.loss == pytest.approx(F.cross_entropy(networks["a"](x), y).item(), rel=1e-6)
            assert (row.loss, row.accuracy, row.chance) == (expected.loss, expected.accuracy, 0.5)

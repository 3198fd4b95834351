"""A part of the data that stands for all: its mean and error by enumeration, any cut into batches, what is refused."""

import itertools
import math
from statistics import fmean, pstdev

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.model import data as batch_data
from pyflatness.numerics.accumulate import Accumulator
from pyflatness.numerics.variances import Variances
from pyflatness.sweep import adaptive_sweep
from pyflatness.sweep.subset import Subset
from support.combinations import every, in_soak
from support.covering import share
from support.many_samples import network

LOSS = nn.CrossEntropyLoss()


def subset(sizes, count):
    found = Subset(sizes, torch.arange(len(sizes)), Accumulator("raise"), seed=0)
    assert found.choose(count)
    return found


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("count", [1, 3.7, 9])
def test_chances_are_in_proportion_to_sizes(count, spread):
    """Those above 1 are 1, and the others make up for it."""
    sizes = (spread * torch.linspace(-1, 1, 12).double()).exp()
    sizes[3] = 0.0
    chances = subset(sizes, count).chances(sizes)
    assert float(chances.sum()) == pytest.approx(count)
    below = chances < 1
    assert torch.allclose(chances[below] * sizes[0], sizes[below] * chances[0])
    assert not bool(below.all()) or spread < 4 or count < 9
    assert not Subset(sizes, torch.arange(12), Accumulator("raise"), seed=0).choose(11)


@pytest.mark.parametrize("allowed", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_the_part_and_what_its_choice_adds_to_the_variance(skew, allowed):
    sizes = (skew * torch.randn(2000, generator=torch.Generator().manual_seed(0)).double()).exp()
    found = Subset(sizes, torch.arange(2000), Accumulator("raise"), seed=0)
    count, left = found.part(0.7, allowed)
    assert found.choose(count)
    chances = found.chances(sizes)
    added = 0.7 * float((sizes**2 * (1 / chances - 1)).sum() / sizes.sum() ** 2)
    assert added == pytest.approx((1 - left) * allowed, rel=1e-6)
    assert found.spread() == pytest.approx(float((sizes**2 / chances).sum() / sizes.sum() ** 2))


@pytest.mark.parametrize("probes", [0, 1, 2])
def test_mean_and_variance_over_all_parts_and_probes(probes):
    """Of eight samples each part has its chance; a probe is κ_i ± d_i. The variance is right to first order in 1/s."""
    sizes = torch.tensor([0.3, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 2.4]).double()
    exact = sizes * torch.tensor([1.1, 0.8, 1.2, 0.9, 1.0, 1.15, 0.95, 1.05]).double()
    deviations = 0.2 * sizes
    chances = subset(sizes, 6).chances(sizes)
    signs = torch.tensor([*itertools.product((-1.0, 1.0), repeat=8)]).double()
    draws, estimates, weights = (exact + signs * deviations).unsqueeze(0), [], []
    if probes == 0:
        draws = exact.expand(1, 1, 8)
    elif probes == 2:  # all patterns of both are too many
        pairs = (torch.randperm(256, generator=torch.Generator().manual_seed(seed)) for seed in range(10))
        draws = torch.cat([torch.stack([draws[0], draws[0][pair]]) for pair in pairs], dim=1)
    for part in itertools.product((False, True), repeat=8):
        kept = torch.tensor(part)
        if int((chances[kept] < 1).sum()) < 2:  # of so few, or certain ones alone, little or nothing is known
            continue
        drawn, t = draws[..., kept] / chances[kept], sizes[kept] / chances[kept]
        variances = Variances()
        variances.add_probes(drawn, None, t, chances[kept], exact=probes == 0)
        scale = sizes.sum() / t.sum()
        estimates.append((scale * drawn.mean(dim=0).sum(dim=-1), scale**2 * variances.result()[0]))
        chance = float(torch.where(kept, chances, 1 - chances).prod())
        weights.append(torch.full_like(estimates[-1][0], chance / drawn.shape[1]))
    found, errors = (torch.cat(each) for each in zip(*estimates, strict=True))
    weights = torch.cat(weights) / torch.cat(weights).sum()
    mean = float((weights * found).sum())
    variance = float((weights * (found - mean) ** 2).sum())
    assert mean == pytest.approx(float(exact.sum()), rel=0.005)
    residuals = (exact - sizes * exact.sum() / sizes.sum()).square()
    probing = deviations.square() / max(probes, 1) * (probes > 0)
    first_order = float((probing / chances + (1 / chances - 1) * residuals).sum())
    assert variance == pytest.approx(first_order, rel=0.15)
    bound = float(residuals.sum()) if probes == 1 else 0.0  # one probe cannot tell what it takes for its own error
    assert float((weights * errors).sum()) == pytest.approx(first_order + bound, rel=0.15)


@every(together=1, scale=[0.5, 20.0], how=[{}, {"probes": 1}, {"probes": 3}])
def test_values_over_seeds(scale, how):
    model, data = network(scale, samples=400)
    exact = pf.relative_flatness(model, LOSS, data, "0")
    found = [pf.relative_flatness(model, LOSS, data, "0", fraction=0.2, seed=seed, **how) for seed in range(60)]
    deviation = pstdev(map(float, found))
    assert fmean(found) == pytest.approx(exact.value, abs=3.5 * deviation / 60**0.5)
    assert fmean(each.stderr**2 for each in found) ** 0.5 == pytest.approx(deviation, rel=0.3)
    assert share([each.interval() for each in found], exact) > 0.88
    assert {(each.method, each.exact, each.samples) for each in found} == {("ggn-sampled", False, 400)}


@pytest.mark.parametrize("seeds", [12, *in_soak(40)])
@pytest.mark.parametrize("scale", [0.5, 20.0])
def test_groups_of_columns_in_a_part(scale, seeds):
    """Few samples have most of the curvature where the softmax is peaked: they have more passes than one."""
    model, data = network(scale, samples=3000)
    exact = pf.relative_flatness(model, LOSS, data, "0")
    how, slack = {"fraction": "auto", "rtol": 0.05}, math.sqrt(40 / seeds)
    found = [pf.relative_flatness(model, LOSS, data, "0", seed=seed, **how) for seed in range(seeds)]
    deviation = pstdev(map(float, found))
    assert deviation < (0.05 + 0.005 * slack) * exact.value
    # Biased by about 0.13 deviations: the part grows less where its first samples have small values.
    assert fmean(found) == pytest.approx(exact.value, abs=(0.13 + 3.5 / math.sqrt(seeds)) * deviation)
    assert -0.2 * slack < fmean(each.stderr**2 for each in found) ** 0.5 / deviation - 1 < 0.6 * slack
    assert share([each.interval() for each in found], exact) > 0.95 - 0.1 * slack
    assert max(int(each.notes[0].split()[0]) for each in found) < 1500


@pytest.mark.parametrize("how", [{"fraction": 0.1, "probes": 2}, {"fraction": "auto", "rtol": 0.12}])
@pytest.mark.parametrize("loss", [LOSS, nn.CrossEntropyLoss(torch.linspace(0.2, 3, 10).double(), reduction="sum")])
def test_any_cut_into_batches(loss, how):
    """The part is of the samples, and these are packed into other batches; as a mapping too, and in several dtypes."""
    model, (x, y) = network(3.0, samples=400)
    whole = pf.measure(model, loss, (x, y), **how)
    batches = [{"x": x[i : i + 17], "labels": y[i : i + 17], "other": torch.ones(3)} for i in range(0, 400, 17)]
    cut = pf.measure(model, loss, batches, forward=lambda m, batch: (m(batch["x"]), batch["labels"]), **how)
    for key in itertools.product(("", *whole.layers), whole.measures):
        one, other = (report[key] if key[0] else report[key[1]] for report in (whole, cut))
        assert other.value == pytest.approx(one.value, rel=1e-9)
        assert other.stderr == pytest.approx(one.stderr, rel=1e-6)
        assert other.dof == pytest.approx(one.dof, rel=1e-4)
    assert whole["trace"].notes == cut["trace"].notes
    assert "of 400 samples were sent backward" in repr(whole["trace"])
    assert pf.measure(model, loss, (x, y), seed=1, **how)["trace"].value != whole["trace"].value


def test_a_plan_does_not_depend_on_the_batches(monkeypatch):
    monkeypatch.setattr(adaptive_sweep, "PLAN", -math.inf)  # no exact values, though they are cheaper here
    model, (x, y) = network(20.0, samples=3000)
    how = {"fraction": "auto", "rtol": 0.03, "measures": "relative_flatness"}
    whole = pf.measure(model, LOSS, (x, y), **how)
    cut = pf.measure(model, LOSS, [*zip(x.split(70), y.split(70), strict=True)], **how)
    assert 256 < int(whole["relative_flatness"].notes[0].split()[0]) < 1500
    for layer in whole.layers:
        assert cut[layer, "relative_flatness"].value == pytest.approx(whole[layer, "relative_flatness"].value, rel=1e-9)


def test_only_the_part_is_run_again():
    model, (x, y) = network(3.0, samples=300)
    ran = []
    handle = model[0].register_forward_hook(lambda module, inputs, output: ran.append(len(output)))
    found = pf.relative_flatness(model, LOSS, [*zip(x.split(50), y.split(50), strict=True)], "0", fraction=0.1)
    handle.remove()
    sent = int(found.notes[0].split()[0])
    assert 15 < sent < 50
    assert sum(ran) <= 300 + sent + 60  # of these some by themselves, to see that samples are


def test_batches_are_joined_where_they_fit():
    one, other = {"x": torch.ones(2, 5), "n": 3}, {"x": torch.zeros(4, 5), "n": 3}
    assert batch_data.joined([one, other])["x"].tolist() == [[1.0] * 5] * 2 + [[0.0] * 5] * 4
    assert batch_data.joined([one, {"x": torch.zeros(4, 6), "n": 3}]) is None
    padded = [(torch.ones(3, length, 8).double(), torch.zeros(3, dtype=torch.long)) for length in (2, 5, 2, 4)]
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Flatten(2), nn.Linear(4, 3)).double()
    found = pf.measure(model, LOSS, padded, fraction=0.5, forward=lambda m, batch: (m(batch[0]).mean(dim=1), batch[1]))
    assert found["trace"].samples == 12


def test_all_of_the_data():
    model, data = network(3.0, samples=60)
    exact = pf.measure(model, LOSS, data)
    assert pf.measure(model, LOSS, data, fraction=1) == exact
    x = torch.where(torch.arange(60).unsqueeze(1) < 5, data[0], 1e4)  # of the others the loss has no curvature
    found = pf.measure(model, LOSS, (x, data[1]), fraction=0.5)
    assert found["trace"].exact
    assert found["trace"].value == pytest.approx(pf.measure(model, LOSS, (x, data[1]))["trace"].value)


def test_as_much_as_a_standard_error_takes():
    model, data = network(3.0, samples=6000)
    exact = pf.measure(model, LOSS, data)
    found = pf.measure(model, LOSS, data, rtol=0.05, fraction="auto")
    for key in itertools.product(exact.layers, exact.measures):
        assert found[key].stderr < 0.055 * found[key].value
        assert abs(found[key] - exact[key]) < 4 * found[key].stderr
    assert 300 < int(found["trace"].notes[0].split()[0]) < 2000
    model, data = network(3.0, samples=150)
    few = pf.measure(model, LOSS, data, rtol=0.05, fraction="auto")
    assert few["0", "trace"].value == pf.measure(model, LOSS, data, rtol=0.05)["0", "trace"].value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0}, "fraction=0: a fraction of the samples above 0"),
        ({"fraction": "some"}, "fraction='some': a fraction of the samples"),
        ({"fraction": "auto"}, "pass rtol="),
        ({"fraction": 0.5, "rtol": 0.1}, r"does not go with rtol= \(but fraction='auto'\)"),
        ({"fraction": 0.5, "probes": "adaptive"}, "does not go with probes='adaptive'"),
        ({"fraction": 0.5, "per_sample": True}, "does not go with per_sample=True"),
        ({"fraction": 0.5, "nan_policy": "omit"}, "does not go with nan_policy='omit'"),
        ({"fraction": 0.5, "measures": "lambda_max"}, "lambda_max has no value by a part of the data"),
        ({"fraction": 0.5, "measures": "sharpness"}, "sharpness has no value by a part of the data"),
        ({"fraction": 0.5, "measures": "neuron_flatness"}, "neuron_flatness has no sampled value"),
        ({"fraction": 1e-9}, "none of 20 samples was drawn"),
    ],
)
def test_refusals(options, message):
    model, data = network(1.0, samples=20)
    with pytest.raises(pf.errors.InputError, match=message):
        pf.measure(model, LOSS, data, **options)


def test_of_what_there_is_no_part():
    model, data = network(1.0, samples=20)
    skipped = pf.measure(model, LOSS, data, fraction=0.5, measures="all").skipped
    assert "fraction=None" in skipped["lambda_max"]
    assert "fraction=None" in skipped["mls"]
    smooth = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 10)).double()
    with pytest.raises(pf.errors.InputError, match="layer '0': fraction= is of GGN values"):
        pf.measure(smooth, LOSS, data, fraction=0.5)
    found = pf.measure(smooth, LOSS, data, fraction=0.5, curvature="ggn")["0", "trace"]
    assert math.isfinite(found.stderr)
    with pytest.raises(pf.errors.InputError, match="can be read once"):
        pf.measure(model, LOSS, iter([data]), fraction=0.5)
    data[0][3, 2] = math.nan
    with pytest.raises(pf.errors.NonFiniteError, match="batch 0: 1 of 20 samples"):
        pf.measure(model, LOSS, data, fraction=0.5)

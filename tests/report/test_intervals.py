"""Intervals: Student's quantile against scipy, degrees of freedom of sums, and what of both an estimate says."""

import dataclasses
import json
import math
import re

import pytest
import torch
from scipy import stats
from torch import nn

import pyflatness as pf
from pyflatness.numerics.variances import Variances, with_squares
from pyflatness.report import intervals
from support.cases import classifier
from support.covering import share
from support.grid import normal

X, Y, LOSS = normal(1, 40, 5), torch.arange(40) % 3, nn.CrossEntropyLoss()
DOFS = [0.5, 1, 1.37, 2, 3, 7.6, 30, 99.5, 1000, 9999, 10001, 1e6, math.inf]


@pytest.mark.parametrize("dof", DOFS)
def test_student_s_quantile(dof):
    for level in (1e-3, 0.1, 0.5, 0.6827, 0.9, 0.95, 0.99, 0.999, 1 - 1e-6):
        expected = stats.norm.isf((1 - level) / 2) if math.isinf(dof) else stats.t.isf((1 - level) / 2, dof)
        assert intervals.student_t(level, dof) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("level", [0, 1, 1.5, -0.1, math.nan, True, "0.95"])
def test_levels(level):
    with pytest.raises(pf.errors.InputError, match=r"level=.* a probability between 0 and 1"):
        sampled().interval(level)
    with pytest.raises(pf.errors.InputError, match="level="):
        dataclasses.replace(sampled(), stderr=None, dof=None).interval(level)


def sampled(**facts):
    return pf.results.Estimate(**{**FACTS, **facts})


FACTS = {"value": 2.0, "stderr": 0.1, "samples": 5, "method": "ggn-sampled", "exact": False, "backend": "reference"}


def test_the_interval_of_an_estimate():
    low, high = sampled(dof=3.5).interval(0.9)
    half = 0.1 * stats.t.isf(0.05, 3.5)
    assert (low, high) == pytest.approx((2 - half, 2 + half), rel=1e-9)
    assert sampled(stderr=None, exact=True).interval() == (2.0, 2.0)
    for unknown in (
        {"dof": None},
        {"stderr": math.nan, "dof": 0.0},
        {"stderr": None},
        {"stderr": math.inf, "dof": 3.0},
        {"stderr": math.nan, "dof": 3.0},
    ):
        assert sampled(**unknown).interval() is None


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (1.06608, 0.02, "1.066 [1.046, 1.086]"),
        (1.23456e-8, 1e-10, "1.2346e-08 [1.2246e-08, 1.2446e-08]"),
        (123456.0, 3000, "123500 [120500, 126500]"),
        (0.0, 0.5, "0 [-0.5, 0.5]"),
        (3.8e-8, 3.801e-8, "3.8e-08 [0, 7.6e-08]"),
        (1.0, 0.0, "1 [1, 1]"),
        (1.000123, 2e-9, "1.000123 [1.000122998, 1.000123002]"),
    ],
)
def test_numbers_are_shown_to_two_digits_of_their_interval(value, half, text):
    assert intervals.shown(value, (value - half, value + half)) == text


def test_what_is_shown():
    assert repr(sampled(dof=9.0)).startswith("Estimate(2 [1.77, 2.23]: not exact, 95 % interval, method ggn-sampled, ")
    assert repr(sampled()).startswith("Estimate(2 [–]: not exact, no interval, ")
    assert repr(sampled(stderr=None)).startswith("Estimate(2: not exact, method ")
    report = pf.measure(classifier(5, 6, 3).double(), LOSS, (X, Y), measures="trace", probes=2)
    low, high = report["0", "trace"].interval()
    assert intervals.shown(report["0", "trace"].value, (low, high)) in str(report)
    assert "[95 % intervals]" in str(report)


# --- degrees of freedom -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [2, 3, 8])
@pytest.mark.parametrize("weights", [[1.0] * 40, [1.0, *[0.01] * 39], [3.0, 2.0, *[0.3] * 38]])
def test_degrees_of_freedom_are_those_of_the_variance(draws, weights):
    """Of normal draws V varies by Var(V) = Σ 2 σ_i⁴ / (k - 1); one sample that carries it has its own k - 1.

    The squares of estimated variances are larger than those of the true ones in the mean, (k + 1) / (k - 1) times: of
    many samples there are so many fewer degrees of freedom, which errs on the wide side.
    """
    squares = torch.tensor(weights).double().square()
    expected = (draws - 1) * float(squares.sum().square() / squares.square().sum())
    fewer = (draws - 1) / (draws + 1)
    found = []
    for seed in range(300):
        variances = Variances()
        values = normal(seed, draws, 40) * squares.sqrt()
        for part in values.split(16, dim=1):  # the cut does not count
            variances.add_probes(part, None, None)
        variance, dof = variances.result()
        assert float(variance) == pytest.approx(float(values.var(dim=0).sum()) / draws)
        assert 0.999 * (draws - 1) <= dof <= 40 * (draws - 1)
        found.append(float(dof))
    assert 0.9 * fewer * expected < sorted(found)[150] < 1.25 * expected


def one_probe(values, sizes):
    """The variance and its degrees of freedom that one probe of each sample tells, by values (…, n)."""
    variances = Variances()
    for part, size in zip(values.split(3, dim=-1), sizes.split(3), strict=True):  # the cut does not count
        variances.add_probes(part.unsqueeze(0), None, size)
    return variances.result()


@pytest.mark.parametrize("power", [0, 1, 3])
def test_one_probe_gives_an_upper_bound_of_the_variance(power):
    """Over all patterns of signs of all samples; the spread between samples is farther above it, where sizes differ.

    Of six samples of which one has half of all sizes it is known to 15 %: deviations are not quite in proportion.
    """
    sizes = torch.linspace(0.5, 2, 6).double() ** power
    factors = torch.eye(3).double() + 0.3 * normal(4, 6, 3, 3)
    forms = factors @ factors.mT * sizes.view(-1, 1, 1)  # B of each sample, whose exact value is its trace
    signs = torch.tensor([[1, a, b] for a in (-1, 1) for b in (-1, 1)]).double()  # -r gives what r does
    each = torch.einsum("ra,nab,rb->nr", signs, forms, signs)
    truth = 2 * (forms.square().sum() - forms.diagonal(dim1=1, dim2=2).square().sum())
    assert float(each.var(dim=1, correction=0).sum()) == pytest.approx(float(truth))
    values = torch.cartesian_prod(*each)
    assert values.sum(dim=1).mean() == pytest.approx(float(forms.diagonal(dim1=1, dim2=2).sum()))
    variance, dof = one_probe(values, sizes)
    spread = 6 * values.var(dim=1)
    assert (1 if power < 3 else 0.85) * truth < variance.mean() < 2 * truth
    assert variance.mean() < (1.5 if power == 0 else 0.5) * spread.mean()
    assert bool(((dof >= 1) & (dof <= 6 + 1e-9)).all())


def test_one_probe_of_many_samples_and_of_none():
    values = 1e3 + normal(3, 500)
    variance, dof = one_probe(values, torch.ones(500).double())
    assert float(variance) == pytest.approx(500 * float(values.var()), rel=1e-6)
    e = values - values.mean()
    assert float(dof) == pytest.approx(float(e.square().sum() ** 2 / (e**4).sum()), rel=1e-3)
    assert Variances().result() is None
    assert not any(math.isfinite(part) for part in one_probe(torch.ones(1).double(), torch.ones(1).double()))


def test_variances_of_groups():
    groups = Variances()
    groups.add(torch.cat([with_squares(torch.tensor([4.0, 0.0, 4.0]).double()), torch.full((1, 3), 4.0).double()]))
    assert [float(part) for part in groups.result()] == [8, 2]


@pytest.mark.parametrize("groups", [1, 4, 7, 8, 40])
def test_few_replicates_have_no_degrees_of_freedom(groups):
    """Groups of many columns in one direction have skewed values: intervals of one of them would cover 85 %."""
    covered = []
    for values in (normal(groups, 500, 2, groups).square() - 1).unbind():
        variances = Variances()
        found = with_squares((values[0] - values[1]).square() / 4)
        variances.add(torch.cat([found, torch.ones_like(found[:1])]))
        variance, dof = (float(part) for part in variances.result())
        estimate = sampled(value=float(values.mean(dim=0).sum()), stderr=variance**0.5, dof=dof)
        if groups < 8:
            assert math.isnan(dof)
        else:
            covered.append(estimate.interval())
    assert groups < 8 or 0.92 < share(covered, 0.0) < 0.98


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_every_sampled_estimate_has_an_interval(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), activation(), nn.Linear(6, 3)).double()
    names = ["relative_flatness", "trace", "scaled_trace", "matrix_normalized_sharpness", "sharpness"]
    names += ["interpolation_sharpness", "adaptive_sharpness_mc"]
    for probes in (2, 3):
        report = pf.measure(model, LOSS, (X, Y), measures=names, probes=probes)
        for held in report.by_measure().values():
            for estimate in held.values():
                low, high = estimate.interval()
                if estimate.exact:  # at a head
                    assert (low, high, estimate.dof) == (estimate.value, estimate.value, None)
                    continue
                assert low < estimate.value < high
                assert estimate.dof > 0.999
        assert pf.results.Report.from_json(report.to_json()) == report
        assert report.to_frame()["dof"].min() > 0.999


def test_degrees_of_freedom_of_what_is_derived():
    model = classifier(5, 6, 3).double()
    report = pf.measure(model, LOSS, (X, Y), measures=["trace", "scaled_trace"], probes=2)
    *first, head = ([report[layer, name].dof for name in ("trace", "scaled_trace")] for layer in report.layers)
    assert head == [None, None]
    assert all(trace == scaled for trace, scaled in first)
    assert report["scaled_trace"].dof == min(trace for trace, _ in first)
    exact, other = sampled(stderr=None, exact=True), sampled(stderr=0.2, dof=4.0)
    assert intervals.together([exact, other, sampled(dof=7.0)]) == (pytest.approx(0.3), 4.0)
    assert intervals.together([other, sampled()]) == (pytest.approx(0.3), None)
    assert intervals.together([exact, exact]) == (None, None)


def test_one_probe_of_several_samples_has_an_interval():
    model = classifier(5, 6, 3).double()
    found = pf.relative_flatness(model, LOSS, (X[:1], Y[:1]), "0", probes=1)
    assert not math.isfinite(found.stderr)
    assert (found.dof, found.interval()) == (None, None)
    assert "[–]" in repr(found)
    found = pf.relative_flatness(model, LOSS, (X, Y), "0", probes=1)
    low, high = found.interval()
    assert low < found.value < high
    assert 1 <= found.dof <= 40


def test_the_interval_of_the_distribution():
    """Of means of 40 samples drawn from 4,000; exact values and sampled ones, over other data than these."""
    model = classifier(5, 6, 3).double()
    x, y = normal(7, 4000, 5), torch.arange(4000) % 3
    truth, order = pf.relative_flatness(model, LOSS, (x, y), "0").value, normal(8, 4000).argsort()
    for how in ({}, {"probes": 1}):
        draws = [
            pf.relative_flatness(model, LOSS, (x[place], y[place]), "0", per_sample=True, seed=seed, **how)
            for seed, place in enumerate(order.split(40))
        ]
        assert 0.9 <= share([each.interval(of="distribution") for each in draws], truth) <= 1
        assert all(each.interval() == (each.value, each.value) for each in draws if each.exact)
    with pytest.raises(pf.errors.InputError, match="per_sample=True"):
        sampled(dof=3.0).interval(of="distribution")
    with pytest.raises(pf.errors.InputError, match="of='population' does not exist"):
        sampled(dof=3.0).interval(of="population")


def test_draws_that_agree_by_chance_have_no_interval():
    """Of one sample and three factors two draws agree every fourth time; an interval of no width would be wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    found = [pf.relative_flatness(model, LOSS, (X[:1].float(), Y[:1]), "0", probes=2, seed=seed) for seed in range(40)]
    agreeing = [estimate for estimate in found if math.isnan(estimate.stderr)]
    assert 2 <= len(agreeing) <= 20
    for estimate in agreeing:
        assert (estimate.exact, estimate.dof, estimate.interval()) == (False, None, None)
        assert "[–]: not exact, standard error unknown, method ggn-sampled" in repr(estimate)
        assert "<td>unknown</td>" in re.sub(r"<td[^>]*>", "<td>", estimate._repr_html_())
        again = pf.results.Estimate.from_dict(json.loads(json.dumps(estimate.to_dict())))
        assert again == estimate
    others = [estimate for estimate in found if estimate not in agreeing]
    assert all(estimate.stderr > 1e-3 * estimate and estimate.interval() for estimate in others)
    names = ["trace", "scaled_trace", "matrix_normalized_sharpness"]  # the network's, of layers that agree or do not
    reports = [pf.measure(model, LOSS, (X[:1].float(), Y[:1]), measures=names, probes=2, seed=s) for s in range(8)]
    for report in reports:
        unknown = any(math.isnan(report[layer, "trace"].stderr or 0.0) for layer in report.layers)
        assert [math.isnan(report[name].stderr) for name in names[1:]] == [unknown] * 2
        assert ("[–]" in str(report)) is (unknown or math.isnan(report["trace"].stderr))
    assert any(math.isnan(report["scaled_trace"].stderr) for report in reports)


def test_groups_of_few_samples_have_no_interval():
    model = classifier(5, 6, 3).double()
    few = pf.measure(model, LOSS, (X[:2], Y[:2]), measures="trace", probes="adaptive", rtol=0.9)["0", "trace"]
    assert few.stderr > 0
    assert few.interval() is None
    assert "no interval" in repr(few)
    assert pf.measure(model, LOSS, (X, Y), measures="trace", probes="adaptive", rtol=0.9)["0", "trace"].interval()


@pytest.mark.parametrize("stderr", [None, 0.1])
def test_a_value_that_is_no_number_is_not_exact(stderr):
    assert not pf.results.Estimate(math.nan, stderr, 5, "ggn", exact=True, backend="reference").exact
    inputs = torch.where(torch.arange(40)[:, None] == 3, math.nan, X)
    found = pf.head_flatness(inputs, normal(2, 3, 5), targets=Y, nan_policy="propagate")
    assert math.isnan(found)
    assert not found.exact


def test_a_figure_has_intervals(tmp_path):
    pytest.importorskip("matplotlib")
    report = pf.measure(classifier(5, 6, 3).double(), LOSS, (X, Y), measures="trace", probes=2)
    _, (axes,) = report.plot()
    (bars,) = axes.containers[0].lines[2]
    ends = [tuple(segment[:, 1]) for segment in bars.get_segments()]
    assert ends == [pytest.approx(report[layer, "trace"].interval()) for layer in report.layers]

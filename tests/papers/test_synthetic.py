"""The synthetic data of P21, appendix C.1, and what the experiments make of tables of networks."""

import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import pyflatness as pf
from benchmarks.papers import correlating, p19_fig1, p21_fig3, p21_fig4, p21_fig7, synthetic, zoo
from benchmarks.papers.experiment import Bench, Points
from benchmarks.papers.zoo import BY_LAYERS, Networks


def test_features_and_labels():
    features, labels = synthetic.dataset(6.0, 1, 4000)
    assert (features.shape, labels.shape) == ((4000, 8), (4000, 1))
    assert torch.linalg.matrix_rank(features) == 6  # two are redundant
    assert labels.unique().tolist() == [-1, 1]
    assert 0.4 < (labels > 0).double().mean() < 0.6
    again, _ = synthetic.dataset(6.0, 1, 4000)
    other, _ = synthetic.dataset(6.0, 2, 4000)
    assert torch.equal(features, again)
    assert not torch.equal(features, other)


def test_separation_is_the_side_of_the_hypercube():
    """The mean of a set's informative features is that of four corners: at ±c/2 or less in every coordinate."""
    means = torch.stack([synthetic.dataset(40.0, seed, 2000)[0][:, :6].mean(dim=0) for seed in range(10)]).abs()
    assert means.max() < 21
    assert means.max() > 10


def test_ridge_is_that_of_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    features, labels = synthetic.dataset(1.0, 0, 200)
    weight, bias = synthetic.ridge(features, labels)
    other = linear_model.Ridge(alpha=1.0).fit(features.numpy(), labels.numpy())
    assert weight[0].tolist() == pytest.approx(other.coef_.ravel().tolist(), rel=1e-9)
    assert bias.item() == pytest.approx(other.intercept_.item(), rel=1e-9)


def test_inputs_lead_to_the_features():
    features, _ = synthetic.dataset(6.0, 0, 20)
    assert synthetic.round_trip(features, 0) < 1e-12


def test_what_is_measured_of_a_data_set(tmp_path):
    bench = Bench("small", {"samples": 50, "tested": 70}, tmp_path)
    _, _, kappa, gap, loss, test, _ = p21_fig3.measured(bench, 2.0, 3)
    features, labels = synthetic.dataset(2.0, 3, 120)
    weight, bias = synthetic.ridge(features[:50], labels[:50])
    squares = (features @ weight.t() + bias - labels) ** 2
    assert loss == pytest.approx(squares[:50].mean().item())
    assert test == pytest.approx(squares[50:].mean().item())
    assert gap == pytest.approx(test - loss)
    assert kappa == pytest.approx(2 * (weight**2).sum().item() * (features[:50] ** 2).sum(dim=1).mean().item())
    row = dict(zip(p21_fig4.NAMES, p21_fig4.measured(bench, 2.0, 3), strict=True))
    assert (row["kappa"], row["gap"]) == (pytest.approx(kappa), pytest.approx(gap))
    assert row["flatness"] == pytest.approx(50 ** (-2 / 12) * kappa / 16)
    assert row["bound"] == pytest.approx(row["flatness"] + row["representativeness"])


def table(**columns):
    names = [f"{recipe}_seed{seed}" for recipe in "abcde" for seed in (0, 1)]
    held = {"name": names, "recipe": [name[0] for name in names], "seed": [0, 1] * 5}
    held |= {"gap": [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]}
    return zoo.tabled(held | {"converged": [name != "e_seed1" for name in names]} | columns, {})


def points(networks):
    return Points(networks.columns, networks.failures, "small", {})


def test_correlations_leave_out_what_did_not_converge():
    networks = table(kappa=[1.0, 2, 3, 4, 5, 6, 7, 8, 9, -99])
    found = correlating.with_gap(networks, ["kappa"])
    assert found.points == 9
    assert found["kappa", "Pearson"].value == pytest.approx(1)
    assert correlating.intervals(networks) == "95 % intervals over recipes and seeds"
    few = Networks(networks.columns, tuple(networks.columns["name"][4:]), {})
    assert "without intervals" in correlating.intervals(few)


def test_which_measures_moved():
    names = ["relative_flatness fc4", "trace fc4", "sharpness network", "fisher_rao network", "pac_bayes network"]
    names.append("weight_norm network")
    columns = {name: [1.0, 3, 2, 5, 4, 6, 8, 7, 9, 10] for name in names}
    moved = columns | {name: [2 * value for value in columns[name]] for name in columns if "rel" not in name}
    found = p21_fig7.judge(points(zoo.joined(table(**columns), table(**moved), names)))
    changes = {finding.what: finding.value for finding in found.findings}
    assert changes["trace fc4, largest relative change"] == 1
    assert changes["relative_flatness fc4, largest relative change"] == 0
    assert "other ones than claimed" in found.verdict  # Fisher-Rao moved here


def test_verdict_on_two_measures():
    good, bad = [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 0], [3.0, 1, 4, 1, 5, 9, 2, 6, 5, 0]
    found = p19_fig1.judge(points(table(**{"scaled_trace fc4": good, "scaled_lambda_max fc4": bad})))
    assert "Not decided: κ = ‖w‖² λ_max 0.47 [-0.59, 0.94]; κ_τ = ‖w‖² Tr(H) 1.00; κ_τ higher than κ" in found.verdict
    assert found.findings[2].value == pytest.approx(1)


def test_other_weights_compute_the_same_function():
    from benchmarks.papers import networks

    net, x = networks.digits_network().eval(), torch.rand(20, 1, 8, 8)
    other = BY_LAYERS.of(net, x, 3)
    assert torch.allclose(other(x), net(x), rtol=1e-4, atol=1e-5)
    ratio = (other.fc1.weight / net.fc1.weight).median().item()
    assert 5 <= ratio <= 25
    assert BY_LAYERS.of(net, x, 4).fc1.weight[0, 0] != other.fc1.weight[0, 0]


def test_a_value_that_is_missing_leaves_out_its_network_alone():
    networks = table(kappa=[1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10], other=[math.inf, *range(8), 0])
    assert correlating.with_gap(networks, ["kappa"]).points == 9
    found = correlating.with_gap(networks, ["kappa", "other"])
    assert (found.points, found.excluded) == (8, ("a_seed0", "e_seed1"))
    empty = Networks(networks.columns, tuple(networks.columns["name"]), {"a_seed0": "did not converge"})
    with pytest.raises(pf.errors.InputError, match=r"no network converged .*did not converge"):
        correlating.with_gap(empty, ["kappa"])


def test_a_figure_shows_every_network():
    figure = Figure()
    correlating.scatter(figure, table(kappa=[math.nan, 2.0, 3, 4, 5, 6, 7, 8, 9, 10]), ["kappa"])
    drawn = sum(np.isfinite(line.get_xdata()).sum() for line in figure.axes[0].get_lines())
    assert drawn == 9  # all that have a value, the one that did not converge too

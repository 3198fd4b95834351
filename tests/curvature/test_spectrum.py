"""Eigenpairs and densities of the loss Hessian against dense eigendecompositions in float64."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.numerics.eigenpairs import Search, quadrature
from pyflatness.numerics.signs import RandomVectors
from support import truth
from support.brute_force import all_parameters_hessian, flat, placed
from support.combinations import every

LOSS = nn.CrossEntropyLoss()


def _network(activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), activation(), nn.LayerNorm(6), nn.Linear(6, 3)).double().eval()


def _data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(20, 4, generator=generator).double(), torch.randint(3, (20,), generator=generator)


def _dense(model, names, ggn=False):
    """The Hessian, or GGN, of the loss in parameters of these names."""
    inputs, targets = _data()
    if not ggn:
        return all_parameters_hessian(model, LOSS, inputs, targets, names)[1]
    theta, named = flat(model, names)
    jacobian = truth.jacobian(lambda t: torch.func.functional_call(model, placed(named, t), (inputs,)), theta)
    p = model(inputs).detach().softmax(1)
    factors = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    jacobian = jacobian.view(*p.shape, -1)
    return torch.einsum("nap,nab,nbq->pq", jacobian, factors, jacobian) / len(inputs)


BLOCKS = {
    None: ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"],
    "0": ["0.weight"],
    "type:Linear": ["0.weight", "3.weight"],
}


@every(which=["largest", "smallest", "both"], curvature=["auto", "ggn"], layers=[*BLOCKS])
def test_pairs_are_those_of_the_dense_matrix(layers, curvature, which):
    model, names = _network(), BLOCKS[layers]
    inputs, targets = _data()
    batches = [(inputs[:7], targets[:7]), (inputs[7:], targets[7:])]
    found = pf.spectrum(model, LOSS, batches, layers=layers, k=3, which=which, curvature=curvature)
    matrix = _dense(model, names, curvature == "ggn")
    values = torch.linalg.eigvalsh(matrix).flip(0)
    wanted = {"largest": values[:3], "smallest": values[-3:], "both": torch.cat([values[:3], values[-3:]])}[which]
    assert found.converged
    assert found.size == len(matrix)
    scale = float(values.abs().max())
    torch.testing.assert_close(found.eigenvalues, wanted, rtol=0, atol=1e-7 * scale)
    assert found.residuals.max() < 1e-7 * scale
    held = [*found.eigenvectors.values()]
    vectors = torch.cat([each.flatten(1) for each in held], dim=1)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(len(wanted), dtype=torch.float64), rtol=0, atol=1e-9)
    off = (vectors @ matrix - found.eigenvalues.unsqueeze(1) * vectors).norm(dim=1)
    torch.testing.assert_close(off, found.residuals, rtol=0.1, atol=1e-10 * scale)


def test_all_eigenvalues_of_a_small_block():
    model = _network()
    found = pf.spectrum(model, LOSS, _data(), layers="3", k=50)
    torch.testing.assert_close(
        found.eigenvalues, torch.linalg.eigvalsh(_dense(model, ["3.weight"])).flip(0), rtol=0, atol=1e-9
    )


def test_density_has_the_moments_of_the_spectrum():
    model = _network()
    matrix = _dense(model, BLOCKS[None])
    found = pf.spectrum(model, LOSS, _data(), k=0, density=True, probes=40, steps=200).density
    for power in (1, 2, 3):
        value, error = found.moment(power)
        exact = float(torch.linalg.eigvalsh(matrix).pow(power).sum())
        assert abs(value - exact) < 4 * error
        assert 0 < error < abs(exact)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(40, dtype=torch.float64))
    points = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    mean, error = found.at(points, 0.02)
    values = torch.linalg.eigvalsh(matrix)
    away = (points.unsqueeze(1) - values) / 0.02
    exact = (-0.5 * away.square()).exp().mean(1) / (0.02 * (2 * torch.pi) ** 0.5)
    assert bool(((mean - exact).abs() <= 5 * error + 1e-6).float().mean() > 0.97)


def _found(asking, matrix):
    vectors = next(asking)
    while True:
        try:
            vectors = asking.send(vectors @ matrix)
        except StopIteration as end:
            return end.value


SPECTRA = {
    "multiple at both ends": [5.0, 5, 5, 1, 0, 0, -1, -1, -3, -3] + [i / 100 for i in range(60)],
    "the same throughout": [1.0] * 20,
    "of rank one": [3.0] + [0.0] * 50,
    "close together": [1 + 1e-4 * i for i in range(40)],
    "two": [2.0, 1.0],
    "zero": [0.0] * 5,
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("largest", "smallest"), [(2, 0), (0, 2), (1, 1), (4, 3)])
def test_multiple_eigenvalues_are_counted(name, largest, smallest):
    values = torch.tensor(sorted(SPECTRA[name], reverse=True), dtype=torch.float64)
    size = len(values)
    if largest + smallest > size:
        return
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    matrix = basis @ torch.diag(values) @ basis.T
    search = Search(RandomVectors(0, size, torch.device("cpu")), tolerance=1e-10, room=30, max_products=5000)
    found = _found(search.pairs(largest, smallest), matrix)
    wanted = torch.cat([values[:largest], values[size - smallest :]])
    assert found.converged
    torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-8)


def test_a_search_that_is_cut_off_says_so():
    values = torch.linspace(0, 1, 400, dtype=torch.float64)
    search = Search(RandomVectors(0, 400, torch.device("cpu")), tolerance=1e-12, room=10, max_products=12)
    found = _found(search.pairs(3, 0), torch.diag(values))
    assert not found.converged
    assert found.values.max() <= 1
    true = (found.values.unsqueeze(1) - values).abs().min(dim=1).values
    assert bool((true <= found.residuals).all())


def test_quadrature_is_exact_where_steps_reach_the_size():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    matrix, start = matrix + matrix.T, torch.randn(3, 12, generator=generator, dtype=torch.float64)
    nodes, weights = _found(quadrature(start, 12), matrix)
    unit = torch.nn.functional.normalize(start, dim=1)
    expected = torch.einsum("bi,ij,bj->b", unit, torch.linalg.matrix_power(matrix, 5), unit)
    torch.testing.assert_close((weights * nodes**5).sum(1), expected)


BAD = {
    "which": ({"which": "top"}, "'largest', 'smallest', 'both'"),
    "k": ({"k": -1}, "k=-1"),
    "nothing": ({"k": 0}, "nothing is asked for"),
    "probes": ({"density": True, "probes": 0}, "probes=0"),
    "tolerance": ({"tolerance": 0}, "tolerance=0"),
    "no such layer": ({"layers": "head"}, "'head'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused(case):
    options, message = BAD[case]
    with pytest.raises(pf.errors.InputError, match=message):
        pf.spectrum(_network(), LOSS, _data(), **options)


def test_figure(tmp_path):
    pytest.importorskip("matplotlib")
    found = pf.spectrum(_network(), LOSS, _data(), k=2, density=True, probes=3, steps=10)
    _, axes = found.plot(tmp_path / "spectrum.png")
    assert (tmp_path / "spectrum.png").stat().st_size > 1000
    assert next(line.get_label() for line in axes.get_lines()) == "eigenvalues"
    assert "trace" in str(found)

"""Lanczos against dense eigenvalues: spectra, several matrices at once, restarts, what the residual promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyflatness.hessian.row_blocks import RowBlocks, add_gradients
from pyflatness.numerics import lanczos
from pyflatness.passes.memory import Budget


def symmetric(*spectra, seed=0):
    """(b, N, N) with the given eigenvalues, and random eigenvectors."""
    values = torch.tensor(spectra, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(*values.shape, values.shape[1], generator=generator, dtype=torch.float64)).Q
    return basis @ torch.diag_embed(values) @ basis.mT


def search(matrices, tolerance=1e-10, limit=200, size=1000, seed=1):
    start = torch.randn(matrices.shape[:2], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    running = lanczos.largest(start, tolerance=tolerance, max_products=limit, size=size)
    counted = []

    def times(vectors):
        counted.append(vectors)
        return (matrices @ vectors.unsqueeze(2)).squeeze(2)

    found = lanczos.solved(running, times)
    assert found.products == len(counted) <= limit + 1
    return found


SPECTRA = {
    "positive": [1.0, 2.0, 3.0, 4.0, 9.0],
    "negative": [-1.0, -2.0, -3.0, -4.0, -9.0],
    "the largest is the smallest in magnitude": [0.5, -100.0, -50.0, -30.0, -1.0],
    "degenerate": [3.0, 3.0, 3.0, 1.0, -3.0],
    "all the same": [2.0] * 5,
    "zero": [0.0] * 5,
    "rank one": [0.0, 0.0, 7.0, 0.0, 0.0],
    "rank one, negative": [0.0, 0.0, -7.0, 0.0, 0.0],
    "close": [1.0, 1.0 - 1e-3, 0.5, 0.2, -1.0],
    "tiny": [1e-100, 2e-100, 0.0, -1e-100, 3e-100],
}


@pytest.mark.parametrize("name", SPECTRA)
def test_spectra(name):
    spectrum = SPECTRA[name]
    found = search(symmetric(spectrum))
    largest = max(map(abs, spectrum))
    assert float(found.values) == pytest.approx(max(spectrum), abs=1e-12 * largest)
    assert float(found.residuals) <= 1e-9 * largest
    assert found.converged


def test_several_at_once():
    """Those that are done early, or whose space is exhausted, stay as they are."""
    found = search(symmetric(*SPECTRA.values()))
    expected = torch.tensor([max(spectrum) for spectrum in SPECTRA.values()], dtype=torch.float64)
    torch.testing.assert_close(found.values, expected, rtol=1e-11, atol=1e-12)
    assert found.converged


@pytest.mark.parametrize("value", [3.0, 0.0, -2.0])
def test_one_dimension(value):
    found = search(symmetric([value]))
    assert float(found.values) == pytest.approx(value)
    assert found.products == 2


@pytest.mark.parametrize("size", [1, 4, 6, 11])
def test_restarts(size):
    spectrum = [*torch.linspace(-5, 1, 60).tolist(), 1.2]
    found = search(symmetric(spectrum), size=size, limit=2000)
    assert found.converged
    assert float(found.values) == pytest.approx(1.2, abs=1e-11)
    assert found.products > search(symmetric(spectrum)).products


def test_bases_stay_within_their_size():
    matrices = symmetric(torch.linspace(-5, 1, 60).tolist())
    running = lanczos.largest(torch.ones(1, 60, dtype=torch.float64), tolerance=0.0, max_products=50, size=7)
    vectors = next(running)
    for _ in range(40):
        vectors = running.send((matrices @ vectors.unsqueeze(2)).squeeze(2))
        assert running.gi_frame.f_locals["basis"].shape[1] <= 7 + 1


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1000))
def test_the_residual_bounds_the_distance_to_an_eigenvalue(n, limit, seed):
    """Also where it is stopped early; and no value lies above the largest eigenvalue."""
    matrix = torch.randn(1, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix = matrix + matrix.mT
    eigenvalues = torch.linalg.eigvalsh(matrix[0])
    found = search(matrix, limit=limit)
    rounding = 1e-12 * float(eigenvalues.abs().max())
    assert float((eigenvalues - found.values).abs().min()) <= float(found.residuals) + rounding
    assert float(found.values) <= float(eigenvalues[-1]) + rounding
    assert found.converged or found.products == limit + 1


def test_nan_ends_the_search():
    found = search(torch.full((2, 3, 3), torch.nan, dtype=torch.float64))
    assert found.values.isnan().all()
    assert found.products == 1


# --- blocks of rows ---------------------------------------------------------------------------------------------------

ROWS, COLUMNS, SAMPLES = 3, 4, 10


def blocks(columns=None, memory=2**20):
    columns = torch.ones(ROWS, COLUMNS, dtype=torch.bool) if columns is None else columns
    return RowBlocks(columns, memory, Budget(None))


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("memory", [1, 300, 2**20])
@pytest.mark.parametrize("samples", [SAMPLES, 1])
def test_kept_rows_gradients_and_blocks_add_up(memory, samples, monkeypatch):
    """In any memory, by products and written out."""
    phi, h, gradients, own = randn(samples, COLUMNS), randn(samples, ROWS), randn(5, ROWS, COLUMNS), randn(3, 4, 4)
    signs, own = torch.tensor([1.0, -1, 1, 0, -1]).double(), own + own.mT
    expected = torch.einsum("ns,nj,nk->sjk", h, phi, phi) + own
    expected = expected + torch.einsum("n,nsj,nsk->sjk", signs, gradients, gradients)
    for usual in (0, 1000):
        monkeypatch.setattr("pyflatness.hessian.row_blocks._USUAL", usual)
        found = blocks(memory=memory)
        for some, weights in zip(phi.split(3), h.split(3), strict=True):
            found.add_weighted(some, weights)
        more = own.clone()
        add_gradients(more, gradients, signs)
        found.add_blocks(more)
        ritz = found.largest(0)
        torch.testing.assert_close(ritz.values, torch.linalg.eigvalsh(expected)[:, -1], rtol=1e-9, atol=1e-12)
        assert bool(ritz.products) == (usual == 0)


@pytest.mark.parametrize("usual", [0, 1000])
def test_columns_that_drop_out_have_no_eigenvalues(usual, monkeypatch):
    monkeypatch.setattr("pyflatness.hessian.row_blocks._USUAL", usual)
    columns = torch.tensor([True, False, True, False]).expand(ROWS, -1)
    phi = randn(SAMPLES, COLUMNS) * columns[0]
    found = blocks(columns)
    found.add_weighted(phi, -torch.ones(SAMPLES, ROWS, dtype=torch.float64))
    expected = -torch.linalg.eigvalsh(phi[:, columns[0]].t() @ phi[:, columns[0]])[0]
    torch.testing.assert_close(found.largest(0).values, expected.expand(ROWS))


def test_blocks_that_are_not_finite(monkeypatch):
    phi = randn(SAMPLES, COLUMNS)
    phi[3, 1] = torch.nan
    for usual in (0, 1000):
        monkeypatch.setattr("pyflatness.hessian.row_blocks._USUAL", usual)
        found = blocks()
        found.add_weighted(phi, torch.ones(SAMPLES, ROWS, dtype=torch.float64))
        assert found.largest(0).values.isnan().all()

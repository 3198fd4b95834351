"""Searches for eigenpairs of matrices that are known: values, copies, residuals, and how many products they take."""

import pytest
import torch

from pyflatness.numerics.eigenpairs import Search
from pyflatness.numerics.signs import RandomVectors
from support.combinations import every

CPU = torch.device("cpu")


def _found(asking, matrix, dtype=torch.float64):
    """What a search finds, and how many vectors each of its products had."""
    wanted, widths = next(asking), []
    while True:
        widths.append(len(wanted))
        try:
            wanted = asking.send((wanted.to(dtype) @ matrix.to(dtype)).double())
        except StopIteration as end:
            return end.value, widths


def _matrix(values, seed=0):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
    matrix = basis @ torch.diag(values) @ basis.T
    return 0.5 * (matrix + matrix.T)


def _spectrum(outliers):
    """A few eigenvalues far out, and many small ones of both signs."""
    bulk = 0.1 * torch.linspace(-1, 1, 200, dtype=torch.float64) ** 3
    return torch.cat([torch.tensor(outliers, dtype=torch.float64), bulk]).sort(descending=True).values


def _search(size, tolerance=1e-9, room=300, limit=5000, seed=1):
    return Search(RandomVectors(seed, size, CPU), tolerance=tolerance, room=room, max_products=limit)


MULTIPLE = {
    "twice": [5.0, 3, 3, 2, 1],
    "three times, and further ones": [5.0, 5, 5, 3, 3, 1],
    "five times": [5.0, 5, 5, 5, 5, 3],
    "at both ends": [4.0, 4, 4, 1, -2, -2, -2, -2],
}


@every(together=1, room=[300, 0], name=[*MULTIPLE])
def test_copies_of_an_eigenvalue_are_counted_with_much_and_with_little_memory(name, room):
    values = _spectrum(MULTIPLE[name])
    matrix = _matrix(values)
    found, _ = _found(_search(len(values), room=room).pairs(5, 3), matrix)
    assert found.converged
    torch.testing.assert_close(found.values, torch.cat([values[:5], values[-3:]]), rtol=0, atol=1e-8)
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(8).double(), rtol=0, atol=1e-10)


def test_residuals_are_those_of_products_of_their_own():
    values = _spectrum([6.0, 4, 3, 2, 1])
    matrix = _matrix(values)
    for tolerance in (1e-3, 1e-6):
        found, _ = _found(_search(len(values), tolerance).pairs(3, 2), matrix)
        own = (found.vectors @ matrix - found.values.unsqueeze(1) * found.vectors).norm(dim=1)
        torch.testing.assert_close(found.residuals, own, rtol=1e-6, atol=1e-12)
        assert 0 < found.residuals.max() < 6 * tolerance


def test_residuals_of_a_basis_that_was_restarted_are_bounds():
    values = _spectrum([6.0, 4, 3, 2, 1])
    matrix = _matrix(values)
    found, _ = _found(_search(len(values), 1e-6, room=0).pairs(3, 2), matrix)
    own = (found.vectors @ matrix - found.values.unsqueeze(1) * found.vectors).norm(dim=1)
    assert bool((own <= found.residuals * (1 + 1e-9)).all())
    assert found.residuals.max() < 6 * 1e-5


def test_residuals_have_the_rounding_of_the_products():
    values = _spectrum([6.0, 4, 3, 2, 1])
    matrix = _matrix(values)
    found, _ = _found(_search(len(values), 1e-12, limit=100).pairs(3, 0), matrix, torch.float32)
    assert not found.converged  # as far as rounding lets them
    own = (found.vectors @ matrix - found.values.unsqueeze(1) * found.vectors).norm(dim=1)
    assert bool((own > 1e-9).all())
    assert bool((found.residuals > 0.1 * own).all())


def test_a_matrix_that_is_not_symmetric_shows_in_the_residuals():
    values = _spectrum([6.0, 4, 3, 2, 1])
    skew = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    matrix = _matrix(values) + 1e-4 * (skew - skew.T)
    found, _ = _found(_search(len(values), 1e-7, limit=400).pairs(3, 0), matrix)
    assert not found.converged
    own = (found.vectors @ matrix - found.values.unsqueeze(1) * found.vectors).norm(dim=1)
    assert bool((found.residuals >= 0.9 * own).all())


def test_what_the_search_takes():
    values = _spectrum([6.0, 4, 3, 2, 1, 0.5, -1])
    matrix = _matrix(values)
    one, widths = _found(_search(len(values)).pairs(1, 0), matrix)
    assert widths == [1] * one.products  # a single pair is the same with copies and without, and is not measured again
    assert _found(_search(len(values)).pairs(1, 0, copies=False), matrix)[0].products == one.products
    single, widths = _found(_search(len(values)).pairs(4, 0, copies=False), matrix)
    assert widths == [1] * single.products
    both, widths = _found(_search(len(values)).pairs(4, 0), matrix)
    assert widths == [2] * (both.products // 2)  # two starts together, and nothing that searches for copies
    assert both.products < 2 * single.products
    assert both.converged
    torch.testing.assert_close(both.values, values[:4], rtol=0, atol=1e-8)


def test_copies_that_come_one_after_another_beyond_an_innermost_value_that_stays():
    values = torch.tensor([3.0] * 5 + [2.0] * 5 + [1.0] * 5 + [0.0] * 10 + [-1.0] * 5, dtype=torch.float64)
    for seed in range(3):
        found, _ = _found(_search(len(values), seed=seed).pairs(4, 12), _matrix(values))
        assert found.converged
        torch.testing.assert_close(found.values, torch.cat([values[:4], values[-12:]]), rtol=0, atol=1e-8)


def test_a_search_for_copies_takes_no_more_products_than_it_may():
    values = _spectrum(MULTIPLE["five times"])
    whole, _ = _found(_search(len(values)).pairs(5, 0), _matrix(values))
    for limit in range(5, whole.products):
        found, widths = _found(_search(len(values), limit=limit).pairs(5, 0), _matrix(values))
        assert sum(widths) == found.products == limit
        assert found.limited != found.converged
        assert found.limited or float((found.values - 5).abs().max()) < 1e-8


@pytest.mark.parametrize("limit", [4, 5, 7])
def test_a_search_takes_no_more_products_than_it_may(limit):
    values = _spectrum([6.0, 4, 3, 2, 1])
    found, _ = _found(_search(len(values), limit=limit).pairs(4, 0), _matrix(values))
    assert found.products == limit
    assert found.limited
    assert not found.converged
    own = (found.vectors @ _matrix(values) - found.values.unsqueeze(1) * found.vectors).norm(dim=1)
    assert bool((own <= found.residuals * (1 + 1e-9) + 1e-12).all())


def test_a_vector_of_one_entry_is_not_zero():
    assert all(float(RandomVectors(seed, 1, CPU).draw()) for seed in range(20))

"""Small eigenvalues on CUDA: on a GPU, and emulated on the CPU, against torch's."""

import torch

from pyflatness.contractions.backends import cuda


def matrices(size, device):
    generator = torch.Generator().manual_seed(size)
    half = torch.randn(9, size, size, generator=generator, dtype=torch.float64)
    half[2] *= 1e200
    half[3] *= 1e-200
    half[5] = 0
    half[6] = torch.eye(size)
    return (half + half.mT).to(device)


def test_small_eigenvalues(cuda_device):
    for size in (1, 2, 3, 5, 10, 31, 32):
        given = matrices(size, cuda_device)
        expected = torch.linalg.eigvalsh(given)
        error = (cuda.small_eigenvalues(given) - expected).abs().amax(dim=1)
        assert (error <= 2e-14 * expected.abs().amax(dim=1)).all(), size


def test_a_matrix_that_is_not_finite(cuda_device):
    given = matrices(4, cuda_device)
    given[1, 2, 3] = given[1, 3, 2] = torch.nan
    given[7, 0, 0] = torch.inf
    lost = cuda.small_eigenvalues(given).isnan()
    assert lost[[1, 7]].all()
    assert int(lost.sum()) == 8

"""What the vectors of a search take at most, by the tensors that are alive after each operation."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pyflatness as pf
from pyflatness.numerics.eigenpairs import BESIDE, BESIDE_STEPS, Search, least_vectors, quadrature
from pyflatness.numerics.signs import RandomVectors


class _Alive(TorchDispatchMode):
    """Note how many vectors of some size, in float64, are alive at most."""

    def __init__(self, size):
        super().__init__()
        self._bytes, self._held, self.most = 8 * size, {}, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
                storage = leaf.untyped_storage()
                if storage.nbytes() >= self._bytes:
                    self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {key: each for key, each in self._held.items() if not each[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._held.values()) / self._bytes)
        return found


def _found(asking, matrix):
    wanted = next(asking)
    while True:
        try:
            images = [wanted * matrix]
            del wanted
            wanted = asking.send(images.pop())
        except StopIteration as end:
            return end.value


SIZE = 100_000  # more columns than are turned at a time


@pytest.mark.parametrize(("k", "copies"), [(1, True), (5, True), (5, False), (17, True)])
def test_a_search_holds_what_it_is_given_and_a_few_beside(k, copies):
    matrix = torch.linspace(-1, 1, SIZE, dtype=torch.float64) ** 15
    limit = least_vectors(k, SIZE) + 12
    search = Search(RandomVectors(0, SIZE, torch.device("cpu")), tolerance=1e-9, room=0, max_products=limit)
    with _Alive(SIZE) as alive:
        found = _found(search.pairs(k, 0, copies=copies), matrix)
    assert found.products == limit  # so that the basis was restarted
    assert least_vectors(k, SIZE) <= alive.most <= least_vectors(k, SIZE) + BESIDE
    off = (found.vectors * matrix - found.values.unsqueeze(1) * found.vectors).norm(dim=1)
    assert bool((off <= found.residuals * (1 + 1e-9) + 1e-12).all())
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(k).double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps", [1, 12])
def test_a_density_holds_its_steps_and_a_few_beside(steps):
    matrix = torch.linspace(0, 1, SIZE, dtype=torch.float64)
    with _Alive(SIZE) as alive:
        generator = torch.Generator().manual_seed(0)
        asking = quadrature(torch.randn(3, SIZE, generator=generator, dtype=torch.float64, device="cpu"), steps)
        nodes, weights = _found(asking, matrix)
    assert 3 * steps <= alive.most <= 3 * (steps + BESIDE_STEPS)
    start = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = start / start.norm(dim=1, keepdim=True)
    torch.testing.assert_close((weights * nodes).sum(dim=1), (unit.square() * matrix).sum(dim=1))


def test_products_are_counted_beside_the_basis():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 200), nn.Tanh(), nn.Linear(200, 3)).eval()  # its gradients are in float32
    size = sum(w.numel() for w in model.parameters())
    data = torch.randn(6, 600), torch.randint(3, (6,))
    with _Alive(size) as alive:
        found = pf.spectrum(model, nn.CrossEntropyLoss(), data, k=2)
    assert found.products <= alive.most <= found.products + 5 + BESIDE  # room is made for 6 at a time
    with _Alive(size) as alive:
        pf.spectrum(model, nn.CrossEntropyLoss(), data, k=0, density=True, probes=4, steps=3)
    assert alive.most <= 4 * (3 + BESIDE_STEPS)

"""How many kernels a wide head launches for a tile of its classes: what little each takes of the host adds up."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyflatness.contractions import SoftmaxVariance
from pyflatness.contractions import cuda as launching
from pyflatness.contractions.backends import cuda

ROWS, FEATURES = 16, 12  # one chunk of rows, whatever the memory
NOTHING = ("empty", "new_empty", "detach")  # launch nothing, as views do


class Launches(TorchDispatchMode):
    """Counts operations of torch that are no views and make no empty tensors."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        if not function.is_view and not name.startswith(NOTHING):
            self.counted[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch):
    """A function that counts what a head of so many classes launches, by name; a product in half precision is one."""
    launch = launching.on_stream

    def counted(features, classes):
        weight = torch.randn(classes, FEATURES, device=features.device).to(features.dtype)
        with Launches() as launches:
            monkeypatch.setattr(launching, "on_stream", lambda *a: launches.counted.update([a[1]]) or launch(*a))
            head = SoftmaxVariance(weight, None, cuda, rows=ROWS, route="rows", memory=1)
            head(features)
        return launches.counted

    if not torch.cuda.is_available():  # where a GPU multiplies half precision the emulation promotes it first
        multiply, add = cuda.multiply, cuda.multiply_add
        float32 = torch.float32
        monkeypatch.setattr(
            cuda, "multiply", lambda a, b, out: out.zero_() if a.dtype != float32 else multiply(a, b, out)
        )
        monkeypatch.setattr(cuda, "multiply_add", lambda a, b, c: c.zero_() if a.dtype != float32 else add(a, b, c))
    return counted


@pytest.mark.parametrize(
    ("dtype", "tile", "most"), [(torch.bfloat16, 64, 4), (torch.float32, 16, 5), (torch.float64, 16, 5)]
)
def test_launches_of_a_tile(cuda_device, launched, dtype, tile, most):
    """Two products, the exponentials with all sums, what is overtaken; float32 has a centred copy of the weights."""
    features = torch.randn(ROWS, FEATURES, device=cuda_device).to(dtype)
    few, many = launched(features, 2 * tile), launched(features, 8 * tile)
    added = many - few
    assert added.total() == 6 * most, added
    assert few.total() - 2 * most < 80, few  # once for a head and for a chunk of rows
